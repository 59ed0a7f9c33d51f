"""The runs a report is about: read from their folders, and grouped into lines that differ in their seed alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.config.settings import NAME, dotted
from fedrane.engines import DEPLOYED
from fedrane.engines.evaluation import Metrics
from fedrane.errors import CheckpointError, Diverged, printable
from fedrane.experiment import ELSEWHERE, defaults, read_toml
from fedrane.report.style import title
from fedrane.training import sessions
from fedrane.training.round_records import problem
from fedrane.training.run_folder import CONFIG, METADATA, METRICS, SESSIONS, Folder, read_order

OF_RUNS = (METADATA, METRICS, SESSIONS)
"""Other programs may have a ``config.toml`` too; a run has one of these beside it."""
UNCOUNTED = ELSEWHERE | {"seed"}
"""Settings that do not make two experiments different; an engine whose clients are other machines does."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read without its dataset and without the method's code."""

    path: Path
    settings: Mapping[str, Any]
    """By their dotted keys; those that an older version did not write have their defaults."""
    history: Sequence[Metrics]
    finished: bool
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """Training examples of each client (row) and class (column); one column where classes are not known, or there are
    none."""

    deviations: tuple[str, ...] = ()
    """Why its result may differ from that of its settings."""
    label: str = ""
    """What a comparison called it, if not by its method."""
    sessions: tuple[sessions.Entry, ...] = ()
    """When, where and by which versions it was trained; none in a folder of an earlier version."""

    @property
    def knows_classes(self) -> bool:
        """Not in a federation of several machines: which classes a client holds does not leave it."""
        return bool(self.labels.shape[1] == len(self.classes))

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def rounds(self) -> int:
        return int(self.settings["rounds"])

    @property
    def counts(self) -> NDArray[np.int64]:
        """Training examples of each client."""
        counts: NDArray[np.int64] = self.labels.sum(1)
        return counts

    @property
    def order(self) -> NDArray[np.int64]:
        """The clients as plots show them: the one with the most training examples first."""
        return np.argsort(-self.counts, kind="stable")

    @property
    def experiment(self) -> dict[str, Any]:
        """The settings it shares with its repetitions."""
        return {key: value for key, value in self.settings.items() if _counts(key, value)}


