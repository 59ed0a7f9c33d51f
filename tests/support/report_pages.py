"""A page with everything that a report can show, and with names that a page must not believe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import folders
from fedrane.report import page
from fedrane.report.runs import Line, gather
from fedrane.report.tsne import Points

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>$x_{1}$ %{y} &amp;"
)
"""Of a method; a class is called likewise."""
FORMULA = '=HYPERLINK("http://x"),1'
"""What a spreadsheet would run."""
CLASSES = ("zero", "<b>one</b>", "'two\" & $3$", "{{ four }}")


def runs(root: Path) -> list[Line]:
    """Four methods, one of them with one seed and one with a post-training round; the last is the hostile one."""
    for seed in (0, 1):
        folders.simple(root / "a" / str(seed), seed=seed, classes=CLASSES)
        folders.alone(root / "b" / str(seed), seed=seed, classes=CLASSES)
        folders.full(root / "c" / str(seed), seed=seed, classes=CLASSES, post=1)
    hostile = folders.full(root / "d" / "0", name=f"/x/own.py:{HOSTILE}", classes=CLASSES, lr=0.5)
    folders.session(root / "a" / "0")
    folders.session(hostile, command=f"fedrane run {HOSTILE}", engine=HOSTILE, start=HOSTILE)
    return gather([root])[0]


def many(root: Path, number: int = 15) -> str:
    """A page on more methods than one plot can hold; one has the name of a formula."""
    for k in range(number):
        make = folders.full if k % 3 else folders.simple
        make(root / "all" / f"{k:02d}" / "0", name=f"x.py:M{k:02d}", lr=0.1 + k / 100, classes=CLASSES)
    labels = {"14": FORMULA, "13": "-2+3"}
    (root / "all" / "comparison.json").write_text(json.dumps({"order": [], "labels": labels}))
    return page.html(gather([root])[0], [], {})


def points(number: int = 40) -> Points:
    draws = np.random.default_rng(0)
    return Points(4, draws.normal(size=(number, 2)), np.arange(number) % len(CLASSES))


def full(root: Path) -> str:
    lines = runs(root)
    embedded = {0: points(), 1: "no global model.", 2: points(), 3: points()}
    return page.html(lines, [f"a note on {HOSTILE}"], embedded)
