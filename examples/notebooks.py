"""Convert the tutorials to notebooks with the output of their cells: python examples/notebooks.py

A tutorial is a Python file in which `# %% [markdown]` begins a cell of text, in comments, and `# %%` one of code. Its
cells run in one namespace, in an empty folder, as they would in Jupyter.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
TUTORIALS = sorted(FOLDER.glob("[0-9]*.py"))


class Cell(NamedTuple):
    kind: str
    """``markdown`` or ``code``."""
    source: str


def cells(tutorial: Path) -> list[Cell]:
    parts = re.split(r"^# %%( \[markdown\])?\n", tutorial.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for markdown, text in zip(parts[1::2], parts[2::2], strict=True):
        source = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if markdown else text
        found.append(Cell("markdown" if markdown else "code", source.strip("\n")))
    return found


def outputs(tutorial: list[Cell], name: str) -> list[str]:
    """What each cell of code prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in tutorial:
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                if cell.kind == "code":
                    exec(compile(cell.source, name, "exec"), names)  # noqa: S102 - our own text
            printed.append(stream.getvalue())
    return printed


def notebook(tutorial: list[Cell], printed: list[str]) -> dict[str, Any]:
    """The notebook in Jupyter's format 4.5."""
    made: list[dict[str, Any]] = []
    for number, (cell, text) in enumerate(zip(tutorial, printed, strict=True)):
        entry = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, "source": cell.source}
        if cell.kind == "code":
            output = {"output_type": "stream", "name": "stdout", "text": text}
            entry |= {"execution_count": None, "outputs": [output] if text else []}
        made.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    os.environ["COLUMNS"] = "100"
    for path in TUTORIALS:
        tutorial = cells(path)
        made = notebook(tutorial, outputs(tutorial, path.name))
        text = json.dumps(made, ensure_ascii=False, indent=1) + "\n"
        path.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        print(path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
