"""What a run prints while it trains: a progress bar in a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.cli.console import write_line
from fedrane.config.effects import uses_alpha
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import Experiment
from fedrane.report.style import clock, count, describe_round, percent, speed
from fedrane.system import extras
from fedrane.system.files import clear_errors, require_text
from fedrane.training.callbacks import Callback
from fedrane.training.result import Result


class Messages(Callback):
    """Prints messages only."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.console, self.label = console, label

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


class Lines(Messages):
    """One plain line for each round."""

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        self.total, self.began, self.before = total, time.perf_counter(), len(history)
        self.console.print(headline(experiment, federation), highlight=False, soft_wrap=True)
        if history:
            done = history[-1]["round"]
            self.message("nothing is left to do" if done >= total else f"going on after round {done}")

    def round(self, record: Metrics) -> None:
        done = record["round"]
        left = (time.perf_counter() - self.began) / max(done - self.before, 1) * (self.total - done)
        text = f"{self.label}round {done}/{self.total}  {describe_round(record)}  {clock(left)} left"
        self.message(text)


class LiveProgress(Messages):
    """A progress bar with the accuracies, the speed and the time left."""

    def __init__(self, console: Console, label: str = "") -> None:
        super().__init__(console, label)
        self.last: dict[str, str] = {}

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        self.console.print(headline(experiment, federation), highlight=False)
        columns: list[Any] = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=self.console)
        done = history[-1]["round"] if history else 0
        self.task: TaskID = self.progress.add_task(self.label or "round", total=total, completed=done, state="")
        self.progress.start()

    def round(self, record: Metrics) -> None:
        for model in (GLOBAL, PERSONAL):
            if f"{model}/accuracy" in record:
                self.last[model] = percent(record[f"{model}/accuracy"])
        state = "  ".join(f"{model} [bold]{value}[/]" for model, value in self.last.items())
        self.progress.update(self.task, completed=record["round"], state=f"{state}  [dim]{speed(record)}[/]")

    def end(self, result: Result) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        if hasattr(self, "progress"):
            self.progress.stop()


class JsonLines(Callback):
    """One JSON object per line: each round's record, and at the end the summary."""

    def __init__(self, write: Any, fields: Mapping[str, str] = {}) -> None:
        self.write = write
        self.fields: dict[str, Any] = dict(fields)

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        self.fields |= {"method": experiment.method_name, "seed": experiment.seed}

    def round(self, record: Metrics) -> None:
        self.write(json.dumps({"event": "round", **self.fields, **record}) + "\n")

    def message(self, text: str) -> None:
        self.write(json.dumps({"event": "message", "text": text}) + "\n")

    def end(self, result: Result) -> None:
        folder = str(result.folder) if result.folder else None
        self.write(
            json.dumps({"event": "end", "finished": result.finished, "folder": folder, **self.fields, **result.summary})
            + "\n"
        )


class TensorBoard(Callback):
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        extras.require("report", "TensorBoard", "torch.utils.tensorboard")
        require_text(folder, "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.open = folder, SummaryWriter

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        done = history[-1]["round"] if history else 0
        with clear_errors(self.folder):
            self.writer: Any = self.open(str(self.folder), purge_step=done + 1)

    def round(self, record: Metrics) -> None:
        with clear_errors(self.folder):
            for name, value in record.items():
                if isinstance(value, int | float) and name != "round":
                    self.writer.add_scalar(name, value, record["round"])
            self.writer.flush()

    def end(self, result: Result) -> None:
        self.writer.close()


def headline(experiment: Experiment, federation: Federation) -> str:
    e, examples = experiment, sum(len(r) for r in federation.split.train)
    alpha = f" α {e.partition.alpha:g}" if uses_alpha(e.partition) else ""
    return (
        f"[bold]{escape(e.method_name)}[/] on {escape(e.dataset)}: {e.clients} clients ({e.partition.kind}{alpha}, "
        f"{examples:,} training examples), {escape(e.model)}, {count(e.rounds, 'round')} of "
        f"{count(e.epochs, 'epoch')}, lr {e.lr:g}, batch {e.batch}, seed {e.seed}, {e.device}"
    )


@contextmanager
def watching(
    console: Console, as_json: bool, quiet: bool, board: Path | None, label: str = "", fields: Mapping[str, str] = {}
) -> Iterator[list[Callback]]:
    """The callbacks that print a run. ``label`` precedes its lines; ``fields`` are added to its JSON objects."""
    watch: list[Callback] = [TensorBoard(board)] if board else []
    bar: LiveProgress | None = None
    if as_json:
        watch.append(JsonLines(write_line, fields))
    elif quiet:
        watch.append(Messages(console))
    elif console.is_terminal:
        bar = LiveProgress(console, label)
        watch.append(bar)
    else:
        watch.append(Lines(console, label))
    try:
        yield watch
    finally:
        if bar:
            bar.close()
