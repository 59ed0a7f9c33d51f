"""How long a cell will take follows from cells that were run; times themselves are not tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedrane.reproduce.estimate import Speeds, measure
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Cell

Make = Callable[..., Sweep]


@pytest.fixture
def done(sweep: Make) -> Sweep:
    finished = sweep(words=("rounds=3",))
    assert finished.go()
    return finished


def estimate(sweep: Sweep, folder: Path) -> float:
    """Without measuring anything."""
    (cell,) = sweep.cells
    seconds = Speeds(sweep, folder / "speeds.json", budget=0).seconds(cell)
    assert seconds is not None
    return seconds


def test_a_cell_is_estimated_by_its_like(sweep: Make, done: Sweep, tmp_path: Path) -> None:
    (record,) = done.records.values()
    start, judge = record["warmup_seconds"], record["eval_seconds"]
    other, train = record["other_seconds"] + start, record["train_seconds"] - start
    assert (record["engine"], record["threads"]) == ("stacked", 1), "what auto was resolved to"
    same = estimate(sweep(words=("rounds=3",), seeds=(1,)), tmp_path)
    assert same == pytest.approx(other + train + judge)
    longer = estimate(sweep(words=("rounds=6",)), tmp_path)
    assert longer == pytest.approx(other + 2 * (train + judge))
    harder = estimate(sweep(words=("rounds=3", "epochs=4")), tmp_path)
    assert harder == pytest.approx(other + 4 * train + judge)


def test_what_is_on_its_way_takes_what_is_left(sweep: Make, done: Sweep, tmp_path: Path) -> None:
    asked = iter([False, False, True])
    begun = sweep(words=("rounds=6",))
    whole = estimate(begun, tmp_path)
    assert not begun.go(stop=lambda: next(asked))
    (record,) = done.records.values()
    assert estimate(begun, tmp_path) == pytest.approx(
        whole - 2 / 3 * (record["train_seconds"] - record["warmup_seconds"] + record["eval_seconds"])
    )


def test_another_method_or_network_is_of_another_speed(sweep: Make, done: Sweep, tmp_path: Path) -> None:
    for other in (sweep(methods=("fedprox",)), sweep(words=("clients=5",)), sweep(words=("model=convnet",))):
        assert Speeds(other, tmp_path / "speeds.json", budget=0).seconds(other.cells[0]) is None


def test_what_is_not_known_is_measured_once(sweep: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sweep(seeds=(0, 1))
    logged: list[str] = []
    speeds = Speeds(wanted, tmp_path / "speeds.json", 60, logged.append)
    times = [speeds.seconds(cell) for cell in wanted.cells]
    assert times[0] == times[1]
    assert len(logged) == 1
    monkeypatch.setattr("fedrane.reproduce.estimate.measure", None)
    assert Speeds(wanted, tmp_path / "speeds.json", 60).seconds(wanted.cells[0]) == pytest.approx(times[0])


@pytest.mark.parametrize("damaged", ["", "[]", "{", '{"a": 1}', '{"a": {"b": 1}}'])
def test_a_damaged_file_of_speeds_is_as_none(sweep: Make, tmp_path: Path, damaged: str) -> None:
    (tmp_path / "speeds.json").write_text(damaged)
    wanted = sweep()
    assert Speeds(wanted, tmp_path / "speeds.json", 0).seconds(wanted.cells[0]) is None


def test_a_measurement_counts_the_examples_of_all_clients(sweep: Make) -> None:
    cell: Cell = sweep().cells[0]
    assert cell.experiment is not None
    speed = measure(cell.experiment.replace(participation=0.5))
    assert speed.examples == pytest.approx(1438 * 0.75, abs=4)
    assert min(speed.per_example, speed.evaluation, speed.around) > 0
