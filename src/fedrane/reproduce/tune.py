"""Search of a method's best settings on validation examples. The test examples are never used.

The examples are spread over the clients as for the table. Each client's test examples are removed, and a part of its
training examples is set aside for validation. The rest is a new dataset with the same clients. Its
test examples are the validation examples: a run on it cannot see a real test example.
"""

from __future__ import annotations

import itertools
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedrane import methods
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Grid
from fedrane.config import effects
from fedrane.config.settings import FIELD, NAME, Layer, Settings, addressed, canonical, flat, nested, parse
from fedrane.data import catalogue, streams
from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset
from fedrane.engines.evaluation import HEADLINES
from fedrane.errors import ConfigError, nearest
from fedrane.experiment import KEYS, Experiment
from fedrane.reproduce.results import DONE, lock
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.tables import BEST
from fedrane.reproduce.targets import Cell, Condition, Selection, Target, best_settings, cells, row
from fedrane.system import loading
from fedrane.system.files import as_toml, read_text, user_path, write_atomically
from fedrane.training.setup import as_dataset, make_partition

LRS = (0.01, 0.05, 0.1, 0.5)
"""Learning rates that every method is tried with."""
BOTH = "both"
MEASURES = (BOTH, GLOBAL, PERSONAL)


@dataclass(frozen=True, eq=False)
class Trial:
    """Values to try, and the cells that try them, one for each seed."""

    values: Settings
    cells: Sequence[Cell]
    wanted: Sequence[Experiment]
    """The same experiments on all examples, test examples included."""

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Tuned:
    """The best settings of a method on a dataset."""

    method: str
    dataset: str
    alpha: float
    settings: Settings
    accuracy: float
    measure: str
    trials: int


def grid_of(method: str, user_grid: Sequence[str], words: Sequence[str] = ()) -> Grid:
    """The user's grid (``key=v1,v2``), or the method's with the learning rates.

    A key of the method's grid that the user sets is tried with that value only; one that has no effect is not tried.
    """
    fixed = parse(words)
    if not user_grid:
        made = _with_fields(method, fixed)
        idle = effects.idle_fields(made)
        plain = {f"{FIELD}{name}": values for name, values in made.grid.items() if name not in idle}
        return {key: (fixed[key],) if key in fixed else values for key, values in {"lr": LRS, **plain}.items()}
    grid: dict[str, tuple[Any, ...]] = {}
    for word in user_grid:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ConfigError(f"--grid {word!r} is not key=value,value", remedy="Write for instance --grid lr=0.05,0.1")
        key = canonical(key)
        for also, how in ((fixed, f"the word {key}={fixed.get(key)}"), (grid, f"another --grid {key}=…")):
            if key in also:
                raise ConfigError(f"--grid {word} and {how}", "a key is set once", "Leave one of them out")
        grid[key] = tuple(values.split(","))
    return grid


def _with_fields(method: str, words: Mapping[str, str]) -> Algorithm:
    """The method with the fields that its row and the user set."""
    set_here = {**row(method).settings, **words}
    return Experiment.from_dict(nested({k: v for k, v in set_here.items() if k.startswith(FIELD)})).algorithm


def for_each(names: Sequence[str], selection: Selection) -> dict[str, Selection]:
    """The selection for each of several methods: the settings for all, and those for it only."""
    shared, per_method = addressed(parse(selection.words), {name: name for name in names}, KEYS)
    words = {name: [f"{key}={value}" for key, value in (shared | mine).items()] for name, mine in per_method.items()}
    return {name: replace(selection, words=tuple(words[name])) for name in names}


