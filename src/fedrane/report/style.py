"""Colours, and how numbers and names are written on the page and in figures."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

COLOURS = (
    "#1266b5", "#f04c05", "#2e9769", "#a23678", "#e5a113", "#8aaef9", "#bd190c", "#0fc4aa", "#0545ff", "#3e94bf",
)  # fmt: skip
"""Visible on white and on a dark page. Any two differ, also for readers who see no red or no green."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
"""Plotly's names for markers."""
MAX_LINES_IN_PLOT = 6
"""More lines than this do not share one plot."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TITLES = {
    "fedavg": "FedAvg",
    "local": "Local",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "moon": "MOON",
    "fedlc": "FedLC",
    "fedntd": "FedNTD",
    "fedsam": "FedSAM",
    "feddecorr": "FedDecorr",
    "fednova": "FedNova",
    "fedavgm": "FedAvgM",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "median": "Median",
    "trimmed-mean": "Trimmed mean",
    "krum": "Krum",
    "multi-krum": "Multi-Krum",
    "rfa": "RFA",
    "q-ffl": "q-FFL",
    "afl": "AFL",
    "fedmgda": "FedMGDA+",
    "fedfv": "FedFV",
    "fedmtl": "FedMTL",
    "fedper": "FedPer",
    "lg-fedavg": "LG-FedAvg",
    "apfl": "APFL",
    "fedrep": "FedRep",
    "fedbn": "FedBN",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "apple": "APPLE",
    "fedrod": "Fed-RoD",
    "fedbabu": "FedBABU",
    "fedproto": "FedProto",
    "fedala": "FedALA",
    "spherefed": "SphereFed",
    "fedrane": "FedRANE",
    "fedrane-wo-lra": "FedRANE w/o LRA",
    "fedrane-wo-gne": "FedRANE w/o GNE",
}
"""The methods as their papers write them."""
DASHES = ("solid", "dash", "dot", "dashdot")
# For papers; on the page the two scales are the style sheet's, which has the same for light and others for dark.
SEQUENTIAL = ("#eef4f9", "#9cc3df", "#3f7fb0", "#12395c")
DIVERGING = ("#9c2f1b", "#dd8f79", "#f4f2ef", "#7fb0d3", "#1f5585")


def colour(line: int) -> str:
    return COLOURS[line % len(COLOURS)]


def dash(line: int) -> str:
    """Another dash each time the colours start over."""
    return DASHES[line // len(COLOURS) % len(DASHES)]


def symbol(number: int) -> str:
    """Another one each time the colours start over, so that no two of fifty have the same colour and symbol."""
    return SYMBOLS[(number + number // len(COLOURS)) % len(SYMBOLS)]


def title(method: str) -> str:
    """A method's name for readers; a user's is named by its class.

    >>> title("fedrod"), title("/home/me/prox.py:Prox")
    ('Fed-RoD', 'Prox')
    """
    return TITLES.get(method, method.rpartition(":")[2])


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
    return {float(f"1e{power}"): f"10{str(power).translate(SUPERSCRIPTS)}" for power in powers}


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
