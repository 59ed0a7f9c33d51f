"""``fedrane datasets``, ``data get`` and ``partition``: the data on this machine, and how clients share them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedrane.cli import completion
from fedrane.cli.arguments import DataRoot, Force, Json, Words, experiment_of, note
from fedrane.cli.console import console_for, plain_table, print_message, show, write_line
from fedrane.system.files import require_new

data_app = typer.Typer(help="Datasets on this machine.", no_args_is_help=True)


def datasets_command(data_root: DataRoot = "", as_json: Json = False) -> None:
    """List the known datasets: which are on this machine, and how to get the others."""
    from fedrane.data import catalogue

    root = catalogue.data_root(data_root or None)
    states = catalogue.status(root)
    if as_json:
        for state in states:
            write_line(json.dumps(asdict(state), default=str) + "\n")
        return
    table = plain_table("dataset", "classes", "shape", "train", "test", "where")
    for known in states:
        shape = "×".join(map(str, known.shape))
        absent = "by hand" if catalogue.by_hand(known.name) else "download"
        where = known.where if known.ready else f"[yellow]{absent}[/]"
        sizes = ("as made" if count is None else f"{count:,}" for count in (known.train, known.test))
        table.add_row(known.name, str(known.classes or "a number"), shape, *sizes, where)
    console = console_for(False)
    show(console, table)
    for text in (
        "download: fedrane data get NAME; by hand: the same command explains how",
        f"data root: {root}",
    ):
        console.print(text, highlight=False, soft_wrap=True)


@data_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="A dataset's name.", autocompletion=completion.dataset)],
    data_root: DataRoot = "",
) -> None:
    """Download a dataset, or the rest of one, and verify its checksums."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fedrane.data import catalogue, download

    console = console_for(False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def advance(done: int, total: int, label: str) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        message = download.get(name, catalogue.data_root(data_root or None), advance)
    print_message(console, message)


def partition_command(
    settings: Words = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot clients × classes into this file.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Save the partition, for partition.file=…")] = None,
    force: Force = False,
    data_root: DataRoot = "",
    as_json: Json = False,
) -> None:
    """Show how an experiment's examples are spread over its clients and how much these differ, without training."""
    from fedrane.config.effects import uses_alpha
    from fedrane.data import partition as partitions
    from fedrane.data.heterogeneity import Heterogeneity
    from fedrane.training.setup import as_dataset, make_partition, settled

    require_new(plot, force)
    require_new(save, force)
    experiment = experiment_of(settings, data_root)
    dataset = as_dataset(experiment, None)
    experiment, unused = settled(experiment, dataset, False, False)
    console = console_for(as_json)
    note(unused)
    for text in dataset.notes:
        print_message(console, text)
    partition = make_partition(experiment, dataset)
    experiment.skew.check(dataset.shape)
    counts = partition.counts(dataset.y, len(dataset.classes))
    measured = Heterogeneity.of(counts)
    how = experiment.partition
    title = f"{experiment.dataset}, {len(counts)} clients, {how.kind}" + (
        f", α {how.alpha:g}" if uses_alpha(how) else ""
    )
    print_message(console, title)
    table = plain_table("", "fewest", "median", "most")
    rows = {"examples per client": measured.sizes} | (
        {"classes per client": measured.classes} if dataset.classes else {}
    )
    for name, values in rows.items():
        table.add_row(name, *(f"{v:,.0f}" for v in values))
    console.print(table)
    for text in measured.lines()[0 if dataset.classes else 1 :]:
        print_message(console, text)
    if experiment.skew.on:
        print_message(console, f"feature skew: {experiment.skew.described()}")
    if as_json:
        settings_of = {"dataset": experiment.dataset, "clients": len(counts), "seed": experiment.seed}
        described = {**settings_of, "partition": asdict(how), "skew": asdict(experiment.skew), **asdict(measured)}
        write_line(json.dumps({**described, "labels": counts.tolist()}) + "\n")
    if plot:
        from fedrane.report.partition_plot import draw  # matplotlib is slow to import

        draw(partition, dataset.y, dataset.classes, plot, title)
        print_message(console, f"plot: {plot}")
    if save:
        partitions.save(partition, save, dataset=dataset.name, kind=how.kind, alpha=how.alpha, seed=experiment.seed)
        print_message(console, f"saved: {save}; use it again with partition.file={save}")
