"""The paper's figures, from plain numbers, as PNG, SVG and PDF: heat maps, scatter plots, curves and pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from fedrane.report import partition_plot

COLOURS = ("#2f6690", "#d9622b", "#1f9d78", "#a552c4", "#c9405f", "#8b7d16", "#2a9bb8", "#77838f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY, PALE = "#8a96a3", "#e6e9ec"
SHADES = LinearSegmentedColormap.from_list("cosine", ["#7d2a18", "#f3ede4", "#8fbbd9", "#2f6690", "#0b2540"])


class Heat(NamedTuple):
    """Rounds × clients; NaN where a client did not take part."""

    rounds: Sequence[int]
    values: NDArray[np.float64]


class Points(NamedTuple):
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[int]
    note: str = ""


class Line(NamedTuple):
    """A mean for each value, and its deviation over seeds (0 with one seed)."""

    x: Sequence[float]
    mean: Sequence[float]
    deviation: Sequence[float]


class Pair(NamedTuple):
    """Without and with something: for each the mean and its deviation."""

    label: str
    without: tuple[float, float]
    having: tuple[float, float]


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG, SVG and PDF; in SVG, text stays text."""
    paths = [stem.with_name(stem.name + suffix) for suffix in partition_plot.SUFFIXES]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
        for path in paths:
            partition_plot.save(figure, path)
    return paths


