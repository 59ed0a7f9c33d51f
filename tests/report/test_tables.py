"""Tables as text, and which entries are marked."""

from __future__ import annotations

import csv

from fedrane.report import tables
from fedrane.report.tables import BOLD, UNDERLINE, mark_best


def test_equals_share_the_mark() -> None:
    marks = mark_best({"a": 0.9, "b": 0.9, "c": 0.8, "d": 0.8, "e": None}, {"b", "c", "d"})
    assert marks == {"a": "bold", "b": "bold", "c": "underline", "d": "underline"}


def test_the_largest_is_the_best_below_zero_too() -> None:
    assert mark_best({"a": -0.1, "b": -0.2}) == {"a": "bold"}


def test_one_alone_is_not_the_best() -> None:
    assert mark_best({"a": 0.9, "b": None}) == {}


def test_each_format_marks_and_escapes() -> None:
    assert tables.mark_terminal("[x]", BOLD) == r"[bold]\[x][/]"
    assert tables.mark_terminal("[x]", "") == r"\[x]"
    assert tables.mark_html("a < b", BOLD) == "<b>a &lt; b</b>"
    assert tables.mark_html("a < b", "") == "a &lt; b"
    assert (tables.mark_markdown("1", BOLD), tables.mark_markdown("1", UNDERLINE)) == ("**1**", "<u>1</u>")
    assert (tables.mark_latex("1", BOLD), tables.mark_latex("1", UNDERLINE)) == (r"\textbf{1}", r"\underline{1}")


def test_latex_escapes_what_is_special() -> None:
    assert tables.tex("a_b & 5 % of {x} – α") == r"a\_b \& 5 \% of \{x\} -- $\alpha$"
    assert tables.tex("a<b>|c") == r"a\textless{}b\textgreater{}\textbar{}c"


def test_a_bar_does_not_end_a_cell() -> None:
    *_, line = tables.markdown_table(["method", "a"], [["x|y", "1"]]).splitlines()
    assert line == r"| x\|y | 1 |"


def test_csv_quotes() -> None:
    text = tables.csv_text(["method", "a"], [["x,y", None]])
    assert list(csv.reader(text.splitlines())) == [["method", "a"], ["x,y", ""]]


def test_no_text_in_csv_is_a_formula() -> None:
    names = ["=1+1", "@SUM(A1)", "+1", "-1+cmd|' /C calc'!A0", "\t=1", " =1", "a=1", "–"]
    text = tables.csv_text(["method", "difference", "a"], [[name, "-0.00500", -0.5] for name in names])
    rows = list(csv.reader(text.splitlines()))[1:]
    assert [row[0] for row in rows] == [f"'{name}" for name in names[:6]] + names[6:]
    assert {tuple(row[1:]) for row in rows} == {("-0.00500", "-0.5")}
