"""The numbers of a report's tables and plots, computed from the runs' records only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.engines.evaluation import ACCURACY, HEADLINES, Metrics
from fedrane.errors import ConfigError
from fedrane.ops.regression import R2
from fedrane.report.comparison import Cell
from fedrane.report.runs import Line, Run
from fedrane.training import timing

Floats = NDArray[np.float64]
MODEL_TYPES = (GLOBAL, PERSONAL)
CLIENTS = {GLOBAL: "global/local_clients", PERSONAL: "personal/clients"}
"""The key of each client's accuracy on its own test examples, for the global and the personal models."""
COSINE, WEIGHTS, RESIDUAL = "cosine", "gne/weights", "gne/residual"
NAMES = {ACCURACY: ACCURACY, R2: "R²"}
"""The measures that methods are compared by: their keys, and their names for readers."""
RANKED = {"AUROC": "auroc", "AUPRC": "auprc"}
"""The measures of two classes that are plotted, and their keys."""
BOTH_CLASSES = {GLOBAL: "global/local_clients_with_both_classes", PERSONAL: "personal/clients_with_both_classes"}
MAX_WORST_CLIENTS = 10
HIGH_TARGETS = (0.99, 0.98, 0.97, 0.96)
"""Target accuracies in addition to the multiples of five per cent."""
MAX_TARGETS = 8
MIN_RESIDUAL = 1e-17
SOLVED = 1e-10
"""A residual below this is rounding error."""


def headline(lines: Sequence[Line]) -> str:
    """What the lines are compared by: the accuracy, or R² where a number is predicted; an error for both."""
    runs = [run for line in lines for run in line.runs]
    found = {name for name in HEADLINES for run in runs for model in MODEL_TYPES if measured(run, f"{model}/{name}")}
    if len(found) > 1:
        why = "an accuracy and an R² cannot be compared"
        raise ConfigError("some of the runs predict classes, and others numbers", why, "Make a report on each")
    return next(iter(found), ACCURACY)


def measured(run: Run, key: str) -> list[Metrics]:
    """The records that have this key."""
    return [record for record in run.history if record.get(key) is not None]


# ---- accuracy over rounds, and what it costs


class Curve(NamedTuple):
    """The accuracy, or another measure, after each round that was evaluated in all repetitions."""

    line: int
    rounds: NDArray[np.int64]
    mean: Floats
    deviation: Floats | None
    """Over seeds; None with one seed."""
    seconds: Floats
    """Of training, from the start, mean over seeds."""
    sent: Floats
    """Bytes, up and down, from the start, mean over seeds."""
    post: NDArray[np.bool_]
    """Whether a round belongs to the post-training stage."""
    measure: str = ACCURACY


def curves(lines: Sequence[Line], model: str, measure: str = "") -> list[Curve]:
    """Of one of ``RANKED``, or of what the lines are compared by."""
    name = RANKED.get(measure) or headline(lines)
    each = (_curve(number, line, f"{model}/{name}") for number, line in enumerate(lines))
    return [curve._replace(measure=measure or NAMES[name]) for curve in each if curve]


def _curve(number: int, line: Line, key: str) -> Curve | None:
    shared = set.intersection(*({record["round"] for record in measured(run, key)} for run in line.runs))
    if not shared:
        return None
    rounds = np.array(sorted(shared), dtype=np.int64)
    series: dict[str, list[list[float]]] = {"accuracy": [], "seconds": [], "sent": []}
    for run in line.runs:
        at = {record["round"]: index for index, record in enumerate(run.history)}
        index = [at[r] for r in rounds.tolist()]
        seconds, up, down = _costs(run)
        series["accuracy"].append([run.history[i][key] for i in index])
        series["seconds"].append(seconds[index].tolist())
        series["sent"].append((up + down)[index].tolist())
    accuracy, seconds, sent = (np.array(values, dtype=np.float64) for values in series.values())
    deviation = accuracy.std(0, ddof=1) if len(accuracy) > 1 else None
    post = rounds > line.first.rounds
    return Curve(number, rounds, accuracy.mean(0), deviation, seconds.mean(0), sent.mean(0), post)


