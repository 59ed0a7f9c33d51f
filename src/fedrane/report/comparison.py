"""Several methods on the same partition, cohorts and seeds, and the table of their results."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from fedrane import engines, methods
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config import effects, sources
from fedrane.config.settings import dotted
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.errors import CheckpointError, ConfigError, Diverged
from fedrane.experiment import Experiment, read_toml
from fedrane.run import resume, run
from fedrane.system import loading
from fedrane.system.files import taking, write_atomically
from fedrane.training import user_code
from fedrane.training.callbacks import Callback
from fedrane.training.predictor import Inputs
from fedrane.training.run_folder import COMPARISON, CONFIG, METADATA, METRICS, SUMMARY, Folder, read_labels
from fedrane.training.setup import automatic_model

COLUMNS = (
    ("global last", GLOBAL, "last"),
    ("global best", GLOBAL, "best"),
    ("personal last", PERSONAL, "last"),
    ("personal best", PERSONAL, "best"),
)


@dataclass(frozen=True)
class Cell:
    """A measure over seeds; None if the method has no such model."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, summaries: Sequence[Metrics], model: str, which: str) -> Cell:
        return cls.over([s[f"{model}/{which}"][f"{model}/accuracy"] for s in summaries if f"{model}/{which}" in s])

    @classmethod
    def over(cls, values: Sequence[float]) -> Cell:
        if not values:
            return cls(None, None)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        text = f"{100 * self.mean:.2f}"
        return text if self.deviation is None else f"{text} ± {100 * self.deviation:.2f}"


SAME = frozenset(
    {"dataset", "data_root", "image_size", "clients", "participation", "client_dropout", "validation", "seed"}
)
"""Keys that all methods of a comparison have in common: they decide the examples, the clients and the cohorts."""


