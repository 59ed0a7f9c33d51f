"""The report as one self-contained HTML file, light and dark, for screens, phones and print."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from fedrane._version import __version__
from fedrane.algorithm import GLOBAL
from fedrane.config.effects import uses_alpha
from fedrane.config.settings import NAME
from fedrane.data.partition import Partitioning
from fedrane.report import measures, plots
from fedrane.report.comparison import Cell
from fedrane.report.measures import COSINE, MODEL_TYPES, Grid
from fedrane.report.plots import Plot
from fedrane.report.runs import Line, differing
from fedrane.report.style import class_colours, colour, count, dash, duration, listed, size
from fedrane.report.tsne import Points
from fedrane.system import extras

MAX_CLASSES_IN_LEGEND = 30
"""With more, a legend of classes is of no use."""
STROKES = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
MODELS = {GLOBAL: "Global model", "personal": "Personal models"}
TEST_SETS = {GLOBAL: "on the official test set", "personal": "each on its client’s own test examples"}
Embedded = Mapping[int, Points | str]
"""For each line, its t-SNE points, or why there are none."""


@dataclass(frozen=True)
class Panel:
    """A plot with its caption."""

    key: str
    title: str
    plot: Plot
    about: str = ""

    @property
    def spoken(self) -> str:
        return ", ".join(filter(None, (self.title, self.about)))


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    lead: str
    panels: list[Panel] = field(default_factory=list)
    layout: str = ""
    legend: str = ""
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Absent:
    """A section that is left out, and why."""

    why: str


def require() -> None:
    """Check that the optional dependencies are installed."""
    extras.require("report", "the page", "plotly.offline", "jinja2")


def html(
    lines: Sequence[Line], notes: Sequence[str], embedded: Embedded, title: str = "", target: float | None = None
) -> str:
    require()
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    parts = [
        Section("results", "Results", _results_lead(lines)),
        _accuracy(lines),
        _clients(lines),
        _cost(lines),
        _cosines(lines),
        _bargain(lines),
        _features(lines, embedded),
        _partition(lines),
        Section("configuration", "Configuration", _configuration_lead(lines)),
    ]
    sections = [part for part in parts if isinstance(part, Section)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_file("page.html")).render(
        title=title or _title(lines),
        subtitle=_subtitle(lines),
        version=__version__,
        notes=notes,
        cards=list(_cards(lines)),
        lines=[{"name": line.name, "colour": colour(k), "strokes": STROKES[dash(k)]} for k, line in enumerate(lines)],
        sections=sections,
        absent=[part.why for part in parts if isinstance(part, Absent)],
        table=_results(lines),
        targets=list(_targets(lines, target)),
        classes=_classes(lines),
        differing=_differing(lines),
        settings=list(_settings(lines)),
        plots=as_script({panel.key: panel.plot for section in sections for panel in section.panels}),
        css=_file("page.css"),
        js=_file("page.js"),
        plotly=get_plotlyjs(),
    )


def as_script(values: Any) -> str:
    """JSON that is safe inside a script element: nothing in it ends the script or starts a tag."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files("fedrane.report").joinpath(name).read_text(encoding="utf-8")


# ---- the head


def _shared(lines: Sequence[Line], key: str) -> Any:
    """A setting that all lines have in common."""
    values = [line.settings.get(key) for line in lines]
    return values[0] if all(value == values[0] for value in values) else None


def _title(lines: Sequence[Line]) -> str:
    dataset = _shared(lines, "dataset")
    if len(lines) == 1:
        return f"{lines[0].name} on {dataset}"
    return f"{len(lines)} methods on {dataset}" if dataset else f"{len(lines)} experiments compared"


def _subtitle(lines: Sequence[Line]) -> str:
    clients, rounds, epochs = (_shared(lines, key) for key in ("clients", "rounds", "epochs"))
    parts = [
        f"{clients} clients" if clients else "",
        _spread(lines),
        f"{count(rounds, 'round')} of {count(epochs, 'epoch')}" if rounds and epochs else "",
        f"model {_shared(lines, 'model')}" if _shared(lines, "model") else "",
    ]
    return " · ".join(filter(None, parts))


def _spread(lines: Sequence[Line]) -> str:
    """How the examples are spread over the clients, if that is the same for all lines."""
    kind, alpha, file = (_shared(lines, f"partition.{key}") for key in ("kind", "alpha", "file"))
    if file:
        return "a saved partition"
    if not kind or not uses_alpha(Partitioning(kind=kind)):
        return kind or ""
    return f"{kind}, α {alpha:g}" if alpha else kind


