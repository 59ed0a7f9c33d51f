"""Features of a global model: the inputs of its head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedrane
from fedrane.errors import DataError, FedraneError
from fedrane.report.runs import read
from fedrane.report.tsne import embed, features, points
from fedrane.training.run_folder import Folder
from fedrane.training.saved import read_models
from problems import quick

DIGITS = fedrane.data.load("digits")
EXAMPLES = np.arange(0, 350, 7)


@pytest.mark.parametrize("method", ["fedavg", "fedrane"])
def test_the_head_predicts_from_them(method: str, tmp_path: Path) -> None:
    """The head on the features gives the model's predictions; FedRANE's features are on the unit sphere."""
    fedrane.run(quick(method=method, rounds=1), tmp_path / "run")
    models = fedrane.load(tmp_path / "run")
    inputs = torch.from_numpy(features(models, models.model, DIGITS, EXAMPLES)).float()
    params = models.algorithm.global_model(models.task, models.server).params
    head = {name.removeprefix("head."): value for name, value in params.items() if name.startswith("head.")}
    scores = torch.func.functional_call(models.task.parts["head"], head, inputs)
    assert torch.allclose(scores, models.model(torch.from_numpy(DIGITS.x_test[EXAMPLES])), atol=1e-5)
    if method == "fedrane":
        assert torch.allclose(inputs.norm(dim=1), torch.ones(len(EXAMPLES)), atol=1e-5)


def test_the_server_alone_is_the_same_server(tmp_path: Path) -> None:
    """Read without its clients, a checkpoint gives the same global model."""
    fedrane.run(quick(method="fedrane", rounds=1), tmp_path / "run")
    whole, part = fedrane.load(tmp_path / "run"), read_models(Folder(tmp_path / "run"), clients=False)
    assert fedrane.tree.equal(whole.server, part.server)
    assert whole.client_states
    assert not part.client_states


def test_rows_in_the_plane(tmp_path: Path) -> None:
    """The requested number, the same for every method, each with its class; separable classes are apart in the plot."""
    fedrane.run(quick(rounds=2, epochs=5, batch=16), tmp_path / "one")
    fedrane.run(quick(rounds=1, method="fedprox"), tmp_path / "other")
    one, other = (points(read(Folder(tmp_path / name)), 150) for name in ("one", "other"))
    assert one.labels.tolist() == other.labels.tolist()
    assert one.positions.shape == (150, 2)
    assert (one.round, other.round) == (2, 1)
    away = np.linalg.norm(one.positions[:, None] - one.positions[None], axis=2) + 1e9 * np.eye(150)
    neighbours = one.labels[away.argmin(1)]
    assert (neighbours == one.labels).mean() > 0.6, "by chance it would be a tenth"


def test_where_there_is_no_global_model(tmp_path: Path) -> None:
    fedrane.run(quick(method="local", rounds=1), tmp_path / "run")
    with pytest.raises(FedraneError, match="no global model"):
        points(read(Folder(tmp_path / "run")))


def test_where_the_dataset_is_not_here(tmp_path: Path) -> None:
    """A dataset that was handed over, or one that has changed since."""
    fedrane.run(quick(rounds=1), tmp_path / "given", dataset=DIGITS)
    with pytest.raises(FedraneError, match="handed over from Python"):
        points(read(Folder(tmp_path / "given")))
    path = tmp_path / "mine.npz"
    np.savez(path, x=DIGITS.x, y=DIGITS.y)
    fedrane.run(quick(rounds=1, dataset=str(path)), tmp_path / "mine")
    np.savez(path, x=DIGITS.x[:, :, :4], y=DIGITS.y)
    with pytest.raises(FedraneError, match="not the dataset"):
        points(read(Folder(tmp_path / "mine")))


def test_what_cannot_be_placed_is_reported_and_does_not_crash() -> None:
    """The library's t-SNE ends the process if all points are the same."""
    rng = np.random.default_rng(0)
    for values in (np.zeros((200, 16)), np.full((200, 16), 3.7), rng.normal(size=(3, 16))):
        with pytest.raises(DataError):
            embed(values)
    for values in (
        rng.normal(size=(50, 1)),
        rng.normal(size=(4, 16)),
        1e-9 * rng.normal(size=(50, 16)),
        1e30 * rng.normal(size=(50, 2)),
    ):
        placed = embed(values)
        assert placed.shape == (len(values), 2)
        assert np.isfinite(placed).all()
