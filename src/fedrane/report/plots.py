"""The page's plots as plain values for Plotly. The page adds the colours of its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.report.measures import Clients, Curve, Grid, Recalls, Residuals, Worst, cheapest, envelope, span
from fedrane.report.runs import Line, Run
from fedrane.report.style import (
    BYTES,
    MAX_LINES_IN_PLOT,
    SECONDS,
    class_colours,
    colour,
    dash,
    decades,
    shorten,
    symbol,
    unit,
)
from fedrane.report.tsne import Points

Plot = dict[str, Any]
SEQUENTIAL, DIVERGING = "coloraxis", "coloraxis2"
"""Plotly's names for the two scales; the page gives them their colours."""
DIGITS = 5
"""Significant digits: more cannot be seen, and would make the page larger."""
MAX_MARKERS = 30
"""Lines with at most this many points have markers."""
MAX_CLASSES_IN_TABLE = 15
"""With more, there is no room for numbers in the cells."""
MAX_TICKS = 26
TILTED = {"tickangle": -40}
MAX_LETTERS = 30
"""As many stand side by side under a plot on a phone."""
MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}
MAX_NAME = 18
"""Characters of a name in a plot."""
NAME_HEIGHT = 19
"""Of a line of text, in pixels, with the share of a plot's height that its axis takes."""
NAME, SHADE = "name", "shade"
"""Marks the traces that narrow plots leave out, and those that belong to no line."""
GREY = "#8494a4"
ROUND = "round %{x}"
CLIENT = "client %{customdata[0]}, seed %{customdata[1]}, %{customdata[2]:,d} training examples"
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
        "margin": MARGIN,
        "showlegend": False,
        "xaxis": axes | x,
        "yaxis": axes | y,
    }
    return {"data": data, "layout": base | layout}


def _title(words: str) -> dict[str, Any]:
    return {"text": words, "standoff": 6}


def _integer_axis(numbers: NDArray[np.int64], max_ticks: int = 12) -> dict[str, Any]:
    """An axis of whole numbers; if they are few, each has a tick."""
    few = len(numbers) <= max_ticks and int(np.ptp(numbers)) <= max_ticks
    return {"dtick": 1} if few else {"tickformat": ",d", "nticks": min(max_ticks, 8)}


# ---- lines


def accuracy(lines: Sequence[Line], curves: Sequence[Curve], together: Sequence[Curve]) -> Plot:
    """Accuracy over rounds, with a band of one standard deviation over seeds, and a name at each line's end.

    ``together`` decides the axes, which several plots share; so for the plots below.
    """
    data = [trace for c in curves for trace in _with_band(lines, c, plain(c.rounds), ROUND)]
    return _named(data, lines, curves, together)


