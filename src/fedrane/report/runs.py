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
from fedrane.errors import CheckpointError
from fedrane.experiment import ELSEWHERE, defaults, read_toml
from fedrane.training.run_folder import CONFIG, METADATA, Folder

DEPTH = 3
"""How deep below a folder runs are looked for: a comparison has METHOD/seed-0."""
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
    """Training examples of each client (row) and class (column); one column where classes are not known."""

    deviations: tuple[str, ...] = ()
    """Why its result may differ from that of its settings."""
    label: str = ""
    """What a comparison called it, if not by its method."""

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
    folders = {folder.path.resolve(): folder for path in paths for folder in _folders(Path(path))}
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


def _folders(path: Path) -> list[Folder]:
    if Folder(path).holds_run():
        return [Folder(path)]
    levels = (path.glob("*/" * depth + CONFIG) for depth in range(1, DEPTH + 1))
    below = [Folder(config.parent) for level in levels for config in sorted(level)]
    if not below:
        what = f"neither it nor a folder in it has a {CONFIG}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} holds no run", what, "Name what 'fedrane run' or 'fedrane compare' has written")
    return below


def read(folder: Folder) -> Run:
    settings = dotted(read_toml(folder.path / CONFIG))
    for key, expected in (("seed", int), ("rounds", int), ("dataset", str), (NAME, str)):
        if not isinstance(settings.get(key), expected):
            why = f"it has {key}={settings[key]}" if key in settings else f"it has no {key}"
            raise CheckpointError(f"{folder.path / CONFIG} is not the configuration of a run", why)
    settings |= {key: value for key, value in defaults(settings[NAME]).items() if key not in settings}
    history = folder.read_metrics()
    metadata = folder.read_metadata()
    classes, labels = tuple(map(str, metadata["inputs"]["classes"])), np.array(metadata["labels"], dtype=np.int64)
    columns = {len(classes), 1} if _deployed(settings.get("engine")) else {len(classes)}
    if labels.shape[1] not in columns:
        raise CheckpointError(f"{folder.path / METADATA}: labels of shape {labels.shape} for {len(classes)} classes")
    deviations = tuple(metadata.get("deviations", ()))
    return Run(folder.path, settings, history, folder.finished, classes, labels, deviations, folder.label)


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
            done = f"{run.path} is unfinished: {run.history[-1]['round']} of {run.settings['rounds']} rounds"
            notes.append(f"{done}; it is left out, because others are finished." if finished else f"{done}.")
        yield Line(name, tuple(sorted(finished or group, key=lambda run: run.seed)))


def names(experiments: Sequence[Mapping[str, Any]], labels: Sequence[str] = ()) -> list[str]:
    """Each one's label, or its method, with what differs from others of that name.

    >>> names([{"method.name": "fedavg", "lr": 0.1}, {"method.name": "fedavg", "lr": 0.5}, {"method.name": "local"}])
    ['fedavg (lr=0.1)', 'fedavg (lr=0.5)', 'local']
    """
    plain = [str(settings[NAME]).rpartition(":")[2] for settings in experiments]
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
