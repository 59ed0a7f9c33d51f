"""The report's plots for papers: the same numbers as on the page, on white, as PNG, SVG and PDF."""

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
from fedrane.report.measures import COSINE, MODEL_TYPES, SOLVED, Curve, Grid, Recalls, Worst
from fedrane.report.page import MAX_CLASSES, MAX_CLASSES_IN_LEGEND, MODELS, Embedded
from fedrane.report.partition_plot import SUFFIXES
from fedrane.report.plots import GREY, MAX_CLASSES_IN_TABLE, MAX_TICKS, middle
from fedrane.report.runs import Line, Run
from fedrane.report.tsne import Points
from fedrane.system.files import clear_errors

SEQUENTIAL = LinearSegmentedColormap.from_list("sequential", style.SEQUENTIAL)
DIVERGING = LinearSegmentedColormap.from_list("diverging", style.DIVERGING)
DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}
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
                names = run.classes if run.knows_classes else ("all classes" if run.classes else "examples",)
                partition_plot.draw_counts(run.labels, names, written[-1], order=run.order.tolist())
        for name, figure in _figures(lines, embedded):
            for suffix in SUFFIXES:
                written.append(folder / f"{name}{suffix}")
                partition_plot.save(figure, written[-1])
    return written


def _figures(lines: Sequence[Line], embedded: Embedded) -> Iterator[tuple[str, Figure]]:
    by_model = _curves(lines)
    if by_model:
        yield "accuracy", _accuracy(lines, by_model)
        for measure, name in measures.RANKED.items():
            if ranked := _curves(lines, measure):
                yield name, _accuracy(lines, ranked)
        yield "cost", _cost(lines, by_model)
        recalls = [(model, recalls) for model in MODEL_TYPES if (recalls := measures.recalls(lines, model))]
        if recalls and len(lines[0].first.classes) <= MAX_CLASSES:
            yield "classes", _recalls(lines, recalls)
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


def _share(x: Sequence[Axes], y: Sequence[Axes] = ()) -> None:
    """Give panels one range; before anything is drawn, so that it covers all of them."""
    for axis in x[1:]:
        axis.sharex(x[0])
    for axis in y[1:]:
        axis.sharey(y[0])


# ---- lines


def _curves(lines: Sequence[Line], measure: str = "") -> list[tuple[str, list[Curve]]]:
    return [(model, curves) for model in MODEL_TYPES if (curves := measures.curves(lines, model, measure))]


def _accuracy(lines: Sequence[Line], by_model: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    if any(len(curves) > style.MAX_LINES_IN_PLOT for _, curves in by_model):
        return _each_alone(lines, by_model)
    figure, axes = _panels(len(by_model), 2, 2.6, 0.4)
    _share(axes, axes)
    for axis, (model, curves) in zip(axes, by_model, strict=True):
        for curve in curves:
            _rise(axis, curve, curve.rounds.astype(np.float64))
        axis.set(title=MODELS[model], xlabel="round", ylabel=f"{curves[0].measure}, %")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, lines)
    return figure