def _cards(lines: Sequence[Line]) -> Iterator[dict[str, str]]:
    for model in MODEL_TYPES:
        cells = [(measures.last(line, f"{model}/accuracy"), line) for line in lines]
        having = [(cell.mean, cell, line) for cell, line in cells if cell.mean is not None]
        if having:
            _, cell, line = max(having, key=lambda entry: entry[0])
            best = f"Best {MODELS[model].lower()}" if len(having) > 1 else MODELS[model]
            yield {"label": best, "value": f"{cell} %", "about": f"{line.name}, last round"}
    runs = sum(len(line.runs) for line in lines)
    seeds = sorted({len(line.runs) for line in lines})
    about = count(seeds[-1], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    methods = "experiment" if len({line.settings[NAME] for line in lines}) < len(lines) else "method"
    yield {"label": "Runs", "value": str(runs), "about": f"{count(len(lines), methods)}, {about} each"}
    spent = sum(sum(r.get("seconds") or 0 for r in run.history) for line in lines for run in line.runs)
    yield {"label": "Training time", "value": duration(spent), "about": "of all runs, with warm-up, without evaluation"}


# ---- the table of results


def _results_lead(lines: Sequence[Line]) -> str:
    several = any(len(line.runs) > 1 for line in lines)
    over = "mean ± standard deviation over seeds" if several else "one seed"
    return (
        f"Accuracy in %, {over}; the best of a column is bold, – is a model that the method does not have. "
        "“Best” is chosen on the test examples themselves: quote “last”. “Worst tenth” is the mean over the 10 % of "
        "clients with the lowest accuracy, “minority” counts only examples of classes that are rare on their client."
    )


def _results(lines: Sequence[Line]) -> dict[str, Any]:
    """Groups of columns, columns and rows; empty columns are left out."""
    columns: list[tuple[str, str, list[dict[str, Any]]]] = []
    for model in MODEL_TYPES:
        prefix = f"{model}/local_" if model == GLOBAL else f"{model}/"
        for name, key, pick in (
            ("last", f"{model}/accuracy", measures.last),
            ("best", f"{model}/accuracy", measures.best),
            ("worst tenth", f"{prefix}accuracy_worst10", measures.last),
            ("minority", f"{model}/minority_accuracy", measures.last),
        ):
            cells = [pick(line, key) for line in lines]
            if any(cell.mean is not None for cell in cells):
                columns.append((MODELS[model], name, _accuracies(cells)))
    seconds = [measures.mean_seconds(line) for line in lines]
    sent = [measures.mean_total(line, "bytes_up", "bytes_down") for line in lines]
    speeds = [measures.speed(line) for line in lines]
    columns += [
        ("A run", "time", [_cell(s, duration(s)) for s in seconds]),
        ("A run", "sent", [_cell(b, size(b)) for b in sent]),
        ("A run", "examples /s", [_cell(s, f"{s:,.0f}") for s in speeds]),
        ("A run", "seeds", [_cell(len(line.runs), str(len(line.runs))) for line in lines]),
    ]
    groups = dict.fromkeys(group for group, _, _ in columns)
    return {
        "groups": [{"name": name, "span": sum(group == name for group, _, _ in columns)} for name in groups],
        "columns": [name for _, name, _ in columns],
        "rows": [
            {"name": line.name, "line": k, "cells": [cells[k] for _, _, cells in columns]}
            for k, line in enumerate(lines)
        ],
    }


def _accuracies(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    top = max(cell.mean for cell in cells if cell.mean is not None)
    rival = sum(cell.mean is not None for cell in cells) > 1
    return [
        _cell(cell.mean, text, rival and cell.mean == top, about)
        for cell, (text, _, about) in ((cell, str(cell).replace("± ", "±").partition(" ")) for cell in cells)
    ]


def _cell(value: float | None, text: str, best: bool = False, about: str = "") -> dict[str, Any]:
    """The value to sort by, the text, and the small text after it. Cells without a value are sorted last."""
    missing = value is None or math.isnan(value)
    shown = "–" if missing else text
    return {"value": "" if missing else repr(value), "text": shown, "about": about, "best": best}


# ---- sections of plots


def _without(lines: Sequence[Line], having: Sequence[int], what: str) -> list[str]:
    without = [line.name for number, line in enumerate(lines) if number not in having]
    return [f"{listed(without)}: {what}."] if without else []


def _accuracy(lines: Sequence[Line]) -> Section | Absent:
    panels, remarks = [], []
    for model in MODEL_TYPES:
        curves = measures.curves(lines, model)
        if curves:
            panels.append(Panel(f"accuracy-{model}", MODELS[model], plots.accuracy(lines, curves), TEST_SETS[model]))
            remarks += _without(lines, [c.line for c in curves], f"no {MODELS[model].lower()}")
    if not panels:
        return Absent("Accuracy over rounds: no run has been evaluated yet.")
    single = all(len(line.runs) == 1 for line in lines)
    band = "One seed each, so there is no band." if single else "The band is one standard deviation over seeds."
    return Section("accuracy", "Accuracy", band, panels, legend="lines", remarks=remarks)


def _clients(lines: Sequence[Line]) -> Section | Absent:
    panels, remarks = [], []
    comparable = measures.share_partitions(lines)
    train_counts = {
        (run.seed, client): int(count)
        for line in lines
        for run in line.runs
        for client, count in enumerate(run.labels.sum(1))
    }
    seeds = any(len(line.runs) > 1 for line in lines)
    boxes, cells = [], []
    for model in MODEL_TYPES:
        clients = measures.clients(lines, model)
        if not clients:
            continue
        boxes.append(Panel(f"clients-{model}", MODELS[model], plots.distribution(lines, clients), "every client"))
        worst = measures.worst(lines, model)
        if comparable and worst.who:
            plot = plots.worst(lines, worst, seeds, train_counts)
            about = "the clients with the lowest accuracy on average over the methods, accuracy in %"
            cells.append(Panel(f"worst-{model}", MODELS[model], plot, about))
    panels = boxes + cells
    if not panels:
        return Absent("Clients: no run has been evaluated yet.")
    if not comparable:
        remarks.append("The worst clients side by side are left out: the runs do not share their partitions.")
    lead = (
        "Accuracy on each client’s own test examples after the last round. A point is a client; a box is half of them."
    )
    return Section("clients", "Clients", lead, panels, legend="lines", remarks=remarks)


def _cost(lines: Sequence[Line]) -> Section | Absent:
    panels, remarks = [], []
    for model in MODEL_TYPES:
        curves = measures.curves(lines, model)
        if not curves:
            continue
        name = MODELS[model]
        panels.append(Panel(f"time-{model}", name, plots.cost(lines, curves, "seconds"), "over training time"))
        sending = [c for c in curves if c.sent[-1] > 0]
        if sending:
            panels.append(Panel(f"sent-{model}", name, plots.cost(lines, sending, "sent"), "over bytes sent"))
        silent = [lines[c.line].name for c in curves if c.sent[-1] == 0]
        remark = f"{listed(silent)}: nothing is sent." if silent else ""
        remarks += [remark] if remark and remark not in remarks else []
    if not panels:
        return Absent("Time and bytes to an accuracy: no run has been evaluated yet.")
    lead = (
        "Mean over seeds. Time is that of training, on the machine the runs were made on; evaluation and warm-up are "
        "not counted; warm-up is the extra time of a process’s first round (imports, compilation)."
    )
    return Section("cost", "Cost", lead, panels, legend="lines", remarks=remarks)


def _targets(lines: Sequence[Line], wanted: float | None) -> Iterator[dict[str, Any]]:
    """For the global and the personal models: the target accuracies, with the cost of each line to reach them."""
    began = False
    for model in MODEL_TYPES:
        if not measures.curves(lines, model):
            continue
        options, first = measures.targets(lines, model)
        if wanted is not None:
            options, first = sorted({*options, wanted}, reverse=True), wanted
        for target in options:
            costs = measures.reached(lines, model, target)
            yield {
                "name": f"{100 * target:g} %, {MODELS[model].lower()}",
                "first": not began and target == first,
                "rows": [_spent(lines[cost.line], cost) for cost in costs],
            }
        began = True


def _spent(line: Line, cost: measures.Reached) -> dict[str, Any]:
    cells = [
        _cell(cost.rounds, f"{cost.rounds:.3g}"),
        _cell(cost.seconds, duration(cost.seconds) if cost.runs else ""),
        _cell(cost.up, size(cost.up) if cost.runs else ""),
        _cell(cost.down, size(cost.down) if cost.runs else ""),
        _cell(cost.runs / len(line.runs), f"{cost.runs} of {len(line.runs)}"),
    ]
    return {"name": line.name, "line": cost.line, "cells": cells}


def _cosines(lines: Sequence[Line]) -> Section | Absent:
    grids = measures.grids(lines, COSINE)
    if not grids:
        return Absent("Cosines: no run records them, because no server makes a step.")
    panels = [
        Panel(f"cosine-{grid.line}", lines[grid.line].name, plots.grid(grid, percent=False), _about_cosines(grid))
        for grid in grids
    ]
    lead = (
        "The cosine between the server’s step and each client’s: blue agrees with the client, red opposes it, "
        f"and a gap is a client that did not take part. {_seed(lines)}"
    )
    remarks = _without(lines, [grid.line for grid in grids], "the server makes no step")
    return Section("cosine", "Directions", lead, panels, "small", "cosine", remarks)


def _about_cosines(grid: Grid) -> str:
    values = grid.values[np.isfinite(grid.values)]
    return f"mean {values.mean():.2f}, lowest {values.min():.2f}".replace("-", "−")


def _seed(lines: Sequence[Line]) -> str:
    seeds = {line.first.seed for line in lines}
    several = any(len(line.runs) > 1 for line in lines)
    if not several and len(seeds) == 1:
        return ""
    return f"Seed {seeds.pop()}." if len(seeds) == 1 else "Each line’s first seed."


def _bargain(lines: Sequence[Line]) -> Section | Absent:
    shares = measures.shares(lines)
    if not shares:
        return Absent("Bargaining weights: no run bargains (FedRANE does).")
    panels = [
        Panel(f"weights-{grid.line}", lines[grid.line].name, plots.grid(grid, percent=True), "each client’s share")
        for grid in shares
    ]
    residuals = measures.residuals(lines)
    if residuals:
        panels.append(Panel("residual", "Residual", plots.residual(lines, residuals), "how far from the equilibrium"))
    lead = (
        "The weights of the clients’ steps in the server’s step, as shares of their sum, and the residual of the "
        f"equilibrium that gave them. {_seed(lines)}"
    )
    return Section("bargain", "Bargaining", lead, panels)


def _features(lines: Sequence[Line], embedded: Embedded) -> Section | Absent:
    panels = [
        Panel(f"tsne-{number}", lines[number].name, plots.scatter(lines[number].first, points), f"round {points.round}")
        for number, points in embedded.items()
        if isinstance(points, Points)
    ]
    whys = dict.fromkeys(why for why in embedded.values() if isinstance(why, str))
    reasons = [f"{listed([lines[k].name for k, other in embedded.items() if other == why])}: {why}" for why in whys]
    if not panels:
        return Absent(f"t-SNE of features: {' '.join(reasons) or 'it was not requested.'}")
    examples = max(len(points.labels) for points in embedded.values() if isinstance(points, Points))
    lead = (
        f"t‑SNE of the inputs of the global model’s head, on the same {examples:,} examples of the official test set. "
        f"A colour is a class. Distances between clusters mean nothing. {_seed(lines)}"
    )
    legend = "classes" if _classes(lines) else ""
    return Section("features", "Features", lead, panels, "small", legend, reasons)


def _classes(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The legend of classes, if all lines have the same and they are few enough."""
    names = lines[0].first.classes
    if len(names) > MAX_CLASSES_IN_LEGEND or any(line.first.classes != names for line in lines):
        return []
    return [{"name": name, "colour": ink} for name, ink in zip(names, class_colours(len(names)), strict=True)]


def _partition(lines: Sequence[Line]) -> Section:
    distinct = measures.partitions(lines)
    panels = []
    for number, (who, run) in enumerate(distinct):
        about = f"seed {run.seed}, {count(len(run.labels), 'client')}, {int(run.labels.sum()):,} training examples"
        title = listed([lines[k].name for k in who]) if len(distinct) > 1 else "Training examples"
        if not run.knows_classes:
            about += "; which classes they have does not leave the clients"
        panels.append(Panel(f"partition-{number}", title, plots.partition(run), about))
    of_class = " of each class" if any(run.knows_classes for _, run in distinct) else ""
    lead = f"The number of training examples{of_class} of each client; its own test examples are not counted."
    return Section("partition", "Partition", lead, panels, "wide" if len(distinct) == 1 else "")


# ---- the configuration


def _configuration_lead(lines: Sequence[Line]) -> str:
    seeds = sorted({run.seed for line in lines for run in line.runs})
    named = f"Seed {seeds[0]}." if len(seeds) == 1 else f"Seeds {listed([str(seed) for seed in seeds])}."
    return f"{'What differs between the runs first. ' if len(lines) > 1 else ''}{named}"


def _differing(lines: Sequence[Line]) -> list[dict[str, Any]]:
    keys = differing([line.settings for line in lines])
    return [{"key": key, "cells": [_value(line.settings.get(key, "–")) for line in lines]} for key in keys]


def _settings(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """The fields that only one method has, for each method; then what all have in common."""
    different = set(differing([line.settings for line in lines]))
    common = set.intersection(*(set(line.settings) for line in lines)) - different
    for line in lines:
        specific = [(key, _value(v)) for key, v in line.settings.items() if key not in common | different]
        if specific:
            yield {"title": f"Fields of {line.name}", "pairs": specific, "open": False}
    same = [(key, _value(value)) for key, value in lines[0].settings.items() if key in common]
    title = "The same in all runs" if len(lines) > 1 else "Settings"
    yield {"title": title, "pairs": same, "open": len(lines) == 1}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if value != "" else "–"
