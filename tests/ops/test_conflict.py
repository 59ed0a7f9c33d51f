"""Conflicts between gradients: the projections by a double loop over plain vectors, and what they guarantee."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedrane.ops.conflict import as_long_as, kept, projected, without_absent
from problems import DOUBLE


def draw(count: int, size: int, seed: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def by_hand(rows: Tensor, losses: list[float], keep: int) -> Tensor:
    """As the paper writes it: each gradient against all others, in the order of rising losses."""
    order = sorted(range(len(losses)), key=lambda k: losses[k])
    result = rows.clone()
    for k in order[: len(order) - keep]:
        for j in order:
            if j != k and result[k] @ rows[j] < 0:
                result[k] = result[k] - (result[k] @ rows[j]) / (rows[j] @ rows[j]) * rows[j]
    return result


@pytest.mark.parametrize("keep", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_the_projections_are_those_of_a_double_loop(seed: int, keep: int) -> None:
    rows, losses = draw(8, 5, seed), draw(1, 6, seed + 50).abs().flatten()
    expected = by_hand(rows[:6], losses.tolist(), keep)
    torch.testing.assert_close(projected(rows @ rows.T, losses, keep) @ rows, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_conflicts_with_the_client_of_the_largest_loss(seed: int) -> None:
    """It comes last: its gradient is orthogonal to the others', or better."""
    rows, losses = draw(7, 4, seed), torch.tensor([3.0, 1, 9, 2, 4, 6, 5], dtype=DOUBLE)
    mixes = projected(rows @ rows.T, losses, 0) @ rows
    others = [k for k in range(7) if k != 2]
    assert float((mixes[others] @ rows[2]).min()) >= -1e-10
    assert float((rows[others] @ rows[2]).min()) < -0.1, "there was something to do"


def test_two_that_conflict_in_closed_form() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=DOUBLE)
    expected = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=DOUBLE)
    losses = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    torch.testing.assert_close(projected(rows @ rows.T, losses, 0) @ rows, expected)
    torch.testing.assert_close(projected(rows @ rows.T, losses, 1) @ rows, torch.stack([expected[0], rows[1]]))
    torch.testing.assert_close(projected(rows @ rows.T, -losses, 1) @ rows, torch.stack([rows[0], expected[1]]))


def test_without_conflicts_nothing_changes() -> None:
    rows = draw(5, 3, 1).abs()
    assert torch.equal(projected(rows @ rows.T, torch.arange(5.0), 0), torch.eye(5, dtype=DOUBLE))


def test_a_zero_gradient_conflicts_with_nobody() -> None:
    rows = draw(4, 3, 2)
    rows[1] = 0
    made = projected(rows @ rows.T, torch.arange(4.0), 0) @ rows
    assert torch.isfinite(made).all()
    torch.testing.assert_close(made[[0, 2, 3]], by_hand(rows[[0, 2, 3]], [0.0, 2.0, 3.0], 0))


def test_the_absent_are_projected_by_group_in_turn() -> None:
    """Against the sum of those of a group that conflict, not against each, and with the last group last."""
    rows = draw(6, 4, 3)
    rows[0] = -rows[1] - rows[2] - 0.3 * rows[3]
    inner, mix = rows @ rows.T, torch.eye(6, dtype=DOUBLE)[0]
    here = rows[0]
    for group in ([1, 2, 5], [3, 4]):
        against = sum((rows[k] for k in group if here @ rows[k] < 0), torch.zeros(4, dtype=DOUBLE))
        if here @ against < 0:
            here = here - (here @ against) / (against @ against) * against
    assert float((here - rows[0]).norm()) > 0.1
    torch.testing.assert_close(without_absent(inner, mix, [[1, 2, 5], [3, 4]]) @ rows, here, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(without_absent(inner, mix, []), mix)


def test_the_length_is_that_of_another_mix() -> None:
    rows = draw(3, 7, 4)
    mix, other = torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.5, 0.5]], dtype=DOUBLE)
    made = as_long_as(rows @ rows.T, mix, other)
    torch.testing.assert_close((made @ rows).norm(), (other @ rows).norm())
    torch.testing.assert_close(made / made.norm(), mix / mix.norm())
    nothing = torch.zeros(3, dtype=DOUBLE)
    assert torch.equal(as_long_as(rows @ rows.T, nothing, other), nothing)


def test_how_many_are_kept() -> None:
    assert [kept(share, 10) for share in (0.0, 0.01, 0.1, 0.11, 0.3, 0.9999)] == [0, 1, 1, 2, 3, 10]
