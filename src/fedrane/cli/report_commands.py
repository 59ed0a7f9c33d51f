"""``fedrane compare`` and ``report``: several runs in one table, on one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedrane.cli import completion
from fedrane.cli.arguments import (
    BestSettings,
    DataRoot,
    Force,
    Json,
    Quiet,
    Trust,
    TunedFile,
    Words,
    note,
    with_data_root,
)
from fedrane.cli.console import INTERRUPTED, Stop, console_for, print_message, show, write_line
from fedrane.errors import FedraneError
from fedrane.system.files import require_new

if TYPE_CHECKING:
    from fedrane.training.callbacks import Callback
    from fedrane.training.run_folder import Folder


def compare_command(
    settings: Words = None,
    names: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Names, comma-separated; label=NAME where a method is used twice.",
            autocompletion=completion.methods,
        ),
    ] = "fedavg,local",
    out: Annotated[Path, typer.Option("--out", help="The folder of all runs.")] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds, from the experiment's seed on.")] = 1,
    metric: Annotated[
        str, typer.Option("--metric", help="What the table is of: accuracy, balanced_accuracy, auroc, auprc, f1, …")
    ] = "accuracy",
    tuned: BestSettings = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into that folder.")] = True,
    data_root: DataRoot = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same partition and seeds; make a table and a report.

    NAME.KEY=value sets a field or a key of one method only: fedprox.strength=0.1, fedprox.lr=0.05. One method with
    several settings: --methods weak=fedprox,strong=fedprox strong.strength=1. 'fedrane keys' lists the keys.
    """
    from fedrane.cli.progress import printer
    from fedrane.report import comparison

    best = TunedFile(tuned) if tuned else None
    words = with_data_root(settings or (), data_root)
    experiments, unused = comparison.experiments_of(names, words, best.layer if best else None)
    note(unused)
    if best:
        best.report(experiments)
    console = console_for(as_json)

    def watch(name: str, seed: int) -> Sequence[Callback]:
        return [printer(console, as_json, quiet, f"{name}, seed {seed} ", {"label": name})]

    with Stop(console).listening() as stop:
        done = comparison.compare(
            experiments, seeds=seeds, out=out, callbacks=watch, stop=stop, progress=False, metric=metric
        )
    if not done.finished:
        print_message(console, f"stopped; the same command goes on from here ({out})")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        show(console, done.table())
        print_message(console, f"results: {out}")
    first = next(iter(experiments.values())).seed
    folders = [comparison.run_folder(out, name, seed) for name in experiments for seed in range(first, first + seeds)]
    written = _page(console, folders, out / "report.html", data_root, quiet or as_json) if page else None
    if as_json:
        event = {"runs": done.runs, "diverged": done.diverged, "report": str(written) if written else None}
        write_line(json.dumps({"event": "comparison", **event}) + "\n")
    if done.diverged:
        raise typer.Exit(1)


def _page(console: Console, folders: Sequence[Folder], out: Path, data_root: str, quiet: bool) -> Path | None:
    """The report on a comparison. An error in it must not make the comparison fail."""
    from fedrane import report

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
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Run folders, or folders that contain them.",
            autocompletion=completion.run_folder,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every plot as PNG, SVG and PDF into this folder.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "",
    target: Annotated[
        float | None, typer.Option("--target", help="Show first what it costs to reach this accuracy (0 to 1).")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Test examples in the t-SNE plot (default: 2000); 0 for no plot.")
    ] = None,
    force: Force = False,
    data_root: DataRoot = "",
    trust_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page on runs: curves, clients, cosines, features, cost, settings.

    Runs may be unfinished. Those that differ only in their seed are averaged. The page needs no network.
    """
    from fedrane import report

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
        samples=report.SAMPLES if samples is None else samples,
        data_root=data_root,
        trust_code=trust_code,
        log=log,
    )
    print_message(console, f"page: {written}")
    if figures:
        print_message(console, f"figures: {figures}")
