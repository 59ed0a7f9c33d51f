"""Sums in a fixed order: the same bits for any parts, and right to the last digits of float64."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from asserts import same_bytes
from fedrane import tree
from fedrane.ops.reduction import Partial, Term, Total

NUMBERS = torch.Generator().manual_seed(0)
COUNT = 45
BASE = {"w": torch.randn(3, 7, generator=NUMBERS), "b": torch.randn((), generator=NUMBERS)}
BASE["d"] = torch.randn(5, generator=NUMBERS, dtype=torch.float64)  # of float32, sums in float64 are often exact
ROWS = {
    name: base
    + 10.0 ** torch.randint(-6, 3, (COUNT, *base.shape), generator=NUMBERS)
    * torch.randn(COUNT, *base.shape, generator=NUMBERS, dtype=base.dtype)
    for name, base in BASE.items()
}
WEIGHTS = torch.randint(1, 900, (COUNT,), generator=NUMBERS)


def part(begin: int, end: int, weights: Tensor | None = WEIGHTS) -> Partial:
    rows = {name: stacked[begin:end] for name, stacked in ROWS.items()}
    equally = Term(rows)
    return Partial.of(
        {"mean": Term(rows, None if weights is None else weights[begin:end], BASE), "sum": equally}, begin
    )


WHOLE = part(0, COUNT).totals(COUNT)


def same(a: dict[str, Total], b: dict[str, Total]) -> None:
    same_bytes(*({name: {"sums": each.sums, "weight": each.weight} for name, each in of.items()} for of in (a, b)))


@pytest.mark.parametrize("cuts", [1, 2, 3, 10, COUNT - 1])
def test_any_cut_and_any_order_of_merging_give_the_same_bits(cuts: int) -> None:
    draws = random.Random(cuts)  # noqa: S311 - not for secrets
    for _ in range(10):
        ends = [0, *sorted(draws.sample(range(1, COUNT), cuts)), COUNT]
        parts = [part(*pair) for pair in pairwise(ends)]
        draws.shuffle(parts)
        while len(parts) > 1:
            first, second = parts.pop(), parts.pop()
            parts.insert(draws.randrange(len(parts) + 1), first + second)
        same(parts[0].totals(COUNT), WHOLE)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 45])
def test_the_sum_is_right_to_the_last_digits(count: int) -> None:
    totals = part(0, count).totals(count)
    assert float(totals["mean"].weight) == WEIGHTS[:count].sum()
    assert float(totals["sum"].weight) == count
    for name, stacked in ROWS.items():
        away = stacked[:count].double() - BASE[name].double()
        for which, rows in (("mean", WEIGHTS[:count, None] * away.reshape(count, -1)), ("sum", stacked[:count])):
            columns = rows.double().reshape(count, -1).T.tolist()
            for column, total in zip(columns, totals[which].sums[name].flatten().tolist(), strict=True):
                assert abs(total - math.fsum(column)) <= 1e-15 * math.fsum(map(abs, column))


def test_a_part_holds_few_nodes() -> None:
    """Client by client, as many as the cohort's size has ones in binary; a part from within, twice as many."""
    running = part(0, 1)
    for k in range(1, COUNT):
        running = running + part(k, k + 1)
        assert len(running._nodes) == (k + 1).bit_count()
    assert len(part(3, 44)._nodes) <= 2 * math.log2(COUNT)


def test_what_is_merged_stays_as_it_was() -> None:
    first, second = part(0, 20), part(20, COUNT)
    before = {key: [leaf.clone() for leaf in sums] for key, sums in first._nodes.items()}
    same((first + second).totals(COUNT), WHOLE)
    for key, sums in first._nodes.items():
        assert all(map(torch.equal, sums, before[key]))
    same((second + first).totals(COUNT), WHOLE)


def test_uploads_are_not_written_to() -> None:
    base, rows = ({"w": torch.ones(*shape, dtype=torch.float64)} for shape in ((3,), (2, 3)))
    Partial.of({"": Term(rows, torch.tensor([2.0, 0.0]), base)}).totals(2)[""].mean()
    assert (rows["w"] == 1).all()
    assert (base["w"] == 1).all()


def test_parts_that_are_missing_or_there_twice_are_refused() -> None:
    for wrong in (part(0, 20), part(0, 20) + part(21, COUNT), part(0, COUNT) + part(3, 4), part(1, COUNT)):
        with pytest.raises(ValueError, match="each once"):
            wrong.totals(COUNT)


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS * 0])
def test_uploads_equal_to_the_base_leave_it_to_the_last_bit(weights: Tensor | None) -> None:
    base = {"w": torch.tensor([0.1, -0.0, 0.0, 3e-39, -1e30])}
    still = {"w": base["w"].expand(COUNT, -1)}
    total = Partial.of({"": Term(still, weights, base)}).totals(COUNT)[""]
    same_bytes(total.mean(), base)
    same_bytes(total.added(base), base)


def test_a_weight_of_zero_hides_whatever_is_there() -> None:
    weights = WEIGHTS.clone()
    weights[[3, 17]] = 0
    rows = {name: stacked.clone() for name, stacked in ROWS.items()}
    for stacked in rows.values():
        stacked[3], stacked[17] = math.nan, math.inf
    zero = {name: stacked.index_fill(0, torch.tensor([3, 17]), 0.0) for name, stacked in ROWS.items()}
    means = [Partial.of({"": Term(each, weights, BASE)}).totals(COUNT)[""].mean() for each in (rows, zero)]
    same_bytes(*means)
    assert tree.finite(means[0])
    weights[3] = 1
    assert not tree.finite(Partial.of({"": Term(rows, weights, BASE)}).totals(COUNT)[""].mean())


def test_the_mean_by_hand() -> None:
    base = {"w": torch.tensor([1.0]), "frozen": torch.tensor([9.0])}
    term = Term({"w": torch.tensor([[2.0], [6.0]])}, torch.tensor([3, 1]), base)
    total = Partial.of({"": term}).totals(2)[""]
    assert total.mean()["w"] == 3.0
    assert total.mean(0.5)["w"] == 2.0
    assert total.added({"w": torch.tensor([5.0])})["w"] == 13.0
    assert total.added({"w": torch.tensor([5.0])}, times=2.0, over=8.0)["w"] == 7.0
    assert total.mean()["frozen"] is base["frozen"]
    assert total.mean()["w"].dtype == torch.float32
    assert not Partial.of({}).totals(7)
