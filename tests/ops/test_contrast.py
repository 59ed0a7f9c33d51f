"""Contrastive discrimination against a double loop written from Eq. (7)."""

from __future__ import annotations

import math

import pytest
import torch

from fedrane.ops.contrast import discrimination


def by_hand(z: torch.Tensor, augmented: torch.Tensor, temperature: float) -> float:
    def sim(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a, b]))[0, 1])

    both = torch.cat([z, augmented])
    n, total = len(z), 0.0
    for i in range(n):
        below = sum(math.exp(sim(both[i], both[j]) / temperature) for j in range(2 * n) if j != i)
        total -= math.log(math.exp(sim(both[i], both[n + i]) / temperature) / below)
    return total / n


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0])
@pytest.mark.parametrize("examples", [1, 2, 7])
def test_it_equals_the_double_loop(examples: int, temperature: float) -> None:
    z, augmented = torch.randn(2, examples, 5, dtype=torch.float64)
    mask = torch.ones(examples, dtype=torch.bool)
    got = float(discrimination(z, augmented, mask, temperature))
    assert got == pytest.approx(by_hand(z, augmented, temperature), abs=1e-12)


def test_padding_does_not_count() -> None:
    z, augmented = torch.randn(2, 9, 5, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False, True, True, False, True])
    expected = discrimination(z[mask], augmented[mask], torch.ones(6, dtype=torch.bool), 0.5)
    z[~mask], augmented[~mask] = float("nan"), float("inf")
    z = z.requires_grad_()
    got = discrimination(z, augmented, mask, 0.5)
    torch.testing.assert_close(got, expected)
    got.backward()
    assert bool(torch.isfinite(z.grad[mask]).all())
    assert bool((z.grad[~mask] == 0).all())


def test_a_row_and_its_augmented_self_attract() -> None:
    """The loss decreases as each z̃_i approaches its z_i."""
    z, other = torch.randn(2, 8, 6, dtype=torch.float64)
    mask = torch.ones(8, dtype=torch.bool)
    losses = [float(discrimination(z, (1 - t) * other + t * z, mask, 0.5)) for t in (0.0, 0.5, 1.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.5


def test_degenerate_batches_stay_finite() -> None:
    for z in (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(1, 4), torch.randn(1, 1).expand(5, 4)):
        z = z.clone().requires_grad_()
        loss = discrimination(z, z * 2, torch.ones(len(z), dtype=torch.bool), 0.1)
        loss.backward()
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(z.grad).all())
    assert float(discrimination(torch.randn(3, 4), torch.randn(3, 4), torch.zeros(3, dtype=torch.bool), 0.5)) == 0


def test_gradients() -> None:
    z, augmented = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda a, b: discrimination(a, b, mask, 0.7), (z, augmented))
