"""How long cells will take: from earlier cells of their like, or, where that is asked for, a few rounds measured now.

Speeds are of a method on a dataset with its network, number of clients and batch, on this device. A cell takes a time
for each row it trains on, one for each evaluation, and one for what is around the rounds.
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

from fedrane.experiment import Experiment
from fedrane.files import write_atomically
from fedrane.reproduce.records import device_name
from fedrane.reproduce.results import DONE, Record
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Cell
from fedrane.run import Result, as_dataset, pick_device, run
from fedrane.settings import Settings

LIKE = ("method.name", "dataset", "model", "clients", "batch", "precision", "norm")
"""Two cells that agree in these are of one speed."""
FEW_ROWS = 6000
"""On a processor a measured round is no longer than this, by fewer clients if need be."""
ROUNDS = 3
"""To be measured: steps are compiled, captured or recorded in the first, and at times once more in the second."""


@dataclass(frozen=True)
class Speed:
    row: float
    """Seconds a row trained on."""
    evaluation: float
    around: float
    rows: float
    """Trained on in a round, for each epoch that the experiment says."""

    def seconds(self, experiment: Experiment, done: int = 0) -> float:
        """Of a cell whose first rounds are done already."""
        rounds = experiment.rounds + len(experiment.algorithm.finale()) - done
        trained = rounds * experiment.participation * experiment.epochs * self.rows
        return self.around + trained * self.row + rounds / experiment.eval_every * self.evaluation


class Speeds:
    """What is known of speeds: by records, by earlier measurements (a file), and by new ones while time is left."""

    def __init__(
        self, sweep: Sweep, cache: Path, budget: float, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.sweep, self.cache, self.tell = sweep, cache, tell
        self.until = time.monotonic() + budget
        self.known = _measured_before(cache) | _of_records(sweep.records.values())
        self.measured = 0

    def seconds(self, cell: Cell) -> float | None:
        """How long what is left of a cell will take; nothing where no time was left to measure, or it cannot run."""
        experiment = cell.experiment
        if experiment is None:
            return None
        like = _like(cell.settings, device_name(str(pick_device(experiment.device))), experiment.engine)
        if like not in self.known and time.monotonic() < self.until:
            self.tell(f"measuring {cell.row.title} on {cell.condition.dataset}, {experiment.clients} clients")
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the cell will be marked with it when it is run
            self.tell(f"{cell.row.title} cannot be measured: {type(error).__name__}: {error}")
            return None


def measure(experiment: Experiment) -> Speed:
    """A few short rounds; what they take beyond the fastest is start-up."""
    short = experiment.replace(rounds=ROUNDS, eval_every=1, checkpoint_every=1, seed=0)
    if pick_device(experiment.device).type == "cpu":
        short = _few_rows(short)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(short, Path(folder) / "run")
    wall = time.perf_counter() - began
    return _of_rounds(result, wall)


def _few_rows(experiment: Experiment) -> Experiment:
    """With as few clients and epochs as keep a round below a number of rows."""
    rows = len(as_dataset(experiment, None).y) * (1 - experiment.partition.test)
    if rows * experiment.epochs <= FEW_ROWS:
        return experiment
    share = min(1.0, max(FEW_ROWS / rows, 1 / experiment.clients))
    return experiment.replace(epochs=1, participation=share)


def _of_rounds(result: Result, wall: float) -> Speed:
    e, steady = result.experiment, min(result.history[:ROUNDS], key=lambda r: r["seconds"])
    rate = steady["seconds"] / max(steady["train/rows"], 1)
    evaluation = min(r["eval_seconds"] for r in result.history[:ROUNDS])
    inside = ROUNDS * (steady["seconds"] + evaluation)
    rest = sum(r["seconds"] + r["eval_seconds"] for r in result.history[ROUNDS:])  # of a finale
    rows = sum(len(rows) for rows in result.federation.split.train)
    passes = e.algorithm.local_epochs(e.epochs) / e.epochs
    return Speed(rate, evaluation, max(wall - inside - rest, 0.0), passes * rows)


def _like(settings: Settings, device: str, engine: str) -> str:
    return json.dumps([*(settings.get(key) for key in LIKE), device, engine])


def _of_records(records: Iterable[Record]) -> dict[str, Speed | None]:
    """The median over cells of a like; of what is around the rounds, over those that ran in one go."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["status"] == DONE and record["rows"] and "tune" not in record["settings"]:
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
        over(lambda r: (r["train_seconds"] - warmup(r)) / r["rows"]),
        over(lambda r: r["eval_seconds"] / max(r["evaluations"], 1)),
        statistics.median(around) if around else 0.0,
        over(lambda r: r["rows"] / r["rounds"] / r["settings"]["epochs"] / r["settings"]["participation"]),
    )


def _measured_before(path: Path) -> dict[str, Speed | None]:
    """Nothing where the file is not there or damaged: it only spares measuring again."""
    try:
        return {like: Speed(**values) for like, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: Mapping[str, Speed | None]) -> None:
    write_atomically(path, json.dumps({like: asdict(s) for like, s in known.items() if s}, indent=1) + "\n")