def _each_alone(lines: Sequence[Line], by_model: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    """A panel for each line; in grey, from the lowest to the highest of all lines."""
    figure, axes = _panels(sum(len(curves) for _, curves in by_model), 4, 1.5)
    _share(axes, axes)
    panels = [(model, curves, curve) for model, curves in by_model for curve in curves]
    for axis, (model, curves, curve) in zip(axes, panels, strict=True):
        everyone = measures.envelope(curves)
        axis.fill_between(everyone.rounds, 100 * everyone.low, 100 * everyone.high, color=GREY, alpha=0.2, linewidth=0)
        _rise(axis, curve, curve.rounds.astype(np.float64))
        axis.set_title(f"{style.shorten(lines[curve.line].name, 18)}\n{MODELS[model].lower()}", fontsize=7.5)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    return figure


def _cost(lines: Sequence[Line], by_model: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    figure, axes = _panels(2 * len(by_model), 2, 2.4, 0.4)
    _share(axes[::2], axes)
    _share(axes[1::2])
    together = [curve for _, curves in by_model for curve in curves]
    many = any(len(curves) > style.MAX_LINES_IN_PLOT for _, curves in by_model)
    for row, (model, curves) in enumerate(by_model):
        for column, (of, scales) in enumerate((("seconds", style.SECONDS), ("sent", style.BYTES))):
            axis = axes[2 * row + column]
            scale, unit = style.unit([getattr(curve, of)[-1] for curve in together], scales)
            for curve in (curve for curve in curves if getattr(curve, of)[-1] > 0):
                _rise(axis, curve if not many else _last(curve), getattr(curve, of)[-1 if many else 0 :] / scale)
            words = "training time" if of == "seconds" else "sent up and down"
            what = f"{'last ' if many else ''}{curves[0].measure}, %"
            axis.set(title=MODELS[model], xlabel=f"{words}, {unit}", ylabel=what)
    for axis in axes[:2]:
        axis.set_xlim(left=0)  # at the end: it fixes the other end as well
    _legend(figure, lines)
    return figure


def _last(curve: Curve) -> Curve:
    return curve._replace(mean=curve.mean[-1:], deviation=None, post=curve.post[-1:])


def _rise(axis: Axes, curve: Curve, x: NDArray[np.float64]) -> None:
    ink, y = style.colour(curve.line), 100 * curve.mean
    marker = MARKERS[style.symbol(curve.line)] if len(x) <= 30 else None
    size = 2.5 if len(x) > 1 else 5
    axis.plot(x, y, color=ink, linestyle=DASHES[style.dash(curve.line)], linewidth=1.5, marker=marker, markersize=size)
    axis.plot(x[curve.post], y[curve.post], "D", markersize=6, markerfacecolor="none", markeredgecolor=ink)
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
            marker=MARKERS[style.symbol(k)],
            markersize=3.5,
            label=style.shorten(line.name),
        )
        for k, line in enumerate(lines)
    ]
    if any(record["round"] > run.rounds for line in lines for run in line.runs for record in run.history[-1:]):
        handles.append(
            Line2D([], [], color=GREY, linestyle="", marker="D", markerfacecolor="none", label="post-training")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(lines), 5))


# ---- clients


def _clients(lines: Sequence[Line]) -> Figure:
    by_model = [(model, clients) for model in MODEL_TYPES if (clients := measures.clients(lines, model))]
    figure, axes = _panels(len(by_model), 2, 0.9 + 0.3 * max(len(clients) for _, clients in by_model))
    _share(axes)
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
        axis.set(title=MODELS[model], xlabel=f"{measures.NAMES[measures.headline(lines)]} of each client, %")
        axis.grid(True, axis="x")
    return figure


def _recalls(lines: Sequence[Line], by_model: Sequence[tuple[str, Recalls]]) -> Figure:
    names = lines[0].first.classes
    figure, axes = _panels(len(by_model), 2, 1.0 + 0.3 * max(len(recalls.lines) for _, recalls in by_model))
    for axis, (model, recalls) in zip(axes, by_model, strict=True):
        _table(axis, lines, recalls.lines, recalls.values)
        step = math.ceil(len(names) / MAX_CLASSES_IN_TABLE)
        shown = [style.shorten(name, 12) for name in names[::step]]
        tilt = 0 if max(map(len, shown)) <= 3 else 40
        axis.set_xticks(range(0, len(names), step), shown, rotation=tilt, ha="right" if tilt else "center")
        axis.set(title=f"{MODELS[model]}: recall, %", xlabel="class")
    return figure


def _worst(lines: Sequence[Line], by_model: Sequence[tuple[str, Worst]]) -> Figure:
    figure, axes = _panels(len(by_model), 2, 1.1 + 0.3 * max(len(worst.lines) for _, worst in by_model))
    several = any(len(line.runs) > 1 for line in lines)
    for axis, (model, worst) in zip(axes, by_model, strict=True):
        _table(axis, lines, worst.lines, worst.accuracy)
        who = zip(worst.who, worst.counts, strict=True)
        names = [f"{c}\n({s})\n{count}" if several else f"{c}\n{count}" for (s, c), count in who]
        axis.set_xticks(range(len(names)), names)
        words = "client, (seed), training examples" if several else "client, training examples"
        axis.set(title=f"{MODELS[model]}: {measures.NAMES[measures.headline(lines)]}, %", xlabel=words)
    return figure


