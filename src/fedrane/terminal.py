"""How commands speak to whoever runs them: what they are told, where lines go, what a run shows, what Ctrl-C does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedrane import display, effects
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.settings import Notice, as_messages, parse
from fedrane.training.callbacks import Callback

INTERRUPTED = 130
Words = Annotated[list[str] | None, typer.Argument(metavar="[FILE.toml] [key=value …]", show_default=False)]
Trust = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the method or network that a folder names, though you have not before."),
]


def experiment_of(words: Sequence[str] | None, data_root: str = "") -> Experiment:
    """What a file and the words laid over it ask for; what of the file is not used is said."""
    (experiment,) = experiments_of(words, lambda given: {"": given}, data_root).values()
    return experiment


def experiments_of(
    words: Sequence[str] | None, share: Callable[[dict[str, str]], Mapping[str, Mapping[str, str]]], data_root: str = ""
) -> dict[str, Experiment]:
    """What a file and the words laid over it ask for, where ``share`` says whose words each are.

    What of the file none of them uses is said on standard error.
    """
    words = list(words or [])
    files = [word for word in words if word.endswith(".toml") and "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}", "one experiment is one file", "Lay words over it")
    given = parse(with_data_root([word for word in words if word not in files], data_root))
    made: dict[str, Experiment] = {}
    unused: list[list[Notice]] = []
    for label, mine in share(given).items():
        asked, notices = Experiment.asked([f"{k}={v}" for k, v in mine.items()], Path(files[0]) if files else None)
        made[label], idle = effects.settle(asked)
        unused.append(notices + idle)
    note(notice for notice in unused[0] if all(_about(notice, other) for other in unused))
    return made


def note(notices: Iterable[Notice]) -> None:
    """What is not used, on standard error."""
    for text in as_messages(notices):
        say(console_for(True), f"note: {text}")


def _about(notice: Notice, others: Iterable[Notice]) -> bool:
    return any((notice.source, notice.key) == (other.source, other.key) for other in others)


def with_data_root(words: Sequence[str], data_root: str) -> list[str]:
    """The words with the folder that ``--data-root`` names, as a path that holds from anywhere."""
    if not data_root:
        return list(words)
    same = [w for w in words if w.startswith("data_root=") and Path(w[10:]).resolve() == Path(data_root).resolve()]
    return [*(word for word in words if word not in same), f"data_root={Path(data_root).resolve()}"]


class Stop:
    """Ctrl-C once: finish the round, save, say how to go on. Twice: stop at once."""

    def __init__(self, console: Console) -> None:
        self.asked, self.console = False, console

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield self
        except KeyboardInterrupt:
            self.console.print("stopped at once; the last checkpoint stands")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGINT, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(RuntimeError):  # caught in the middle of another line, Python refuses to begin this one
            self.console.print("\nfinishing this round, then saving (Ctrl-C again to stop at once)")


def console_for(as_json: bool) -> Console:
    """Standard output, or where that carries JSON, standard error."""
    return Console(stderr=as_json, emoji=False)


@contextmanager
def watching(
    console: Console, as_json: bool, quiet: bool, board: Path | None, label: str = "", who: Mapping[str, str] = {}
) -> Iterator[list[Callback]]:
    """What shows a run: with ``label`` before its lines, or ``who`` among the facts of its lines of JSON."""
    watch: list[Callback] = [display.TensorBoard(board)] if board else []
    live: display.Live | None = None
    if as_json:
        watch.append(display.JsonLines(write_line, who))
    elif quiet:
        watch.append(display.Messages(console))
    elif console.is_terminal:
        live = display.Live(console, label)
        watch.append(live)
    else:
        watch.append(display.Lines(console, label))
    try:
        yield watch
    finally:
        if live:
            live.close()


def say(console: Console, text: str) -> None:
    """A line as it is: paths are not broken, and their brackets are no markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def show(console: Console, table: Table) -> None:
    """A table as wide as it is: rather a line too long than a result cut short."""
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)


def write_line(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