@dataclass(frozen=True)
class Line:
    """One experiment and its repetitions, in the order of their seeds: a line of the table, a curve of a plot."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def settings(self) -> dict[str, Any]:
        return self.first.experiment


def gather(paths: Iterable[str | Path]) -> tuple[list[Line], list[str]]:
    """The lines of these run folders, or of folders that contain them, and notes on the runs."""
    folders = {folder.path.resolve(): folder for path in paths for folder in folders_in(Path(path))}
    notes: list[str] = []
    kept: list[Run] = []
    for folder in folders.values():
        run = read(folder)
        twins = [other for other in kept if other.seed == run.seed and other.experiment == run.experiment]
        if not run.history:
            notes.append(f"{run.path} is left out: no round of it is finished yet.")
        elif twins:
            notes.append(f"{run.path} is left out: it repeats {twins[0].path}, seed included.")
        else:
            kept.append(run)
            notes += [f"{run.path}: {deviation}" for deviation in run.deviations]
    if not kept:
        why = notes[0] if notes else "no folder was named"
        raise CheckpointError("there is nothing to report", why, "Let a run finish its first round")
    return list(_lines(kept, notes)), notes


def folders_in(path: Path) -> list[Folder]:
    """The run folder of this path, or those in it."""
    if Folder(path).holds_run():
        return [Folder(path)]
    configs = [config for config in path.rglob(CONFIG) if any((config.parent / name).exists() for name in OF_RUNS)]
    below = [
        Folder(config.parent) for config in sorted(configs, key=lambda config: (len(config.parts), _position(config)))
    ]
    if not below:
        what = f"neither it nor a folder in it has a {CONFIG}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} holds no run", what, "Name what 'fedrane run' or 'fedrane compare' has written")
    return below


def _position(config: Path) -> tuple[Path, int, Path]:
    """Runs of a comparison have the order in which their methods were named, others that of their paths."""
    method = config.parent.parent
    order = read_order(method.parent)
    return method.parent, order.index(method.name) if method.name in order else len(order), config


def read(folder: Folder) -> Run:
    settings = dotted(read_toml(folder.path / CONFIG))
    for key, expected in (("seed", int), ("rounds", int), ("dataset", str), (NAME, str)):
        if not isinstance(settings.get(key), expected):
            why = f"it has {key}={settings[key]}" if key in settings else f"it has no {key}"
            raise CheckpointError(f"{folder.path / CONFIG} is not the configuration of a run", why)
    settings |= {key: value for key, value in defaults(settings[NAME]).items() if key not in settings}
    history = folder.read_metrics()
    metadata = folder.read_metadata()
    classes = tuple(printable(str(name)) for name in metadata["inputs"]["classes"])
    labels = np.array(metadata["labels"], dtype=np.int64)
    columns = {len(classes) or 1} | ({1} if _deployed(settings.get("engine")) else set())
    if labels.shape[1] not in columns:
        raise CheckpointError(f"{folder.path / METADATA}: labels of shape {labels.shape} for {len(classes)} classes")
    for record in history:
        if why := problem(record, len(labels)):
            raise CheckpointError(f"{folder.path / METRICS}: round {record['round']} {why}")
    deviations = tuple(metadata.get("deviations", ()))
    entries = tuple(sessions.read(folder))
    shown = {key: printable(value) if isinstance(value, str) else value for key, value in settings.items()}
    label = printable(folder.label)
    return Run(folder.path, shown, history, folder.finished, classes, labels, deviations, label, entries)


def _lines(runs: Sequence[Run], notes: list[str]) -> Iterator[Line]:
    """In the order of their first runs. Unfinished runs are left out if a finished one of the same line exists."""
    groups: list[list[Run]] = []
    for run in runs:
        same = [group for group in groups if group[0].experiment == run.experiment]
        if same:
            same[0].append(run)
        else:
            groups.append([run])
    first = [group[0] for group in groups]
    for group, name in zip(groups, names([r.settings for r in first], [r.label for r in first]), strict=True):
        finished = [run for run in group if run.finished]
        for run in (run for run in group if not run.finished):
            outcome = run.sessions[-1].get("outcome") or "" if run.sessions else ""
            ended = "diverged" if outcome.startswith(Diverged.__name__) else "is unfinished"
            done = f"{run.path} {ended}: {run.history[-1]['round']} of {run.settings['rounds']} rounds"
            notes.append(f"{done}; it is left out, because others are finished." if finished else f"{done}.")
        yield Line(name, tuple(sorted(finished or group, key=lambda run: run.seed)))


def names(experiments: Sequence[Mapping[str, Any]], labels: Sequence[str] = ()) -> list[str]:
    """Each one's label, or its method's title, with what differs from others of that name.

    >>> names([{"method.name": "fedavg", "lr": 0.1}, {"method.name": "fedavg", "lr": 0.5}, {"method.name": "local"}])
    ['FedAvg (lr=0.1)', 'FedAvg (lr=0.5)', 'Local']
    """
    plain = [title(str(settings[NAME])) for settings in experiments]
    labelled = [label or name for label, name in zip(labels or plain, plain, strict=True)]
    made = []
    for name, settings in zip(labelled, experiments, strict=True):
        namesakes = [other for other, its in zip(experiments, labelled, strict=True) if its == name]
        differences = [
            f"{key.removeprefix('method.')}={settings[key]}" for key in differing(namesakes) if key in settings
        ]
        made.append(f"{name} ({', '.join(differences)})" if differences else name)
    return made


def _counts(key: str, value: Any) -> bool:
    return key not in UNCOUNTED or (key == "engine" and _deployed(value))


def _deployed(engine: Any) -> bool:
    return engine in tuple(DEPLOYED)  # by equality: a file may hold anything


def differing(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys with different values, except those that do not make two experiments different."""
    every = ((key, value) for settings in experiments for key, value in settings.items())
    keys = dict.fromkeys(key for key, value in every if _counts(key, value))
    return [key for key in keys if len({str(settings[key]) for settings in experiments if key in settings}) > 1]


def in_words(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if value != "" else "–"
