"""The page's plots as plain values for Plotly. The page adds the colours of its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.report.measures import Clients, Curve, Grid, Residuals, Worst
from fedrane.report.runs import Line, Run
from fedrane.report.style import BYTES, SECONDS, class_colours, colour, dash, decades, shorten, unit
from fedrane.report.tsne import Points

Plot = dict[str, Any]
SEQUENTIAL, DIVERGING = "coloraxis", "coloraxis2"
"""Plotly's names for the two scales; the page gives them their colours."""
DIGITS = 5
"""Significant digits: more cannot be seen, and would make the page larger."""
MAX_MARKERS = 30
"""Lines with at most this many points have markers."""
BAND = "2e"
"""The opacity of a band, as a suffix of its colour."""


def text(name: str, max_length: int = 0) -> str:
    """Escape a name from a file: Plotly interprets some HTML tags."""
    return escape(shorten(name, max_length) if max_length else name, quote=False)


def plain(values: NDArray[Any] | Sequence[float]) -> list[Any]:
    """As JSON values; what is not finite is None, a gap in the plot."""
    array = np.asarray(values)
    if array.ndim > 1:
        return [plain(row) for row in array]
    return [float(f"{v:.{DIGITS}g}") if np.isfinite(v) else None for v in array.astype(np.float64)]


def _plot(data: list[dict[str, Any]], height: int, x: dict[str, Any], y: dict[str, Any], **layout: Any) -> Plot:
    axes = {"automargin": True, "fixedrange": False}
    base = {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "showlegend": False,
        "xaxis": axes | x,
        "yaxis": axes | y,
    }
    return {"data": data, "layout": base | layout}


def _title(words: str) -> dict[str, Any]:
    return {"text": words, "standoff": 6}


def _integer_axis(numbers: NDArray[np.int64]) -> dict[str, Any]:
    """An axis of whole numbers; if they are few, each has a tick."""
    return {"dtick": 1} if len(numbers) <= 12 and int(np.ptp(numbers)) <= 12 else {"tickformat": ",d", "nticks": 8}


# ---- lines


def accuracy(lines: Sequence[Line], curves: Sequence[Curve]) -> Plot:
    """Accuracy over rounds, with a band of one standard deviation over seeds."""
    data = [trace for c in curves for trace in _with_band(lines, c, plain(c.rounds), "round %{x}")]
    return _plot(data, 330, _rounds([c.rounds for c in curves]), {"title": _title("accuracy, %")}, hovermode="closest")


def cost(lines: Sequence[Line], curves: Sequence[Curve], of: str) -> Plot:
    """Accuracy over the cost of training so far: ``seconds`` or ``sent``."""
    spent = [c.seconds if of == "seconds" else c.sent for c in curves]
    scale, name = unit([values[-1] for values in spent], SECONDS if of == "seconds" else BYTES)
    hover = f"%{{x:.3g}} {name}, round %{{customdata[0]}}"
    xs = [plain(values / scale) for values in spent]
    data = [trace for c, x in zip(curves, xs, strict=True) for trace in _with_band(lines, c, x, hover)]
    words = "training time" if of == "seconds" else "sent up and down"
    x = {"title": _title(f"{words}, {name}"), "rangemode": "tozero"}
    return _plot(data, 290, x, {"title": _title("accuracy, %")}, hovermode="closest")


def residual(lines: Sequence[Line], residuals: Sequence[Residuals]) -> Plot:
    data = [
        _line(lines, each.line, plain(each.rounds), plain(each.values)) | {"hovertemplate": "round %{x}<br>%{y:.2g}"}
        for each in residuals
    ]
    ticks = decades([value for trace in data for value in trace["y"]])
    y = {
        "title": _title("max |p ∘ Mp − w|"),
        "type": "log",
        "range": [math.log10(min(ticks)) - 0.1, math.log10(max(ticks)) + 0.1],
        "tickvals": list(ticks),
        "ticktext": list(ticks.values()),
        "tickfont": {"size": 14},  # superscripts are small
    }
    return _plot(data, 300, _rounds([each.rounds for each in residuals]), y, hovermode="closest")


