"""The figures for papers: one of each type, as PNG and as SVG, with any names."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import folders
from fedrane.report import figures
from fedrane.report.runs import gather
from fedrane.report.tsne import Points
from report_pages import points, runs


def test_every_figure_both_ways(tmp_path: Path) -> None:
    """PNGs that are wide enough to print and not blank; SVGs that are well formed."""
    written = figures.draw(runs(tmp_path / "runs"), {0: points(), 1: "none", 2: points()}, tmp_path / "figures")
    names = {"accuracy", "cost", "clients", "worst-clients", "cosine", "bargain", "features", "partition"}
    assert {path.stem for path in written} == names
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")  # noqa: S314 - our own file
        else:
            with Image.open(path) as picture:
                assert picture.width >= 700
                assert np.asarray(picture.convert("L")).std() > 5, path.name


def test_few_numbers_make_few_figures(tmp_path: Path) -> None:
    """One run that sends nothing and has no global model."""
    lines, _ = gather([folders.alone(tmp_path / "run")])
    written = figures.draw(lines, {0: "no global model."}, tmp_path / "figures")
    assert {path.stem for path in written} == {"accuracy", "cost", "clients", "worst-clients", "partition"}


def test_the_same_runs_make_the_same_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SUFFIXES", (".svg",))
    lines, _ = gather([folders.simple(tmp_path / "run")])
    one, two = (figures.draw(lines, {}, tmp_path / name) for name in ("one", "two"))
    for path, other in zip(one, two, strict=True):
        assert path.read_bytes() == other.read_bytes(), path.name


def test_many_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More methods than colours, more clients than names on an axis, and more classes than a legend holds."""
    monkeypatch.setattr(figures, "SUFFIXES", (".png",))
    classes = tuple(f"class {k}" for k in range(40))
    for number in range(13):
        run = folders.full if number < 2 else folders.simple
        run(tmp_path / "runs" / f"{number:02d}", name=f"method-{number}", classes=classes)
    lines, _ = gather([tmp_path / "runs"])
    draws = np.random.default_rng(0)
    scattered = Points(1, draws.normal(size=(80, 2)), np.arange(80) % 40)
    written = figures.draw(lines, {0: scattered}, tmp_path / "figures")
    assert {path.stem for path in written} >= {"accuracy", "cosine", "features"}
