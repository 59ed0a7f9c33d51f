"""The figures for papers: one of each type, as PNG, SVG and PDF, with any names."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import folders
from fedrane.report import figures, measures
from fedrane.report.runs import gather
from fedrane.report.tsne import Points
from report_pages import points, runs


def test_every_figure_in_each_format(tmp_path: Path) -> None:
    """PNGs that are wide enough to print and not blank; SVGs that are well formed; PDFs with TrueType fonts."""
    written = figures.draw(runs(tmp_path / "runs"), {0: points(), 1: "none", 2: points()}, tmp_path / "figures")
    names = {"accuracy", "classes", "cost", "clients", "worst-clients", "cosine", "bargain", "features", "partition"}
    assert {path.name for path in written} == {f"{n}{suffix}" for n in names for suffix in (".png", ".svg", ".pdf")}
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")  # noqa: S314 - our own file
        elif path.suffix == ".pdf":
            page = path.read_bytes()
            assert page.startswith(b"%PDF-")
            assert b"/FontFile2" in page, "TrueType"
            assert b"/Type3" not in page, "which journals refuse"
        else:
            with Image.open(path) as picture:
                assert picture.width >= 700
                assert np.asarray(picture.convert("L")).std() > 5, path.name


def test_two_classes_have_figures_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SUFFIXES", (".png",))
    records = [folders.record(r, **folders.two_classes(0.7 + 0.02 * r)) for r in (1, 2)]
    lines, _ = gather([folders.write(tmp_path / "run", records, classes=("no", "yes"))])
    written = {path.stem for path in figures.draw(lines, {}, tmp_path / "figures")}
    assert {"auroc", "auprc"} <= written
    (axis,) = figures._accuracy(lines, figures._curves(lines, "AUROC")).axes
    assert axis.get_ylabel() == "AUROC, %"
    assert axis.lines[0].get_ydata() == pytest.approx([72, 74])


def test_panels_of_one_kind_share_their_axes(tmp_path: Path) -> None:
    """With few and with many methods, post-training rounds included."""
    few, many = runs(tmp_path / "few"), tmp_path / "many"
    for number in range(8):
        folders.full(many / str(number), name=f"method-{number}", post=number % 2)
    for lines in (few, gather([many])[0]):
        by_model = [(model, measures.curves(lines, model)) for model in measures.MODEL_TYPES]
        axes = figures._accuracy(lines, by_model).axes
        assert len({(axis.get_xlim(), axis.get_ylim()) for axis in axes if axis.has_data()}) == 1
        assert axes[0].get_xlim()[1] > 4, "the post-training round is inside"
        cost = figures._cost(lines, by_model).axes
        for same in (cost[::2], cost[1::2]):
            assert len({(axis.get_xlim(), axis.get_ylim()) for axis in same}) == 1
            reach = max(float(line.get_xdata()[-1]) for axis in same for line in axis.lines if len(line.get_xdata()))
            assert 0 == same[0].get_xlim()[0] < reach <= same[0].get_xlim()[1]


def test_few_numbers_make_few_figures(tmp_path: Path) -> None:
    """One run that sends nothing and has no global model."""
    lines, _ = gather([folders.alone(tmp_path / "run")])
    written = figures.draw(lines, {0: "no global model."}, tmp_path / "figures")
    assert {path.stem for path in written} == {"accuracy", "cost", "clients", "worst-clients", "partition"}


def test_the_same_runs_make_the_same_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time of day."""
    monkeypatch.setattr(figures, "SUFFIXES", (".svg", ".pdf"))
    lines, _ = gather([folders.simple(tmp_path / "run")])
    one, two = (figures.draw(lines, {}, tmp_path / name) for name in ("one", "two"))
    for path, other in zip(one, two, strict=True):
        assert path.read_bytes() == other.read_bytes(), path.name
        assert b"Date" not in path.read_bytes(), path.name


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