def _rounds(each: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    return {"title": _title("round"), **_integer_axis(np.unique(np.concatenate(each)))}


def _line(lines: Sequence[Line], number: int, x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "legendgroup": str(number),
        "name": text(lines[number].name),
        "x": x,
        "y": y,
        "mode": "lines+markers" if len(x) <= MAX_MARKERS else "lines",
        "line": {"color": colour(number), "dash": dash(number), "width": 2},
        "marker": {"size": 5},
    }


def _with_band(lines: Sequence[Line], curve: Curve, x: list[Any], hover: str) -> list[dict[str, Any]]:
    line = _line(lines, curve.line, x, plain(100 * curve.mean))
    if curve.deviation is None:
        about = {"customdata": curve.rounds[:, None].tolist(), "hovertemplate": f"{hover}<br>%{{y:.2f}} %"}
        return [line | about]
    low, high = (100 * (curve.mean + sign * curve.deviation).clip(0, 1) for sign in (-1, 1))
    band = line | {
        "x": x + x[::-1],
        "y": plain(low) + plain(high[::-1]),
        "mode": "lines",
        "fill": "toself",
        "fillcolor": colour(curve.line) + BAND,
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    about = {
        "customdata": [[int(r), float(f"{100 * d:.3g}")] for r, d in zip(curve.rounds, curve.deviation, strict=True)],
        "hovertemplate": f"{hover}<br>%{{y:.2f}} ± %{{customdata[1]:.2f}} %",
    }
    return [band, line | about]


# ---- clients


def distribution(lines: Sequence[Line], clients: Sequence[Clients]) -> Plot:
    """A box for each line, and a point for each client and seed."""
    data = [
        {
            "type": "box",
            "legendgroup": str(each.line),
            "name": text(lines[each.line].name),
            "orientation": "h",
            "x": plain(100 * each.accuracy),
            "y": [position] * len(each.accuracy),
            "customdata": np.stack([each.clients, each.seeds], 1).tolist(),
            "boxpoints": "all",
            "jitter": 0.6,
            "pointpos": 0,
            "marker": {"size": 4, "opacity": 0.55, "color": colour(each.line)},
            "line": {"width": 1.5, "color": colour(each.line)},
            "fillcolor": colour(each.line) + "22",
            "hoveron": "points",
            "hovertemplate": "client %{customdata[0]}, seed %{customdata[1]}<br>%{x:.2f} %",
        }
        for position, each in enumerate(clients)
    ]
    y = _names(lines, [each.line for each in clients])
    return _plot(data, 90 + 44 * len(clients), {"title": _title("accuracy, %")}, y)


def _names(lines: Sequence[Line], shown: Sequence[int]) -> dict[str, Any]:
    """An axis of lines, the first at the top."""
    return {
        "tickvals": list(range(len(shown))),
        "ticktext": [text(lines[number].name, 18) for number in shown],
        "range": [len(shown) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }


def worst(lines: Sequence[Line], worst_clients: Worst, seeds: bool, train_counts: dict[tuple[int, int], int]) -> Plot:
    """The worst clients. With ``seeds`` a client's name has its seed. ``train_counts``: its training examples."""
    cells = {
        "type": "heatmap",
        "z": plain(100 * worst_clients.accuracy),
        "text": [[f"{value:.0f}" for value in row] for row in 100 * worst_clients.accuracy],
        "texttemplate": "%{text}",
        "customdata": [[[client, seed, train_counts[seed, client]] for seed, client in worst_clients.who]]
        * len(worst_clients.lines),
        "hovertemplate": "client %{customdata[0]}, seed %{customdata[1]}, %{customdata[2]} training examples<br>"
        "%{z:.2f} %<extra></extra>",
        "coloraxis": DIVERGING,
        "xgap": 2,
        "ygap": 2,
    }
    x = {
        "title": _title("client (seed), the worst first" if seeds else "client, the worst first"),
        "tickvals": list(range(len(worst_clients.who))),
        "ticktext": [f"{client}<br>({seed})" if seeds else str(client) for seed, client in worst_clients.who],
        "tickangle": 0,
        "showgrid": False,
        "ticks": "",
    }
    scale = {DIVERGING: {"cmin": 0, "cmax": 100, "showscale": False}}
    return _plot([cells], 110 + 34 * len(worst_clients.lines), x, _names(lines, worst_clients.lines), **scale)


def partition(run: Run) -> Plot:
    """Training examples of each class and client, shaded by their square root; above, each client's total.

    These alone where the classes are not known.
    """
    counts = run.labels.T
    clients = list(range(counts.shape[1]))
    x = {"title": _title("client"), "showgrid": False, "zeroline": False, **_integer_axis(np.arange(len(clients)))}
    bars: dict[str, Any] = {
        "type": "bar",
        "x": clients,
        "y": run.labels.sum(1).tolist(),
        "marker": {"color": "#8494a4"},
        "hovertemplate": "client %{x}<br>%{y:,d} examples<extra></extra>",
    }
    if not run.knows_classes:
        return _plot([bars], 260, x, {"rangemode": "tozero", "title": _title("examples")}, bargap=0.25)
    cells = {
        "type": "heatmap",
        "x": clients,
        "z": plain(np.where(counts > 0, np.sqrt(counts), np.nan)),
        "customdata": counts.tolist(),
        "text": [[text(name)] * len(clients) for name in run.classes],
        "hovertemplate": "client %{x}, class %{text}<br>%{customdata:,d} examples<extra></extra>",
        "hoverongaps": False,
        "coloraxis": SEQUENTIAL,
        "xgap": 1 if len(clients) <= 60 else 0,
        "ygap": 1 if len(counts) <= 40 else 0,
    }
    step = max(1, len(counts) // 26)
    top = 0.2
    y = {
        "domain": [0, 1 - top - 0.03],
        "tickvals": list(range(0, len(counts), step)),
        "ticktext": [text(name, 14) for name in run.classes[::step]],
        "range": [len(counts) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }
    y2 = {"domain": [1 - top, 1], "nticks": 3, "automargin": True, "rangemode": "tozero", "title": _title("examples")}
    ticks = _counts(int(counts.max()))
    bar: dict[str, Any] = {
        "title": {"text": "examples"},
        "tickvals": plain(np.sqrt(ticks)),
        "ticktext": [f"{t:,}" for t in ticks],
    }
    bar |= {"thickness": 10, "len": 0.8, "y": 0.4, "outlinewidth": 0}
    scale = {SEQUENTIAL: {"cmin": 0, "cmax": float(np.sqrt(counts.max())), "colorbar": bar}}
    height = 170 + min(520, max(160, 22 * len(counts)))
    return _plot([cells, bars | {"yaxis": "y2"}], height, x, y, yaxis2=y2, bargap=0.25, **scale)


def _counts(largest: int) -> list[int]:
    """Marks for a scale of square roots: 1, 2 or 5 times a power of ten, five of them at most."""
    nice = [
        digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5) if digit * 10**power <= largest
    ]
    return nice[:: -(len(nice) // 5 + 1)][::-1]


# ---- clients over rounds, and features


def grid(recorded: Grid, percent: bool) -> Plot:
    """Client × round: cosines from −1 to 1, or shares in per cent."""
    cells = {
        "type": "heatmap",
        "x": plain(recorded.rounds),
        "y": list(range(len(recorded.values))),
        "z": plain(100 * recorded.values if percent else recorded.values),
        "hovertemplate": "client %{y}, round %{x}<br>" + ("%{z:.1f} %" if percent else "%{z:.3f}") + "<extra></extra>",
        "hoverongaps": False,
        "coloraxis": SEQUENTIAL if percent else DIVERGING,
        "xgap": 1 if len(recorded.rounds) <= 40 else 0,
        "ygap": 1 if len(recorded.values) <= 40 else 0,
    }
    flat = {"showgrid": False, "zeroline": False}
    bar = {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0, "nticks": 6}
    highest = 100 * float(np.nanmax(recorded.values)) or 1.0
    shared = {DIVERGING: {"cmin": -1, "cmax": 1, "showscale": False}}
    scale = {SEQUENTIAL: {"cmin": 0, "cmax": highest, "colorbar": bar}} if percent else shared
    x = {"title": _title("round"), **flat, **_integer_axis(recorded.rounds)}
    y = {"title": _title("client"), **flat, **_integer_axis(np.arange(len(recorded.values))), "autorange": "reversed"}
    return _plot([cells], 90 + min(420, max(150, 16 * len(recorded.values))), x, y, **scale)


def scatter(run: Run, points: Points) -> Plot:
    """A colour for each class."""
    colours = class_colours(len(run.classes))
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": text(run.classes[label]),
            "x": plain(points.positions[points.labels == label, 0]),
            "y": plain(points.positions[points.labels == label, 1]),
            "marker": {"color": colours[label], "size": 4, "opacity": 0.8},
            "hovertemplate": "%{fullData.name}<extra></extra>",
        }
        for label in np.unique(points.labels).tolist()
    ]
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "ticks": ""}
    return _plot(data, 300, bare, bare | {"scaleanchor": "x"}, hovermode="closest")
