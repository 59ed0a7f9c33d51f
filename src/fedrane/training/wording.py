"""How the numbers of a run are written: in the terminal, in a notebook, in logs and on the page."""

from __future__ import annotations

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.engines.evaluation import Metrics


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def count(number: float, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_round(record: Metrics) -> str:
    parts = [
        f"{model} {percent(record[f'{model}/accuracy'])}"
        for model in (GLOBAL, PERSONAL)
        if f"{model}/accuracy" in record
    ]
    if record.get("train/loss") is not None:
        parts.append(f"loss {record['train/loss']:.4f}")
    parts.append(speed(record))
    if record["lost"]:
        parts.append(f"{len(record['lost'])} lost")
    return "  ".join(parts)


def speed(record: Metrics) -> str:
    return f"{record['samples_per_second']:,.0f} samples/s" if record["cohort"] else "no client replied"
