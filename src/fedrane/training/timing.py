"""The time of rounds without the warm-up of the process.

The first round of a process includes imports, thread pools and compilation. In a comparison, the first method would pay
for all of them. Warm-up is the time beyond what the same number of examples takes in other rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

WARMUP = "warmup"
"""The entry of a record that marks the first round trained by its process."""
Records = Sequence[dict[str, Any]]


def starts(record: dict[str, Any]) -> bool:
    """Whether this is the first round of a process; round 1 is, in older folders that did not record it."""
    return bool(record.get(WARMUP, record["round"] == 1))


def clean(history: Records, rounds: int) -> list[dict[str, Any]]:
    """Return the training rounds without warm-up and without the post-training stage."""
    return [r for r in history if r.get("cohort") and r["round"] <= rounds and not starts(r)]


def training(history: Records, rounds: int) -> list[float]:
    """Return the training seconds of each round without warm-up, or as measured if no other round is available."""
    usual = [_seconds(r) / _examples(r) for r in clean(history, rounds)]
    if not usual:
        return [_seconds(r) for r in history]
    each = statistics.median(usual)
    return [min(_seconds(r), each * _examples(r)) if starts(r) else _seconds(r) for r in history]


def warmup(history: Records, rounds: int) -> float:
    return sum(_seconds(r) for r in history) - sum(training(history, rounds))


def speed(history: Records, rounds: int) -> float:
    """Return training examples per second: the median over clean rounds, or over all if there are none."""
    rated = clean(history, rounds) or [r for r in history if r.get("cohort")]
    return statistics.median(r.get("samples_per_second") or 0.0 for r in rated) if rated else 0.0


def _seconds(record: dict[str, Any]) -> float:
    return float(record.get("seconds") or 0.0)


def _examples(record: dict[str, Any]) -> int:
    return int(record.get("train/examples") or 1)
