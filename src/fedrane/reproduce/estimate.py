"""How long cells will take: estimated from earlier, similar cells, or from a few rounds measured now.

A speed is that of a method on a dataset with a network, number of clients and batch size, on this device. The time of
a cell has three parts: for each example it trains on, for each evaluation, and for what is around the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedrane.config.settings import Settings
from fedrane.experiment import Experiment
from fedrane.ops.sgd import Schedule
from fedrane.reproduce.records import device_name
from fedrane.reproduce.results import DONE, Record
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Cell
from fedrane.runner import run
from fedrane.system.files import write_atomically
from fedrane.training.result import Result
from fedrane.training.setup import as_dataset, pick_device

LIKE = ("method.name", "dataset", "model", "clients", "batch", "precision", "norm")
"""Two cells with the same values of these have the same speed."""
MAX_EXAMPLES = 6000
"""Of a measured round on a CPU; with fewer clients if needed."""
ROUNDS = 3
"""To measure: steps are compiled, captured or recorded in the first, sometimes again in the second."""


@dataclass(frozen=True)
class Speed:
    per_example: float
    """Seconds for each training example."""
    evaluation: float
    around: float
    examples: float
    """Training examples of a round, for each epoch of the experiment or each of its steps."""

    def seconds(self, experiment: Experiment, done: int = 0) -> float:
        """The time of a cell, without its first ``done`` rounds."""
        rounds = experiment.rounds + len(experiment.algorithm.post_training()) - done
        trained = rounds * experiment.participation * (experiment.steps or experiment.epochs) * self.examples
        return self.around + trained * self.per_example + rounds / experiment.eval_every * self.evaluation


class Speeds:
    """Known speeds: of records, of earlier measurements (a file), and of new ones within the time budget."""

    def __init__(
        self, sweep: Sweep, cache: Path, budget: float, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.sweep, self.cache, self.log = sweep, cache, log
        self.until = time.monotonic() + budget
        self.known = _measured_before(cache) | _of_records(sweep.records.values())
        self.measured = 0

    def seconds(self, cell: Cell) -> float | None:
        """The time that a cell still needs; None if it is not known, or the cell cannot run."""
        experiment = cell.experiment
        if experiment is None:
            return None
        like = _like(cell.settings, device_name(str(pick_device(experiment.device))), experiment.engine)
        if like not in self.known and time.monotonic() < self.until:
            self.log(f"measuring {cell.row.title} on {cell.condition.dataset}, {experiment.clients} clients")
            self.known[like] = self._measure(cell, experiment)
            self.measured += 1
            _write(self.cache, self.known)
        speed = self.known.get(like)
        return speed.seconds(experiment, self._done(cell)) if speed else None

    def _done(self, cell: Cell) -> int:
        folder = self.sweep.folder(cell)
        if not (folder.holds_run() and folder.checkpoints()):
            return 0
        return int(folder.checkpoints()[-1].stem.removeprefix("round-"))

    def _measure(self, cell: Cell, experiment: Experiment) -> Speed | None:
        try:
            return measure(experiment)
        except Exception as error:  # noqa: BLE001 - the cell's record will have the error when it is run
            self.log(f"{cell.row.title} cannot be measured: {type(error).__name__}: {error}")
            return None


def measure(experiment: Experiment) -> Speed:
    """Measure a few short rounds. What they take beyond the fastest one is start-up."""
    reduced = experiment.replace(rounds=ROUNDS, eval_every=1, checkpoint_every=1, seed=0, schedule=Schedule())
    if pick_device(experiment.device).type == "cpu":
        reduced = _with_fewer_examples(reduced)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(reduced, Path(folder) / "run", progress=False)
    wall = time.perf_counter() - began
    return _of_rounds(result, wall)


def _with_fewer_examples(experiment: Experiment) -> Experiment:
    """With fewer clients and epochs or steps, so that a round has at most ``MAX_EXAMPLES``."""
    examples = len(as_dataset(experiment, None).y) * (1 - experiment.partition.test)
    if experiment.steps:
        examples = float(experiment.clients * experiment.batch)
    if examples * (experiment.steps or experiment.epochs) <= MAX_EXAMPLES:
        return experiment
    share = min(1.0, max(MAX_EXAMPLES / examples, 1 / experiment.clients))
    if experiment.steps:
        return experiment.replace(steps=max(1, int(MAX_EXAMPLES / (share * examples))), participation=share)
    return experiment.replace(epochs=1, participation=share)


def _of_rounds(result: Result, wall: float) -> Speed:
    e, steady = result.experiment, min(result.history[:ROUNDS], key=lambda r: r["seconds"])
    per_example = steady["seconds"] / max(steady["train/examples"], 1)
    evaluation = min(r["eval_seconds"] for r in result.history[:ROUNDS])
    inside = ROUNDS * (steady["seconds"] + evaluation)
    rest = sum(r["seconds"] + r["eval_seconds"] for r in result.history[ROUNDS:])  # of post-training
    clients = range(result.federation.population)
    examples = result.federation.examples_trained(clients, e.algorithm.local_epochs(e.length))
    return Speed(per_example, evaluation, max(wall - inside - rest, 0.0), examples / (e.steps or e.epochs))


def _like(settings: Settings, device: str, engine: str) -> str:
    counted = ["steps"] if settings.get("steps") else []
    return json.dumps([*(settings.get(key) for key in LIKE), device, engine, *counted])


def _of_records(records: Iterable[Record]) -> dict[str, Speed | None]:
    """The median over similar cells. The time around the rounds is of cells that were not interrupted."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["status"] == DONE and record.get("examples") and "tune" not in record["settings"]:
            # The first records name the engine as it was asked for.
            asked = str(record.get("engine_asked", record["engine"]))
            groups.setdefault(_like(record["settings"], record["device"], asked), []).append(record)
    return {like: _median(group) for like, group in groups.items()}


def _median(group: list[Record]) -> Speed:
    def over(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.median(value(record) for record in group)

    def warmup(record: Mapping[str, Any]) -> float:
        return float(record.get("warmup_seconds", 0.0))

    around = [r["other_seconds"] + warmup(r) for r in group if r["other_seconds"] is not None]
    return Speed(
        over(lambda r: (r["train_seconds"] - warmup(r)) / r["examples"]),
        over(lambda r: r["eval_seconds"] / max(r["evaluations"], 1)),
        statistics.median(around) if around else 0.0,
        over(lambda r: r["examples"] / r["rounds"] / _length(r["settings"]) / r["settings"]["participation"]),
    )


def _length(settings: Settings) -> float:
    """Of a round, in steps or epochs; records made before there were steps have epochs only."""
    return float(settings.get("steps") or settings["epochs"])


def _measured_before(path: Path) -> dict[str, Speed | None]:
    """Empty if the file is missing or damaged: it is only a cache."""
    try:
        return {like: Speed(**values) for like, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: Mapping[str, Speed | None]) -> None:
    write_atomically(path, json.dumps({like: asdict(s) for like, s in known.items() if s}, indent=1) + "\n")
