"""What a run shows while it trains: a progress bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config.effects import uses_alpha
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import Experiment
from fedrane.system import terminal
from fedrane.training.callbacks import Callback
from fedrane.training.wording import achieved, clock, count, describe_round, speed


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


class ProgressBar(Messages):
    """A progress bar with the accuracies, the speed and the time left."""

    def __init__(self, console: Console, label: str = "") -> None:
        super().__init__(console, label)
        self.last: dict[str, str] = {}
        self.redraw: Callable[[], None] | None = None

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
        if self.console.is_jupyter:
            self.redraw = in_notebook(self.progress)
        else:
            self.progress.start()

    def round(self, record: Metrics) -> None:
        for model in (GLOBAL, PERSONAL):
            if value := achieved(record, model):
                self.last[model] = value
        state = "  ".join(f"{model} [bold]{value}[/]" for model, value in self.last.items())
        self.progress.update(self.task, completed=record["round"], state=f"{state}  [dim]{speed(record)}[/]")
        if self.redraw:
            self.redraw()

    def close(self) -> None:
        """Restore the terminal."""
        if hasattr(self, "progress"):
            self.progress.stop()


def in_notebook(progress: Progress) -> Callable[[], None]:
    """Show it below the cell; returns what draws it again. Rich itself would need the package ipywidgets for that."""
    from IPython.display import HTML, display

    def drawn() -> Any:
        page = Console(record=True, file=io.StringIO(), force_jupyter=False, color_system="truecolor", width=115)
        page.print(progress.get_renderable())
        line = "<pre style='white-space:pre;overflow-x:auto;line-height:normal;margin:0'>{code}</pre>"
        return HTML(page.export_html(inline_styles=True, code_format=line))

    shown = display(drawn(), display_id=True)
    return lambda: shown.update(drawn())


def watcher(console: Console, label: str = "") -> Callback:
    """A progress bar where one can be drawn, else plain lines. ``label`` precedes them."""
    return ProgressBar(console, label) if console.is_jupyter or console.is_terminal else Lines(console, label)


def shown(progress: bool | None, label: str = "") -> list[Callback]:
    """The callback that shows a run on standard error; none without ``progress``.

    None stands for yes in a terminal and in a notebook, and for no elsewhere and in a test.
    """
    console = terminal.console(stderr=True)
    if progress is None:
        testing = "PYTEST_CURRENT_TEST" in os.environ
        progress = console.is_jupyter or (sys.stderr is not None and sys.stderr.isatty() and not testing)
    return [watcher(console, label)] if progress else []


def headline(experiment: Experiment, federation: Federation) -> str:
    e, examples = experiment, sum(len(r) for r in federation.split.train)
    length = count(e.steps, "step") if e.steps else count(e.epochs, "epoch")
    alpha = f" α {e.partition.alpha:g}" if uses_alpha(e.partition) else ""
    return (
        f"[bold]{escape(e.method_name)}[/] on {escape(e.dataset)}: {e.clients} clients ({e.partition.kind}{alpha}, "
        f"{examples:,} training examples), {escape(e.model)}, {count(e.rounds, 'round')} of "
        f"{length}, lr {e.lr:g}, batch {e.batch}, seed {e.seed}, {e.device}"
    )