def trials(method: str, condition: Condition, grid: Grid, selection: Selection, validation: float) -> list[Trial]:
    """Every combination of the grid's values, on the examples that are not test examples."""
    if not 0 < validation < 1:
        raise ConfigError(f"--validation {validation:g}", "it is a share of training examples", "Use for instance 0.2")
    seeds = selection.seeds or (0,)
    target = Target("tune", "", "table", (), (method,), (condition.dataset,), (condition.alpha,), len(seeds))
    planned = []
    for values in itertools.product(*grid.values()):
        tried = dict(zip(grid, values, strict=True))
        words = (*selection.words, *(f"{key}={value}" for key, value in tried.items()))
        made = cells(target, Selection((), (), (method,), seeds, words))
        wanted = [cell.experiment for cell in made if cell.experiment]
        if not wanted:
            raise ConfigError(made[0].problem, remedy=nearest(method, methods.known()))
        understood = flat(wanted[0].to_dict())
        if unknown := [key for key in tried if key not in understood]:
            raise ConfigError(
                f"--grid {unknown[0]}=…", "it is no key of an experiment", nearest(unknown[0], understood)
            )
        tried = {key: understood[key] for key in tried}
        planned.append(
            Trial(tried, [_validating(*pair, validation) for pair in zip(made, wanted, strict=True)], wanted)
        )
    return planned


def describe(trials: Sequence[Trial]) -> str:
    """How many trials there are, and of which values.

    >>> one, two = (Trial({"lr": lr, "batch": 16}, [], []) for lr in (0.1, 0.5))
    >>> describe([one, two])
    '2 trials (lr 0.1, 0.5 × batch 16)'
    """
    tried = {key: dict.fromkeys(str(trial.values[key]) for trial in trials) for key in trials[0].values}
    grid = " × ".join(f"{key} {', '.join(values)}" for key, values in tried.items())
    return f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'} ({grid})"


def _validating(cell: Cell, wanted: Experiment, validation: float) -> Cell:
    """The cell on the dataset of :func:`without_test`; the setting ``tune`` makes its record a different one."""
    settings = {**cell.settings, "tune": validation}
    return replace(cell, settings=settings, experiment=on_validation(wanted, validation))


def on_validation(wanted: Experiment, validation: float) -> Experiment:
    """The experiment on the dataset of :func:`without_test`, where each example has its client already."""
    return wanted.replace(partition=_inner(validation))


def _inner(validation: float) -> partitions.Partitioning:
    return partitions.Partitioning(kind="natural", test=validation)


def without_test(dataset: Dataset, wanted: Experiment, validation: float) -> Dataset:
    """A dataset of the clients' training examples only; its test examples are those set aside for validation."""
    everything = make_partition(wanted, dataset)
    kept = partitions.split(everything, wanted.seed, wanted.partition.test, ordered=bool(dataset.alphabet)).train
    owner = np.repeat(np.arange(len(kept), dtype=np.int64), [len(r) for r in kept])
    index = np.concatenate(kept)
    x, y = dataset.x[index], dataset.y[index]
    inner = partitions.partition(y, len(dataset.classes), 0, _inner(validation), wanted.seed, owner)
    aside = np.concatenate(partitions.split(inner, wanted.seed, validation, ordered=bool(dataset.alphabet)).test)
    # Shuffled, as a test set is: with norm=batch a prediction depends on its batch, which one client must not fill.
    aside = aside[streams.permutation(len(aside), wanted.seed, "validation")]
    name = f"{dataset.name}, training examples"
    # Mean and deviation, and a table's form, are the dataset's.
    return replace(dataset, name=name, x=x, y=y, x_test=x[aside], y_test=y[aside], client=owner)


class TrialData:
    """The datasets of trials: one for each seed, partition and way to read the data."""

    def __init__(self, trials: Sequence[Trial], validation: float) -> None:
        pairs = [pair for trial in trials for pair in zip(trial.cells, trial.wanted, strict=True)]
        self.wanted = {cell.key: experiment for cell, experiment in pairs}
        self.validation = validation
        self.made: dict[Any, Dataset] = {}

    def __call__(self, cell: Cell) -> Dataset:
        wanted = self.wanted[cell.key]
        read = wanted.table_options, wanted.image_size, wanted.window
        same = (wanted.seed, wanted.clients, wanted.partition, *read)
        if same not in self.made:
            self.made[same] = without_test(as_dataset(wanted, None), wanted, self.validation)
        return self.made[same]


