"""The plot of a partition works in every format and size, and nothing in it overlaps."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedrane.data.partition import Partition, Partitioning, partition
from fedrane.errors import DataError
from fedrane.report.partition_plot import _round, draw

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def picture(path: Path, clients: int, classes: int, title: str = "", names: list[str] | None = None) -> Path:
    y = np.arange(clients * 40) % classes
    made = partition(y, classes, clients, Partitioning(alpha=0.3), 0)
    draw(made, y, names or [f"class {label}" for label in range(classes)], path, title)
    return path


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_each_format(tmp_path: Path, suffix: str) -> None:
    content = picture(tmp_path / "new" / f"picture{suffix}", 8, 4, "α = 0.3").read_bytes()
    assert content.startswith(SIGNATURES[suffix])
    assert len(content) > 5000


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (2, 2), (40, 30), (41, 3), (60, 100), (500, 2), (500, 100)])
def test_no_label_overlaps_another(tmp_path: Path, clients: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    picture(tmp_path / "picture.png", clients, classes, "a title")
    figure = drawn[0]
    figure.draw_without_rendering()
    cells = figure.axes[0]
    columns = [text.get_window_extent() for text in cells.get_xticklabels() if text.get_text()]
    lines = [text.get_window_extent() for text in cells.get_yticklabels() if text.get_text()]
    assert len(columns) >= min(clients, 5)
    assert len(lines) == classes
    assert all(left.x1 < right.x0 for left, right in pairwise(columns))
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(lines))
    panels = [axes.get_tightbbox() for axes in figure.axes]
    assert all(panel is not None and figure.bbox.padded(1).containsx(panel.x0) for panel in panels)
    assert all(panel is not None and figure.bbox.padded(1).containsx(panel.x1) for panel in panels)


def test_svg_parses_and_shows_names_as_they_are(tmp_path: Path) -> None:
    names = ["$x^2", "<b> & c", "a name far too long to be shown whole"]
    path = picture(tmp_path / "picture.svg", 5, 3, "$title", names)
    root = ElementTree.fromstring(path.read_bytes())  # noqa: S314 - made by this very test
    assert root.tag.endswith("svg")


def test_a_client_with_one_class_and_a_class_without_examples(tmp_path: Path) -> None:
    draw(Partition((np.array([0]), np.array([1]))), np.array([0, 0]), ["a", "b"], tmp_path / "small.png")
    ones = Partition(tuple(np.array([row]) for row in range(70)))
    draw(ones, np.arange(70) % 2, ["a", "b", "c"], tmp_path / "shaded.png")
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_an_unknown_suffix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Known: \.png, \.svg, \.pdf"):
        picture(tmp_path / "picture.doc", 2, 2)


def test_pyplot_stays_out_of_it() -> None:
    check = "import sys, fedrane.report.partition_plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("examples", "shown"), [(0.1, 1), (1, 1), (4, 2), (9.9, 5), (10, 10), (499, 200), (73_000, 50_000)]
)
def test_the_scale_has_round_numbers(examples: float, shown: int) -> None:
    assert _round(examples) == shown
