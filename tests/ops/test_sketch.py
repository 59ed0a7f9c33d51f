"""The laws of sketches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedrane.ops.nash import gram
from fedrane.ops.sketch import Sketches, sketched

DOUBLE = torch.float64
SHAPES = {"body.weight": (3, 7), "body.bias": (3,), "head.weight": (5, 4)}
SIZE = 44


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def of(rows: Tensor, width: int = 8, seed: int = 0, round: int = 1) -> Sketches:
    """The sketches of rows of numbers, as deviations of three parameters from zero."""
    parts = torch.split(rows, [torch.Size(shape).numel() for shape in SHAPES.values()], 1)
    stack = {n: part.reshape(-1, *shape) for part, (n, shape) in zip(parts, SHAPES.items(), strict=True)}
    base = {name: torch.zeros(shape, dtype=rows.dtype) for name, shape in SHAPES.items()}
    return sketched(base, stack, width, seed, round)


@pytest.mark.parametrize("width", [8, 9, 20, 43])
def test_every_coordinate_is_in_one_number_with_a_sign(width: int) -> None:
    """Those of one run, of as many as a sketch has numbers, in different ones; a run goes on in the next parameter."""
    places = of(torch.eye(SIZE, dtype=DOUBLE), width).numbers
    assert set(places.abs().unique().tolist()) == {0, 1}
    assert places.abs().sum(1).tolist() == [1] * SIZE
    assert 10 < int((places.sum(1) > 0).sum()) < 34
    order = [slice(21, 24), slice(0, 21), slice(24, SIZE)]  # of the names, sorted
    taken = torch.cat([places[each] for each in order]).abs().argmax(1).tolist()
    for begin in range(0, SIZE, width):
        run = taken[begin : begin + width]
        assert [(each - run[0]) % width for each in run] == list(range(len(run)))
    rows = draw(6, SIZE).mul(100).round()
    assert torch.equal(of(rows, width).numbers, rows @ places)


def test_a_sketch_is_linear_to_the_bit() -> None:
    """Sums, where they are exact; powers of two and signs always."""
    a, b = draw(4, SIZE).mul(1000).round(), draw(4, SIZE, seed=1).mul(1000).round()
    assert torch.equal(of(a + b).numbers, of(a).numbers + of(b).numbers)
    for factor in (-1.0, 2.0, 2.0**-9):
        c = draw(4, SIZE)
        assert torch.equal(of(factor * c).numbers, factor * of(c).numbers)
        assert torch.equal(of(factor * c).norms, abs(factor) * of(c).norms)


def test_inner_products_are_right_on_average_with_the_promised_variance() -> None:
    """Over 3,000 seeds, for vectors that resemble each other, do not, and have two coordinates only."""
    few = torch.zeros(2, SIZE, dtype=DOUBLE)
    few[0, 3], few[1, 40] = 3.0, 3.0
    rows = torch.cat([draw(1, SIZE) + 0.3 * draw(2, SIZE, seed=1), draw(1, SIZE, seed=2), few])
    products = torch.stack([s.numbers @ s.numbers.T for s in (of(rows, 8, seed) for seed in range(3000))])
    exact = rows @ rows.T
    squares = exact.diagonal()
    variance = products.var(0)
    error = (products.mean(0) - exact).abs()
    assert bool((error <= 4.5 * (variance / len(products)).sqrt() + 1e-9).all())
    bound = (squares[:, None] * squares + exact**2) / 8
    assert bool((variance <= 1.2 * bound).all())
    assert float(variance[0, 1]) > 0.5 * float(bound[0, 1]), "the bound is no empty promise"


def test_up_to_its_width_a_sketch_is_exact() -> None:
    """A group of fewer parameters has a sketch as long as itself, and the Gram matrix of the deviations."""
    rows = draw(5, SIZE)
    for width in (SIZE, SIZE + 1, 5000):
        made = of(rows, width)
        assert made.numbers.shape == (5, SIZE)
        torch.testing.assert_close(made.numbers @ made.numbers.T, rows @ rows.T, rtol=1e-12, atol=1e-12)


def test_norms_are_exact() -> None:
    for width in (8, 13, 64):
        torch.testing.assert_close(of(draw(5, SIZE), width).norms, draw(5, SIZE).norm(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("apart", [1e3, 1.0, 1e-6])
def test_deviations_are_taken_in_double_precision(apart: float) -> None:
    base = {"w": (1e3 * draw(40)).float()}
    rows = {"w": (base["w"].double() + apart * draw(5, 40, seed=1)).float()}
    made = sketched(base, rows, 64, 0, 1)
    torch.testing.assert_close(made.numbers @ made.numbers.T, gram(base, rows), rtol=1e-12, atol=0)


@pytest.mark.parametrize("width", [8, 13, 64])
def test_a_client_alone_makes_the_same_bits(width: int) -> None:
    """Whatever the cohort, and in whatever order the parameters come."""
    rows = draw(70, SIZE)
    together = of(rows, width)
    for begin, end in ((0, 1), (3, 5), (20, 70)):
        apart = of(rows[begin:end], width)
        assert torch.equal(apart.numbers, together.numbers[begin:end])
        assert torch.equal(apart.norms, together.norms[begin:end])
    base, stack = {"a": draw(9), "b": draw(5)}, {"a": draw(3, 9, seed=1), "b": draw(3, 5, seed=2)}
    one, other = sketched(base, stack, 8, 0, 1), sketched(base, dict(reversed(stack.items())), 8, 0, 1)
    assert torch.equal(one.numbers, other.numbers)


def test_a_broken_upload_breaks_no_other() -> None:
    rows = draw(4, SIZE)
    good = of(rows)
    rows[2, 5], rows[1, 7] = float("nan"), float("inf")
    made = of(rows)
    assert made.usable().tolist() == [True, False, False, True]
    assert torch.equal(made.numbers[[0, 3]], good.numbers[[0, 3]])


def test_a_sketch_that_is_zero_tells_nothing() -> None:
    """Two coordinates that meet with opposite signs: there are norms, and no direction."""
    places = of(torch.eye(SIZE, dtype=DOUBLE)).numbers
    twins = next((i, j) for i in range(SIZE) for j in range(i) if torch.equal(places[i], places[j]))
    rows = torch.zeros(2, SIZE, dtype=DOUBLE)
    rows[:, twins[0]] = torch.tensor([1.0, 2.0])
    rows[0, twins[1]] = -1.0
    assert of(rows).usable().tolist() == [False, True]
    assert of(torch.zeros(1, SIZE, dtype=DOUBLE)).usable().tolist() == [False]


def test_seed_round_and_group_have_signs_of_their_own() -> None:
    rows = draw(3, SIZE)
    same, seed, round = of(rows), of(rows, seed=1), of(rows, round=2)
    assert torch.equal(of(rows).numbers, same.numbers)
    base, stack = {"w": torch.zeros(SIZE, dtype=DOUBLE)}, {"w": rows}
    group = sketched(base, stack, 8, 0, 1)
    renamed = sketched({"v": base["w"]}, {"v": rows}, 8, 0, 1)
    for a, b in ((same, seed), (same, round), (seed, round), (group, renamed)):
        assert not torch.allclose(a.numbers, b.numbers)
        assert not torch.allclose(a.numbers.abs(), b.numbers.abs())


def test_the_signs_are_those_of_every_version() -> None:
    """Server and clients draw them apart, so they may never change."""
    made = sketched({"w": torch.zeros(20)}, {"w": 2.0 ** torch.arange(20)[None]}, 8, seed=3, round=4)
    assert made.numbers.tolist() == [[-480, 1088, -1920, 69631, -122878, -278524, 491528, -240]]
