"""Robust aggregation: against NumPy and SciPy, and how far a minority can move it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedrane import tree
from fedrane.ops import byzantine
from fedrane.tree import Tensors

DOUBLE = torch.float64


def uploads(count: int, seed: int = 0, size: int = 12) -> tuple[Tensors, Tensors, Tensor]:
    """A server's parameters in two tensors, uploads around them, and the uploads as a matrix."""
    draws = torch.Generator().manual_seed(seed)
    flat = torch.randn(count, size, generator=draws, dtype=DOUBLE)
    rows = {"a": flat[:, : size // 2].reshape(count, 2, -1), "b": flat[:, size // 2 :]}
    base = {name: torch.randn(rows[name].shape[1:], generator=draws, dtype=DOUBLE) for name in rows}
    return base, rows, flat


def joined(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in ("a", "b")])


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_median_of_every_number(count: int) -> None:
    base, rows, flat = uploads(count)
    median = joined(byzantine.middle(base, rows, (count - 1) // 2))
    np.testing.assert_allclose(median.numpy(), np.median(flat.numpy(), axis=0), atol=1e-14)


def test_the_mean_without_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of columns."""
    base, rows, flat = uploads(9)
    expected = np.sort(flat.numpy(), axis=0)[2:7].mean(0)
    for size in (tree.BLOCK_SIZE, 18):
        monkeypatch.setattr(tree, "BLOCK_SIZE", size)
        np.testing.assert_allclose(joined(byzantine.middle(base, rows, 2)).numpy(), expected, atol=1e-14)


def test_equal_uploads_leave_the_server_as_it_is() -> None:
    base, _, _ = uploads(1)
    rows = {name: torch.stack([value] * 7) for name, value in base.items()}
    assert tree.equal(byzantine.middle(base, rows, 3), base)
    assert tree.equal(byzantine.middle(base, rows, 1), base)


@pytest.mark.parametrize(
    ("share", "counts"), [(0.2, {1: 0, 2: 0, 3: 1, 5: 1, 6: 2, 10: 2, 11: 3}), (0.45, {10: 4, 9: 4})]
)
def test_how_many_are_tolerated(share: float, counts: dict[int, int]) -> None:
    """The share, rounded up, and always fewer than half."""
    assert {count: byzantine.tolerated(share, count) for count in counts} == counts


def test_distances_of_all_pairs() -> None:
    base, rows, flat = uploads(6)
    torch.testing.assert_close(
        byzantine.distances(base, rows), torch.cdist(flat, flat).square(), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("keep", [1, 4])
def test_krum_by_a_double_loop(keep: int) -> None:
    hostile = 2
    for seed in range(10):
        base, rows, flat = uploads(8, seed)
        scores = []
        for k in range(8):
            away = sorted(float((flat[k] - flat[j]).square().sum()) for j in range(8) if j != k)
            scores.append(sum(away[: 8 - hostile - 2]))
        weights = byzantine.krum(byzantine.distances(base, rows), hostile, keep)
        expected = torch.zeros(8, dtype=DOUBLE)
        expected[np.argsort(scores)[:keep].tolist()] = 1 / keep
        torch.testing.assert_close(weights, expected)


def test_the_geometric_median_by_another_solver() -> None:
    base, rows, flat = uploads(7, seed=5)
    weights = torch.tensor([1.0, 2, 1, 3, 1, 1, 2], dtype=DOUBLE)
    c = byzantine.geometric_median(byzantine.distances(base, rows), weights, 1e-9, 2000)
    assert float(c.sum()) == pytest.approx(1)

    def total(v: np.ndarray) -> float:
        return float((weights.numpy() * np.linalg.norm(v - flat.numpy(), axis=1)).sum())

    best = minimize(total, flat.mean(0).numpy(), options={"gtol": 1e-10}).x
    np.testing.assert_allclose((c @ flat).numpy(), best, atol=1e-5)
    pull = flat - c @ flat
    assert float((weights / pull.norm(dim=1) @ pull).norm()) < 1e-8, "the unit pulls balance"


@pytest.mark.parametrize("far", [1e3, 1e9])
def test_a_minority_cannot_move_it_far(far: float) -> None:
    """However far its uploads are; the average goes with them."""
    base, rows, flat = uploads(9, seed=7)
    for name in rows:
        rows[name][[2, 6]] = far
    honest = [k for k in range(9) if k not in (2, 6)]
    centre, spread = flat[honest].mean(0), float((flat[honest] - flat[honest].mean(0)).norm(dim=1).max())
    squares = byzantine.distances(base, rows)
    stacked = torch.cat([rows["a"].flatten(1), rows["b"]], 1)
    points = {
        "median": joined(byzantine.middle(base, rows, 4)),
        "trimmed": joined(byzantine.middle(base, rows, 2)),
        "krum": byzantine.krum(squares, 2, 1) @ stacked,
        "multi-krum": byzantine.krum(squares, 2, 7) @ stacked,
        "rfa": byzantine.geometric_median(squares, torch.ones(9, dtype=DOUBLE), 1e-6, 200) @ stacked,
    }
    assert {name: float((point - centre).norm()) < 2 * spread for name, point in points.items()} == dict.fromkeys(
        points, True
    )
    assert float((stacked.mean(0) - centre).norm()) > 100 * spread
