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
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config.effects import uses_alpha
from fedrane.config.settings import NAME
from fedrane.data.partition import Partitioning
from fedrane.engines.evaluation import ACCURACY
from fedrane.errors import printable
from fedrane.ops.regression import R2
from fedrane.report import measures, plots, provenance
from fedrane.report.comparison import ERRORS, Cell
from fedrane.report.measures import COSINE, MODEL_TYPES, SOLVED, Curve, Grid
from fedrane.report.plots import Plot
from fedrane.report.runs import Line, Run, differing, in_words
from fedrane.report.style import MAX_LINES_IN_PLOT, class_colours, colour, dash, duration, listed, size, symbol
from fedrane.report.tsne import Points
from fedrane.system import extras
from fedrane.training.wording import count

MAX_CLASSES_IN_LEGEND = 30
"""With more, a legend of classes is of no use."""
MAX_CLASSES = 200
"""With more, there is no table of recalls."""
STROKES = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
NAMES_OF_SECTIONS = {ACCURACY: "Accuracy", R2: "R²"}
MODELS = {GLOBAL: "Global model", "personal": "Personal models"}
RANKED_SETS = {GLOBAL: " on the official test set", "personal": ", mean over clients"}
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
    heading: str = ""
    """Of this panel and those that follow."""
    numbers: str = ""
    """What the plot shows, for readers who do not see it."""

    @property
    def spoken(self) -> str:
        return ", ".join(filter(None, (self.title, self.about, self.numbers)))


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
        _ranking(lines),
        _recalls(lines),
        _clients(lines),
        _cost(lines),
        _cosines(lines),
        _bargain(lines),
        _features(lines, embedded),
        _partition(lines),
        Section("configuration", "Configuration", _configuration_lead(lines)),
    ]
    sections = [part for part in parts if isinstance(part, Section)]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    return environment.from_string(_file("page.html")).render(
        title=title or _title(lines),
        subtitle=_subtitle(lines),
        version=__version__,
        notes=notes,
        facts=provenance.facts(lines),
        cards=list(_cards(lines)),
        lines=[
            {"name": line.name, "colour": colour(k), "strokes": STROKES[dash(k)], "symbol": symbol(k)}
            for k, line in enumerate(lines)
        ],
        sections=sections,
        absent=[part.why for part in parts if isinstance(part, Absent)],
        table=_results(lines),
        targets=list(_targets(lines, target)),
        measure=measures.NAMES[measures.headline(lines)],
        classes=_classes(lines),
        differing=_differing(lines),
        settings=list(_settings(lines)),
        plots=as_script({panel.key: panel.plot for section in sections for panel in section.panels}),
        data=as_script(provenance.data(lines, __version__)),
        css=_file("page.css"),
        js=_file("page.js"),
        plotly=get_plotlyjs(),
    )