@dataclass(frozen=True)
class Comparison:
    """The summaries of each method's runs, one for each seed."""

    runs: dict[str, list[Metrics]]
    folder: Path
    diverged: dict[str, str] = field(default_factory=dict)
    """What went wrong, by method."""
    labels: dict[str, str] = field(default_factory=dict)
    """What each label stands for."""

    def cell(self, method: str, model: str, which: str) -> Cell:
        return Cell.of(self.runs[method], model, which)

    @property
    def caption(self) -> str:
        seeds = max(len(summaries) for summaries in self.runs.values())
        over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
        lost = "".join(f"; {name} diverged in some runs, which are left out" for name in self.diverged)
        meant = "".join(f"; {label} is {what}" for label, what in self.labels.items())
        return f"accuracy in %{over}; – where the method has no such model{lost}{meant}"

    def rows(self) -> list[list[str]]:
        def speed(summaries: list[Metrics]) -> str:
            return f"{statistics.fmean(s['samples_per_second'] for s in summaries):,.0f}" if summaries else "diverged"

        return [
            [name, *(str(self.cell(name, model, which)) for _, model, which in COLUMNS), speed(summaries)]
            for name, summaries in self.runs.items()
        ]

    def table(self) -> Table:
        """For the terminal, the best of each column bold."""
        table = Table(caption=escape(self.caption), caption_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        for title in (*(title.replace(" ", "\n") for title, _, _ in COLUMNS), "samples\n/s"):
            table.add_column(title, justify="right", no_wrap=True)
        best = [max(self.cell(name, *column).mean or -math.inf for name in self.runs) for _, *column in COLUMNS]
        for row in self.rows():
            means = [self.cell(row[0], *column).mean for _, *column in COLUMNS]
            marked = [f"[bold]{t}[/]" if m == b else t for t, m, b in zip(row[1:-1], means, best, strict=True)]
            table.add_row(escape(row[0]), *marked, row[-1])
        return table

    def markdown(self) -> str:
        head = ["method", *(title for title, _, _ in COLUMNS), "samples/s"]
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *self.rows()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{self.caption}\n"


def compare(
    experiments: dict[str, Experiment],
    seeds: Sequence[int],
    out: str | Path,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda name, seed: (),
    stop: Callable[[], bool] = lambda: False,
) -> Comparison | None:
    """Run each experiment with each seed in its own folder. Finished runs are kept, interrupted ones are resumed.

    The experiments are named by method or by label. Returns None if it was stopped on the way.
    """
    _check_apart(experiments, out)
    with taking(Path(out), "comparison", holding=f"*/seed-*/{CONFIG}"):
        comparison = _compared(experiments, seeds, Path(out), callbacks, stop)
    if comparison:
        write_atomically(Path(out) / "table.md", comparison.markdown())
    return comparison


def _compared(
    experiments: dict[str, Experiment],
    seeds: Sequence[int],
    out: Path,
    callbacks: Callable[[str, int], Sequence[Callback]],
    stop: Callable[[], bool],
) -> Comparison | None:
    labels = _labels(experiments)
    runs: dict[str, list[Metrics]] = {name: [] for name in experiments}
    diverged: dict[str, str] = {}
    for seed in seeds:
        for name, experiment in experiments.items():
            folder = run_folder(out, name, seed)
            wanted = experiment.replace(seed=seed)
            go_on = folder.holds_run()
            if go_on:
                _require_same(folder, wanted)
                user_code.remember(wanted)
            if not (go_on and folder.finished):
                watch = [*callbacks(name, seed), _Labelling(out, labels)]
                path = folder.path
                try:
                    if go_on:
                        result = resume(path, callbacks=watch, stop=stop)
                    else:
                        result = run(wanted, path, callbacks=watch, stop=stop)
                except Diverged as error:  # the other methods can still be compared
                    diverged[name] = str(error)
                    for callback in watch:
                        callback.message(f"{name}, seed {seed}: {error}")
                    continue
                if not result.finished:
                    return None
            runs[name].append(_summary(folder))
    return Comparison(runs, out, diverged, labels)


def _summary(folder: Folder) -> Metrics:
    """Checked: it has all that the table reads, as far as the method has such models."""
    summary = folder.read_json(SUMMARY)
    try:
        measured = [(model, f"{model}/{which}") for _, model, which in COLUMNS]
        numbers = [summary[name][f"{model}/accuracy"] for model, name in measured if name in summary]
        readable = all(isinstance(number, int | float) for number in [summary["samples_per_second"], *numbers])
    except (KeyError, TypeError):
        readable = False
    if not readable:
        raise CheckpointError(
            f"{folder.path / SUMMARY} is not the summary of a run",
            remedy=f"Remove it: it is written again from {METRICS} when the comparison goes on",
        )
    return dict(summary)


def _check_apart(experiments: dict[str, Experiment], out: str | Path) -> None:
    """No two names share a folder or an experiment."""
    for name, other in itertools.combinations(experiments, 2):
        if run_folder(out, name, 0).path == run_folder(out, other, 0).path:
            raise ConfigError(f"{name} and {other}", "their folders would be the same", "Give them other labels")
        if experiments[name] == experiments[other]:
            raise ConfigError(
                f"{name} and {other} are the same experiment", remedy=f"Set a field of one: {other}.FIELD=value"
            )


def _labels(experiments: dict[str, Experiment]) -> dict[str, str]:
    """What each label stands for: its method, and the settings in which it differs from others of that method."""
    labels = {}
    for label, experiment in experiments.items():
        if label in methods.known() or loading.is_reference(label):
            continue
        others = [dotted(e.to_dict()) for e in experiments.values() if e.method_name == experiment.method_name]
        settings = dotted(experiment.to_dict())
        changed = [
            f"{key.removeprefix('method.')}={settings[key]}"
            for key in settings
            if any(e[key] != settings[key] for e in others)
        ]
        labels[label] = f"{experiment.method_name} ({', '.join(changed)})" if changed else experiment.method_name
    return labels


class _Labelling(Callback):
    """Writes the labels for later reports. Labels of earlier comparisons in the folder stay."""

    def __init__(self, out: Path, labels: dict[str, str]) -> None:
        self.out, self.labels = out, labels

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        if self.labels:
            new = {run_folder(self.out, label, 0).path.parent.name: label for label in self.labels}
            Folder(self.out).write_json(COMPARISON, {"labels": read_labels(self.out) | new})


def run_folder(out: str | Path, method: str, seed: int) -> Folder:
    """Where a comparison keeps a run. The name of a user's method is a path, so it is cleaned."""
    return Folder(Path(out) / re.sub(r"[^\w.+-]+", "-", method).strip("-.") / f"seed-{seed}")


def _require_same(folder: Folder, wanted: Experiment) -> None:
    """The folder must hold a run of this experiment; values ``auto`` may have been resolved."""
    values = read_toml(folder.path / CONFIG)
    name = dotted(values).get("method.name")
    if name != wanted.method_name:  # before anything that the folder names is loaded
        raise _another(folder, "method.name", name, wanted.method_name)
    metadata = folder.read_metadata()
    for deviation in metadata.get("deviations", []):
        raise CheckpointError(
            f"{folder.path}: {deviation}", "it is no plain run of this experiment", "Choose another --out"
        )
    files = sources.user_files(wanted)
    for key in sources.changed(metadata.get("sources", {}), sources.contents(wanted)):
        raise CheckpointError(
            f"{files[key]} has changed since the run in {folder.path}",
            "its results would be taken for those of the present file",
            "Choose another --out",
        )
    config = Experiment.from_dict(values)
    saved, idle = dotted(config.to_dict()), effects.idle(config)
    from_auto = _from_auto(str(saved["device"]), Inputs.from_dict(metadata["inputs"], folder.path / METADATA))
    clients_given = wanted.partition.file or "natural" in (wanted.partition.kind, saved["partition.kind"])
    for key, now in dotted(wanted.to_dict()).items():
        was = saved.get(key)
        settled = (
            (now == engines.AUTO and was in from_auto.get(key, ()))
            or (key == "threads" and now == 0)
            or key in idle
            or (key == "clients" and clients_given)
            or (key in ("dataset", "model") and was == str(Path(now).resolve()))
        )
        if was != now and not settled:
            means = f" ({' or '.join(from_auto[key])})" if now == engines.AUTO and key in from_auto else ""
            raise _another(folder, key, was, f"{now}{means}")


def _from_auto(device: str, inputs: Inputs) -> dict[str, Sequence[str]]:
    """What ``auto`` may have been resolved to on that device and with these inputs, by key."""
    return {
        "model": (automatic_model(engines.AUTO, inputs.shape),),
        "partition.kind": ("natural", "dirichlet"),
        "engine": engines.AUTOMATIC,
        "device": ("cpu", "cuda"),
        "precision": ("float32",) if device == "cpu" else ("float32", "bf16"),
    }


def _another(folder: Folder, key: str, was: object, now: object) -> CheckpointError:
    return CheckpointError(
        f"{folder.path} holds a run with {key}={was}, not {now}",
        "its results would be taken for another experiment's",
        "Choose another --out",
    )
