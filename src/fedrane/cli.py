"""The command ``fedrane``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedrane import comparison, conformance, display, methods, report
from fedrane._version import __version__
from fedrane.calibration import TRAINING
from fedrane.data import catalogue, download
from fedrane.data import partition as partitions
from fedrane.display import plain_table, uses_alpha
from fedrane.errors import ConfigError, FedraneError
from fedrane.experiment import KEYS, Experiment
from fedrane.flower.commands import flower_app
from fedrane.folder import CONFIG, Folder
from fedrane.predictor import answer, read_rows
from fedrane.profile import Profiler
from fedrane.reproduce.commands import reproduce_command, tune_command
from fedrane.run import load, resume, run
from fedrane.settings import NAME, addressed, by_label, parse
from fedrane.terminal import (
    INTERRUPTED,
    Stop,
    Trust,
    Words,
    console_for,
    experiment_of,
    experiments_of,
    note,
    say,
    show,
    watching,
    write_line,
)
from fedrane.training.callbacks import Callback
from fedrane.training.result import Result
from fedrane.training.setup import as_dataset, make_partition, settled

app = typer.Typer(
    help="Federated learning on data that differ from client to client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Datasets on this machine.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
app.command("reproduce")(reproduce_command)
app.command("tune")(tune_command)

DataRoot = Annotated[
    str, typer.Option("--data-root", help="Where datasets lie (else FEDRANE_DATA, else the cache folder).")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable lines on standard output.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard scalars into the run folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]


def main() -> None:
    """Errors meant for the user are one line and a non-zero exit."""
    try:
        app()
    except FedraneError as error:
        console_for(True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


# ---- runs


def _conclude(console: Console, result: Result, as_json: bool) -> None:
    if not result.finished:
        say(console, f"stopped after round {result.round}; go on with: fedrane resume {result.folder}")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        name = Folder(result.folder).label if result.folder else ""
        only = comparison.Comparison({name or result.experiment.method_name: [result.summary]}, result.folder or Path())
        show(console, only.table())
        say(console, f"results: {result.folder}")


@app.command("run")
def run_command(
    words: Words = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder (a new one under runs/ if not given).")
    ] = None,
    data_root: DataRoot = "",
    as_json: Json = False,
    tensorboard: Board = False,
    trace: Annotated[
        bool,
        typer.Option("--profile", help="Trace one round: trace.json, which opens in Perfetto, and its main parts."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment: a TOML file, key=value words, or both (words win).

    Keys: method dataset model clients rounds epochs batch lr momentum weight_decay participation seed engine device
    precision eval_every partition.kind partition.alpha method.FIELD … (all of them: docs/guide.md). A set of values
    by name: preset=paper.
    """
    experiment = experiment_of(words, data_root)
    folder = out or _new_folder(experiment)
    console = console_for(as_json)
    board = folder / "tensorboard" if tensorboard else None
    with Stop(console).listening() as stop, watching(console, as_json, quiet, board) as watch:
        profiler = Profiler(folder / "trace.json") if trace else None
        result = run(experiment, folder, callbacks=[*watch, *([profiler] if profiler else [])], stop=stop)
    if profiler and not as_json:
        show(console, display.profile_table(profiler))
        say(console, f"trace: {profiler.path} (open it at ui.perfetto.dev)")
    _conclude(console, result, as_json)


