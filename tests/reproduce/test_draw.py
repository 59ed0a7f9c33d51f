"""Every figure is drawn from results alone, and holds what it should."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedrane.reproduce import draw, records, tables
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Selection, targets
from fedrane.runner import run
from problems import quick

METHODS = ("fedavg", "fedrane-wo-lra")
PERSONAL = "local"
"""Has no global model, so that only its personal accuracy is shown."""


def drawn(name: str, sweep: Sweep, folder: Path, methods: tuple[str, ...]) -> dict[str, Path]:
    (target,) = targets(name)
    alphas = tuple(dict.fromkeys(cell.condition.alpha for cell in sweep.cells))
    made = tables.result_tables(target, Selection(("digits",), alphas, methods, (0,)), sweep)
    paths = draw.figures(target, made, sweep, folder)
    return {path.suffix: path for path in paths}


def words(svg: Path) -> str:
    """All text in a picture."""
    return " ".join("".join(node.itertext()) for node in ET.parse(svg).iter() if node.tag.endswith("text"))  # noqa: S314 - our own file


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", ["FedAvg", "FedRANE w/o LRA", "client", "round", "cosine"]),
        ("tsne", ["FedAvg", "FedRANE w/o LRA", "silhouette"]),
        ("clients", ["FedAvg", "G-FL", "P-FL", "clients K"]),
    ],
)
def test_a_figure_shows_its_methods(
    sweep: Callable[..., Sweep], tmp_path: Path, name: str, expected: list[str]
) -> None:
    asked = (*METHODS, PERSONAL)
    done = sweep(name, methods=asked)
    if name == "clients":
        done.cells = [cell for cell in done.cells if cell.condition.value in (5, 10)]
    assert not drawn(name, done, tmp_path, asked), "nothing to draw yet"
    assert done.go()
    assert {done.status(cell) for cell in done.cells} == {"done"}
    files = drawn(name, done, tmp_path, asked)
    assert sorted(files) == [".pdf", ".png", ".svg"]
    text = words(files[".svg"])
    assert all(word in text for word in expected), text
    pixels = np.asarray(Image.open(files[".png"]).convert("L"))
    assert 0.01 < (pixels < 250).mean() < 0.9, "neither empty nor full"


def test_a_cell_whose_model_is_gone_is_run_again_for_its_features(sweep: Callable[..., Sweep]) -> None:
    table = sweep("table-gfl")
    assert table.go()
    wanted = sweep("tsne")
    assert wanted.go()
    before, after = (s.records[s.cells[0].key] for s in (table, wanted))
    assert after["kept"]["tsne"]["labels"]
    assert before["global"] == after["global"]


def test_pairs_show_what_is_gained(sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    names = targets("minority")[0].rows
    done = sweep("minority", methods=names)
    for number, cell in enumerate(done.cells):
        figures = {"accuracy": 0.5 + 0.01 * number, "minority_accuracy": 0.2 + 0.1 * number}
        both = {model: {"best": figures, "last": figures} for model in ("global", "personal")}
        done.records[cell.key] = {"status": "done", "kept": {}, **both}
    text = words(drawn("minority", done, tmp_path, names)[".svg"])
    assert "+10.0" in text, "each pair is one row apart"
    assert "α 0.5, bargaining" in text
    assert "with it" in text


def test_the_features_are_those_that_the_head_is_given() -> None:
    """The head on the features gives the model's predictions; features for an orthonormal head have norm one."""
    import torch

    for method in METHODS:
        result = run(quick(method=method, rounds=1))
        examples = np.arange(7)
        seen = torch.from_numpy(records.features(result, examples)).float()
        x, y = result.federation.test.take(examples)
        scores = result.algorithm.predict(result.task, result.server.model, x, torch.ones(len(y), dtype=torch.bool))
        net = result.task.evaluating(result.server.model, torch.ones(len(y), dtype=torch.bool))
        assert torch.allclose(net.head(seen), scores, atol=1e-5)
        if method != "fedavg":
            assert torch.allclose(seen.norm(dim=1), torch.ones(7), atol=1e-5)
