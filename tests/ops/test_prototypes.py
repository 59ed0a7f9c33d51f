"""Prototypes: their mean over those who have one, and the nearest by distances."""

from __future__ import annotations

import math

import torch

from fedrane.ops.prototypes import Nearest, mean_by_class, weighted
from problems import DOUBLE

POINTS = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], dtype=DOUBLE)


def nearest(known: list[float]) -> Nearest:
    module = Nearest(4, 2).double()
    module.points, module.known = POINTS, torch.tensor(known, dtype=DOUBLE)
    return module


def test_the_mean_by_hand() -> None:
    """A weight of zero takes no part, whatever stands there; a class that nobody has is not present."""
    nan = math.nan
    prototypes = torch.tensor([[[1.0, 2.0], [nan, nan], [0.0, 0.0]], [[4.0, 8.0], [5.0, 6.0], [0.0, 0.0]]])
    summed = weighted(prototypes, torch.tensor([[1.0, 0.0, 0.0], [2.0, 7.0, 0.0]]))
    means, present = mean_by_class(**{name: each.sum(0) for name, each in summed.items()})
    assert present.tolist() == [True, True, False]
    torch.testing.assert_close(means, torch.tensor([[3.0, 6.0], [5.0, 6.0], [0.0, 0.0]], dtype=DOUBLE))


def test_scores_are_squared_distances() -> None:
    features = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    scores = nearest([1.0] * 4)(features, torch.zeros(20, 4, dtype=DOUBLE))
    torch.testing.assert_close(scores, -torch.cdist(features, POINTS).square())


def test_a_class_without_a_prototype_is_never_the_nearest() -> None:
    """Not even if all others are far away."""
    features = torch.tensor([[0.0, 0.0], [0.0, 4.0], [1e4, 1e4]], dtype=DOUBLE)
    scores = nearest([0.0, 1.0, 1.0, 0.0])(features, torch.zeros(3, 4, dtype=DOUBLE))
    assert scores.argmax(1).tolist() == [1, 2, 2]
    assert (scores[:, [0, 3]].amax(1) < scores[:, [1, 2]].amin(1) - 9).all()
    assert torch.isfinite(scores).all()


def test_without_any_prototype_the_scores_are_those_of_the_head() -> None:
    handed = torch.arange(8, dtype=DOUBLE).reshape(2, 4)
    assert torch.equal(nearest([0.0] * 4)(torch.ones(2, 2, dtype=DOUBLE), handed), handed)