def span(curves: Sequence[Curve]) -> tuple[float, float]:
    """The lowest and the highest accuracy of these curves, bands included."""
    deviations = [0.0 if c.deviation is None else c.deviation for c in curves]
    low = min(float((c.mean - deviation).min()) for c, deviation in zip(curves, deviations, strict=True))
    high = max(float((c.mean + deviation).max()) for c, deviation in zip(curves, deviations, strict=True))
    lowest = -0.2 if curves[0].measure == NAMES[R2] else 0.0  # R² has no bound below: a bad start would hide the rest
    return max(low, lowest), min(high, 1.0)


class Envelope(NamedTuple):
    """The lowest and the highest of several curves after each training round that one of them has."""

    rounds: NDArray[np.int64]
    low: Floats
    high: Floats


def envelope(curves: Sequence[Curve]) -> Envelope:
    at: dict[int, list[float]] = {}
    for curve in curves:
        for round, mean in zip(curve.rounds[~curve.post].tolist(), curve.mean[~curve.post].tolist(), strict=True):
            at.setdefault(round, []).append(mean)
    rounds = sorted(at)
    return Envelope(
        np.array(rounds, dtype=np.int64), np.array([min(at[r]) for r in rounds]), np.array([max(at[r]) for r in rounds])
    )


def cheapest(costs: Sequence[float], accuracies: Sequence[float]) -> list[int]:
    """Those that no other beats: every other one that is at least as accurate costs more.

    >>> cheapest([1.0, 2.0, 3.0], [0.5, 0.4, 0.6])
    [0, 2]
    """
    pairs = list(zip(costs, accuracies, strict=True))
    return [
        number
        for number, (cost, accuracy) in enumerate(pairs)
        if not any(c <= cost and a >= accuracy and (c, a) != (cost, accuracy) for c, a in pairs)
    ]


def _costs(run: Run) -> tuple[Floats, Floats, Floats]:
    """Seconds of training without warm-up, bytes up and bytes down, each from the start to the end of a round."""
    bytes_up, bytes_down = ([record.get(key) or 0 for record in run.history] for key in ("bytes_up", "bytes_down"))
    each = (timing.training(run.history, run.rounds), bytes_up, bytes_down)
    seconds, up, down = (np.cumsum(values, dtype=np.float64) for values in each)
    return seconds, up, down


class Reached(NamedTuple):
    """The cost of a line until it first reached an accuracy: means over the runs that did."""

    line: int
    runs: int
    """The number of these runs."""
    rounds: float
    seconds: float
    up: float
    down: float


def reached(lines: Sequence[Line], model: str, target: float) -> list[Reached]:
    """For each line that has such a model; NaN if no run reached the target."""
    costs, key = [], f"{model}/{headline(lines)}"
    for number, line in enumerate(lines):
        if not any(measured(run, key) for run in line.runs):
            continue
        spent = [cost for run in line.runs if (cost := _spent(run, key, target))]
        means = np.mean(spent, axis=0).tolist() if spent else [math.nan] * 4
        costs.append(Reached(number, len(spent), *means))
    return costs


def _spent(run: Run, key: str, target: float) -> list[float] | None:
    for index, record in enumerate(run.history):
        if record.get(key) is not None and record[key] >= target:
            return [record["round"], *(total[index] for total in _costs(run))]
    return None


