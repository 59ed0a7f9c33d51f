"""Arithmetic on trees."""

from __future__ import annotations

import math

import pytest
import torch

from asserts import same_bytes
from fedrane import tree
from fedrane.ops import reduction
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
    base, step = {"w": torch.tensor([7.0, -4.0])}, {"w": torch.tensor([1.0, 0.0])}
    rows = {"w": base["w"] + torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 1.0], [0.0, 0.0]])}
    assert tree.cosines(step, base, rows) == pytest.approx([1.0, 0.0, -1 / math.sqrt(2), 0.0])
    assert tree.cosines({"w": torch.zeros(2)}, base, rows) == [0.0] * 4


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_cosines_are_those_of_float64_for_numbers_of_any_size(size: float) -> None:
    numbers = torch.Generator().manual_seed(0)
    step, rows = torch.randn(40_000, generator=numbers), torch.randn(3, 40_000, generator=numbers)
    rows += torch.tensor([[1.0], [0.1], [0.0]]) * step
    expected = torch.nn.functional.cosine_similarity(rows.double(), step.double()).tolist()
    cosines = tree.cosines({"w": size * step}, {"w": torch.zeros(40_000)}, {"w": size * rows})
    assert cosines == pytest.approx(expected, abs=1e-6)


def test_one_number_that_is_not_finite_breaks_its_row() -> None:
    rows = {"w": torch.zeros(4, 2, 3), "c": torch.zeros(4)}
    rows["w"][1, 0, 2], rows["c"][3] = float("nan"), float("inf")
    assert tree.finite_rows(rows) == [True, False, True, False]
    assert tree.finite_rows({"w": torch.full((2, 3), 3e38)}) == [True, True]  # although their sum overflows


def test_move_leaves_what_no_row_names() -> None:
    base = {"w": torch.ones(2), "frozen": torch.full((2,), 9.0)}
    moved = tree.move(base, {"w": torch.tensor([[3.0, 3.0], [5.0, 5.0]])}, torch.tensor([0.5, 0.5]))
    assert torch.equal(moved["w"], torch.tensor([4.0, 4.0]))
    assert moved["frozen"] is base["frozen"]


def test_cosines_are_the_same_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    step, rows = torch.randn(5, generator=draws), torch.randn(6, 5, generator=draws)
    expected = torch.nn.functional.cosine_similarity(rows, step).tolist()
    for block in (tree.CPU_BLOCK_SIZE, 13, 1):
        monkeypatch.setattr(tree, "CPU_BLOCK_SIZE", block)
        cosines = tree.cosines({"w": step}, {"w": torch.zeros(5)}, {"w": rows})
        assert cosines == pytest.approx(expected, abs=1e-6)


def test_move_is_the_same_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formula, with weights that do not sum to one."""
    draws = torch.Generator().manual_seed(0)
    base = {"a": torch.randn(3, 5, generator=draws), "b": torch.randn(4, generator=draws)}
    rows = {name: torch.randn(6, *p.shape, generator=draws) for name, p in base.items()}
    weights = torch.tensor([0.5, -1.0, 0.0, 2.0, 0.25, 0.125])
    first: tree.Tensors = {}
    for block in (reduction.BLOCK_SIZE["cpu"], 33, 13, 1):
        monkeypatch.setitem(reduction.BLOCK_SIZE, "cpu", block)
        moved = tree.move(base, rows, weights)
        for name, p in base.items():
            torch.testing.assert_close(moved[name], p + torch.tensordot(weights, rows[name] - p, 1))
        same_bytes(moved, first := first or moved)


def test_columns_are_the_leaves_of_all_trees_side_by_side() -> None:
    trees = [Model({"w": torch.full((2,), float(k)), "b": torch.tensor(k)}, {}) for k in range(3)]
    reordered = trees[2]._replace(params=dict(reversed(trees[2].params.items())))  # the order of names does not matter
    columns = tree.columns([trees[0], trees[1], reordered])
    assert list(columns) == ["params/w", "params/b"]
    assert all(a is b for a, b in zip(columns["params/b"], (t.params["b"] for t in trees), strict=True))
    assert [float(w[0]) for w in columns["params/w"]] == [0, 1, 2]
    for other in (Model({"w": torch.zeros(2)}, {}), {"params": {}}, Model({"w": {}, "b": torch.tensor(0)}, {})):
        with pytest.raises(ValueError, match="differ in structure"):
            tree.columns([trees[0], other])


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 1, 5, 6), (4, 3, 5, 6)])
def test_as_saved_has_the_layout_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    plain = torch.arange(math.prod(shape)).reshape(shape)
    assert tree.as_saved(plain) is plain
    if len(shape) == 4:
        _, c, h, w = shape
        odd = plain.contiguous(memory_format=torch.channels_last).as_strided(shape, (c * h * w, 1, c * w, c))
        assert tree.as_saved(odd).stride() == plain.stride() != odd.stride()
        assert torch.equal(tree.as_saved(odd), plain)
