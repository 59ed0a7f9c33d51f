"""The command ``fedrane``."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command. An error meant for the user is one line and exit status 2."""
    from rich.markup import escape

    from fedrane.cli.app import app  # here, since commands of other packages import this one
    from fedrane.cli.console import console_for
    from fedrane.errors import FedraneError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that it does not have must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except FedraneError as error:
        console_for(True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
