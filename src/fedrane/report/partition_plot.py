"""Plot of a partition: clients × classes, with the size of each client above."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from fedrane.data.partition import Partition
from fedrane.errors import DataError, nearest, printable
from fedrane.system.files import write_atomically

SUFFIXES = (".png", ".svg", ".pdf")
_BLUE, _GREY = "#2f6690", "#8a96a3"
_SHADES = LinearSegmentedColormap.from_list("examples", ["#d3e5f2", "#6aa5cd", "#2f6690", "#0b2540"])
_MAX_BUBBLES = (40, 30)  # clients, classes: with more, cells are shaded instead of small discs
_MAX_NAMED = 60  # clients: with more, not every one has a label


def draw(
    partition: Partition,
    y: NDArray[Any],
    class_names: Sequence[str],
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Plot the number of examples of each class and client; the suffix of ``path`` decides: PNG, SVG or PDF."""
    draw_counts(partition.counts(y, len(class_names)), class_names or ["examples"], path, title)


def draw_counts(
    counts: NDArray[np.int64],
    class_names: Sequence[str],
    path: str | os.PathLike[str],
    title: str = "",
    order: Sequence[int] = (),
) -> None:
    """The same from (clients, classes) counts; the clients in this order, if one is given."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"plot {path.name}", "plots are PNG, SVG or PDF files", nearest(path.suffix, SUFFIXES))
    clients, classes = counts.shape
    counts = counts[list(order)] if order else counts
    bubbles = clients <= _MAX_BUBBLES[0] and classes <= _MAX_BUBBLES[1]
    # Inches: cells shrink as they get many, within a page; the rest is for names, sizes and the scale.
    width, height = min(0.5 * clients, 13.0), min((0.45 if bubbles else 0.25) * classes, 11.0)
    figure = Figure(figsize=(max(width + 2.2, 5.0), max(height + 2.1, 3.4)), layout="constrained", dpi=150)
    grid = figure.add_gridspec(
        2, 2, height_ratios=(1.0, max(height, 1.3)), width_ratios=(max(width, 2.8), 0.5 if bubbles else 0.2)
    )
    cells = figure.add_subplot(grid[1, 0])
    bars = figure.add_subplot(grid[0, 0], sharex=cells)
    scale = figure.add_subplot(grid[1, 1])
    if title:
        figure.suptitle(title, fontsize=12, parse_math=False)
    _name_axes(cells, bars, order or range(clients), class_names, height / classes)
    bars.bar(np.arange(clients), counts.sum(1), width=0.7 if clients <= _MAX_NAMED else 1.0, color=_GREY)
    (_bubbles if bubbles else _shades)(figure, cells, scale, counts)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Save without the date, so that the same numbers give the same file."""
    suffix, drawn = path.suffix.lower().removeprefix("."), io.BytesIO()
    dated = {"svg": "Date", "pdf": "CreationDate"}
    with mpl.rc_context({"pdf.fonttype": 42}):  # TrueType fonts: journals refuse those of type 3
        figure.savefig(drawn, format=suffix, metadata={dated[suffix]: None} if suffix in dated else None)
    write_atomically(path, drawn.getvalue())


def _name_axes(cells: Axes, bars: Axes, names: Sequence[int], class_names: Sequence[str], cell: float) -> None:
    """Label clients and classes, each of them where there is room; ``cell`` is the height of a class in inches."""
    clients = len(names)
    cells.set(xlim=(-0.5, clients - 0.5), ylim=(len(class_names) - 0.5, -0.5), xlabel="Client", ylabel="Class")
    every = 1 if clients <= _MAX_NAMED else math.ceil(clients / 20)
    cells.set_xticks(range(0, clients, every), [str(name) for name in names[::every]])
    step = math.ceil(0.1 / cell)  # the smallest text is a tenth of an inch high
    names_shown = [printable(name) for name in class_names[::step]]
    shown = [name if len(name) <= 20 else name[:19] + "…" for name in names_shown]
    size = min(9.0, 0.75 * 72 * cell * step)
    cells.set_yticks(range(0, len(class_names), step), shown, fontsize=size, parse_math=False)
    cells.tick_params(axis="x", labelsize=7 if 30 < clients <= _MAX_NAMED else 8)
    bars.tick_params(axis="x", labelbottom=False, length=0)
    bars.tick_params(axis="y", labelsize=8)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    bars.set_ylabel("Training\nexamples", fontsize=9)
    bars.spines[["top", "right"]].set_visible(False)


def _bubbles(figure: Figure, cells: Axes, scale: Axes, counts: NDArray[np.int64]) -> None:
    """A disc in each cell, its area proportional to the number of examples, and a legend of three discs."""
    cells.grid(color="#e6e9ec", linewidth=0.6)
    cells.set_axisbelow(True)
    cells.spines[:].set_color("#c8ced4")
    cells.tick_params(length=0)
    scale.axis("off")
    figure.draw_without_rendering()  # the layout settles, and with it the size of a cell
    box = cells.get_window_extent()
    cell = min(box.width / counts.shape[0], box.height / counts.shape[1]) * 72 / figure.dpi
    widest = min(0.94 * cell, 30.0)
    area_per_example = widest**2 / counts.max()
    client, label = np.nonzero(counts)
    areas = np.maximum(counts[client, label] * area_per_example, 1.0)  # a single example still shows as a dot
    cells.scatter(client, label, s=areas, color=_BLUE, alpha=0.85, linewidths=0)
    shown = sorted({_round(int(counts.max()) * part) for part in (1.0, 0.4, 0.1)})
    handles = [
        cells.scatter([], [], s=count * area_per_example, color=_BLUE, alpha=0.85, linewidths=0) for count in shown
    ]
    scale.legend(
        handles,
        [f"{count:,}" for count in shown],
        title="Examples",
        title_fontsize=9,
        fontsize=8,
        loc="upper left",
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        scatterpoints=1,
        handlelength=widest / 8,
        labelspacing=max(0.5, widest / 8 - 1.2),
    )


def _round(count: float) -> int:
    """Down to 1, 2 or 5 times a power of ten."""
    unit = int("1" + "0" * (len(str(int(count))) - 1))
    return max(digit * unit for digit in (1, 2, 5) if digit * unit <= max(count, 1))


def _shades(figure: Figure, cells: Axes, scale: Axes, counts: NDArray[np.int64]) -> None:
    """A shade in each cell, by the square root of its number of examples, so that small numbers differ; 0 is white."""
    picture = cells.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=_SHADES,
        norm=PowerNorm(0.5, vmin=1, vmax=max(int(counts.max()), 2)),
    )
    ticks = sorted({1, *(_round(int(counts.max()) * part) for part in (1.0, 0.5, 0.2, 0.05))})
    figure.colorbar(picture, cax=scale, ticks=ticks, format=StrMethodFormatter("{x:,.0f}"))
    scale.set_title("Examples", fontsize=9)
    scale.tick_params(labelsize=8)
