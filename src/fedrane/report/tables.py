"""Tables as text: Markdown, HTML, CSV and LaTeX, and which entry of a column is the best."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich import markup

_FORMULA = re.compile(r"\s*[=+@\t\r]|\s*-(?![\d.]+(e[-+]?\d+)?$)")
"""How a formula begins; a negative number is none."""
BOLD, UNDERLINE = "bold", "underline"
_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "–": "--", "±": r"$\pm$", "α": r"$\alpha$", "λ": r"$\lambda$", "τ": r"$\tau$", "₁": "$_1$",
}  # fmt: skip


def mark_best(means: Mapping[str, float | None], rivals: Iterable[str] = ()) -> dict[str, str]:
    """Bold for the best, underlined for the best of the rivals that are not bold.

    >>> mark_best({"fedavg": 0.8, "moon": 0.9, "fedrane": 0.95}, {"fedavg", "moon"})
    {'fedrane': 'bold', 'moon': 'underline'}
    """
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2:
        return {}
    best = max(known.values(), default=math.nan)
    marks = {name: BOLD for name, mean in known.items() if mean == best}
    left = {name: known[name] for name in rivals if name in known and name not in marks}
    second = max(left.values(), default=math.nan)
    return marks | {name: UNDERLINE for name, mean in left.items() if mean == second}


def mark_terminal(text: str, mark: str) -> str:
    """For rich."""
    return f"[{mark}]{markup.escape(text)}[/]" if mark else markup.escape(text)


def mark_markdown(text: str, mark: str) -> str:
    return {BOLD: f"**{text}**", UNDERLINE: f"<u>{text}</u>"}.get(mark, text)


def mark_html(text: str, mark: str) -> str:
    return {BOLD: f"<b>{escape(text)}</b>", UNDERLINE: f"<u>{escape(text)}</u>"}.get(mark, escape(text))


def mark_latex(text: str, mark: str) -> str:
    """The text is LaTeX already."""
    command = {BOLD: "\\textbf", UNDERLINE: "\\underline"}.get(mark, "")
    return f"{command}{{{text}}}" if command else text


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def csv_text(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A text that a spreadsheet would take for a formula gets an apostrophe: names come from files of others too."""
    stream = io.StringIO()
    rows = [[f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell for cell in row] for row in lines]
    csv.writer(stream, lineterminator="\n").writerows([heads, *rows])
    return stream.getvalue()


def tex(text: str) -> str:
    """Plain text as LaTeX: its special characters, and the papers' Greek letters."""
    return "".join(_TEX.get(character, character) for character in text).replace(r"$\lambda$\_CD", r"$\lambda_{CD}$")
