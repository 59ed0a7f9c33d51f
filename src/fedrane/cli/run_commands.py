"""``fedrane run``, ``resume`` and ``predict``: train a model and use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrane.cli import completion
from fedrane.cli.arguments import BestSettings, Board, DataRoot, Json, MLflow, Quiet, Trust, Wandb, Words, experiment_of
from fedrane.cli.console import INTERRUPTED, Stop, console_for, plain_table, print_message, show, write_line
from fedrane.errors import ConfigError

if TYPE_CHECKING:
    from fedrane.experiment import Experiment
    from fedrane.training.callbacks import Callback
    from fedrane.training.profiling import Profiler
    from fedrane.training.result import Result


def _conclude(console: Console, result: Result, as_json: bool) -> None:
    from fedrane.report.comparison import Comparison
    from fedrane.training.run_folder import Folder

    if not result.finished:
        print_message(console, f"stopped after round {result.round}; go on with: fedrane resume {result.folder}")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        label = Folder(result.folder).label if result.folder else ""
        name = label or re.split(r"[/\\]", result.experiment.method_name)[-1]  # of your own file without its folder
        only = Comparison({name: [result.summary]}, result.folder)
        show(console, only.table())
        print_message(console, f"results: {result.folder}")


def run_command(
    settings: Words = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder (default: a new one under runs/).")] = None,
    tuned: BestSettings = None,
    data_root: DataRoot = "",
    as_json: Json = False,
    tensorboard: Board = False,
    wandb: Wandb = False,
    mlflow: MLflow = False,
    trace: Annotated[
        bool,
        typer.Option("--profile", help="Trace one round into trace.json, for Perfetto, and print where its time went."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train one experiment, given as a TOML file, as key=value settings, or both.

    Settings on the command line override the file. preset=paper starts from the settings that the paper states.
    'fedrane keys' explains all keys, 'fedrane methods NAME' a method's own fields.

    Example: fedrane run method=fedprox method.strength=0.1 dataset=digits clients=10 partition.alpha=0.1
    """
    from fedrane.cli.progress import printer
    from fedrane.runner import run
    from fedrane.training.profiling import Profiler

    experiment = experiment_of(settings, data_root, tuned)
    folder = out or _new_folder(experiment)
    console = console_for(as_json)
    watch = [*_trackers(console, folder, tensorboard, wandb, mlflow), printer(console, as_json, quiet)]
    profiler = Profiler(folder / "trace.json") if trace else None
    watch += [profiler] if profiler else []
    with Stop(console).listening() as stop:
        result = run(experiment, folder, callbacks=watch, stop=stop, progress=False)
    if profiler and not as_json:
        show(console, _profile_table(profiler))
        print_message(console, f"trace: {profiler.path} (open it at ui.perfetto.dev)")
    _conclude(console, result, as_json)


def _new_folder(experiment: Experiment) -> Path:
    from fedrane.training.run_folder import Folder, default_name

    name = default_name(experiment)
    taken = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
    return next(path for path in taken if Folder(path).is_free())