def _shown(value: Any) -> Any:
    """What the page shows of a value; what is marked as safe is of another type than text."""
    return printable(value) if type(value) is str else value


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
    clients, rounds, epochs, steps = (_shared(lines, key) for key in ("clients", "rounds", "epochs", "steps"))
    length = count(steps, "step") if steps else count(epochs, "epoch") if epochs else ""
    parts = [
        f"{clients} clients" if clients else "",
        _spread(lines),
        f"{count(rounds, 'round')} of {length}" if rounds and length else "",
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
        cells = [(measures.last(line, f"{model}/{measures.headline(lines)}"), line) for line in lines]
        having = [(cell.mean, cell, line) for cell, line in cells if cell.mean is not None]
        if having:
            _, cell, line = max(having, key=lambda entry: entry[0])
            best = f"Best {MODELS[model].lower()}" if len(having) > 1 else MODELS[model]
            about = f"{line.name}, last round" + (", R²" if measures.headline(lines) == R2 else "")
            yield {"label": best, "value": f"{cell} %", "about": about}
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
    if measures.headline(lines) == R2:
        return (
            f"R² in %, the share of the variance that is explained, {over}; the best of a column is bold, – is a model "
            "that the method does not have. “Best” is chosen on the test examples themselves: quote “last”. “Worst "
            "tenth” is the mean over the 10 % of clients with the lowest R², each against the variance of all clients’ "
            "examples. RMSE and MAE are in the unit of the number that is predicted; the lower the better."
        )
    return (
        f"Accuracy in %, {over}; the best of a column is bold, – is a model that the method does not have. "
        "“Best” is chosen on the test examples themselves: quote “last”. “Worst tenth” is the mean over the 10 % of "
        "clients with the lowest accuracy, “minority” counts only examples of classes that are rare on their client, "
        f"“balanced” is the mean of the classes’ recalls.{_about_two_classes(lines)}"
    )


def _about_two_classes(lines: Sequence[Line]) -> str:
    if not any(_curves(lines, measure) for measure in measures.RANKED):
        return ""
    return (
        f" F1, AUPRC and “sensitivity” are of the class {_positive(lines)}; “sensitivity” is the highest at a "
        "specificity of at least 95 %, “macro F1” the mean of both classes’ F1."
    )


def _positive(lines: Sequence[Line]) -> str:
    runs = (run for line in lines for run in line.runs if len(run.classes) == 2)
    return listed([*dict.fromkeys(measures.positive_class(run) for run in runs)] or ["that is named second"])


def _results(lines: Sequence[Line]) -> dict[str, Any]:
    """Groups of columns, columns and rows; empty columns are left out."""
    columns: list[tuple[str, str, list[dict[str, Any]]]] = []
    headline = measures.headline(lines)
    for model in MODEL_TYPES:
        prefix = f"{model}/local_" if model == GLOBAL else f"{model}/"
        for name, key, pick in (
            ("last", f"{model}/{headline}", measures.last),
            ("best", f"{model}/{headline}", measures.best),
            ("worst tenth", f"{prefix}{headline}_worst10", measures.last),
            *((name.upper(), f"{model}/{name}", measures.last) for name in ERRORS),
            ("minority", f"{model}/minority_accuracy", measures.last),
            ("balanced", f"{model}/balanced_accuracy", measures.last),
            ("AUROC", f"{model}/auroc", measures.last),
            ("AUPRC", f"{model}/auprc", measures.last),
            ("sensitivity", f"{model}/sensitivity_at_specificity_95", measures.last),
            ("F1", f"{model}/f1", measures.last),
            ("macro F1", model, measures.macro_f1),
        ):
            cells = [pick(line, key) for line in lines]
            if any(cell.mean is not None for cell in cells):
                columns.append((MODELS[model], name, _compared(cells, is_error=key.endswith(ERRORS))))
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


def _compared(cells: Sequence[Cell], is_error: bool) -> list[dict[str, Any]]:
    """A column with its best entry marked."""
    means = [cell.mean for cell in cells if cell.mean is not None]
    best = min(means) if is_error else max(means)
    texts = (cell.error if is_error else str(cell) for cell in cells)
    return [
        _cell(cell.mean, text, len(means) > 1 and cell.mean == best, about)
        for cell, (text, _, about) in zip(cells, (t.replace("± ", "±").partition(" ") for t in texts), strict=True)
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
    panels: list[Panel] = []
    remarks: list[str] = []
    by_model = _curves(lines)
    if not by_model:
        return Absent("Accuracy over rounds: no run has been evaluated yet.")
    many = _are_many(by_model)
    panels += _over_rounds(lines, by_model, TEST_SETS)
    for model, curves in by_model.items():
        remarks += _without(lines, [c.line for c in curves], f"no {MODELS[model].lower()}")
    single = all(len(line.runs) == 1 for line in lines)
    lead = "One seed each, so there is no band." if single else "The band is one standard deviation over seeds."
    if many:
        lead += " Grey: from the lowest to the highest method. All plots have the same axes."
    trained = dict.fromkeys(lines[c.line].name for curves in by_model.values() for c in curves if c.post.any())
    if trained:
        lead += f" ◇ is the post-training stage: {listed(list(trained))}."
    layout, legend = ("multiples", "") if many else ("", "lines")
    return Section("accuracy", NAMES_OF_SECTIONS[measures.headline(lines)], lead, panels, layout, legend, remarks)


def _curves(lines: Sequence[Line], measure: str = "") -> dict[str, list[Curve]]:
    return {model: curves for model in MODEL_TYPES if (curves := measures.curves(lines, model, measure))}


def _are_many(by_model: Mapping[str, Sequence[Curve]]) -> bool:
    """Whether there are too many for one plot."""
    return any(len(curves) > MAX_LINES_IN_PLOT for curves in by_model.values())


def _over_rounds(
    lines: Sequence[Line], by_model: Mapping[str, Sequence[Curve]], measured_on: Mapping[str, str]
) -> Iterator[Panel]:
    """A plot for each type of model, or with many methods one for each method; all have the same axes."""
    together, alone = [curve for curves in by_model.values() for curve in curves], _are_many(by_model)
    for model, curves in by_model.items():
        key = f"{curves[0].measure.lower().replace('²', '2')}-{model}"
        if not alone:
            plot = plots.accuracy(lines, curves, together)
            yield Panel(key, MODELS[model], plot, measured_on[model], numbers=_ends(lines, curves))
            continue
        heading = f"{MODELS[model]}, {measured_on[model]}"
        for curve in curves:
            plot = plots.one_of_many(lines, curve, curves, together)
            about = f"last {100 * curve.mean[-1]:.2f} %"
            above = heading if curve is curves[0] else ""
            yield Panel(f"{key}-{curve.line}", lines[curve.line].name, plot, about, above)


def _ranking(lines: Sequence[Line]) -> Section | Absent | None:
    """With more than two classes nothing is missing."""
    panels: list[Panel] = []
    by_measure = {measure: by_model for measure in measures.RANKED if (by_model := _curves(lines, measure))}
    for measure, by_model in by_measure.items():
        measured_on = {model: f"{measure}{where}" for model, where in RANKED_SETS.items()}
        panels += _over_rounds(lines, by_model, measured_on)
    if not panels:
        two = any(len(run.classes) == 2 for line in lines for run in line.runs)
        return Absent("AUROC and AUPRC: no run recorded them.") if two else None
    many = any(_are_many(by_model) for by_model in by_measure.values())
    lead = (
        "AUROC is the probability that an example of the positive class has a higher score than one of the other; 50 % "
        "is chance. AUPRC is the mean precision over all thresholds; chance is the share of the positive class, "
        f"{_positive(lines)}. For personal models both are the mean over the clients that have test examples of both "
        "classes, weighted by their number of examples."
    )
    remarks = [
        f"{MODELS[PERSONAL]}: {both} of {everyone} clients have test examples of both classes."
        for both, everyone in measures.with_both_classes(lines, PERSONAL)
    ]
    layout, legend = ("multiples", "") if many else ("", "lines")
    return Section("ranking", "AUROC and AUPRC", lead, panels, layout, legend, remarks)


def _ends(lines: Sequence[Line], curves: Sequence[Curve]) -> str:
    return ", ".join(f"{lines[c.line].name} ends at {100 * c.mean[-1]:.2f} %" for c in curves)


def _recalls(lines: Sequence[Line]) -> Section | Absent | None:
    panels = []
    for model in MODEL_TYPES:
        recalls = measures.recalls(lines, model)
        if recalls and len(lines[0].first.classes) <= MAX_CLASSES:
            plot = plots.recall(lines, recalls, lines[0].first.classes)
            panels.append(Panel(f"recall-{model}", MODELS[model], plot, TEST_SETS[model]))
    if not panels:
        if measures.headline(lines) == R2:
            return None
        why = f"no run recorded it, the runs have different classes, or more than {MAX_CLASSES}"
        return Absent(f"Recall of each class: {why}.")
    lead = "The recall of each class after the last round, in %: the share of its examples that are recognised."
    return Section("classes", "Classes", lead, panels, "wide" if len(lines[0].first.classes) > 12 else "")


def _clients(lines: Sequence[Line]) -> Section | Absent:
    remarks = []
    comparable = measures.share_partitions(lines)
    seeds = any(len(line.runs) > 1 for line in lines)
    by_model = {model: clients for model in MODEL_TYPES if (clients := measures.clients(lines, model))}
    lowest = min((float(each.accuracy.min()) for clients in by_model.values() for each in clients), default=0.0)
    boxes, cells, name = [], [], measures.NAMES[measures.headline(lines)]
    for model, clients in by_model.items():
        plot = plots.distribution(lines, clients, lowest, name)
        boxes.append(Panel(f"clients-{model}", MODELS[model], plot, "every client"))
        worst = measures.worst(lines, model)
        if comparable and worst.who:
            about = f"the {len(worst.who)} clients with the lowest {name} on average over the methods, {name} in %"
            if len(worst.who) == worst.of:
                about = f"every client, {name} in %"
            cells.append(Panel(f"worst-{model}", MODELS[model], plots.worst(lines, worst, seeds), about))
    panels = boxes + cells
    if not panels:
        return Absent("Clients: no run has been evaluated yet.")
    if not comparable:
        remarks.append("The worst clients side by side are left out: the runs do not share their partitions.")
    lead = (
        f"{name[0].upper()}{name[1:]} on each client’s own test examples after the last round. A point is a client; a "
        "box is half of them. "
        "Here and below, clients are in the order of their training examples, the most first."
    )
    return Section("clients", "Clients", lead, panels, "", "" if len(lines) > MAX_LINES_IN_PLOT else "lines", remarks)


def _cost(lines: Sequence[Line]) -> Section | Absent:
    panels: list[Panel] = []
    remarks: list[str] = []
    by_model = _curves(lines)
    together = [curve for curves in by_model.values() for curve in curves]
    many = any(len(curves) > MAX_LINES_IN_PLOT for curves in by_model.values())
    for model, curves in by_model.items():
        for of, about in (("seconds", "over training time"), ("sent", "over bytes sent")):
            shown = [c for c in curves if getattr(c, of)[-1] > 0]
            if not shown:
                continue
            if many:
                plot = plots.last_cost(lines, shown, of, together)
                about = f"last {curves[0].measure} {about}; those with names are beaten in both by no other"
            else:
                plot = plots.cost(lines, shown, of, together)
            key = f"{'time' if of == 'seconds' else of}-{model}"
            panels.append(Panel(key, MODELS[model], plot, about, numbers=_ends(lines, shown)))
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
        Panel(f"cosine-{grid.line}", lines[grid.line].name, plots.grid(_run(lines, grid), grid), _about_cosines(grid))
        for grid in grids
    ]
    lead = (
        "The cosine between the server’s step and each client’s: blue agrees with the client, red opposes it, "
        f"and a gap is a client that did not take part. {_seed(lines)}"
    )
    remarks = _without(lines, [grid.line for grid in grids], "the server makes no step")
    return Section("cosine", "Directions", lead, panels, "small", "cosine", remarks)


def _run(lines: Sequence[Line], grid: Grid) -> Run:
    return lines[grid.line].first


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
    highest = max(float(np.nanmax(grid.values)) for grid in shares)
    panels = [
        Panel(
            f"weights-{grid.line}",
            lines[grid.line].name,
            plots.grid(_run(lines, grid), grid, highest),
            "each client’s share",
        )
        for grid in shares
    ]
    residuals = measures.residuals(lines)
    remarks = []
    largest = max((float(each.values.max()) for each in residuals), default=math.nan)
    if largest <= SOLVED:
        remarks.append(f"The equilibrium is solved to rounding error: max |p ∘ Mp − w| is at most {largest:.0e}.")
    elif residuals:
        panels.append(Panel("residual", "Residual", plots.residual(lines, residuals), "how far from the equilibrium"))
    lead = f"The weights of the clients’ steps in the server’s step, as shares of their sum. {_seed(lines)}"
    return Section("bargain", "Bargaining", lead, panels, remarks=remarks)


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
        f"Colour and symbol are the class. Distances between clusters mean nothing. {_seed(lines)}"
    )
    legend = "classes" if _classes(lines) else ""
    return Section("features", "Features", lead, panels, "small", legend, reasons)


