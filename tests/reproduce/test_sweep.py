"""A sweep runs what is missing, and one cell's trouble is not the others'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrane.errors import ConfigError, FileError, NoEffect
from fedrane.reproduce import records
from fedrane.reproduce import sweep as module
from fedrane.reproduce.sweep import Sweep

USER_METHODS = Path(__file__).with_name("user_methods.py")
Make = Callable[..., Sweep]


def states(sweep: Sweep) -> dict[str, str]:
    return {cell.row.name.rpartition(":")[2]: sweep.status(cell) for cell in sweep.cells}


def test_what_is_done_is_not_run_again(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sweep(methods=("fedavg", "fedprox"))
    assert first.go()
    assert states(first) == {"fedavg": "done", "fedprox": "done"}
    monkeypatch.setattr(module, "run", None)
    monkeypatch.setattr(module, "resume", None)
    again = sweep(methods=("fedavg", "fedprox"))
    assert not again.waiting()
    assert again.go()
    assert list(again.records.values()) == list(first.records.values())


def test_a_record_holds_both_measures_of_best_and_last(sweep: Make) -> None:
    cells = sweep(methods=("fedavg", "fedrane-wo-lra"), words=("rounds=3", "fedrane-wo-lra.calibrate=false"))
    assert cells.go()
    average, rane = (cells.records[cell.key] for cell in cells.cells)
    assert "personal" not in average, "a model that a method does not have is absent"
    for model in ("global", "personal"):
        best, last, curve = (rane[model][name] for name in ("best", "last", "curve"))
        assert len(curve) == rane["rounds"] == last["round"] == 3
        assert curve[best["round"] - 1] == max(curve) == pytest.approx(best["accuracy"], abs=1e-4)
        assert last["accuracy"] == pytest.approx(curve[-1], abs=1e-4)
        assert len(last["recall"]) == 10
    assert {"version", "device", "seconds", "seed", "settings"} <= rane.keys()


def test_a_failing_cell_is_marked_and_the_rest_goes_on(sweep: Make) -> None:
    names = (f"{USER_METHODS}:Broken", f"{USER_METHODS}:Exploding", "fedavg", f"{USER_METHODS}:Plain")
    first = sweep(methods=names)
    assert first.go()
    assert states(first) == {"fedavg": "done", "Broken": "failed", "Exploding": "failed", "Plain": "done"}
    reasons = {cell.row.title: first.reason(cell) for cell in first.cells}
    assert "ZeroDivisionError: nobody is left" in reasons["Broken (user's)"]
    assert "no longer finite" in reasons["Exploding (user's)"]
    words = [record.get("word") for record in first.records.values()]
    assert words.count("diverged") == words.count("failed") == 1
    assert not sweep(methods=names).waiting(), "a failed cell is not tried again by itself"
    again = sweep(methods=names, retry=True)
    assert {cell.row.title for cell in again.waiting()} == {"Broken (user's)", "Exploding (user's)"}
    assert again.go()
    assert states(again) == states(first)


def test_a_mended_cell_replaces_its_failure(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.run
    monkeypatch.setattr(module, "run", lambda *a, **b: 1 / 0)
    assert states(sweep()) == {"fedavg": "waiting"}
    assert sweep().go()
    assert states(sweep()) == {"fedavg": "failed"}
    monkeypatch.setattr(module, "run", real)
    again = sweep(retry=True)
    assert again.go()
    assert states(again) == states(sweep()) == {"fedavg": "done"}


def test_a_word_that_turns_out_to_do_nothing_is_no_fault_of_the_cell(sweep: Make, tmp_path: Path) -> None:
    """The user's data are read when the cell is run; a record would be the plain cell's, and keep that from running."""
    np.savez(tmp_path / "own.npz", x=np.arange(80.0).reshape(40, 2) % 7, y=np.arange(40) % 2)
    asked = {"datasets": (str(tmp_path / "own.npz"),), "words": ("norm=shared", "model=auto")}
    with pytest.raises(NoEffect, match="norm=shared"):
        sweep(**asked).go()
    assert not sweep(**asked).records


def test_a_mistake_that_a_method_finds_in_its_cell_is_recorded(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise ConfigError("more classes than features")

    monkeypatch.setattr(module, "run", refuse)
    first = sweep()
    assert first.go()
    assert states(first) == {"fedavg": "failed"}


def test_a_full_disk_is_no_fault_of_the_cell(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise FileError("no room")

    monkeypatch.setattr(module, "run", full)
    with pytest.raises(FileError):
        sweep().go()
    assert states(sweep()) == {"fedavg": "waiting"}


def test_a_stopped_sweep_goes_on_inside_its_cell(sweep: Make, tmp_path: Path) -> None:
    words = ("rounds=4",)
    stopped = sweep(words=words)
    asked = iter([False, False, True])  # before the cell, after its first round, after its second
    assert not stopped.go(stop=lambda: next(asked))
    assert states(stopped) == {"fedavg": "waiting"}
    seen: list[int] = []

    class Note(module.Callback):
        def round(self, record: dict[str, int]) -> None:
            seen.append(record["round"])

    resumed = sweep(words=words)
    assert resumed.go(watch=lambda cell: [Note()])
    assert seen == [3, 4], "not from its start"
    (record,) = resumed.records.values()
    assert len(record["global"]["curve"]) == 4
    folder = resumed.folder(resumed.cells[0])
    assert folder.finished
    assert not folder.checkpoints(), "what is recorded needs no checkpoints"


def test_a_dataset_that_is_not_here_leaves_its_cells_empty(sweep: Make) -> None:
    cells = sweep(datasets=("digits", "cifar100"))
    cells.absent = {"cifar100": "a download"}
    assert cells.go()
    assert [cells.status(cell) for cell in cells.cells] == ["done", "absent"]


def test_cosines_are_read_off_a_run_that_is_done(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heat maps want more of a cell than the table does; it need not be trained again for that."""
    assert sweep("table-gfl").go()
    monkeypatch.setattr(module, "run", None)
    wanted = sweep("cosine")
    assert states(wanted) == {"fedavg": "waiting"}
    assert wanted.go()
    (record,) = wanted.records.values()
    kept = record["kept"]["cosines"]
    assert kept["rounds"] == [1, 2]
    assert [len(line) for line in kept["cosines"]] == [4, 4]
    assert all(0 < value <= 1 for line in kept["cosines"] for value in line)


