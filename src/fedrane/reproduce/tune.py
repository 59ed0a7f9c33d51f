"""Looking for a method's best settings on validation rows; the test rows are never in the tuner's hands.

The rows are spread over the clients as they will be for the table, each client's test rows are taken away, and of its
training rows a part is set aside. What is left is a dataset of its own: its clients are the clients, its test rows are
the validation rows. Runs on it cannot look at a test row, since they have none.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedrane import effects, loading, methods
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Grid
from fedrane.data import partition as partitions
from fedrane.data import streams
from fedrane.data.dataset import Dataset
from fedrane.errors import ConfigError, nearest
from fedrane.experiment import KEYS, Experiment
from fedrane.files import write_atomically
from fedrane.reproduce.results import DONE, lock
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.tables import BEST
from fedrane.reproduce.targets import Cell, Condition, Selection, Target, cells, row
from fedrane.run import as_dataset, make_partition
from fedrane.settings import FIELD, Settings, addressed, flat, nested, parse

RATES = (0.01, 0.05, 0.1, 0.5)
"""Learning rates, which every method is tried with."""
BOTH = "both"
MEASURES = (BOTH, GLOBAL, PERSONAL)


@dataclass(frozen=True, eq=False)
class Trial:
    """Values tried, and the cells, one a seed, that try them."""

    values: Settings
    cells: Sequence[Cell]
    wanted: Sequence[Experiment]
    """What the cells stand for: the same with test rows."""


@dataclass(frozen=True)
class Tuned:
    """The best that was found for a method on a dataset."""

    method: str
    dataset: str
    alpha: float
    settings: Settings
    accuracy: float
    measure: str
    trials: int


def grid_of(method: str, own: Sequence[str], words: Sequence[str] = ()) -> Grid:
    """The user's grid (``key=v1,v2``), or the method's with the learning rates.

    A key of the method's grid that is set by a word is tried with that value alone; one that the words leave without
    effect is not tried.
    """
    fixed = parse(words)
    if not own:
        made = _with_fields(method, fixed)
        idle = effects.idle_fields(made)
        plain = {f"{FIELD}{name}": values for name, values in made.grid.items() if name not in idle}
        return {key: (fixed[key],) if key in fixed else values for key, values in {"lr": RATES, **plain}.items()}
    grid: dict[str, tuple[Any, ...]] = {}
    for word in own:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ConfigError(f"--grid {word!r} is not key=value,value", remedy="Write for instance --grid lr=0.05,0.1")
        for also, how in ((fixed, f"the word {key}={fixed.get(key)}"), (grid, f"another --grid {key}=…")):
            if key in also:
                raise ConfigError(f"--grid {word} and {how}", "a key is set once", "Leave one of them out")
        grid[key] = tuple(values.split(","))
    return grid


def _with_fields(method: str, words: Mapping[str, str]) -> Algorithm:
    """The method with the fields that its row and the words set."""
    set_here = {**row(method).settings, **words}
    return Experiment.from_dict(nested({k: v for k, v in set_here.items() if k.startswith(FIELD)})).algorithm


def for_each(names: Sequence[str], selection: Selection) -> dict[str, Selection]:
    """What is asked for each of several methods: the words for all, and those for it alone."""
    shared, own = addressed(parse(selection.words), {name: name for name in names}, KEYS)
    words = {name: [f"{key}={value}" for key, value in (shared | mine).items()] for name, mine in own.items()}
    return {name: replace(selection, words=tuple(words[name])) for name in names}


def trials(method: str, condition: Condition, grid: Grid, selection: Selection, validation: float) -> list[Trial]:
    """Every combination of the grid's values, on the rows that are not test rows."""
    if not 0 < validation < 1:
        raise ConfigError(f"--validation {validation:g}", "it is a share of the training rows", "Use for instance 0.2")
    seeds = selection.seeds or (0,)
    target = Target("tune", "", "table", (), (method,), (condition.dataset,), (condition.alpha,), len(seeds))
    found = []
    for values in itertools.product(*grid.values()):
        tried = dict(zip(grid, values, strict=True))
        words = (*selection.words, *(f"{key}={value}" for key, value in tried.items()))
        made = cells(target, Selection((), (), (method,), seeds, words))
        wanted = [cell.experiment for cell in made if cell.experiment]
        if not wanted:
            raise ConfigError(made[0].problem, remedy=nearest(method, methods.known()))
        understood = flat(wanted[0].to_dict())
        if strange := [key for key in tried if key not in understood]:
            raise ConfigError(
                f"--grid {strange[0]}=…", "it is no key of an experiment", nearest(strange[0], understood)
            )
        tried = {key: understood[key] for key in tried}
        found.append(Trial(tried, [_validating(*pair, validation) for pair in zip(made, wanted, strict=True)], wanted))
    return found


def _validating(cell: Cell, wanted: Experiment, validation: float) -> Cell:
    """The cell as it is run on the rows that :func:`without_test` leaves; ``tune`` keeps it apart from a real one."""
    settings = {**cell.settings, "tune": validation}
    return replace(cell, settings=settings, experiment=on_validation(wanted, validation))


def on_validation(wanted: Experiment, validation: float) -> Experiment:
    """The experiment as it is run on the rows that :func:`without_test` leaves: each has its client already."""
    return wanted.replace(partition=_inner(validation))


