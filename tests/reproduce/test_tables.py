"""Tables: their content, and that each format is well formed."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedrane.reproduce import tables
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Condition, Selection, cells, targets

USER_METHODS = Path(__file__).with_name("user_methods.py")
GFL = targets("table-gfl")[0]
SELECTION = Selection(
    ("fmnist", "cifar10"), (0.1, 0.5), ("all", f"{USER_METHODS}:Plain"), (0, 1), (f"data_root={Path(__file__).parent}",)
)


@pytest.fixture
def filled(tmp_path: Path) -> Sweep:
    """Figures made up: each seed of a row is the paper's figure and a little more; some are not there."""
    sweep = Sweep(cells(GFL, SELECTION), store_of(tmp_path), tmp_path / "cells")
    for cell in sweep.cells:
        value = 0.5 if cell.row.group == "user" else tables.in_paper("global", cell.row.name, cell.condition) or 0.0
        if cell.condition == Condition("cifar10", 0.5) or cell.experiment is None:
            continue
        if cell.row.name == "fedprox":
            sweep.records[cell.key] = {
                "status": "failed",
                "word": "diverged",
                "reason": "it left 100 % of _all_ & more",
            }
            continue
        if cell.row.name == "scaffold" and cell.seed == 1:
            continue
        figures = {"accuracy": value + 0.01 * (cell.seed + 1)}
        record: dict[str, Any] = {"status": "done", "kept": {}, "global": {"best": figures, "last": figures}}
        sweep.records[cell.key] = record
    return sweep


def store_of(folder: Path) -> Any:
    from fedrane.reproduce.results import ResultStore

    return ResultStore(folder / "results")


def at(made: tables.ResultTable, row: str, condition: Condition = Condition("fmnist", 0.1)) -> str:  # noqa: B008 - it is frozen
    return made.ours(made.entries[row, condition])


def test_an_entry_holds_mean_spread_paper_and_difference(filled: Sweep) -> None:
    made = tables.result_tables(GFL, SELECTION, filled)[0]
    entry = made.entries["fedavg", Condition("fmnist", 0.1)]
    assert entry.mean == pytest.approx(0.7902 + 0.015)
    assert made.ours(entry) == "80.52 ± 0.71"
    assert made.theirs(entry) == ("79.02", "+1.50")


def test_what_is_lacking_is_seen(filled: Sweep) -> None:
    made = {(s.measure, s.which): s for s in tables.result_tables(GFL, SELECTION, filled)}
    best = made["global", "best"]
    assert at(best, "fedprox") == "diverged"
    assert at(best, "scaffold") == "80.81 (1 of 2 seeds)"
    assert at(best, "fedavg", Condition("cifar10", 0.5)) == "", "nothing was run"
    assert at(made["personal", "best"], "fedavg") == "–", "no such model"
    assert any("it left 100 %" in note for note in best.notes)
    assert set(made) == {(m, w) for m in ("global", "personal") for w in ("best", "last")}


def test_what_all_lack_is_reported_once(filled: Sweep) -> None:
    """Where every condition has one seed of two, the caption has it and no entry does."""
    for cell in filled.cells:
        if cell.seed == 1:
            filled.records.pop(cell.key, None)
    made = tables.result_tables(GFL, SELECTION, filled)[0]
    assert "1 of 2 seeds" in made.caption
    assert at(made, "scaffold") == "80.81"
    assert at(made, "fedavg") == "80.02"


def test_the_best_is_bold_and_the_best_comparison_method_underlined(filled: Sweep) -> None:
    made = tables.result_tables(GFL, SELECTION, filled)[0]
    condition = Condition("fmnist", 0.1)
    means = {row.name: made.entry(row, condition).mean or 0 for row in made.rows}
    bold = [name for (name, where), mark in made.marks.items() if where == condition and mark == "bold"]
    lined = [name for (name, where), mark in made.marks.items() if where == condition and mark == "underline"]
    assert bold == [max(means, key=lambda name: means[name])]
    rivals = [row.name for row in made.rows if row.group == "comparison" and row.name not in bold]
    assert lined == [max(rivals, key=lambda name: means[name])]


def test_where_less_is_better_the_least_is_bold() -> None:
    assert not tables.MEASURES["cosine-spread"].highest


def test_csv_has_every_figure_once(filled: Sweep) -> None:
    made = tables.result_tables(GFL, SELECTION, filled)
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(made))))
    assert len(lines) == 4 * 4 * 12, "measures and rounds × conditions × rows"
    keys = {(line["measure"], line["round"], line["dataset"], line["alpha"], line["method"]) for line in lines}
    assert len(keys) == len(lines)
    for line in lines:
        if line["mean"] and line["paper"]:
            assert float(line["difference"]) == pytest.approx(float(line["mean"]) - float(line["paper"]), abs=2e-5)


def test_markdown_tables_are_whole(filled: Sweep) -> None:
    text = tables.markdown(tables.result_tables(GFL, SELECTION, filled))
    parts = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(parts) == 4 * 2, "one a measure, round and dataset"
    for table in parts:
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1
        assert len(table.splitlines()) == 2 + 12
    assert "**" in text
    assert "<u>" in text


def test_latex_tables_are_whole(filled: Sweep) -> None:
    text = tables.latex(tables.result_tables(GFL, SELECTION, filled))
    for kind in ("table*", "tabular"):
        assert text.count(f"\\begin{{{kind}}}") == text.count(f"\\end{{{kind}}}") == 4
    columns = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    for spec, body in zip(columns, re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL), strict=True):
        for line in (line for line in body.splitlines() if line.endswith("\\\\")):
            spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + spans == len(spec), line
    assert text.count("{") == text.count("}")
    assert "\\textbf{" in text
    assert "\\underline{" in text


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("pdflatex") or os.environ.get("CI")), reason="there is no LaTeX here")
def test_latex_compiles(filled: Sweep, tmp_path: Path) -> None:
    head = "\\documentclass{article}\\usepackage{booktabs}\\usepackage{graphicx}\\begin{document}\n"
    text = head + tables.latex(tables.result_tables(GFL, SELECTION, filled)) + "\\end{document}\n"
    (tmp_path / "table.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "table.pdf").stat().st_size > 10_000


def test_a_stand_in_has_no_column_of_the_paper(sweep: Callable[..., Sweep]) -> None:
    done = sweep(methods=("fedavg", "fedprox"))
    assert done.go()
    made = tables.result_tables(GFL, Selection(("digits",), (0.5,), ("fedavg", "fedprox"), (0,)), done)[0]
    assert not made.has_paper(made.conditions)
    (table,) = tables.terminal(made)
    assert [column.header for column in table.columns] == ["method", "α 0.5"]


def test_a_caption_names_rounds_and_seeds_and_marks_only_where_there_is_something_to_choose(filled: Sweep) -> None:
    caption = tables.result_tables(GFL, SELECTION, filled)[0].caption
    assert "mean ± standard deviation, 100 rounds, 2 seeds" in caption
    assert "bold" in caption
    alone = Selection(("fmnist",), (0.1,), ("fedrane",), (0,), (*SELECTION.words, "rounds=1"))
    sweep = Sweep(cells(GFL, alone), filled.store, filled.runs)
    figures = {"accuracy": 0.5}
    record = {"status": "done", "kept": {}, "global": {"best": figures, "last": figures}}
    sweep.records = {cell.key: record for cell in sweep.cells}
    made = tables.result_tables(GFL, alone, sweep)[0]
    assert made.caption.startswith("accuracy in %, 1 round, 1 seed, beside")
    assert "bold" not in made.caption
    assert not made.marks
