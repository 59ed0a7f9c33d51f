"""Colours, and how numbers and names are written: on the page, in figures and in the terminal."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.engines.evaluation import Metrics

# Mid-tones that are visible on white and on a dark page; neighbours differ in hue and in lightness.
COLOURS = (
    "#2f7dc0", "#d9622b", "#1f9d78", "#a552c4", "#c9405f", "#8b7d16",
    "#2a9bb8", "#6c6fd8", "#a8643a", "#6f8a2b", "#d26aa5", "#77838f",
)  # fmt: skip
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DASHES = ("solid", "dash", "dot", "dashdot")
# For papers; on the page the two scales are the style sheet's, which has the same for light and others for dark.
SEQUENTIAL = ("#eef4f9", "#9cc3df", "#3f7fb0", "#12395c")
DIVERGING = ("#9c2f1b", "#dd8f79", "#f4f2ef", "#7fb0d3", "#1f5585")


def colour(line: int) -> str:
    return COLOURS[line % len(COLOURS)]


def dash(line: int) -> str:
    """Another dash each time the colours start over."""
    return DASHES[line // len(COLOURS) % len(DASHES)]


def class_colours(classes: int) -> list[str]:
    """A colour for each class: of the palette if it is large enough, else hues around the circle in two lightnesses."""
    if classes <= len(COLOURS):
        return list(COLOURS[:classes])
    hues = (colorsys.hls_to_rgb(k / classes, (0.42, 0.6)[k % 2], 0.6) for k in range(classes))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in hues]


def shorten(name: str, max_length: int = 24) -> str:
    """For an axis, where a long name would leave no room for the plot."""
    return name if len(name) <= max_length else name[: max_length - 1] + "…"


def duration(seconds: float) -> str:
    """
    >>> duration(8.25), duration(75), duration(7500)
    ('8.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """
    >>> size(0), size(512), size(5_300_000)
    ('0 B', '512 B', '5.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def unit(values: Sequence[float], scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest of the units in which the largest value is not below one."""
    largest = max(values, default=0.0)
    return next((scale for scale in scales if largest >= scale[0]), scales[-1])


SECONDS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def decades(values: Sequence[float], max_ticks: int = 8) -> dict[float, str]:
    """Powers of ten around these values, and how they are written: not as formulas, which not every font has.

    >>> decades([2e-16, 3e-15])
    {1e-16: '10⁻¹⁶', 1e-15: '10⁻¹⁵', 1e-14: '10⁻¹⁴'}
    """
    low, high = math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 1
    powers = range(low, high + 1, math.ceil((high - low) / max_ticks))
    return {float(f"1e{power}"): f"10{str(power).translate(RAISED)}" for power in powers}


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def count(number: int, word: str) -> str:
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