def _new_folder(experiment: Experiment) -> Path:
    dataset = Path(experiment.dataset).stem or "data"
    name = f"{dataset}-{experiment.method_name.rpartition(':')[2]}-seed{experiment.seed}"
    taken = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
    return next(path for path in taken if not Folder(path).holds_run())


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="Plan so many rounds.", show_default=False)
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although data or code changed since; it is recorded.")
    ] = False,
    trust_code: Trust = False,
    as_json: Json = False,
    tensorboard: Board = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed; the end is the same, bit for bit.

    With rounds=N, to that many rounds, also where the run is finished; nothing else of an experiment can be changed.
    """
    rounds = _rounds(words or [], folder)
    console = console_for(as_json)
    board = folder / "tensorboard" if tensorboard else None
    label = Folder(folder).label
    who = {"label": label} if label else {}
    with Stop(console).listening() as stop, watching(console, as_json, quiet, board, who=who) as watch:
        result = resume(
            folder, rounds=rounds, accept_changes=accept_changes, trust_code=trust_code, callbacks=watch, stop=stop
        )
    _conclude(console, result, as_json)


def _rounds(words: Sequence[str], folder: Path) -> int | None:
    """The one setting that a run can be resumed with."""
    for word in words:
        if word.partition("=")[0] != "rounds":
            raise ConfigError(
                f"{word} to resume a run",
                "of its settings only rounds can be changed: with any other it would be another experiment",
                f"Start a new one: fedrane run {folder / CONFIG} {word}",
            )
    value = parse(words, example="rounds=100").get("rounds")
    if value is not None and not value.isdecimal():
        raise ConfigError(f"rounds={value}", "it must be a whole number", "Use for instance rounds=100")
    return None if value is None else int(value)


@app.command("compare")
def compare_command(
    words: Words = None,
    names: Annotated[
        str, typer.Option("--methods", help="Names with commas between them; label=NAME where one stands twice.")
    ] = "fedavg,local",
    out: Annotated[Path, typer.Option("--out", help="A folder for all runs.")] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option("--seeds", help="Repetitions, from the experiment's seed on.")] = 1,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")] = True,
    data_root: DataRoot = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same partition and seeds, print one table, and write a page with plots.

    A field of one method alone is set as NAME.FIELD=value, for instance fedprox.strength=0.1; so is a key such as
    fedprox.lr=0.05. One method with several settings: --methods weak=fedprox,strong=fedprox strong.strength=1.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}", "it counts repetitions", "Use 1 or more")
    experiments = _experiments(words, names, data_root)
    first = next(iter(experiments.values())).seed
    console = console_for(as_json)

    with Stop(console).listening() as stop, ExitStack() as watchers:

        def watch(name: str, seed: int) -> Sequence[Callback]:
            who = {"label": name}
            return watchers.enter_context(watching(console, as_json, quiet, None, f"{name}, seed {seed} ", who))

        done = comparison.compare(experiments, range(first, first + seeds), out, watch, stop)
    if done is None:
        say(console, f"stopped; the same command goes on from here ({out})")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        show(console, done.table())
        say(console, f"results: {out}")
    folders = [comparison.run_folder(out, name, seed) for name in experiments for seed in range(first, first + seeds)]
    written = _page(console, folders, out / "report.html", data_root, quiet or as_json) if page else None
    if as_json:
        told = {"runs": done.runs, "diverged": done.diverged, "report": str(written) if written else None}
        write_line(json.dumps({"event": "comparison", **told}) + "\n")
    if done.diverged:
        raise typer.Exit(1)


def _page(console: Console, folders: Sequence[Folder], out: Path, data_root: str, quiet: bool) -> Path | None:
    """The report on a comparison; that it cannot be made must not make the comparison fail."""
    runs = [folder.path for folder in folders if folder.holds_run()]
    tell = (lambda text: None) if quiet else (lambda text: say(console, text))
    try:
        written = report.write(runs, out, data_root=data_root, tell=tell)
    except FedraneError as error:
        say(console, f"no page was written: {error}")
        return None
    say(console, f"page: {written}")
    return written


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders that contain them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every picture as PNG and SVG into this folder.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="What the page is called.")] = "",
    target: Annotated[
        float | None, typer.Option("--target", help="The accuracy, 0 … 1, whose cost is shown first.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", help="Test rows in the t-SNE of features; 0 leaves it out.")
    ] = report.SAMPLES,
    data_root: DataRoot = "",
    trust_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page on finished or unfinished runs: curves, clients, cosines, features, cost, settings.

    It needs no network, and nothing but a browser. Runs that differ in their seed alone are put together.
    """
    console = console_for(False)
    tell = (lambda text: None) if quiet else (lambda text: say(console, text))
    written = report.write(
        runs,
        out,
        figures=figures,
        title=title,
        target=target,
        samples=samples,
        data_root=data_root,
        trust_code=trust_code,
        tell=tell,
    )
    say(console, f"page: {written}")
    if figures:
        say(console, f"figures: {figures}")


def _experiments(words: Sequence[str] | None, names: str, data_root: str) -> dict[str, Experiment]:
    """One experiment a method; a word NAME.FIELD=value goes to that method alone."""
    labels = by_label(names, {"preset", *(f.name for f in fields(Experiment))})
    if not labels:
        raise ConfigError("--methods names none", remedy=f"For instance --methods {','.join(methods.METHODS)}")

    def share(given: dict[str, str]) -> dict[str, dict[str, str]]:
        if NAME in given:
            found = f"method={given[NAME]} with --methods"
            raise ConfigError(found, "compare takes its methods from --methods", "Name them all there")
        shared, own = addressed(given, labels, KEYS)
        for label, key in ((label, key) for label, mine in own.items() for key in mine):
            if key in comparison.SAME or key.startswith("partition."):
                raise ConfigError(
                    f"{label}.{key}={own[label][key]}",
                    "all methods are compared on the same rows, clients and cohorts",
                    f"Set {key} for all of them",
                )
        return {label: {**shared, NAME: name, **own[label]} for label, name in labels.items()}

    return experiments_of(words, share, data_root)


# ---- models


@app.command("predict")
def predict_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or .npz files with x.")],
    client: Annotated[int | None, typer.Option("--client", help="Answer with this client's own model.")] = None,
    trust_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Answer with a trained model: the global one, or a client's own."""
    saved = load(folder, trust_code=trust_code)
    model = saved.model if client is None else saved.personal(client)
    rows = [row for file in files for row in read_rows(file, saved.inputs.shape, saved.experiment.image_size)]
    answers = list(answer(model, rows, saved.experiment.batch))
    if as_json:
        for a in answers:
            write_line(json.dumps(a) + "\n")
        return
    console, measure = console_for(False), "score" if model.calibration is None else "probability"
    table = plain_table("input", "class")
    table.add_column(measure, justify="right")
    for a in answers:
        table.add_row(escape(a["input"]), escape(a["class"]), f"{a[measure]:.3f}")
    console.print(table)
    if model.calibration and model.calibration.examples == TRAINING:
        say(console, "probabilities were fitted to training examples; validation=0.1 sets others aside for that")


