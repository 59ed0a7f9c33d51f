"""Balanced softmax: its formula, its consistency, and absent classes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrane.ops.balance import balanced_cross_entropy
from fedrane.task import Batch, cross_entropy

DOUBLE = torch.float64


def examples(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Batch]:
    draws = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, classes, generator=draws, dtype=DOUBLE)
    y = torch.randint(classes, (n,), generator=draws)
    return scores, batch_of(y)


def batch_of(y: Tensor) -> Batch:
    return Batch(y, y, torch.ones(len(y), dtype=torch.bool), torch.tensor(0))


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_the_formula(strength: float) -> None:
    scores, batch = examples(7, 4)
    counts = torch.tensor([3.0, 1.0, 40.0, 7.0], dtype=DOUBLE)
    total = 0.0
    for i in range(7):
        weights = [float(counts[c]) ** strength * math.exp(float(scores[i, c])) for c in range(4)]
        total -= math.log(weights[int(batch.y[i])] / sum(weights))
    assert float(balanced_cross_entropy(scores, counts, batch, strength)) == pytest.approx(total / 7, rel=1e-12)


def test_equal_counts_are_plain_cross_entropy() -> None:
    scores, batch = examples(9, 5)
    for n in (1, 6, 1000):
        balanced = balanced_cross_entropy(scores, torch.full((5,), float(n), dtype=DOUBLE), batch)
        torch.testing.assert_close(balanced, cross_entropy(scores, batch), rtol=1e-13, atol=0)


def test_only_proportions_count_and_scores_may_be_shifted() -> None:
    scores, batch = examples(9, 3)
    counts = torch.tensor([2.0, 5.0, 1.0], dtype=DOUBLE)
    value = balanced_cross_entropy(scores, counts, batch)
    torch.testing.assert_close(balanced_cross_entropy(scores, 12 * counts, batch), value)
    torch.testing.assert_close(balanced_cross_entropy(scores + 3.0, counts, batch), value)


def test_it_learns_what_a_balanced_client_would() -> None:
    """For any counts, scores log p(x | class) are stationary: the posterior for equal classes. Not so with CE."""
    likelihood = torch.tensor([[6, 1, 2], [3, 1, 2], [1, 8, 6]])  # tenths: the distribution of x in each class (column)
    for counts in ([10, 10, 10], [40, 10, 20], [10, 200, 30]):
        where, y = [], []
        for c, n in enumerate(counts):
            for x in range(3):
                where += [x] * (n // 10 * int(likelihood[x, c]))
                y += [c] * (n // 10 * int(likelihood[x, c]))
        batch = batch_of(torch.tensor(y))
        n = torch.tensor(counts, dtype=DOUBLE)
        gradients = []
        for loss in (lambda s, n=n, b=batch: balanced_cross_entropy(s, n, b), lambda s, b=batch: cross_entropy(s, b)):
            table = (likelihood.double() / 10).log().requires_grad_()
            loss(table[torch.tensor(where)]).backward()
            assert table.grad is not None
            gradients.append(float(table.grad.abs().max()))
        assert gradients[0] < 1e-15
        assert (gradients[1] > 1e-2) == (len(set(counts)) > 1)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_absent_classes(dtype: torch.dtype) -> None:
    """As if they did not exist, without NaN in loss or gradient, also in padding."""
    drawn, batch = examples(8, 4)
    scores, y = drawn.to(dtype), batch.y % 2 * 3  # classes 0 and 3
    counts = torch.tensor([5, 0, 0, 3], dtype=dtype)
    free = scores.clone().requires_grad_()
    loss = balanced_cross_entropy(free, counts, batch_of(y))
    loss.backward()
    assert free.grad is not None
    assert bool(torch.isfinite(free.grad).all())
    assert bool((free.grad[:, 1:3] == 0).all()), "what a client does not have it does not push down"
    alone = F.cross_entropy(scores[:, [0, 3]] + counts[[0, 3]].log(), (y > 0).long())
    torch.testing.assert_close(loss.detach(), alone)

    labels = torch.cat([y, torch.tensor([1, 2])])
    mask = torch.tensor([True] * 8 + [False] * 2)
    padded = torch.cat([scores, torch.full((2, 4), 1e3, dtype=dtype)]).requires_grad_()
    again = balanced_cross_entropy(padded, counts, Batch(labels, labels, mask, labels[0]))
    again.backward()
    assert padded.grad is not None
    torch.testing.assert_close(again.detach(), loss.detach())
    torch.testing.assert_close(padded.grad, torch.cat([free.grad, torch.zeros(2, 4, dtype=dtype)]))


def test_a_client_without_rows() -> None:
    scores, batch = examples(3, 4)
    free = scores.requires_grad_()
    nobody = batch._replace(mask=torch.zeros(3, dtype=torch.bool))
    loss = balanced_cross_entropy(free, torch.zeros(4, dtype=DOUBLE), nobody)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert free.grad is not None
    assert bool((free.grad == 0).all())


def test_without_strength_it_is_plain_cross_entropy() -> None:
    """Bit for bit, absent classes included."""
    scores, batch = examples(8, 4)
    counts = torch.tensor([5, 0, 2, 3], dtype=DOUBLE)
    assert torch.equal(balanced_cross_entropy(scores, counts, batch, 0.0), cross_entropy(scores, batch))