def _table(axis: Axes, lines: Sequence[Line], shown: Sequence[int], values: NDArray[np.float64]) -> None:
    """Accuracies from 0 to 1 as shaded cells, with their numbers if they are few."""
    axis.imshow(100 * values, cmap=SEQUENTIAL, vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(100 * values):
        if values.shape[1] <= MAX_CLASSES_IN_TABLE and np.isfinite(value):
            ink = "white" if value > 50 else "#1d2733"
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(len(shown)), [style.shorten(lines[k].name) for k in shown])
    _bare(axis)


def _bare(axis: Axes) -> None:
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


# ---- clients over rounds, and features


def _cosines(lines: Sequence[Line], grids: Sequence[Grid]) -> Figure:
    figure, axes = _panels(len(grids), 4, 2.0, 0.3)
    for axis, grid in zip(axes, grids, strict=True):
        picture = _cells(axis, lines[grid.line].first, grid, grid.values, DIVERGING, Normalize(-1, 1))
        axis.set_title(style.shorten(lines[grid.line].name))
    figure.colorbar(picture, ax=axes, label="cosine", shrink=0.8, aspect=25, pad=0.01)
    return figure


def _cells(axis: Axes, run: Run, grid: Grid, values: NDArray[np.float64], colours: Any, norm: Normalize) -> Any:
    """Client × round, for the rounds that were recorded; the client with the most training examples first."""
    picture = axis.imshow(values[run.order], cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    shown = range(0, len(grid.rounds), max(1, math.ceil(len(grid.rounds) / 6)))
    axis.set_xticks(list(shown), [str(grid.rounds[k]) for k in shown])
    step = math.ceil(2 * len(run.order) / MAX_TICKS)
    names = [f"{client} ({run.counts[client]:,})" for client in run.order[::step]]
    axis.set_yticks(range(0, len(run.order), step), names, fontsize=5.5)
    axis.set(xlabel="round", ylabel="client (examples)")
    if grid.rounds[-1] > run.rounds:
        axis.axvline(int((grid.rounds <= run.rounds).sum()) - 0.5, color=GREY, linestyle=":")
    _bare(axis)
    return picture


def _bargain(lines: Sequence[Line], shares: Sequence[Grid]) -> Figure:
    residuals = measures.residuals(lines)
    unsolved = any(each.values.max() > SOLVED for each in residuals)
    figure, axes = _panels(len(shares) + unsolved, 2, 2.4)
    norm = Normalize(0, 100 * max(float(np.nanmax(grid.values)) for grid in shares) or 1.0)
    for axis, grid in zip(axes, shares, strict=False):
        picture = _cells(axis, lines[grid.line].first, grid, 100 * grid.values, SEQUENTIAL, norm)
        axis.set_title(f"{style.shorten(lines[grid.line].name)}: weights")
        figure.colorbar(picture, ax=axis, label="share, %")
    if not unsolved:
        return figure
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
        present = np.unique(points.labels).tolist()
        for label in present:
            own = points.positions[points.labels == label]
            marker = MARKERS[style.symbol(label)]
            axis.scatter(own[:, 0], own[:, 1], s=4, color=inks[label], marker=marker, linewidths=0)
            if len(present) <= MAX_CLASSES_IN_TABLE:
                name = style.shorten(lines[number].first.classes[label], 10)
                axis.annotate(name, own[middle(own)], (0, 5), textcoords="offset points", ha="center", fontsize=6)
        axis.set(title=style.shorten(lines[number].name), xticks=[], yticks=[], aspect="equal", adjustable="datalim")
        axis.spines[:].set_visible(True)
    if len(classes) <= MAX_CLASSES_IN_LEGEND and all(other == classes for other in others):
        inks = style.class_colours(len(classes))
        handles = [
            Line2D(
                [],
                [],
                linestyle="",
                marker=MARKERS[style.symbol(k)],
                markersize=4,
                color=inks[k],
                label=style.shorten(name, 14),
            )
            for k, name in enumerate(classes)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(classes), 10), handletextpad=0.1)
    return figure
