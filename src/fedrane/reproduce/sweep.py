"""Runs the missing cells one after another. Each has its own run folder, so a kill costs at most one round."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fedrane.data.dataset import Dataset
from fedrane.errors import FileError, NoEffect
from fedrane.experiment import Experiment
from fedrane.reproduce import records
from fedrane.reproduce.results import DONE, FAILED, Record, ResultStore, lock
from fedrane.reproduce.targets import Cell
from fedrane.runner import resume, run
from fedrane.system.files import clear_errors
from fedrane.training import user_code
from fedrane.training.callbacks import Callback
from fedrane.training.result import Result
from fedrane.training.run_folder import Folder
from fedrane.training.setup import as_dataset, pick_device

WAITING, UNKNOWN, ABSENT, ELSEWHERE = "waiting", "unknown", "absent", "elsewhere"
Watch = Callable[[Cell], Sequence[Callback]]
Source = Callable[[Cell], Dataset | None]


@dataclass
class Sweep:
    """Cells to run, and their records."""

    cells: Sequence[Cell]
    store: ResultStore
    runs: Path
    """The folder of run folders."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Datasets that are not on this machine, and how to get them."""
    retry: bool = False
    source: Source = lambda cell: None
    """A dataset to use instead of the experiment's."""
    records: dict[str, Record] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    """Cells that another process is running."""
    tried: set[str] = field(default_factory=set)
    """Cells that this process has run."""

    def __post_init__(self) -> None:
        self.records = self.store.read()

    def status(self, cell: Cell) -> str:
        record = self.records.get(cell.key)
        if record and record["status"] == DONE and set(cell.keeps) <= record["kept"].keys():
            return DONE
        if cell.experiment is None:
            return UNKNOWN
        if cell.condition.dataset in self.absent:
            return ABSENT
        again = self.retry and cell.key not in self.tried
        if record and record["status"] == FAILED and not again:
            return FAILED
        return ELSEWHERE if cell.key in self.elsewhere else WAITING

    def reason(self, cell: Cell) -> str:
        """Why a cell has no result, or misses some of its extra data."""
        status, record = self.status(cell), self.records.get(cell.key, {})
        if status == FAILED:
            return str(record["reason"])
        if status == DONE:
            return "; ".join(reason for name, reason in record.get("problems", {}).items() if name in cell.keeps)
        return cell.problem if status == UNKNOWN else ""

    def waiting(self) -> list[Cell]:
        """The cells to run, each once: two entries of a table may share a cell."""
        unique = {cell.key: cell for cell in self.cells if self.status(cell) == WAITING}
        return list(unique.values())

    def folder(self, cell: Cell) -> Folder:
        method = str(cell.settings["method.name"]).rpartition(":")[2]
        name = f"{Path(cell.condition.dataset).stem}-{cell.condition.alpha:g}-{method}-seed{cell.seed}-{cell.key}"
        return Folder(self.runs / name)

    def go(
        self,
        watch: Watch = lambda cell: (),
        stop: Callable[[], bool] = lambda: False,
        log: Callable[[Cell, int, int], None] = lambda cell, number, total: None,
    ) -> bool:
        """Run all that is missing. Returns False if it was stopped before the end."""
        todo = self.waiting()
        for number, cell in enumerate(todo, 1):
            if stop():
                return False
            with lock(self.runs / ".locks" / cell.key, wait=False) as ours:
                if not ours:
                    self.elsewhere.add(cell.key)
                    continue
                self.records = self.store.read()  # another process may have done it meanwhile
                if self.status(cell) != WAITING:
                    continue
                if self.records.get(cell.key, {}).get("status") == FAILED:
                    self._clear(self.folder(cell).path)
                self.tried.add(cell.key)
                record = self._one(cell, watch, stop)
                if record is None:
                    return False
                self.store.add(record)
                self.records = self.store.read()
                self._tidy(cell)
            log(cell, number, len(todo))
        return True

    def _one(self, cell: Cell, watch: Watch, stop: Callable[[], bool]) -> Record | None:
        """The record of a cell, finished or failed; None if it was stopped."""
        experiment = _runnable(cell)
        try:
            if (record := self._from_folder(cell)) is not None:
                return record
            began = time.perf_counter()
            fresh = not self.folder(cell).holds_run()
            result = self._run(cell, experiment, watch(cell), stop)
            wall = time.perf_counter() - began if fresh else None
            if not result.finished:
                return None
            return records.finished(cell.settings, result, cell.keeps, wall, experiment.engine)
        except (FileError, NoEffect):  # a full disk or a setting without effect is not this cell's failure
            raise
        except Exception as error:  # noqa: BLE001 - the other cells can still be run
            return records.failed(cell.settings, error, str(pick_device(experiment.device)), experiment.engine)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _run(
        self, cell: Cell, experiment: Experiment, callbacks: Sequence[Callback], stop: Callable[[], bool]
    ) -> Result:
        folder, dataset = self.folder(cell), self.source(cell)
        if folder.finished and not folder.checkpoints():
            self._clear(folder.path)  # its model was removed but is needed now: run the cell again
        if folder.holds_run():
            dataset = dataset or as_dataset(experiment, None)  # the data may have moved since
            user_code.remember(experiment)
            go = partial(resume, folder.path)
        else:
            go = partial(run, experiment, folder.path)
        return go(dataset=dataset, callbacks=callbacks, stop=stop, calibrate=False, progress=False)

    def _from_folder(self, cell: Cell) -> Record | None:
        """If a record misses only what the metrics have, the cell need not be run again."""
        record, folder = self.records.get(cell.key), self.folder(cell)
        if not (record and record["status"] == DONE and folder.finished):
            return None
        if set(cell.keeps) - record["kept"].keys() != {records.COSINES}:
            return None
        history, population = folder.read_metrics(), len(folder.read_metadata()["labels"])
        if len(history) != record["rounds"]:
            return None
        return {**record, "kept": {**record["kept"], records.COSINES: records.cosines(history, population)}}

    def _tidy(self, cell: Cell) -> None:
        """Remove the checkpoints, which are far larger than the record. The metrics stay."""
        if self.records[cell.key]["status"] == DONE:
            with clear_errors(self.runs):
                for path in self.folder(cell).checkpoints():
                    path.unlink()

    def _clear(self, path: Path) -> None:
        with clear_errors(path):
            shutil.rmtree(path, ignore_errors=not path.exists())


def _runnable(cell: Cell) -> Experiment:
    if cell.experiment is None:
        raise ValueError(f"{cell.name}: {cell.problem}")
    return cell.experiment


def counts(sweep: Sweep, cells: Iterable[Cell] | None = None) -> dict[str, int]:
    """The number of cells in each state."""
    states = [sweep.status(cell) for cell in (sweep.cells if cells is None else cells)]
    return {state: states.count(state) for state in dict.fromkeys(states)}