def _classes(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The legend of classes, if all lines have the same and they are few enough."""
    names = lines[0].first.classes
    if len(names) > MAX_CLASSES_IN_LEGEND or any(line.first.classes != names for line in lines):
        return []
    inks = class_colours(len(names))
    return [{"name": name, "colour": inks[k], "symbol": symbol(k)} for k, name in enumerate(names)]


def _partition(lines: Sequence[Line]) -> Section:
    distinct = measures.partitions(lines)
    panels = []
    for number, (who, run) in enumerate(distinct):
        about = f"seed {run.seed}, {count(len(run.labels), 'client')}, {int(run.labels.sum()):,} training examples"
        title = listed([lines[k].name for k in who]) if len(distinct) > 1 else "Training examples"
        if run.classes and not run.knows_classes:
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
    return [{"key": key, "cells": [in_words(line.settings.get(key, "–")) for line in lines]} for key in keys]


def _settings(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """The fields that only one method has, for each method; then what all have in common."""
    different = set(differing([line.settings for line in lines]))
    common = set.intersection(*(set(line.settings) for line in lines)) - different
    for line in lines:
        specific = [(key, in_words(v)) for key, v in line.settings.items() if key not in common | different]
        if specific:
            yield {"title": f"Fields of {line.name}", "pairs": specific, "open": False}
    same = [(key, in_words(value)) for key, value in lines[0].settings.items() if key in common]
    title = "The same in all runs" if len(lines) > 1 else "Settings"
    yield {"title": title, "pairs": same, "open": len(lines) == 1}
