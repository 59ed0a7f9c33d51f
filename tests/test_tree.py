"""Arithmetic on trees."""

from __future__ import annotations

import math

import pytest
import torch

from asserts import same_bytes
from fedrane import tree
from fedrane.task import Model, State

A = State(Model({"w": torch.tensor([1.0, 2.0])}, {"m": torch.tensor([3.0])}), {"c": {"d": torch.tensor(4.0)}})
B = State(Model({"w": torch.tensor([5.0, 6.0])}, {"m": torch.tensor([7.0])}), {"c": {"d": torch.tensor(8.0)}})


def test_flatten_names_every_leaf() -> None:
    assert list(tree.flatten(A)) == ["model/params/w", "model/stats/m", "extra/c/d"]
    same_bytes(tree.nest(tree.flatten(A)), A)


def test_arithmetic() -> None:
    same_bytes(tree.add(A, B), tree.map(lambda a, b: a + b, A, B))
    same_bytes(tree.sub(tree.add(A, B), B), A)
    same_bytes(tree.scale(A, 2.0), tree.add(A, A))
    assert float(tree.dot(A, B)) == 1 * 5 + 2 * 6 + 3 * 7 + 4 * 8
    assert float(tree.norm(A)) == pytest.approx(math.sqrt(30))
    same_bytes(tree.row(tree.stack([A, B]), 1), B)
    assert tree.nbytes(A) == 16
    assert isinstance(tree.add(A, B), State)


def test_equal_is_to_the_bit() -> None:
    nan = {"x": torch.tensor([float("nan"), 0.0])}
    assert tree.equal(nan, {"x": nan["x"].clone()})
    assert not tree.equal({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)})
    assert not tree.equal({"x": torch.zeros(2)}, {"x": torch.zeros(2).double()})
    assert not tree.equal({"x": torch.zeros(2)}, {"y": torch.zeros(2)})
    assert not tree.finite(nan)


@pytest.mark.parametrize("bad", [{"x": (torch.zeros(1), torch.zeros(1))}, {"x": 1.0}, {"a/b": torch.zeros(1)}])
def test_what_is_no_tree_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        tree.flatten(bad)


def test_cosines() -> None:
    base, step = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.0])}
    rows = {"w": torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 1.0], [0.0, 0.0]])}
    assert tree.cosines(step, base, rows) == pytest.approx([1.0, 0.0, -1 / math.sqrt(2), 0.0])
    assert tree.cosines({"w": torch.zeros(2)}, base, rows) == [0.0] * 4


def test_move_leaves_what_no_row_names() -> None:
    base = {"w": torch.ones(2), "frozen": torch.full((2,), 9.0)}
    moved = tree.move(base, {"w": torch.tensor([[3.0, 3.0], [5.0, 5.0]])}, torch.tensor([0.5, 0.5]))
    assert torch.equal(moved["w"], torch.tensor([4.0, 4.0]))
    assert moved["frozen"] is base["frozen"]