def one_of_many(lines: Sequence[Line], curve: Curve, others: Sequence[Curve], together: Sequence[Curve]) -> Plot:
    """One line's accuracy over rounds; in grey, from the lowest to the highest of all lines."""
    everyone = envelope(others)
    rounds = plain(everyone.rounds)
    shade = {
        "type": "scatter",
        "meta": SHADE,
        "mode": "lines",
        "x": rounds + rounds[::-1],
        "y": plain(100 * everyone.low) + plain(100 * everyone.high[::-1]),
        "fill": "toself",
        "fillcolor": GREY + BAND,
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    data = [shade, *_with_band(lines, curve, plain(curve.rounds), ROUND)]
    x, y = _round_axis(together, 6), _accuracy_axis(together)
    return _plot(data, 190, x | {"title": None}, y | {"title": None}, hovermode="closest")


def cost(lines: Sequence[Line], curves: Sequence[Curve], of: str, together: Sequence[Curve]) -> Plot:
    """Accuracy over the cost of training so far: ``seconds`` or ``sent``."""
    scale, name, x = _cost_axis(together, of)
    data = []
    for c in curves:
        data += _with_band(lines, c, plain(getattr(c, of) / scale), f"%{{x:.3g}} {name}, round %{{customdata[0]}}")
    return _plot(data, 290, x, _accuracy_axis(together), hovermode="closest")


def last_cost(lines: Sequence[Line], curves: Sequence[Curve], of: str, together: Sequence[Curve]) -> Plot:
    """The last accuracy of each line over what it cost; those that no other beats are named."""
    scale, name, x = _cost_axis(together, of)
    spent, last = [float(getattr(c, of)[-1]) for c in curves], [float(c.mean[-1]) for c in curves]
    most = max(float(getattr(c, of)[-1]) for c in together)
    best = sorted(cheapest(spent, last), key=lambda k: spent[k])
    data = [
        {
            "type": "scatter",
            "legendgroup": str(c.line),
            "name": text(lines[c.line].name),
            "mode": "markers+text" if k in best else "markers",
            "x": plain([spent[k] / scale]),
            "y": plain([100 * last[k]]),
            "text": [text(lines[c.line].name, MAX_NAME)],
            "textposition": f"{('bottom', 'top')[k in best and best.index(k) % 2]} {_inwards(spent[k] / most)}",
            "textfont": {"size": 11},
            "cliponaxis": False,
            "marker": {"color": colour(c.line), "symbol": symbol(c.line), "size": 10, "opacity": 0.85},
            "hovertemplate": f"%{{x:.3g}} {name}<br>%{{y:.2f}} %",
        }
        for k, c in enumerate(curves)
    ]
    lasts = [c._replace(mean=c.mean[-1:], deviation=None) for c in together]
    return _plot(
        data, 330, x, _accuracy_axis(lasts) | {"title": _title(f"last {curves[0].measure}, %")}, hovermode="closest"
    )


def _inwards(place: float) -> str:
    """The side of a point, at this share of an axis, on which there is room for a name."""
    return "right" if place < 0.25 else "left" if place > 0.75 else "center"


def _cost_axis(curves: Sequence[Curve], of: str) -> tuple[float, str, dict[str, Any]]:
    """The unit, its name and the axis."""
    most = max(float(getattr(c, of)[-1]) for c in curves)
    scale, name = unit([most], SECONDS if of == "seconds" else BYTES)
    words = "training time" if of == "seconds" else "sent up and down"
    return scale, name, {"title": _title(f"{words}, {name}"), "range": plain([0, 1.04 * most / scale])}


def _accuracy_axis(curves: Sequence[Curve]) -> dict[str, Any]:
    low, high = (100 * value for value in span(curves))
    room = max(0.04 * (high - low), 0.5)
    return {"title": _title(f"{curves[0].measure}, %"), "range": plain([low - room, high + room])}


def _round_axis(curves: Sequence[Curve], max_ticks: int = 12) -> dict[str, Any]:
    first, last = min(int(c.rounds[0]) for c in curves), max(int(c.rounds[-1]) for c in curves)
    room = max(0.04 * (last - first), 0.2)
    return _rounds([c.rounds for c in curves], max_ticks) | {"range": plain([first - room, last + room])}


def _named(
    data: list[dict[str, Any]], lines: Sequence[Line], curves: Sequence[Curve], together: Sequence[Curve]
) -> Plot:
    """Lines with their names beside them, moved apart where they would cover each other."""
    height, x, y = 330, _round_axis(together), _accuracy_axis(together)
    if len(curves) == 1:
        return _plot(data, height, x, y, hovermode="closest")
    names = [text(lines[c.line].name, MAX_NAME) for c in curves]
    low, high = y["range"]
    heights = apart([100 * float(c.mean[-1]) for c in curves], NAME_HEIGHT / height * (high - low), low, high)
    data += [
        {
            "type": "scatter",
            "meta": NAME,
            "legendgroup": str(c.line),
            "mode": "text",
            "x": x["range"][-1:],
            "y": plain([at]),
            "text": [f'<span style="color:{colour(c.line)}">●</span> {name}'],
            "textposition": "middle right",
            "textfont": {"size": 12},
            "cliponaxis": False,
            "hoverinfo": "skip",
        }
        for c, name, at in zip(curves, names, heights, strict=True)
    ]
    room = 24 + 7 * max(len(lines[c.line].name[:MAX_NAME]) for c in curves)
    return _plot(data, height, x, y, hovermode="closest", margin=MARGIN | {"r": room})


def apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The same values, moved as little as needed to be at least ``gap`` from each other and within the limits.

    >>> apart([5.0, 5.0, 9.0], 2.0, 0.0, 10.0)
    [4.0, 6.0, 9.0]
    """
    gap = min(gap, (high - low) / max(len(values), 1))
    order = sorted(range(len(values)), key=lambda k: values[k])
    groups: list[tuple[float, int]] = []
    for k in order:  # neighbours that are too near share their middle
        middle, count = values[k], 1
        while groups and middle - groups[-1][0] < gap * (count + groups[-1][1]) / 2:
            other, others = groups.pop()
            middle, count = (middle * count + other * others) / (count + others), count + others
            middle = min(max(middle, low + gap * (count - 1) / 2), high - gap * (count - 1) / 2)
        groups.append((middle, count))
    placed = [middle + gap * (k - (count - 1) / 2) for middle, count in groups for k in range(count)]
    result = [0.0] * len(values)
    for k, value in zip(order, placed, strict=True):
        result[k] = value
    return result


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


def _rounds(each: Sequence[NDArray[np.int64]], max_ticks: int = 12) -> dict[str, Any]:
    return {"title": _title("round"), **_integer_axis(np.unique(np.concatenate(each)), max_ticks)}


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
    """A line, its band if it has one, and the marks of its post-training rounds."""
    line = _line(lines, curve.line, x, plain(100 * curve.mean))
    line["customdata"] = [[int(r)] for r in curve.rounds]
    line["hovertemplate"] = f"{hover}<br>%{{y:.2f}} %"
    traces = [line]
    if curve.deviation is not None:
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
        del band["customdata"], band["hovertemplate"]
        for value, deviation in zip(line["customdata"], curve.deviation, strict=True):
            value.append(float(f"{100 * deviation:.3g}"))
        line["hovertemplate"] = f"{hover}<br>%{{y:.2f}} ± %{{customdata[1]:.2f}} %"
        traces.insert(0, band)
    if curve.post.any():
        marked = {
            key: [v for v, post in zip(line[key], curve.post, strict=True) if post] for key in ("x", "y", "customdata")
        }
        ring = {"symbol": "diamond-open", "size": 11, "color": colour(curve.line), "line": {"width": 2}}
        hovered = line["hovertemplate"] + "<br>post-training"
        traces.append(line | marked | {"mode": "markers", "marker": ring, "hovertemplate": hovered})
    return traces


# ---- clients


def distribution(lines: Sequence[Line], clients: Sequence[Clients], lowest: float, name: str) -> Plot:
    """A box for each line, and a point for each client and seed; ``lowest`` value of all such plots."""
    data = [
        {
            "type": "box",
            "legendgroup": str(each.line),
            "name": text(lines[each.line].name),
            "orientation": "h",
            "x": plain(100 * each.accuracy),
            "y": [position] * len(each.accuracy),
            "customdata": _who(lines[each.line], each),
            "boxpoints": "all",
            "jitter": 0.6,
            "pointpos": 0,
            "marker": {"size": 4, "opacity": 0.55, "color": colour(each.line)},
            "line": {"width": 1.5, "color": colour(each.line)},
            "fillcolor": colour(each.line) + "22",
            "hoveron": "points",
            "hovertemplate": CLIENT + "<br>%{x:.2f} %",
        }
        for position, each in enumerate(clients)
    ]
    y = _names(lines, [each.line for each in clients])
    room = max(4 * (1 - lowest), 0.5)
    x = {"title": _title(f"{name}, %"), "range": plain([100 * lowest - room, 100 + room])}
    return _plot(data, 90 + (44 if len(clients) <= MAX_LINES_IN_PLOT else 30) * len(clients), x, y)


def _who(line: Line, clients: Clients) -> list[list[int]]:
    counts = {run.seed: run.counts for run in line.runs}
    pairs = zip(clients.clients.tolist(), clients.seeds.tolist(), strict=True)
    return [[client, seed, int(counts[seed][client])] for client, seed in pairs]


def _names(lines: Sequence[Line], shown: Sequence[int]) -> dict[str, Any]:
    """An axis of lines, the first at the top."""
    return {
        "tickvals": list(range(len(shown))),
        "ticktext": [text(lines[number].name, MAX_NAME) for number in shown],
        "range": [len(shown) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }


def worst(lines: Sequence[Line], worst_clients: Worst, seeds: bool) -> Plot:
    """The worst clients. With ``seeds`` a client's name has its seed."""
    who = zip(worst_clients.who, worst_clients.counts, strict=True)
    each = [[client, seed, count] for (seed, client), count in who]
    names = [f"{client}<br>({seed})<br>{count}" if seeds else f"{client}<br>{count}" for client, seed, count in each]
    words = "client, (seed), training examples" if seeds else "client, training examples"
    cells = {"customdata": [each] * len(worst_clients.lines), "hovertemplate": CLIENT + "<br>%{z:.2f} %<extra></extra>"}
    x = {"title": _title(words), "tickvals": list(range(len(names))), "ticktext": names}
    return _table(lines, worst_clients.lines, worst_clients.accuracy, cells, x)


def recall(lines: Sequence[Line], recalls: Recalls, classes: Sequence[str]) -> Plot:
    """The recall of each class, for each line."""
    names = [text(name) for name in classes]
    cells = {
        "customdata": [names] * len(recalls.lines),
        "hovertemplate": "class %{customdata}<br>%{z:.2f} %<extra></extra>",
    }
    step = math.ceil(len(classes) / MAX_MARKERS)
    shown = [text(name, 12) for name in classes[::step]]
    x = {"title": _title("class"), "tickvals": list(range(0, len(classes), step)), "ticktext": shown}
    fit = len(shown) * max(map(len, shown)) <= MAX_LETTERS
    return _table(lines, recalls.lines, recalls.values, cells, x | ({} if fit else TILTED))


def _table(
    lines: Sequence[Line], shown: Sequence[int], values: NDArray[np.float64], cells: dict[str, Any], x: dict[str, Any]
) -> Plot:
    """Accuracies from 0 to 1 as shaded cells, a row for each line, with their numbers if they are few."""
    cells |= {"type": "heatmap", "z": plain(100 * values), "coloraxis": SEQUENTIAL, "hoverongaps": False}
    few = values.shape[1] <= MAX_CLASSES_IN_TABLE
    if few:
        cells["text"] = [[f"{value:.0f}" if math.isfinite(value) else "" for value in row] for row in 100 * values]
        cells["texttemplate"] = "%{text}"
    cells |= {"xgap": 2, "ygap": 2} if few else {"ygap": 2}
    scale = {SEQUENTIAL: {"cmin": 0, "cmax": 100, "showscale": False}}
    x = {"tickangle": 0, "showgrid": False, "ticks": "", "zeroline": False} | x
    return _plot(
        [cells], 120 + (34 if len(shown) <= MAX_LINES_IN_PLOT else 24) * len(shown), x, _names(lines, shown), **scale
    )


def partition(run: Run) -> Plot:
    """Training examples of each class and client, shaded by their square root; above, each client's total.

    These alone where the classes are not known.
    """
    counts = run.labels[run.order].T
    names = run.order.tolist()
    clients = list(range(len(names)))
    x: dict[str, Any] = {"title": _title("client, most training examples first")}
    x |= {"showgrid": False, "zeroline": False, "tickangle": 0, **_ticks([str(name) for name in names], MAX_TICKS)}
    bars: dict[str, Any] = {
        "type": "bar",
        "x": clients,
        "y": run.counts[run.order].tolist(),
        "customdata": names,
        "marker": {"color": GREY},
        "hovertemplate": "client %{customdata}<br>%{y:,d} training examples<extra></extra>",
    }
    if not run.knows_classes:
        return _plot([bars], 260, x, {"rangemode": "tozero", "title": _title("training examples")}, bargap=0.25)
    cells = {
        "type": "heatmap",
        "x": clients,
        "z": plain(np.where(counts > 0, np.sqrt(counts), np.nan)),
        "customdata": [[[count, name] for count, name in zip(row, names, strict=True)] for row in counts.tolist()],
        "text": [[text(name)] * len(clients) for name in run.classes],
        "hovertemplate": "client %{customdata[1]}, class %{text}<br>%{customdata[0]:,d} examples<extra></extra>",
        "hoverongaps": False,
        "coloraxis": SEQUENTIAL,
        "xgap": 1 if len(clients) <= 60 else 0,
        "ygap": 1 if len(counts) <= 40 else 0,
    }
    step = max(1, len(counts) // 26)
    top = 0.2
    y = {
        "title": _title("class"),
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


def grid(run: Run, recorded: Grid, highest: float | None = None) -> Plot:
    """Client × round: cosines from −1 to 1, or shares from 0 to the ``highest``, in per cent."""
    shares = highest is not None
    values = recorded.values[run.order]
    who = [[client, count] for client, count in zip(run.order.tolist(), run.counts[run.order].tolist(), strict=True)]
    hover = "client %{customdata[0]}, %{customdata[1]:,d} training examples<br>round %{x}: "
    cells = {
        "type": "heatmap",
        "x": plain(recorded.rounds),
        "y": list(range(len(values))),
        "z": plain(100 * values if shares else values),
        "customdata": [[each] * len(recorded.rounds) for each in who],
        "hovertemplate": hover + ("%{z:.1f} %" if shares else "%{z:.3f}") + "<extra></extra>",
        "hoverongaps": False,
        "coloraxis": SEQUENTIAL if shares else DIVERGING,
        "xgap": 1 if len(recorded.rounds) <= 40 else 0,
        "ygap": 1 if len(values) <= 40 else 0,
    }
    flat = {"showgrid": False, "zeroline": False}
    bar = {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0, "nticks": 6}
    scale: dict[str, Any] = {DIVERGING: {"cmin": -1, "cmax": 1, "showscale": False}}
    if highest is not None:
        scale = {SEQUENTIAL: {"cmin": 0, "cmax": 100 * highest or 1.0, "colorbar": bar}}
    if recorded.rounds[-1] > run.rounds:  # the post-training stage, behind a line
        line = {"color": GREY, "width": 2, "dash": "dot"}
        end = {"x0": run.rounds + 0.5, "x1": run.rounds + 0.5, "yref": "paper", "y0": 0, "y1": 1}
        scale["shapes"] = [{"type": "line", **end, "line": line}]
    x = {"title": _title("round"), **flat, **_integer_axis(recorded.rounds)}
    ticks = _ticks([f"{client} ({count:,})" for client, count in who], MAX_TICKS)
    y = {"title": _title("client (training examples)"), **flat, **ticks, "autorange": "reversed"}
    return _plot([cells], 90 + min(420, max(150, 16 * len(values))), x, y, **scale)


def _ticks(names: Sequence[str], most: int) -> dict[str, Any]:
    """All names, or every second, third … so that there are at most so many."""
    step = math.ceil(len(names) / most)
    return {"tickvals": list(range(0, len(names), step)), "ticktext": list(names[::step])}


def scatter(run: Run, points: Points) -> Plot:
    """A colour and a symbol for each class; the names of few classes stand in their middles."""
    colours = class_colours(len(run.classes))
    data, names = [], []
    for label in np.unique(points.labels).tolist():
        own = points.positions[points.labels == label]
        marker = {"color": colours[label], "symbol": symbol(label), "size": 5, "opacity": 0.8}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": text(run.classes[label]),
                "x": plain(own[:, 0]),
                "y": plain(own[:, 1]),
                "marker": marker,
                "hovertemplate": "%{fullData.name}<extra></extra>",
            }
        )
        x, y = plain(own[middle(own)])
        names.append({"x": x, "y": y, "text": text(run.classes[label], 10), "showarrow": False, "yshift": 13})
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "ticks": ""}
    named = {"annotations": names if len(names) <= MAX_CLASSES_IN_TABLE else []}
    return _plot(data, 300, bare, bare | {"scaleanchor": "x"}, hovermode="closest", **named)


def middle(points: NDArray[np.float64]) -> int:
    """The point with the least sum of distances to the others: unlike the mean, it lies in a cluster."""
    return int(np.linalg.norm(points[:, None] - points, axis=2).sum(1).argmin())