def score(sweep: Sweep, trial: Trial, measure: str) -> float | None:
    """The best round's validation accuracy or R², mean over seeds; None if a seed failed."""
    values = []
    for cell in trial.cells:
        if sweep.status(cell) != DONE:
            return None
        record = sweep.records[cell.key]
        asked = (GLOBAL, PERSONAL) if measure == BOTH else (measure,)
        found = [record[model][BEST] for model in asked if model in record]
        each = [figures[next(name for name in HEADLINES if name in figures)] for figures in found]
        if not each:
            raise ConfigError(f"{cell.row.name} has no {measure} model", remedy=f"Use --measure {BOTH}")
        values.append(statistics.fmean(each))
    return statistics.fmean(values)


def choose(sweep: Sweep, trials: Sequence[Trial], condition: Condition, measure: str) -> Tuned:
    """The best trial; the first of equals."""
    scored = [(value, trial) for trial in trials if (value := score(sweep, trial, measure)) is not None]
    method = trials[0].cells[0].row.name
    if not scored:
        raise ConfigError(
            f"no trial of {method} finished", sweep.reason(trials[0].cells[0]), "Try smaller learning rates"
        )
    value, trial = max(scored, key=lambda pair: pair[0])
    return Tuned(method, condition.dataset, condition.alpha, trial.values, value, measure, len(trials))


# ---- the file that reproduce reads

ENTRY: Mapping[str, type] = {"method": str, "dataset": str, "alpha": float, "settings": dict}
"""The form of an entry."""


def read(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The entries of the file."""
    try:
        entries = tomllib.loads(read_text(path)).get("tuned", [])
        if not entries or not isinstance(entries, list):
            raise ValueError("it has no entry [[tuned]]")
        for entry in entries:
            wrong = [key for key, form in ENTRY.items() if not isinstance(entry, dict) or not _fits(entry, key, form)]
            if wrong:
                raise ValueError(f"the {wrong[0]} of an entry is missing, or is no {ENTRY[wrong[0]].__name__}")
            if not loading.is_reference(entry["method"]):  # a user's method may be on another machine
                row(entry["method"])  # an unknown name is a mistake
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}", remedy="Make it with fedrane tune") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not what fedrane tune writes: {error}") from error
    return tuple(entries)


def _fits(entry: Mapping[str, Any], key: str, form: type) -> bool:
    """A whole number is a float, too."""
    value = entry.get(key)
    return isinstance(value, form) or (form is float and type(value) is int)


def layer(path: Path, entries: Iterable[Mapping[str, Any]], wanted: Experiment) -> Layer | None:
    """The settings in the file for an experiment's method and dataset: for its α if there are any, else for another."""
    here = [
        {**entry, "method": loading.absolute(entry["method"]), "dataset": _absolute_data(entry["dataset"])}
        for entry in entries
    ]
    settings = best_settings(
        here, wanted.method_name, Condition(_absolute_data(wanted.dataset), wanted.partition.alpha)
    )
    return Layer(str(path), {NAME: wanted.method_name, **settings}) if settings else None


def _absolute_data(dataset: str) -> str:
    """A file by its absolute path: it may be named from another folder."""
    return dataset if dataset in catalogue.NAMES else str(user_path(dataset).resolve())


def write(path: Path, tuned: Tuned) -> None:
    """Add to the file; replace an entry of the same method, dataset and α. Several processes may do so at once."""
    new = {
        "method": tuned.method,
        "dataset": tuned.dataset,
        "alpha": tuned.alpha,
        "accuracy": round(tuned.accuracy, 5),
        "measure": tuned.measure,
        "trials": tuned.trials,
        "settings": tuned.settings,
    }
    head = "# Written by fedrane tune; read by --tuned. The accuracy is on validation examples.\n"
    with open_for_more(path) as entries:
        others = [e for e in entries if any(e[key] != new[key] for key in ("method", "dataset", "alpha"))]
        write_atomically(path, head + "".join(_entry(entry) for entry in [*others, new]))


@contextmanager
def open_for_more(path: Path) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """The entries of the file, locked against other writers; an error if the file cannot be extended."""
    with lock(path.with_name(f".{path.name}.lock")):
        yield read(path) if path.exists() else ()


def _entry(values: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in values.items() if key != "settings"}
    return "\n" + as_toml(plain, "[[tuned]]") + as_toml(flat(values["settings"]), "[tuned.settings]")
