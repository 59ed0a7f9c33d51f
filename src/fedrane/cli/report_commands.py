"""``fedrane compare`` and ``report``: several runs in one table, on one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedrane import methods, report
from fedrane.cli.arguments import DataRoot, Force, Json, Quiet, Trust, Words, experiments_of
from fedrane.cli.console import INTERRUPTED, Stop, console_for, print_message, show, write_line
from fedrane.cli.progress import watching
from fedrane.config.settings import NAME, addressed, by_label
from fedrane.errors import ConfigError, FedraneError
from fedrane.experiment import KEYS, Experiment
from fedrane.report import comparison
from fedrane.system.files import require_new
from fedrane.training.callbacks import Callback
from fedrane.training.run_folder import Folder


def compare_command(
    settings: Words = None,
    names: Annotated[
        str, typer.Option("--methods", help="Names, comma-separated; label=NAME where a method is used twice.")
    ] = "fedavg,local",
    out: Annotated[Path, typer.Option("--out", help="The folder of all runs.")] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds, from the experiment's seed on.")] = 1,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into that folder.")] = True,
    data_root: DataRoot = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same partition and seeds; make a table and a report.

    NAME.KEY=value sets a field or a key of one method only: fedprox.strength=0.1, fedprox.lr=0.05. One method with
    several settings: --methods weak=fedprox,strong=fedprox strong.strength=1. 'fedrane run --help' lists the keys.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}", "it counts repetitions", "Use 1 or more")
    experiments = _experiments(settings, names, data_root)
    first = next(iter(experiments.values())).seed
    console = console_for(as_json)

    with Stop(console).listening() as stop, ExitStack() as watchers:

        def watch(name: str, seed: int) -> Sequence[Callback]:
            label = f"{name}, seed {seed} "
            return watchers.enter_context(watching(console, as_json, quiet, None, label, {"label": name}))

        done = comparison.compare(experiments, range(first, first + seeds), out, watch, stop)
    if done is None:
        print_message(console, f"stopped; the same command goes on from here ({out})")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        show(console, done.table())
        print_message(console, f"results: {out}")
    folders = [comparison.run_folder(out, name, seed) for name in experiments for seed in range(first, first + seeds)]
    written = _page(console, folders, out / "report.html", data_root, quiet or as_json) if page else None
    if as_json:
        event = {"runs": done.runs, "diverged": done.diverged, "report": str(written) if written else None}
        write_line(json.dumps({"event": "comparison", **event}) + "\n")
    if done.diverged:
        raise typer.Exit(1)


def _page(console: Console, folders: Sequence[Folder], out: Path, data_root: str, quiet: bool) -> Path | None:
    """The report on a comparison. An error in it must not make the comparison fail."""
    runs = [folder.path for folder in folders if folder.holds_run()]
    log = (lambda text: None) if quiet else (lambda text: print_message(console, text))
    try:
        written = report.write(runs, out, data_root=data_root, log=log)
    except FedraneError as error:
        print_message(console, f"no page was written: {error}")
        return None
    print_message(console, f"page: {written}")
    return written


def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders that contain them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every plot as PNG and SVG into this folder.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "",
    target: Annotated[
        float | None, typer.Option("--target", help="Show first what it costs to reach this accuracy (0 to 1).")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", help="Test examples in the t-SNE plot; 0 for no plot.")
    ] = report.SAMPLES,
    force: Force = False,
    data_root: DataRoot = "",
    trust_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page on runs: curves, clients, cosines, features, cost, settings.

    Runs may be unfinished. Those that differ only in their seed are averaged. The page needs no network.
    """
    if not out.is_dir():  # which is another error
        require_new(out, force)
    require_new(figures, force)
    console = console_for(False)
    log = (lambda text: None) if quiet else (lambda text: print_message(console, text))
    written = report.write(
        runs,
        out,
        figures=figures,
        title=title,
        target=target,
        samples=samples,
        data_root=data_root,
        trust_code=trust_code,
        log=log,
    )
    print_message(console, f"page: {written}")
    if figures:
        print_message(console, f"figures: {figures}")


def _experiments(words: Sequence[str] | None, names: str, data_root: str) -> dict[str, Experiment]:
    """One experiment for each method; NAME.KEY=value is for that method only."""
    labels = by_label(names, {"preset", *(f.name for f in fields(Experiment))})
    if not labels:
        raise ConfigError("--methods names none", remedy=f"For instance --methods {','.join(methods.METHODS)}")

    def share(given: dict[str, str]) -> dict[str, dict[str, str]]:
        if NAME in given:
            conflict = f"method={given[NAME]} with --methods"
            raise ConfigError(conflict, "compare takes its methods from --methods", "Name them all there")
        shared, per_label = addressed(given, labels, KEYS)
        for label, key in ((label, key) for label, mine in per_label.items() for key in mine):
            if key in comparison.SAME or key.startswith("partition."):
                raise ConfigError(
                    f"{label}.{key}={per_label[label][key]}",
                    "all methods are compared on the same examples, clients and cohorts",
                    f"Set {key} for all of them",
                )
        return {label: {**shared, NAME: name, **per_label[label]} for label, name in labels.items()}

    return experiments_of(words, share, data_root)
