"""The time of a round does not include the warm-up of its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedrane
from fedrane.training import timing
from fedrane.training.run_folder import SUMMARY
from problems import quick


def record(round: int, seconds: float, examples: int = 100, **more: Any) -> dict[str, Any]:
    speed = {"samples_per_second": examples / seconds}
    return {"round": round, "cohort": [0], "train/examples": examples, "seconds": seconds, **speed, **more}


def test_what_the_first_round_takes_beyond_the_usual_is_warm_up() -> None:
    history = [record(1, 9.0, warmup=True), record(2, 1.0), record(3, 1.2), record(4, 1.4)]
    assert timing.training(history, 4) == pytest.approx([1.2, 1.0, 1.2, 1.4])
    assert timing.warmup(history, 4) == pytest.approx(7.8)
    assert timing.speed(history, 4) == pytest.approx(100 / 1.2)


def test_the_usual_goes_by_the_rows() -> None:
    history = [record(1, 9.0, examples=300), record(2, 1.0), record(3, 2.0, examples=200)]
    assert timing.training(history, 3) == pytest.approx([3.0, 1.0, 2.0])


def test_a_resumed_run_has_started_twice() -> None:
    history = [record(1, 5.0, warmup=True), record(2, 1.0), record(3, 8.0, warmup=True), record(4, 1.0)]
    assert timing.training(history, 4) == pytest.approx([1.0] * 4)


def test_a_first_round_that_was_fast_took_what_it_took() -> None:
    assert timing.training([record(1, 0.5), record(2, 1.0)], 2) == [0.5, 1.0]


def test_without_another_round_nothing_is_taken_off() -> None:
    """A post-training stage trains differently: its time and those of the rounds are not comparable."""
    history = [record(1, 5.0, warmup=True), record(2, 0.1)]
    assert timing.training(history, 1) == [5.0, 0.1]
    assert timing.warmup(history, 1) == 0
    assert timing.speed(history, 1) == pytest.approx((20 + 1000) / 2)
    lost = {"round": 1, "cohort": [], "seconds": 0.001, "samples_per_second": 0.0}
    assert timing.speed([lost], 3) == 0
    assert timing.training([], 3) == []


def test_a_run_marks_the_first_round_that_each_process_trains(tmp_path: Path) -> None:
    marks = [record.get("warmup", False) for record in fedrane.run(quick()).history]
    assert marks == [True, False, False]
    fedrane.run(quick(), tmp_path / "run", stop=lambda: True)
    resumed = fedrane.resume(tmp_path / "run")
    assert [record.get("warmup", False) for record in resumed.history] == [True, True, False]
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["warmup_seconds"] == pytest.approx(timing.warmup(resumed.history, 3))
    assert summary["seconds"] >= summary["warmup_seconds"] >= 0


def test_a_round_without_replies_is_not_the_first() -> None:
    history = fedrane.run(quick(client_dropout=0.9, clients=2, rounds=6, seed=1)).history
    trained = [record["round"] for record in history if record["cohort"]]
    assert trained[0] > 1, "nobody replied in the first round"
    assert [record["round"] for record in history if record.get("warmup")] == trained[:1]