def _inner(validation: float) -> partitions.Partitioning:
    return partitions.Partitioning(kind="natural", test=validation)


def without_test(rows: Dataset, wanted: Experiment, validation: float) -> Dataset:
    """The clients' training rows alone; test rows are those that a run on it sets aside of them to validate."""
    everything = make_partition(wanted, rows)
    kept = partitions.split(everything, wanted.seed, wanted.partition.test).train
    owner = np.repeat(np.arange(len(kept), dtype=np.int64), [len(r) for r in kept])
    index = np.concatenate(kept)
    x, y = rows.x[index], rows.y[index]
    inner = partitions.partition(y, len(rows.classes), 0, _inner(validation), wanted.seed, owner)
    aside = np.concatenate(partitions.split(inner, wanted.seed, validation).test)
    # In random order, as a test set is: with norm=batch a prediction depends on its batch, which no client may fill.
    aside = aside[streams.permutation(len(aside), wanted.seed, "validation")]
    return Dataset(
        f"{rows.name}, training rows", x, y, x[aside], y[aside], rows.classes, rows.mean, rows.std, owner
    )  # mean and std are the dataset's constants


class Rows:
    """The rows that trials are run on: all that have their seed and partition in common are on the same."""

    def __init__(self, found: Sequence[Trial], validation: float) -> None:
        pairs = [pair for trial in found for pair in zip(trial.cells, trial.wanted, strict=True)]
        self.wanted = {cell.key: experiment for cell, experiment in pairs}
        self.validation = validation
        self.made: dict[Any, Dataset] = {}

    def __call__(self, cell: Cell) -> Dataset:
        wanted = self.wanted[cell.key]
        same = (wanted.seed, wanted.clients, wanted.partition)
        if same not in self.made:
            self.made[same] = without_test(as_dataset(wanted, None), wanted, self.validation)
        return self.made[same]


def score(sweep: Sweep, trial: Trial, measure: str) -> float | None:
    """Mean over seeds of the best round's accuracy on validation rows; nothing where one of them has failed."""
    values = []
    for cell in trial.cells:
        if sweep.status(cell) != DONE:
            return None
        record = sweep.records[cell.key]
        asked = (GLOBAL, PERSONAL) if measure == BOTH else (measure,)
        each = [record[whose][BEST]["accuracy"] for whose in asked if whose in record]
        if not each:
            raise ConfigError(f"{cell.row.name} has no {measure} model", remedy=f"Use --measure {BOTH}")
        values.append(statistics.fmean(each))
    return statistics.fmean(values)


def choose(sweep: Sweep, found: Sequence[Trial], condition: Condition, measure: str) -> Tuned:
    """The best trial; of equals the first."""
    scored = [(value, trial) for trial in found if (value := score(sweep, trial, measure)) is not None]
    method = found[0].cells[0].row.name
    if not scored:
        raise ConfigError(
            f"no trial of {method} came to an end", sweep.reason(found[0].cells[0]), "Try smaller learning rates"
        )
    value, trial = max(scored, key=lambda pair: pair[0])
    return Tuned(method, condition.dataset, condition.alpha, trial.values, value, measure, len(found))


# ---- the file that reproduce reads


def read(path: Path) -> tuple[Mapping[str, Any], ...]:
    """What was tuned so far."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("tuned", [])
        if not entries:
            raise ValueError("it has no entry [[tuned]]")
        if not all({"method", "dataset", "alpha", "settings"} <= entry.keys() for entry in entries):
            raise ValueError("an entry lacks its method, dataset, alpha or settings")
        for entry in entries:
            if not loading.is_reference(entry["method"]):  # a method of one's own may be on another machine
                row(entry["method"])  # one that nobody knows is a mistake
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}", remedy="Make it with fedrane tune") from error
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not what fedrane tune writes: {error}") from error
    return tuple(entries)


def write(path: Path, found: Tuned) -> None:
    """Add to the file, in place of what was found before for the same method, dataset and α.

    Several may add at once: each reads what the others added before.
    """
    new = {
        "method": found.method,
        "dataset": found.dataset,
        "alpha": found.alpha,
        "accuracy": round(found.accuracy, 5),
        "measure": found.measure,
        "trials": found.trials,
        "settings": found.settings,
    }
    head = "# Written by fedrane tune; read by fedrane reproduce --tuned. The accuracy is on validation rows.\n"
    with open_for_more(path) as entries:
        others = [e for e in entries if any(e[key] != new[key] for key in ("method", "dataset", "alpha"))]
        write_atomically(path, head + "".join(_entry(entry) for entry in [*others, new]))


@contextmanager
def open_for_more(path: Path) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """What was tuned so far, while nobody else adds to it; an error where it cannot be added to."""
    with lock(path.with_name(f".{path.name}.lock")):
        yield read(path) if path.exists() else ()


def _entry(values: Mapping[str, Any]) -> str:
    """As TOML, whose strings, numbers and truth values are JSON's."""
    plain = {key: value for key, value in values.items() if key != "settings"}
    lines = ["", "[[tuned]]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in plain.items())]
    settings = flat(values["settings"])
    return "\n".join([*lines, "[tuned.settings]", *(f"{k} = {json.dumps(v)}" for k, v in settings.items())]) + "\n"
