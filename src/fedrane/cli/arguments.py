"""Arguments and options that several commands share, and the experiments they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedrane.cli.console import console_for, print_message
from fedrane.config import effects
from fedrane.config.settings import Notice, as_messages, parse
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml] [key=value …]", help="A file, and settings that override it.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that a run folder names, even if you never ran it before."),
]
DataRoot = Annotated[
    str, typer.Option("--data-root", help="Folder of datasets (default: $FEDRANE_DATA, or the cache).")
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard scalars into the run folder.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


def experiment_of(words: Sequence[str] | None, data_root: str = "") -> Experiment:
    """The experiment of a file and the settings that override it. Values of the file that are not used are reported."""
    (experiment,) = experiments_of(words, lambda given: {"": given}, data_root).values()
    return experiment


def experiments_of(
    words: Sequence[str] | None, share: Callable[[dict[str, str]], Mapping[str, Mapping[str, str]]], data_root: str = ""
) -> dict[str, Experiment]:
    """Several experiments of one file and the settings that override it; ``share`` deals out the settings by label.

    Values of the file that none of them uses are reported on standard error.
    """
    words = list(words or [])
    files = [word for word in words if word.endswith(".toml") and "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}", "one experiment is one file", "Override it with key=value")
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
    """Report on standard error what is not used."""
    for text in as_messages(notices):
        print_message(console_for(True), f"note: {text}")


def _about(notice: Notice, others: Iterable[Notice]) -> bool:
    return any((notice.source, notice.key) == (other.source, other.key) for other in others)


def with_data_root(words: Sequence[str], data_root: str) -> list[str]:
    """The settings, with the folder of ``--data-root`` as an absolute path."""
    if not data_root:
        return list(words)
    same = [w for w in words if w.startswith("data_root=") and Path(w[10:]).resolve() == Path(data_root).resolve()]
    return [*(word for word in words if word not in same), f"data_root={Path(data_root).resolve()}"]