def test_what_a_figure_lacks_does_not_cost_the_run(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collapsed network gives all examples the same features: its accuracies count, and missing data are named."""
    monkeypatch.setattr(records, "features", lambda result, examples: np.zeros((len(examples), 8)))
    first = sweep("tsne")
    assert first.go()
    assert states(first) == states(sweep("tsne")) == {"fedavg": "done"}
    (record,) = first.records.values()
    assert record["global"]["last"]["accuracy"] > 0
    assert record["kept"]["tsne"] is None
    assert "the same features" in first.reason(first.cells[0])
    assert sweep("table-gfl").reason(first.cells[0]) == first.reason(first.cells[0])
    assert not sweep("table-gfl").reason(sweep("table-gfl").cells[0]), "a table has no use for them"


def test_cells_of_another_process_are_left_to_it(sweep: Make) -> None:
    mine = sweep(methods=("fedavg", "fedprox"))
    taken = mine.cells[0]
    with module.lock(mine.runs / ".locks" / taken.key):
        assert mine.go()
    assert states(mine) == {"fedavg": "elsewhere", "fedprox": "done"}
    mine.records[taken.key] = {"status": "failed", "reason": "it diverged there"}
    assert states(mine) == {"fedavg": "failed", "fedprox": "done"}, "and is not waited for for ever"
    assert states(sweep(methods=("fedavg", "fedprox"))) == {"fedavg": "waiting", "fedprox": "done"}