def targets(lines: Sequence[Line], model: str) -> tuple[list[float], float]:
    """Target accuracies, highest first, and the default: the highest that half of the lines reach in all runs."""
    key = f"{model}/{headline(lines)}"
    bests = [[max(r[key] for r in records) for run in line.runs if (records := measured(run, key))] for line in lines]
    sure = sorted(min(best) for best in bests if best)
    highest = max(max(best) for best in bests if best)
    wanted = [*HIGH_TARGETS, *(percent / 100 for percent in range(95, 0, -5))]
    options = [target for target in wanted if target <= highest][:MAX_TARGETS] or [highest]
    return options, next((target for target in options if target <= sure[len(sure) // 2]), options[-1])


# ---- clients


class Clients(NamedTuple):
    """The clients' last accuracies in all repetitions of a line."""

    line: int
    seeds: NDArray[np.int64]
    clients: NDArray[np.int64]
    accuracy: Floats


def clients(lines: Sequence[Line], model: str) -> list[Clients]:
    result = []
    for number, line in enumerate(lines):
        last = [(run, records[-1]) for run in line.runs if (records := measured(run, CLIENTS[model]))]
        if last:
            each = [record[CLIENTS[model]] for _, record in last]
            seeds = np.concatenate([np.full(len(its), run.seed) for (run, _), its in zip(last, each, strict=True)])
            who = np.concatenate([_evaluated(run, record) for run, record in last])
            result.append(Clients(number, seeds, who, np.concatenate(each).astype(np.float64)))
    return result


def _evaluated(run: Run, record: Metrics) -> NDArray[np.int64]:
    """The clients whose accuracies a record has, in order: in a federation some may not have replied."""
    return np.setdiff1d(np.arange(len(run.labels)), record.get("unevaluated", []))


class Worst(NamedTuple):
    """The clients with the lowest accuracy on average over the lines; the one with the most training examples first."""

    lines: list[int]
    who: list[tuple[int, int]]
    """Seed and client."""
    counts: list[int]
    """Their training examples."""
    accuracy: Floats
    """Lines × clients."""
    of: int = 0
    """How many clients all lines have."""


def worst(lines: Sequence[Line], model: str) -> Worst:
    """Among the clients that all lines have; the lines must share their partitions."""
    each = clients(lines, model)
    if not each:
        return Worst([], [], [], np.zeros((0, 0)))
    by_client = [
        dict(zip(zip(c.seeds.tolist(), c.clients.tolist(), strict=True), c.accuracy.tolist(), strict=True))
        for c in each
    ]
    shared = sorted(set.intersection(*(set(values) for values in by_client)))
    table = np.array([[values[who] for who in shared] for values in by_client], dtype=np.float64)
    table = table.reshape(len(each), len(shared))
    lowest = np.argsort(table.mean(0), kind="stable")[:MAX_WORST_CLIENTS]
    counts = {(run.seed, k): n for line in lines for run in line.runs for k, n in enumerate(run.counts.tolist())}
    order = sorted(lowest.tolist(), key=lambda i: -counts[shared[i]])
    who = [shared[i] for i in order]
    return Worst([c.line for c in each], who, [counts[each] for each in who], table[:, order], len(shared))


def partitions(lines: Sequence[Line]) -> list[tuple[list[int], Run]]:
    """The distinct partitions at the lines' first seeds: the lines that have it, and one of their runs."""
    distinct: list[tuple[list[int], Run]] = []
    for number, line in enumerate(lines):
        same = [who for who, run in distinct if _same_partition(run, line.first)]
        if same:
            same[0].append(number)
        else:
            distinct.append(([number], line.first))
    return distinct


def _same_partition(run: Run, other: Run) -> bool:
    return run.classes == other.classes and np.array_equal(run.labels, other.labels)


def share_partitions(lines: Sequence[Line]) -> bool:
    """Whether a client number means the same client in all lines, for each seed."""
    first = {run.seed: run for run in lines[0].runs}
    return all(_same_partition(first[run.seed], run) for line in lines for run in line.runs if run.seed in first)


# ---- classes


class Recalls(NamedTuple):
    """The recall of each class after the last round, mean over seeds; NaN for a class without test examples."""

    lines: list[int]
    values: Floats
    """Lines × classes."""


def recalls(lines: Sequence[Line], model: str) -> Recalls | None:
    """None if no line recorded them, or if the lines have different classes."""
    if any(line.first.classes != lines[0].first.classes for line in lines):
        return None
    having, values = [], []
    for number, line in enumerate(lines):
        last = [records[-1][f"{model}/recall"] for run in line.runs if (records := measured(run, f"{model}/recall"))]
        if last:
            having.append(number)
            values.append(np.array(last, dtype=np.float64).mean(0))
    return Recalls(having, np.array(values)) if having else None


def positive_class(run: Run) -> str:
    """Of two classes, the one that F1, AUPRC and sensitivity are of."""
    return str(run.settings["positive"] or run.classes[1])


def with_both_classes(lines: Sequence[Line], model: str) -> list[tuple[int, int]]:
    """Of how many clients the mean AUROC is, and of how many that were evaluated; each pair of numbers once."""
    last = [
        (run, records[-1]) for line in lines for run in line.runs if (records := measured(run, BOTH_CLASSES[model]))
    ]
    return sorted({(record[BOTH_CLASSES[model]], len(_evaluated(run, record))) for run, record in last})


def macro_f1(line: Line, model: str) -> Cell:
    """With two classes, of the last round, over seeds: the mean of both classes' F1."""
    return Cell.over([score for run in line.runs if (score := _macro_f1(run, model)) is not None])


def _macro_f1(run: Run, model: str) -> float | None:
    """Recalls and accuracy determine it with two classes: accuracy = (1 - share) · first + share · second.

    The share of the second class is the same in all rounds; the round in which the recalls differ most has it with
    the fewest rounding errors. None if they never differ, or if the examples were not the same in all rounds.
    """
    records = measured(run, f"{model}/recall")
    pairs = np.array([r[f"{model}/recall"] for r in records], dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or any(r.get("unevaluated") for r in records):
        return None
    gaps = pairs[:, 1] - pairs[:, 0]
    widest = int(np.abs(gaps).argmax())
    if not abs(gaps[widest]) > 0:  # also if a class has no examples: NaN
        return None
    share = (records[widest][f"{model}/accuracy"] - pairs[widest, 0]) / gaps[widest]
    first, second = pairs[-1]
    f1s = [
        2 * own * hit / (own * hit + own + other * (1 - rejected))
        for own, hit, other, rejected in ((1 - share, first, share, second), (share, second, 1 - share, first))
    ]
    return float(np.mean(f1s))


# ---- clients over rounds


class Grid(NamedTuple):
    """A value for each client and round of a line's first run; NaN if the client did not take part."""

    line: int
    seed: int
    rounds: NDArray[np.int64]
    values: Floats
    """Clients × rounds."""


def grids(lines: Sequence[Line], key: str) -> list[Grid]:
    return [grid for number, line in enumerate(lines) if (grid := _grid(number, line.first, key))]


def _grid(number: int, run: Run, key: str) -> Grid | None:
    records = measured(run, key)
    if not records:
        return None
    values = np.full((len(run.labels), len(records)), np.nan)
    for column, record in enumerate(records):
        values[record["cohort"], column] = np.array(record[key], dtype=np.float64)
    if not np.isfinite(values).any():
        return None
    return Grid(number, run.seed, np.array([record["round"] for record in records]), values)


def shares(lines: Sequence[Line]) -> list[Grid]:
    """Each client's share of the sum of the bargaining weights."""
    result = []
    for grid in grids(lines, WEIGHTS):
        total = np.nansum(grid.values, axis=0)
        result.append(
            grid._replace(values=grid.values / np.where(total > 0, total, np.inf))
        )  # 0 if the server makes no step
    return result


class Residuals(NamedTuple):
    """The residual of each round's equilibrium, at least ``MIN_RESIDUAL``: the axis is logarithmic."""

    line: int
    rounds: NDArray[np.int64]
    values: Floats


def residuals(lines: Sequence[Line]) -> list[Residuals]:
    result = []
    for number, line in enumerate(lines):
        records = measured(line.first, RESIDUAL)
        if records:
            rounds, values = np.array([r["round"] for r in records]), np.array([r[RESIDUAL] for r in records])
            result.append(Residuals(number, rounds, np.maximum(values.astype(np.float64), MIN_RESIDUAL)))
    return result


# ---- the table


def last(line: Line, key: str) -> Cell:
    """The last value of each run, over seeds."""
    return Cell.over([records[-1][key] for run in line.runs if (records := measured(run, key))])


def best(line: Line, key: str) -> Cell:
    return Cell.over([max(r[key] for r in records) for run in line.runs if (records := measured(run, key))])


def mean_total(line: Line, *keys: str) -> float:
    """The sum over all rounds, mean over seeds."""
    return float(np.mean([sum(r.get(key) or 0 for r in run.history for key in keys) for run in line.runs]))


def mean_seconds(line: Line) -> float:
    """The training time of all rounds without warm-up, mean over seeds."""
    return float(np.mean([sum(timing.training(run.history, run.rounds)) for run in line.runs]))


def speed(line: Line) -> float:
    """Training examples per second: median over rounds, mean over seeds."""
    return float(np.mean([timing.speed(run.history, run.rounds) for run in line.runs]))
