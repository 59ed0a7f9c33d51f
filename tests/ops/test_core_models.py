"""Mixing cores, and the draw of those to request."""

from __future__ import annotations

import math

import torch
from torch.func import vmap

from fedrane.ops import core_models
from fedrane.task import Client, Context, Model, State
from problems import DOUBLE

NOTHING = Model({}, {})


def client(index: int, population: int, round: int = 1) -> Client:
    integer = torch.tensor
    lr = torch.tensor(0.1, dtype=DOUBLE)
    return Client(integer(index), integer(10), None, integer(1), integer(round), lr, population)


def test_a_draw_takes_positions_by_what_is_left_of_the_weights() -> None:
    """The chance of each pair in its order: p_i p_j / (1 − p_i)."""
    weights, count = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=DOUBLE), 20_000
    keys = 1_000_003 * torch.arange(count)
    pairs = vmap(lambda key: core_models.draw(weights.log(), 2, key))(keys)
    for i in range(4):
        for j in range(4):
            chance = float(weights[i] * weights[j] / (1 - weights[i])) if i != j else 0.0
            frequency = float(((pairs[:, 0] == i) & (pairs[:, 1] == j)).double().mean())
            assert abs(frequency - chance) <= 5 * math.sqrt(chance / count)


def test_what_was_never_had_comes_first_and_oneself_never() -> None:
    relation, had = torch.tensor([0.9, 0.9, 0.0, 0.9, 0.0], dtype=DOUBLE), torch.tensor([3, 0, 0, 1, 7])
    ctx = Context(State(NOTHING, {"which": torch.tensor([1, 4, 0])}), State(NOTHING, {}), client(1, 5))
    asked = [core_models.next_request(ctx, relation, had, torch.tensor(key)).tolist() for key in range(200)]
    assert all(wishes[0] == 2 for wishes in asked)
    assert {core for wishes in asked for core in wishes[1:]} == {0, 3, 4}


def test_a_larger_coefficient_is_asked_for_more_often_and_more_so_in_later_rounds() -> None:
    """Weight b^|p|: with b = 1.5 at first, then r M / N."""
    relation, had = torch.tensor([0.1, -1.0, 0.0], dtype=DOUBLE), torch.ones(3, dtype=torch.int64)
    keys = 1_000_003 * torch.arange(4000)
    for round, base in ((1, 1.5), (60, 20.0)):
        down = State(NOTHING, {"which": torch.tensor([1])})
        ctx = Context(down, State(NOTHING, {}), client(0, 3, round))
        asked = vmap(lambda key, ctx=ctx: core_models.next_request(ctx, relation, had, key))(keys)
        chance = base / (base + 1)
        assert abs(float((asked == 1).double().mean()) - chance) < 5 * math.sqrt(chance * (1 - chance) / len(keys))


def test_the_mix_is_of_ones_own_core_the_fresh_ones_and_copies_of_the_rest() -> None:
    examples = torch.arange(20, dtype=DOUBLE).reshape(5, 2, 2)
    kept, fresh, core = {"a": examples}, {"a": -examples[[4, 0]]}, {"a": torch.full((2, 2), 100.0, dtype=DOUBLE)}
    relation = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=DOUBLE)
    ctx = Context(
        State(NOTHING, {"cores": fresh, "which": torch.tensor([4, 0])}), State(NOTHING, {"cores": kept}), client(2, 5)
    )
    expected = -0.1 * examples[0] + 0.2 * examples[1] + 0.3 * core["a"] + 0.4 * examples[3] - 0.5 * examples[4]
    torch.testing.assert_close(core_models.mix(ctx, core, relation)["a"], expected)


def test_the_next_in_number_go_round_and_are_others() -> None:
    sizes = torch.ones(4)
    assert core_models.next_in_number(sizes, 2).tolist() == [[1, 2], [2, 3], [3, 0], [0, 1]]
    assert core_models.next_in_number(sizes, 9).tolist() == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert core_models.next_in_number(torch.ones(1), 3).tolist() == [[]]
