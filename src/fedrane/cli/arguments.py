"""Arguments and options that several commands share, and the experiments they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrane.cli import completion
from fedrane.cli.console import console_for, print_message
from fedrane.errors import ConfigError

if TYPE_CHECKING:
    from fedrane.config.settings import Layer, Notice
    from fedrane.experiment import Experiment

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml] [key=value …]",
        help="A file, and settings that override it.",
        show_default=False,
        autocompletion=completion.words,
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
Wandb = Annotated[
    bool, typer.Option("--wandb", help="Also log to Weights & Biases (project: $WANDB_PROJECT, or fedrane).")
]
MLflow = Annotated[
    bool, typer.Option("--mlflow", help="Also log to MLflow (server or file: $MLFLOW_TRACKING_URI, or MLflow's own).")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
BestSettings = Annotated[
    Path | None,
    typer.Option(
        "--tuned", help="Use the settings that 'fedrane tune' found; key=value overrides them.", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


def experiment_of(words: Sequence[str] | None, data_root: str = "", tuned: Path | None = None) -> Experiment:
    """The experiment of a file and the settings that override it. Values of the file that are not used are reported."""
    from fedrane.config.words import experiments_of

    best = TunedFile(tuned) if tuned else None
    made, unused = experiments_of(
        with_data_root(words or (), data_root), lambda given: {"": given}, best.layer if best else None
    )
    note(unused)
    if best:
        best.report(made)
    return made[""]


class TunedFile:
    """A file of ``fedrane tune``: settings that override those of the experiment's file."""

    def __init__(self, path: Path) -> None:
        from fedrane.reproduce import tune

        self.path, self.tune, self.entries = path, tune, tune.read(path)

    def layer(self, experiment: Experiment) -> Layer | None:
        return self.tune.layer(self.path, self.entries, experiment)

    def report(self, made: Mapping[str, Experiment]) -> None:
        """Print which settings come from the file, and who has none there."""
        from fedrane.config.settings import NAME, dotted

        without = [label or e.method_name for label, e in made.items() if self.layer(e) is None]
        if len(without) == len(made):
            have = dict.fromkeys(f"{entry['method']} on {entry['dataset']}" for entry in self.entries)
            dataset = next(iter(made.values())).dataset
            what = f"{self.path} has nothing for {', '.join(without)} on {dataset}"
            raise ConfigError(what, f"it has settings of {', '.join(have)}", "Find others with fedrane tune")
        for label, e in made.items():
            values, origin = dotted(e.to_dict()), e.origin or {}
            chosen = [f"{key}={values[key]}" for key, by in origin.items() if by == str(self.path) and key != NAME]
            if chosen:
                print_note(f"{label or e.method_name}: {' '.join(chosen)} from {self.path}")
        if without:
            print_note(f"{self.path} has nothing for {', '.join(without)}")


def note(notices: Iterable[Notice]) -> None:
    """Report on standard error what is not used."""
    from fedrane.config.settings import as_messages

    for text in as_messages(notices):
        print_note(text)


def print_note(text: str) -> None:
    print_message(console_for(True), f"note: {text}")


def with_data_root(words: Sequence[str], data_root: str) -> list[str]:
    """The settings, with the folder of ``--data-root`` as an absolute path."""
    if not data_root:
        return list(words)
    same = [w for w in words if w.startswith("data_root=") and Path(w[10:]).resolve() == Path(data_root).resolve()]
    return [*(word for word in words if word not in same), f"data_root={Path(data_root).resolve()}"]