# ---- data


@app.command("datasets")
def datasets_command(data_root: DataRoot = "", as_json: Json = False) -> None:
    """The known datasets: which are here, and how to get the others."""
    root = catalogue.data_root(data_root or None)
    states = catalogue.status(root)
    if as_json:
        for state in states:
            write_line(json.dumps(asdict(state), default=str) + "\n")
        return
    table = plain_table("dataset", "classes", "shape", "train", "test", "where, or how to get it")
    for known in states:
        shape, where = "×".join(map(str, known.shape)), str(known.where) if known.ready else f"[yellow]{known.how}[/]"
        table.add_row(known.name, str(known.classes), shape, f"{known.train:,}", f"{known.test:,}", where)
    console = console_for(False)
    show(console, table)
    console.print(f"data root: {root}", highlight=False, soft_wrap=True)


@data_app.command("get")
def get_command(name: Annotated[str, typer.Argument(help="A dataset's name.")], data_root: DataRoot = "") -> None:
    """Download a dataset, or the rest of one; checked, and in place only when whole."""
    console = console_for(False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def advance(done: int, total: int | None, label: str) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        said = download.get(name, catalogue.data_root(data_root or None), advance)
    say(console, said)


@app.command("partition")
def partition_command(
    words: Words = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw clients × classes into this file.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Save it, to be used again with partition.file=…")] = None,
    data_root: DataRoot = "",
) -> None:
    """Show how an experiment's rows lie with the clients, without running it."""
    experiment = experiment_of(words, data_root)
    rows = as_dataset(experiment, None)
    experiment, unused = settled(experiment, rows, False, False)
    console = console_for(False)
    note(unused)
    partition = make_partition(experiment, rows)
    counts = partition.counts(rows.y, len(rows.classes))
    held = (counts > 0).sum(1)
    how = experiment.partition
    title = f"{experiment.dataset}, {len(counts)} clients, {how.kind}" + (
        f", α {how.alpha:g}" if uses_alpha(how) else ""
    )
    say(console, title)
    table = plain_table("", "fewest", "median", "most")
    for name, values in (("rows a client", counts.sum(1)), ("classes a client", held)):
        table.add_row(name, *(f"{v:,.0f}" for v in (values.min(), np.median(values), values.max())))
    console.print(table)
    if plot:
        from fedrane.report.partition_plot import draw  # matplotlib is slow to import

        draw(partition, rows.y, rows.classes, plot, title)
        say(console, f"picture: {plot}")
    if save:
        partitions.save(partition, save, dataset=rows.name, kind=how.kind, alpha=how.alpha, seed=experiment.seed)
        say(console, f"saved: {save}; use it again with partition.file={save}")


# ---- methods


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="One of them, to see its fields.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """The methods and what each answers with; of one by name, its fields and their defaults."""
    chosen = {name: methods.find(name)} if name else {key: methods.find(key) for key in methods.known()}
    if as_json:
        for key, entry in chosen.items():
            facts: dict[str, Any] = {"name": key, "summary": entry.summary, "venue": entry.venue, "year": entry.year}
            facts |= {"category": entry.category, "answers": entry.kind.answers, "fields": entry.fields}
            write_line(json.dumps(facts) + "\n")
        return
    table = plain_table("method", "published", "answers", "what it is")
    for key, entry in chosen.items():
        table.add_row(key, f"{entry.venue} {entry.year or ''}".strip(), entry.category, entry.summary)
    console = console_for(False)
    console.print(table)
    if not name:
        say(console, "fields of one: fedrane methods NAME")
        return
    values = plain_table("field", "default")
    for field, value in chosen[name].fields.items():
        values.add_row(f"method.{field}", str(value))
    console.print(values if chosen[name].fields else "it has no fields")


@app.command("check")
def check_command(method: Annotated[str, typer.Argument(help="A method's name, or path.py:Class.")]) -> None:
    """Hold a method, yours or one of ours, to the laws that every method must keep."""
    console = console_for(False)
    entry = methods.find(method)
    found = []
    for verdict in conformance.verdicts(entry.kind(**entry.preset)):
        found.append(verdict)
        title = conformance.title(verdict.law)
        said = f"[green]holds[/]  {title}"
        if verdict.problem:
            said = f"[red]fails[/]  {title}: {escape(verdict.problem)}"
        if verdict.again:
            said = f"[yellow]not run[/]  {title}: the same error"
        console.print(said, highlight=False, soft_wrap=True)
    held, blocked = sum(not v.problem for v in found), sum(v.again for v in found)
    console.print(f"{held} of {len(found)} laws hold" + (f", {blocked} could not be run" if blocked else ""))
    if held < len(found):
        raise typer.Exit(1)
