"""The time of rounds, without the start of the process that ran them.

The first round of a process also pays for imports, thread pools and compilation: in a comparison the first method would
pay for all. What it took beyond the usual time of as many rows is its warm-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

WARMUP = "warmup"
"""The entry of a record that marks a round as the first that its process has trained."""
Records = Sequence[dict[str, Any]]


def starts(record: dict[str, Any]) -> bool:
    """Whether a process began with it; in folders from before it was recorded, round 1 did."""
    return bool(record.get(WARMUP, record["round"] == 1))


def clean(history: Records, rounds: int) -> list[dict[str, Any]]:
    """The rounds of training with nothing else in them; what a finale does is no measure for others."""
    return [r for r in history if r.get("cohort") and r["round"] <= rounds and not starts(r)]


def training(history: Records, rounds: int) -> list[float]:
    """Seconds of training in each round, without warm-up, of an experiment of so many rounds; as they were measured
    where there is no other round to compare with."""
    usual = [_seconds(r) / _rows(r) for r in clean(history, rounds)]
    if not usual:
        return [_seconds(r) for r in history]
    each = statistics.median(usual)
    return [min(_seconds(r), each * _rows(r)) if starts(r) else _seconds(r) for r in history]


def warmup(history: Records, rounds: int) -> float:
    return sum(_seconds(r) for r in history) - sum(training(history, rounds))


def speed(history: Records, rounds: int) -> float:
    """Training rows a second: the median over clean rounds, or over all where there is none."""
    rated = clean(history, rounds) or [r for r in history if r.get("cohort")]
    return statistics.median(r.get("samples_per_second") or 0.0 for r in rated) if rated else 0.0


def _seconds(record: dict[str, Any]) -> float:
    return float(record.get("seconds") or 0.0)


def _rows(record: dict[str, Any]) -> int:
    return int(record.get("train/rows") or 1)
