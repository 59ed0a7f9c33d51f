"""Weights on a simplex, the nearest to a point and those of the shortest mix, each by its optimality conditions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrane.ops.simplex import Array, projection, shortest_mix
from problems import DOUBLE

TINY = 1e-12


def vectors(count: int, size: int, seed: int) -> Array:
    """Some with a common direction, some of very different lengths."""
    draws = np.random.default_rng(seed)
    rows = draws.standard_normal((count, size)) + draws.choice([0.0, 2.0]) * draws.standard_normal(size)
    return rows * 10 ** (draws.choice([0.0, 1.0]) * draws.standard_normal((count, 1)))


def box(count: int, radius: float, seed: int) -> tuple[Array, Array]:
    shares = np.random.default_rng(seed).dirichlet(np.full(count, 0.5))
    return np.maximum(shares - radius, 0), np.minimum(shares + radius, 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_projection_is_on_the_simplex_and_nearest(seed: int) -> None:
    """max(0, v − τ) with one τ for all is the optimality condition."""
    point = 2 * torch.randn(1 + seed % 7, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    found = projection(point)
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1, abs=TINY)
    used = found > 0
    shift = (point - found)[used]
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=0, atol=TINY)
    assert bool((point[~used] <= shift[0] + TINY).all())


def test_a_point_of_the_simplex_stays_and_a_shift_of_all_is_ignored() -> None:
    point = torch.tensor([0.2, 0.5, 0.3, 0.0], dtype=DOUBLE)
    torch.testing.assert_close(projection(point), point, rtol=0, atol=TINY)
    torch.testing.assert_close(projection(point + 7), point, rtol=0, atol=TINY)


@pytest.mark.parametrize("radius", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_shortest_mix_fulfils_its_optimality_conditions(seed: int, radius: float) -> None:
    """For one ν: (Mλ)_k = ν inside the box, ≥ ν at its lower side, ≤ ν at its upper one. Also where the vectors depend
    on each other, and where zero is among their mixes."""
    count, size = 1 + 3 * seed, (2, 8, 60)[seed % 3]
    rows = vectors(count, size, seed)
    low, high = box(count, radius, seed)
    weights, gap = shortest_mix(rows @ rows.T, low, high)
    scale = float(np.square(rows).sum(1).max())
    assert weights.sum() == pytest.approx(1, abs=TINY)
    assert weights.min() >= 0
    assert (weights - low).min() >= -TINY
    assert (high - weights).min() >= -TINY
    assert gap <= TINY * scale
    gradient = rows @ (rows.T @ weights)
    inside = (weights > low + 1e-9) & (weights < high - 1e-9)
    above, below = gradient[(weights > low + 1e-9)], gradient[(weights < high - 1e-9)]
    near = 1e-7 * scale
    assert np.ptp(gradient[inside]) <= near if inside.any() else True
    assert above.max() <= below.min() + near if len(above) and len(below) else True


def test_two_vectors_in_closed_form() -> None:
    """At a right angle the weights are as the inverse squares; one that points along a shorter one gets none."""
    free = np.zeros(2), np.ones(2)
    assert shortest_mix(np.diag([1.0, 9.0]), *free).weights == pytest.approx([0.9, 0.1], abs=TINY)
    assert shortest_mix(np.array([[1.0, 2.0], [2.0, 5.0]]), *free).weights == pytest.approx([1, 0], abs=TINY)
    bounded = np.array([0.2, 0.2]), np.array([0.7, 0.8])
    assert shortest_mix(np.diag([1.0, 9.0]), *bounded).weights == pytest.approx([0.7, 0.3], abs=TINY)


def test_a_certificate_bounds_what_is_lost() -> None:
    """No random point of the box is shorter by more than the gap, and the gap is that of the best vertex."""
    draws = np.random.default_rng(0)
    rows = draws.standard_normal((9, 20))
    gram = rows @ rows.T
    weights, gap = shortest_mix(gram, np.zeros(9), np.ones(9))
    gradient = gram @ weights
    assert gap == pytest.approx(gradient @ weights - gradient.min(), abs=1e-10)
    for _ in range(200):
        other = draws.dirichlet(np.full(9, 0.3))
        assert weights @ gram @ weights <= other @ gram @ other + gap + TINY


def test_where_zero_is_a_mix_it_is_found() -> None:
    rows = np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0], [5.0, 5.0]])
    weights, _ = shortest_mix(rows @ rows.T, np.zeros(4), np.ones(4))
    assert np.abs(weights @ rows).max() <= 1e-7


@pytest.mark.parametrize("count", [30, 200])
def test_many_vectors_are_exact_too(count: int) -> None:
    """Nearly orthogonal: all are used, and the box cuts off none or some."""
    rows = np.random.default_rng(1).standard_normal((count, 2000))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for radius in (0.1 / count, 0.1, 1.0):
        low, high = box(count, radius, 2)
        assert shortest_mix(rows @ rows.T, low, high).gap <= 1e-11
