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

from fedrane.system import terminal

INTERRUPTED = 130


class Stop:
    """Ctrl-C once: finish the round, save, and print how to resume. Twice: stop at once."""

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
            self.console.print("stopped at once; the last checkpoint is kept")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(RuntimeError):  # Python refuses to print while another line is being printed
            self.console.print("\nfinishing this round, then saving (Ctrl-C again to stop at once)")


def console_for(as_json: bool) -> Console:
    """Standard output, or standard error if standard output carries JSON."""
    return terminal.console(stderr=as_json)


def print_message(console: Console, text: str) -> None:
    """Print a line as it is: paths are not wrapped, and their brackets are not markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def show(console: Console, table: Table) -> None:
    """Print a table at its full width: a line that is too long is better than a number that is cut."""
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)


def plain_table(*columns: str) -> Table:
    """A table whose cells can be copied: long text is wrapped, never cut."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def write_line(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
