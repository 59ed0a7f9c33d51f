"""The command ``fedrane``."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command. An error meant for the user is one line and exit status 2."""
    from fedrane.cli.commands import app  # here, since commands of other packages import this one
    from fedrane.errors import FedraneError
    from fedrane.system.loading import raised_at

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that it does not have must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now: when Python ends, what cannot be written is a traceback
    except FedraneError as error:
        _fail(str(error))
    except BrokenPipeError:
        _fail("the output was closed")
    except OSError as error:
        _fail(f"system error: {error}")
    except MemoryError as error:
        _fail(f"there is not enough memory: {error}")
    except (Exception, SystemExit) as error:
        place = raised_at(error)
        if not place:
            raise
        _fail(f"your own code raised {type(error).__name__}: {error} ({place})")


def _fail(message: str) -> None:
    from rich.markup import escape

    from fedrane.cli.console import console_for
    from fedrane.errors import one_line

    console_for(True).print(f"[bold red]error:[/] {escape(one_line(message))}", highlight=False, soft_wrap=True)
    with suppress(OSError, AttributeError):  # what is left in the buffer must not fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(2)