def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=completion.run_folder)],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="Train up to this round.", show_default=False)
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume although data or code have changed (it is recorded)."),
    ] = False,
    trust_code: Trust = False,
    as_json: Json = False,
    tensorboard: Board = False,
    wandb: Wandb = False,
    mlflow: MLflow = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run that was stopped or killed. The result is the same, bit for bit.

    With rounds=N the run goes on to that many rounds, even if it had finished. Nothing else of it can be changed.
    """
    from fedrane.cli.progress import printer
    from fedrane.runner import resume
    from fedrane.training.run_folder import Folder

    rounds = _rounds(settings or [], folder)
    console = console_for(as_json)
    label = Folder(folder).label
    fields = {"label": label} if label else {}
    watch = [*_trackers(console, folder, tensorboard, wandb, mlflow), printer(console, as_json, quiet, fields=fields)]
    with Stop(console).listening() as stop:
        result = resume(
            folder,
            rounds=rounds,
            accept_changes=accept_changes,
            trust_code=trust_code,
            callbacks=watch,
            stop=stop,
            progress=False,
        )
    _conclude(console, result, as_json)


def _trackers(console: Console, folder: Path, tensorboard: bool, wandb: bool, mlflow: bool) -> list[Callback]:
    from fedrane.training.trackers import MLflowLogger, TensorBoardLogger, WandbLogger

    made: list[Callback] = [TensorBoardLogger(folder / "tensorboard")] if tensorboard else []
    note = partial(print_message, console)
    made += [WandbLogger(notify=note)] if wandb else []
    made += [MLflowLogger(notify=note)] if mlflow else []
    return made


def _rounds(words: Sequence[str], folder: Path) -> int | None:
    """The only setting that may change when a run is resumed."""
    from fedrane.config.settings import canonical, parse
    from fedrane.training.run_folder import CONFIG

    for word in words:
        if canonical(word.partition("=")[0]) != "rounds":
            raise ConfigError(
                f"{word} to resume a run",
                "of its settings only rounds can be changed: with any other it would be another experiment",
                f"Start a new one: fedrane run {folder / CONFIG} {word}",
            )
    value = parse(words, example="rounds=100").get("rounds")
    if value is not None and not value.isdecimal():
        raise ConfigError(f"rounds={value}", "it must be a whole number", "Use for instance rounds=100")
    return None if value is None else int(value)


def verify_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders that hold some.")],
    as_json: Json = False,
) -> None:
    """Check that the files of runs are as they were written: settings, partition, metrics, checkpoints and the rest.

    Nothing is changed. The exit status is 1 if a file was edited, is damaged or belongs to another run.
    """
    from fedrane.report.runs import folders_in
    from fedrane.training.verify import verify

    console, files, problems = console_for(as_json), 0, 0
    for folder in [each for path in folders for each in folders_in(path)]:
        for checked in verify(folder):
            files, problems = files + 1, problems + bool(checked.problem)
            if as_json:
                write_line(json.dumps({"run": str(folder.path), "ok": not checked.problem, **checked._asdict()}) + "\n")
                continue
            state = "[red]damaged[/]" if checked.problem else "[green]ok[/]     "
            about = (checked.problem or checked.note).replace(f"{folder.path}/", "")
            text = escape(f"{folder.path / checked.file}{about and f': {about}'}")
            console.print(f"{state} {text}", highlight=False, soft_wrap=True)
    print_message(console, f"{files} files, {problems or 'none'} damaged")
    if problems:
        raise typer.Exit(1)


def _profile_table(profiler: Profiler) -> Table:
    """The parts of the traced round, then its operations, the slowest first."""
    table = plain_table("part of the round", "seconds", "calls")
    for number, parts in enumerate((profiler.phases, profiler.operations)):
        if number:
            table.add_section()
        for part in parts:
            name = part.name if len(part.name) <= 60 else part.name[:57] + "…"
            table.add_row(escape(name), f"{part.seconds:.4f}", str(part.calls))
    return table


def predict_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=completion.run_folder)],
    files: Annotated[list[Path], typer.Argument(help="Images, CSV files, or .npz files with x.")],
    client: Annotated[int | None, typer.Option("--client", help="Use this client's personal model.")] = None,
    trust_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict with a trained model: the global one, or a client's personal one."""
    from fedrane.runner import load
    from fedrane.training.calibration import TRAINING
    from fedrane.training.predictor import predict, read_named_inputs

    saved = load(folder, trust_code=trust_code)
    model = saved.model if client is None else saved.personal(client)
    rows = [row for file in files for row in read_named_inputs(file, saved.inputs, saved.experiment.image_size)]
    predictions = list(predict(model, rows, saved.experiment.batch))
    if as_json:
        for prediction in predictions:
            write_line(json.dumps(prediction) + "\n")
        return
    console, measure = console_for(False), "score" if model.calibration is None else "probability"
    if model.inputs.target:
        table = plain_table("input", "prediction")
        for each in predictions:
            table.add_row(escape(each["input"]), f"{each['prediction']:.6g}")
        console.print(table)
        return
    table = plain_table("input", "class")
    table.add_column(measure, justify="right")
    for each in predictions:
        table.add_row(escape(each["input"]), escape(each["class"]), f"{each[measure]:.3f}")
    console.print(table)
    if model.calibration and model.calibration.examples == TRAINING:
        print_message(
            console, "probabilities were fitted to training examples; validation=0.1 sets others aside for that"
        )
