"""The plots of a target, from the records of its cells. What has not been run is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedrane.report import paper_figures
from fedrane.reproduce.records import COSINES
from fedrane.reproduce.results import DONE, Record
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.tables import BEST, MEASURES, Entry, ResultTable
from fedrane.reproduce.targets import Condition, Target

SHORT_TITLES = {"global": "G-FL", "personal": "P-FL"}


def figures(target: Target, made: Sequence[ResultTable], sweep: Sweep, folder: Path) -> list[Path]:
    """Draw them; returns the files. There are none for a table, or before anything was run."""
    draw = {"heat-map": _heat_maps, "scatter": _scatters, "curve": _curves, "pairs": _pairs}.get(target.kind)
    return [] if draw is None else draw(target, made, sweep, folder)


def _kept(sweep: Sweep, what: str) -> Iterator[tuple[Condition, dict[str, Record]]]:
    """For each condition, the first seed's records that have this extra data, by the title of their row."""
    for condition in dict.fromkeys(cell.condition for cell in sweep.cells):
        records: dict[str, Record] = {}
        for cell in sweep.cells:
            if cell.condition == condition and sweep.status(cell) == DONE and cell.row.title not in records:
                record = sweep.records[cell.key]
                records |= {cell.row.title: record} if _drawable(record["kept"].get(what)) else {}
        if records:
            yield condition, records


def _drawable(kept: Any) -> bool:
    """A method without a step of the server has no cosines."""
    return kept is not None and bool(kept.get("rounds", True))


def _at(target: Target, condition: Condition, extent: str) -> str:
    return f"{target.title}\n{condition.dataset}, α {condition.alpha:g}, {extent}"


def _stem(target: Target, condition: Condition, folder: Path) -> Path:
    return folder / f"{target.name}-{Path(condition.dataset).stem}-{condition.alpha:g}"


def _heat_maps(target: Target, made: Sequence[ResultTable], sweep: Sweep, folder: Path) -> list[Path]:
    paths: list[Path] = []
    for condition, records in _kept(sweep, COSINES):
        maps = {
            title: paper_figures.Heat(kept["rounds"], np.array(kept["cosines"], dtype=np.float64))
            for title, record in records.items()
            if (kept := record["kept"][COSINES])
        }
        paths += paper_figures.heat_maps(maps, _at(target, condition, made[0].extent), _stem(target, condition, folder))
    return paths


def _scatters(target: Target, made: Sequence[ResultTable], sweep: Sweep, folder: Path) -> list[Path]:
    paths: list[Path] = []
    for condition, records in _kept(sweep, "tsne"):
        plots, classes = {}, []
        for title, record in records.items():
            kept = record["kept"]["tsne"]
            classes = kept["classes"]
            parts = [f"{100 * record['global']['last']['accuracy']:.1f} %"]
            parts += [] if kept["separation"] is None else [f"silhouette {kept['separation']:.2f}"]
            note = ", ".join(parts)
            plots[title] = paper_figures.Points(kept["x"], kept["y"], kept["labels"], note)
        title = _at(target, condition, made[0].extent)
        paths += paper_figures.scatters(plots, classes, title, _stem(target, condition, folder))
    return paths


def _curves(target: Target, made: Sequence[ResultTable], sweep: Sweep, folder: Path) -> list[Path]:
    panels: dict[str, dict[str, paper_figures.Line]] = {}
    groups = {(condition.dataset, condition.alpha) for condition in made[0].conditions}
    for table in (table for table in made if table.which == BEST):
        wanted = target.panels.get(table.measure, target.rows)
        lines: dict[str, paper_figures.Line] = {}
        for dataset, alpha in dict.fromkeys((condition.dataset, condition.alpha) for condition in table.conditions):
            for row in (row for row in table.rows if row.name in wanted or row.name not in target.rows):
                conditions = [
                    condition
                    for condition in table.conditions
                    if (condition.dataset, condition.alpha) == (dataset, alpha)
                ]
                points = [(p.value, e) for p in conditions if (e := table.entry(row, p)).mean is not None]
                name = row.title if len(groups) == 1 else f"{row.title}, {dataset}" + _alpha(table, alpha)
                if points:
                    lines[name] = _line(points)
        panels[f"{SHORT_TITLES.get(table.measure, MEASURES[table.measure].title)}, best round"] = lines
    if not any(panels.values()):
        return []
    where = ", ".join(f"{dataset} α {alpha:g}" for dataset, alpha in sorted(groups))
    title = f"{target.title}\n{where}, {made[0].extent}"
    return paper_figures.curves(panels, target.label, title, folder / target.name)


def _alpha(table: ResultTable, alpha: float) -> str:
    return f" α {alpha:g}" if len({condition.alpha for condition in table.conditions}) > 1 else ""


def _line(points: Sequence[tuple[float | None, Entry]]) -> paper_figures.Line:
    return paper_figures.Line(
        [value or 0.0 for value, _ in points],
        [entry.mean or 0.0 for _, entry in points],
        [entry.deviation or 0.0 for _, entry in points],
    )


def _pairs(target: Target, made: Sequence[ResultTable], sweep: Sweep, folder: Path) -> list[Path]:
    panels: dict[str, list[paper_figures.Pair]] = {}
    drawn = target.drawn or target.measures
    for table in (table for table in made if table.which == BEST and table.measure in drawn):
        for dataset, conditions in table.groups():
            drawn_pairs = []
            for condition in conditions:
                for name, rows in target.pairs.items():
                    without, having = (table.entries.get((row, condition)) for row in rows)
                    if without and having and without.mean is not None and having.mean is not None:
                        sides = [(e.mean or 0.0, e.deviation or 0.0) for e in (without, having)]
                        drawn_pairs.append(paper_figures.Pair(f"α {condition.alpha:g}, {name}", *sides))
            if drawn_pairs:
                panels[f"{dataset}\n{table.how.title}"] = drawn_pairs
    if not panels:
        return []
    title = f"{target.title}\nbest round, {made[0].extent}"
    return paper_figures.pairs(panels, target.words, title, folder / target.name)
