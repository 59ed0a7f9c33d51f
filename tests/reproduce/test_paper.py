"""The paper's numbers are those of its source, and our marks on them are the paper's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedrane.report.tables import mark_best
from fedrane.reproduce.targets import COMPARISON, Condition, in_paper, paper, paper_alphas, row, targets

SOURCE = Path(__file__).with_name("paper-tables.tex")
"""The two tables in the paper's source."""
DATASETS = {"EMNIST": "emnist-letters", "FMNIST": "fmnist", "Cifar10": "cifar10", "Cifar100": "cifar100"}
OURS = {
    r"\modelname": "fedrane",
    r"\modelname-w/o-\moduleA": "fedrane-wo-lra",
    r"\modelname-w/o-\moduleB": "fedrane-wo-gne",
}
MARKS = {r"\textbf": "bold", r"\underline": "underline"}


def table(measure: str) -> dict[tuple[str, Condition], tuple[float, str]]:
    """From the source: the figure and the mark of each row at each condition."""
    caption = {"global": "G-FL", "personal": "P-FL"}[measure]
    text = next(t for t in SOURCE.read_text().split(r"\begin{table*}") if f"Accuracy of {caption}" in t)
    names = [DATASETS[name] for name in re.findall(r"\\multicolumn\{3\}\{c\}\{(\w+)\}", text)]
    alphas = [float(alpha) for alpha in re.findall(r"Dir\((.+?)\)", text)]
    conditions = [
        Condition(name, alpha) for name, alpha in zip([n for n in names for _ in range(3)], alphas, strict=True)
    ]
    entries = {}
    for line in re.findall(r"^\s*(\S.*\d.*?)\\\\", text, re.MULTILINE):
        title, *figures = (part.strip() for part in line.split("&"))
        if title.startswith("Method") or len(figures) != len(conditions):
            continue
        name = OURS.get(title, title.lower().replace("-", ""))
        for condition, figure in zip(conditions, figures, strict=True):
            mark, number = re.fullmatch(r"(\\\w+)?\{?\s*(0\.\d+)\s*\}?", figure).groups()  # type: ignore[union-attr]
            entries[name, condition] = float(number), MARKS.get(mark, "")
    return entries


@pytest.mark.parametrize("measure", ["global", "personal"])
def test_the_figures_are_the_source_s(measure: str) -> None:
    source = table(measure)
    assert len(source) == 11 * 4 * 3
    for (name, condition), (figure, _) in source.items():
        assert in_paper(measure, name, condition) == figure, (name, condition)
    assert sum(len(rows) * len(paper_alphas()) for rows in paper()[measure].values()) == len(source), "and no others"


@pytest.mark.parametrize("measure", ["global", "personal"])
def test_our_marks_on_the_paper_s_figures_are_the_paper_s(measure: str) -> None:
    source = table(measure)
    for condition in {condition for _, condition in source}:
        means = {name: figure for (name, where), (figure, _) in source.items() if where == condition}
        rivals = {name for name in means if row(name).group == COMPARISON}
        marks = {name: mark for (name, where), (_, mark) in source.items() if where == condition and mark}
        assert mark_best(means, rivals) == marks, condition


@pytest.mark.parametrize(("target", "measure"), [("table-gfl", "global"), ("table-pfl", "personal")])
def test_a_table_has_the_paper_s_rows_and_columns(target: str, measure: str) -> None:
    (ours,) = targets(target)
    source = table(measure)
    assert list(ours.rows) == list(dict.fromkeys(name for name, _ in source)), "in its order"
    assert [Condition(d, a) for d in ours.datasets for a in ours.alphas] == list(dict.fromkeys(p for _, p in source))
    assert ours.seeds == 5