def _figure(columns: int, rows: int, width: float, height: float, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(columns * width, rows * height + 0.5), layout="constrained", dpi=160)
    figure.suptitle(title, fontsize=11, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    return figure, axes


def _grid(count: int, max_columns: int) -> tuple[int, int]:
    """The numbers of columns and rows for this many panels."""
    columns = min(count, max_columns) if count != 4 or max_columns < 2 else 2
    return columns, math.ceil(count / columns)


def _quiet(axes: Axes) -> None:
    axes.grid(color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


# ---- the figures


def heat_maps(maps: Mapping[str, Heat], title: str, stem: Path) -> list[Path]:
    """One map for each method, clients across and rounds downwards, all on one scale."""
    columns, rows = _grid(len(maps), 2)
    figure, axes = _figure(columns, rows, 3.6, 2.9, title)
    everything = np.concatenate([heat.values.ravel() for heat in maps.values()])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    largest = max(abs(low), abs(high), 1e-6)
    picture = None
    for axis, (name, heat) in zip(axes, maps.items(), strict=False):
        clients = heat.values.shape[1]
        # Below zero the step opposes a client: the scale is red there, in 0.2 of its length.
        picture = axis.imshow(
            heat.values,
            aspect="auto",
            interpolation="nearest",
            cmap=SHADES,
            vmin=min(low, -largest / 3),
            vmax=largest,
            extent=(-0.5, clients - 0.5, heat.rounds[-1] + 0.5, heat.rounds[0] - 0.5),
        )
        spread = float(np.mean(np.nanstd(heat.values, axis=1)))
        least = float(np.mean(np.nanmin(heat.values, axis=1)))
        axis.set_title(f"{name}\nspread {spread:.3f}, least {least:.3f}", fontsize=9, parse_math=False)
        axis.set_xlabel("client", fontsize=8)
        axis.set_ylabel("round", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    for axis in axes[len(maps) :]:
        axis.axis("off")
    if picture is not None:
        bar = figure.colorbar(picture, ax=axes, shrink=0.8)
        bar.set_label("cosine", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return save(figure, stem)


def scatters(plots: Mapping[str, Points], classes: Sequence[str], title: str, stem: Path) -> list[Path]:
    """One panel for each method, points coloured by class."""
    columns, rows = _grid(len(plots), 3)
    figure, axes = _figure(columns, rows, 2.9, 3.0, title)
    colours = [mpl.colormaps["tab10" if len(classes) <= 10 else "gist_rainbow"](c) for c in _spaced(len(classes))]
    for axis, (name, points) in zip(axes, plots.items(), strict=False):
        axis.scatter(points.x, points.y, c=[colours[label] for label in points.labels], s=4, linewidths=0, alpha=0.8)
        axis.set_title(f"{name}\n{points.note}" if points.note else name, fontsize=9, parse_math=False)
        axis.set_aspect("equal", adjustable="datalim")
        axis.set_box_aspect(1)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_color("#c8ced4")
    for axis in axes[len(plots) :]:
        axis.axis("off")
    handles = [Line2D([], [], marker="o", linestyle="", markersize=4, color=colour) for colour in colours]
    if len(classes) <= 26:
        room = int(columns * 2.9 * 14)  # characters across, with the space that an entry takes in addition to its name
        lines = math.ceil(len(classes) * (max(map(len, classes)) + 5) / room)
        per_line = math.ceil(len(classes) / lines)
        figure.legend(handles, classes, loc="outside lower center", ncols=per_line, fontsize=7, frameon=False)
    return save(figure, stem)


def _spaced(classes: int) -> list[float] | list[int]:
    return list(range(classes)) if classes <= 10 else [c / (classes - 1) for c in range(classes)]


def curves(panels: Mapping[str, Mapping[str, Line]], label: str, title: str, stem: Path) -> list[Path]:
    """One panel for each measure; bars show the standard deviation over seeds."""
    figure, axes = _figure(len(panels), 1, 3.7, 3.2, title)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axis, (measure, lines) in zip(axes, panels.items(), strict=True):
        values = sorted({x for line in lines.values() for x in line.x})
        for name, line in lines.items():
            index = names.index(name)
            axis.errorbar(
                line.x,
                [100 * m for m in line.mean],
                [100 * d for d in line.deviation] if any(line.deviation) else None,
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                linewidth=1.6,
                elinewidth=1,
                capsize=2.5,
                label=name,
            )
        if values and values[0] >= 1 and values[-1] / values[0] > 5:
            axis.set_xscale("log")
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(measure, fontsize=9, parse_math=False)
        axis.set_xlabel(label, fontsize=9)
        axis.set_ylabel("accuracy in %", fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.margins(y=0.12)
        _quiet(axis)
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    shown = [handles[name] for name in names]
    figure.legend(shown, names, loc="outside lower center", ncols=min(len(names), 4), fontsize=8, frameon=False)
    return save(figure, stem)


def pairs(panels: Mapping[str, Sequence[Pair]], words: Sequence[str], title: str, stem: Path) -> list[Path]:
    """One panel for each measure and dataset: from without to with, and the gain."""
    columns, rows = _grid(len(panels), 2)
    tallest = max((len(group) for group in panels.values()), default=1)
    figure, axes = _figure(columns, rows, 4.6, 0.36 * tallest + 1.3, title)
    for axis, (measure, group) in zip(axes, panels.items(), strict=False):
        for height, pair in enumerate(reversed(group)):
            (a, spread_a), (b, spread_b) = (tuple(100 * v for v in side) for side in (pair.without, pair.having))
            axis.plot([a, b], [height, height], color="#c8ced4", linewidth=2.5, zorder=1)
            for value, spread, colour in ((a, spread_a, GREY), (b, spread_b, COLOURS[0])):
                axis.errorbar(value, height, xerr=spread or None, fmt="o", color=colour, markersize=7, capsize=3)
            axis.annotate(
                f"{b - a:+.1f}", (max(a + spread_a, b + spread_b), height), (9, 0), textcoords="offset points",
                va="center", fontsize=8, fontweight="bold", color=COLOURS[0] if b >= a else "#9c2f1b",
            )  # fmt: skip
        axis.set_yticks(range(len(group)), [pair.label for pair in reversed(group)], fontsize=8)
        axis.set_ylim(-0.6, len(group) - 0.4)
        axis.margins(x=0.25)
        axis.set_title(measure, fontsize=9, parse_math=False)
        axis.set_xlabel("accuracy in %", fontsize=8)
        _quiet(axis)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    handles = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in (GREY, COLOURS[0])]
    figure.legend(handles, words, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return save(figure, stem)
