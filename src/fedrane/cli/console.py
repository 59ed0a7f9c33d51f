"""Where commands print, and what Ctrl-C does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import typer
from rich import box
from rich.console import Console
from rich.table import Table

INTERRUPTED = 130


class Stop:
    """Ctrl-C once: finish the round, save, say how to go on. Twice: stop at once."""

    def __init__(self, console: Console) -> None:
        self.asked, self.console = False, console

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        except KeyboardInterrupt:
            self.console.print("stopped at once; the last checkpoint stands")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(RuntimeError):  # caught in the middle of another line, Python refuses to begin this one
            self.console.print("\nfinishing this round, then saving (Ctrl-C again to stop at once)")


def console_for(as_json: bool) -> Console:
    """Standard output, or where that carries JSON, standard error."""
    return Console(stderr=as_json, emoji=False)


def say(console: Console, text: str) -> None:
    """A line as it is: paths are not broken, and their brackets are no markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def show(console: Console, table: Table) -> None:
    """A table as wide as it is: rather a line too long than a result cut short."""
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)


def plain_table(*columns: str) -> Table:
    """A table whose cells can be copied: nothing is cut, what is too long goes on in the next line."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def write_line(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
