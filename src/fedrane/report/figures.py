"""The report's plots for papers: the same numbers as on the page, on white, as PNG and SVG."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedrane.report import measures, partition_plot, style
from fedrane.report.measures import COSINE, MODEL_TYPES, Curve, Grid, Worst
from fedrane.report.page import MAX_CLASSES_IN_LEGEND, MODELS, Embedded
from fedrane.report.runs import Line
from fedrane.report.tsne import Points
from fedrane.system.files import clear_errors

SUFFIXES = (".png", ".svg")
SEQUENTIAL = LinearSegmentedColormap.from_list("sequential", style.SEQUENTIAL)
DIVERGING = LinearSegmentedColormap.from_list("diverging", style.DIVERGING)
DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
LOOK: dict[Any, Any] = {
    "text.parse_math": False,  # names are not formulas
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa5b0",
    "axes.labelsize": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.color": "#4a5561",
    "ytick.color": "#4a5561",
    "grid.color": "#e6eaee",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "fedrane",
}
PAGE = 7.2
"""The width of a page of text, in inches."""


def draw(lines: Sequence[Line], embedded: Embedded, folder: Path) -> list[Path]:
    """Write every figure that the runs have numbers for. Files of the same name are replaced."""
    written: list[Path] = []
    with clear_errors(folder), mpl.rc_context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name in a script that the font does not have
        folder.mkdir(parents=True, exist_ok=True)
        for number, (_, run) in enumerate(distinct := measures.partitions(lines)):
            name = "partition" if len(distinct) == 1 else f"partition-{number + 1}"
            for suffix in SUFFIXES:
                written.append(folder / f"{name}{suffix}")
                names = run.classes if run.knows_classes else ("all classes",)
                partition_plot.draw_counts(run.labels, names, written[-1])
        for name, figure in _figures(lines, embedded):
            for suffix in SUFFIXES:
                written.append(folder / f"{name}{suffix}")
                partition_plot.save(figure, written[-1])
    return written


def _figures(lines: Sequence[Line], embedded: Embedded) -> Iterator[tuple[str, Figure]]:
    by_model = [(model, curves) for model in MODEL_TYPES if (curves := measures.curves(lines, model))]
    if by_model:
        yield "accuracy", _accuracy(lines, by_model)
        yield "cost", _cost(lines, by_model)
        yield "clients", _clients(lines)
        worst = [(model, clients) for model in MODEL_TYPES if (clients := measures.worst(lines, model)).who]
        if worst and measures.share_partitions(lines):
            yield "worst-clients", _worst(lines, worst)
    if grids := measures.grids(lines, COSINE):
        yield "cosine", _cosines(lines, grids)
    if shares := measures.shares(lines):
        yield "bargain", _bargain(lines, shares)
    if points := {number: embedding for number, embedding in embedded.items() if isinstance(embedding, Points)}:
        yield "features", _features(lines, points)


def _panels(count: int, columns: int, height: float, extra: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Panels across the width of a page; unused ones in the last row stay empty."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width = PAGE if columns > 1 else 0.6 * PAGE
    figure = Figure(figsize=(width, height * rows + extra), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


# ---- lines


def _accuracy(lines: Sequence[Line], by_model: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    figure, axes = _panels(len(by_model), 2, 2.6, 0.4)
    for axis, (model, curves) in zip(axes, by_model, strict=True):
        for curve in curves:
            _rise(axis, curve, curve.rounds.astype(np.float64))
        axis.set(title=MODELS[model], xlabel="round", ylabel="accuracy, %")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, lines)
    return figure


def _cost(lines: Sequence[Line], by_model: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    figure, axes = _panels(2 * len(by_model), 2, 2.4, 0.4)
    for row, (model, curves) in enumerate(by_model):
        for axis, of, scales in ((axes[2 * row], "seconds", style.SECONDS), (axes[2 * row + 1], "sent", style.BYTES)):
            shown = [curve for curve in curves if getattr(curve, of)[-1] > 0]
            scale, unit = style.unit([getattr(curve, of)[-1] for curve in shown], scales)
            for curve in shown:
                _rise(axis, curve, getattr(curve, of) / scale)
            words = "training time" if of == "seconds" else "sent up and down"
            axis.set(title=MODELS[model], xlabel=f"{words}, {unit}", ylabel="accuracy, %")
            axis.set_xlim(left=0)
    _legend(figure, lines)
    return figure


def _rise(axis: Axes, curve: Curve, x: NDArray[np.float64]) -> None:
    ink, y = style.colour(curve.line), 100 * curve.mean
    marker = "o" if len(x) <= 30 else None
    axis.plot(x, y, color=ink, linestyle=DASHES[style.dash(curve.line)], linewidth=1.5, marker=marker, markersize=2.5)
    if curve.deviation is not None:
        low, high = ((y + sign * 100 * curve.deviation).clip(0, 100) for sign in (-1, 1))
        axis.fill_between(x, low, high, color=ink, alpha=0.15, linewidth=0)
    axis.grid(True)


def _legend(figure: Figure, lines: Sequence[Line]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=style.colour(k),
            linestyle=DASHES[style.dash(k)],
            linewidth=1.5,
            label=style.shorten(line.name),
        )
        for k, line in enumerate(lines)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(lines), 5))


# ---- clients


def _clients(lines: Sequence[Line]) -> Figure:
    by_model = [(model, clients) for model in MODEL_TYPES if (clients := measures.clients(lines, model))]
    figure, axes = _panels(len(by_model), 2, 0.9 + 0.3 * max(len(clients) for _, clients in by_model))
    for axis, (model, clients) in zip(axes, by_model, strict=True):
        values = [100 * each.accuracy for each in clients]
        boxes = axis.boxplot(values, orientation="horizontal", widths=0.6, showfliers=False)
        for position, each in enumerate(clients, 1):
            ink = style.colour(each.line)
            for part in ("boxes", "medians"):
                boxes[part][position - 1].set_color(ink)
            for part in ("whiskers", "caps"):
                for stroke in boxes[part][2 * position - 2 : 2 * position]:
                    stroke.set_color(ink)
            spread = np.linspace(-0.18, 0.18, 7)[np.arange(len(each.accuracy)) % 7]
            axis.scatter(100 * each.accuracy, position + spread, s=5, color=ink, alpha=0.6, linewidths=0, zorder=3)
        axis.margins(x=0.03)
        axis.set_yticks(range(1, len(clients) + 1), [style.shorten(lines[each.line].name) for each in clients])
        axis.invert_yaxis()
        axis.set(title=MODELS[model], xlabel="accuracy of each client, %")
        axis.grid(True, axis="x")
    return figure


def _worst(lines: Sequence[Line], by_model: Sequence[tuple[str, Worst]]) -> Figure:
    figure, axes = _panels(len(by_model), 2, 1.0 + 0.3 * max(len(worst.lines) for _, worst in by_model))
    several = any(len(line.runs) > 1 for line in lines)
    for axis, (model, worst) in zip(axes, by_model, strict=True):
        axis.imshow(100 * worst.accuracy, cmap=DIVERGING, vmin=0, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(100 * worst.accuracy):
            ink = "white" if abs(value - 50) > 30 else "#1d2733"
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=ink)
        axis.set_xticks(range(len(worst.who)), [f"{c}\n({s})" if several else str(c) for s, c in worst.who])
        axis.set_yticks(range(len(worst.lines)), [style.shorten(lines[k].name) for k in worst.lines])
        axis.set(title=MODELS[model], xlabel="client (seed), the worst first" if several else "client, the worst first")
        _bare(axis)
    return figure


def _bare(axis: Axes) -> None:
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


# ---- clients over rounds, and features


def _cosines(lines: Sequence[Line], grids: Sequence[Grid]) -> Figure:
    figure, axes = _panels(len(grids), 4, 2.0, 0.3)
    for axis, grid in zip(axes, grids, strict=True):
        picture = _cells(axis, grid, grid.values, DIVERGING, Normalize(-1, 1))
        axis.set_title(style.shorten(lines[grid.line].name))
    figure.colorbar(picture, ax=axes, label="cosine", shrink=0.8, aspect=25, pad=0.01)
    return figure


def _cells(axis: Axes, grid: Grid, values: NDArray[np.float64], colours: Any, norm: Normalize) -> Any:
    """Client × round, for the rounds that were recorded."""
    picture = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    shown = range(0, len(grid.rounds), max(1, math.ceil(len(grid.rounds) / 6)))
    axis.set_xticks(list(shown), [str(grid.rounds[k]) for k in shown])
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set(xlabel="round", ylabel="client")
    _bare(axis)
    return picture


def _bargain(lines: Sequence[Line], shares: Sequence[Grid]) -> Figure:
    residuals = measures.residuals(lines)
    figure, axes = _panels(len(shares) + 1, 2, 2.4)
    for axis, grid in zip(axes, shares, strict=False):
        highest = 100 * float(np.nanmax(grid.values)) or 1.0
        picture = _cells(axis, grid, 100 * grid.values, SEQUENTIAL, Normalize(0, highest))
        axis.set_title(f"{style.shorten(lines[grid.line].name)}: weights")
        figure.colorbar(picture, ax=axis, label="share, %")
    for each in residuals:
        ink, dash = style.colour(each.line), DASHES[style.dash(each.line)]
        axes[-1].plot(each.rounds, each.values, color=ink, linestyle=dash, marker="o", markersize=2.5)
    ticks = style.decades([value for each in residuals for value in each.values])
    axes[-1].set(title="Residual", xlabel="round", ylabel="max |p ∘ Mp − w|", yscale="log")
    axes[-1].set_yticks(list(ticks), list(ticks.values()))
    axes[-1].minorticks_off()
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].grid(True)
    return figure


def _features(lines: Sequence[Line], embedded: dict[int, Points]) -> Figure:
    figure, axes = _panels(len(embedded), 3, 2.3, 0.4)
    classes, *others = (lines[number].first.classes for number in embedded)
    for axis, (number, points) in zip(axes, embedded.items(), strict=True):
        inks = style.class_colours(len(lines[number].first.classes))
        x, y = points.positions.T
        axis.scatter(x, y, s=3, c=[inks[label] for label in points.labels], linewidths=0)
        axis.set(title=style.shorten(lines[number].name), xticks=[], yticks=[], aspect="equal", adjustable="datalim")
        axis.spines[:].set_visible(True)
    if len(classes) <= MAX_CLASSES_IN_LEGEND and all(other == classes for other in others):
        inks = style.class_colours(len(classes))
        handles = [
            Line2D([], [], linestyle="", marker="o", markersize=4, color=ink, label=style.shorten(name, 14))
            for name, ink in zip(classes, inks, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(classes), 10), handletextpad=0.1)
    return figure
