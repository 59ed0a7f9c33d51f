"""How the numbers of a run are written: in the terminal, in a notebook, in logs and on the page."""

from __future__ import annotations

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.engines.evaluation import ACCURACY, Metrics, headline


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def achieved(record: Metrics, model: str) -> str:
    """The accuracy or R² of a model; empty if it was not evaluated."""
    if (key := headline(record, model)) is None:
        return ""
    return percent(record[key]) if key.endswith(ACCURACY) else f"R² {record[key]:.3f}"


def count(number: float, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_round(record: Metrics) -> str:
    parts = [f"{model} {value}" for model in (GLOBAL, PERSONAL) if (value := achieved(record, model))]
    if record.get("train/loss") is not None:
        parts.append(f"loss {record['train/loss']:.4f}")
    parts.append(speed(record))
    if record["lost"]:
        parts.append(f"{len(record['lost'])} lost")
    return "  ".join(parts)


def speed(record: Metrics) -> str:
    return f"{record['samples_per_second']:,.0f} samples/s" if record["cohort"] else "no client replied"
