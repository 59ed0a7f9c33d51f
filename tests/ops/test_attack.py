"""Hostile clients: who they are, and what the server gets from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asserts import same_bytes
from fedrane import Attack, tree
from fedrane.errors import ConfigError
from fedrane.task import Model, State

DOUBLE = torch.float64


def sent() -> tuple[State, State]:
    draws = torch.Generator().manual_seed(0)
    server = State(Model({"w": torch.randn(3, 2, generator=draws)}, {"m": torch.randn(2, generator=draws)}), {})
    params = {"w": torch.randn(4, 3, 2, generator=draws)}
    ups = State(Model(params, {"m": torch.randn(4, 2, generator=draws)}), {"c": {"w": torch.randn(4, 2)}})
    return server, ups


def test_who_is_hostile() -> None:
    """The share, at least one; the same clients for the same seed."""
    attack = Attack("sign", 0.3)
    assert len(attack.hostile(10, 0)) == 3
    assert len(attack.hostile(2, 0)) == 1
    assert attack.hostile(100, 4) == attack.hostile(100, 4) != attack.hostile(100, 5)
    assert Attack().hostile(100, 4) == []


@pytest.mark.parametrize(("kind", "factor"), [("sign", -3.0), ("scale", 3.0)])
def test_deviations_are_multiplied(kind: str, factor: float) -> None:
    server, ups = sent()
    turned = Attack(kind, factor=3.0).uploads(server, ups, [1, 3], [7, 8])
    for part in ("params", "stats"):
        for name, base in getattr(server.model, part).items():
            before, after = getattr(ups.model, part)[name], getattr(turned.model, part)[name]
            torch.testing.assert_close(after[[1, 3]] - base, factor * (before[[1, 3]] - base))
            assert torch.equal(after[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(turned.extra["c"]["w"][1], factor * ups.extra["c"]["w"][1])


def test_noise_is_as_long_as_asked_and_new_in_every_round() -> None:
    server = State(Model({"w": torch.zeros(100, 100)}, {}), {})
    ups = State(Model({"w": torch.full((2, 100, 100), 3.0)}, {}), {})
    attack = Attack("noise", factor=5.0)
    first, same, other = (attack.uploads(server, ups, [1], [key]) for key in (1, 1, 2))
    same_bytes(first, same)
    assert not tree.equal(first, other)
    noise = first.model.params["w"][1] - 3
    assert float(noise.norm()) == pytest.approx(5 * 300, rel=0.02)
    assert torch.equal(first.model.params["w"][0], ups.model.params["w"][0])


def test_labels_of_the_hostile_are_reversed() -> None:
    y = np.array([0, 1, 2, 9, 0], dtype=np.int64)
    assert Attack("labels").labels(y, 10, [np.array([0, 3])]).tolist() == [9, 1, 2, 0, 0]
    assert y.tolist() == [0, 1, 2, 9, 0]


def test_uploads_are_not_touched_without_an_attack_on_them() -> None:
    server, ups = sent()
    assert Attack("labels").uploads(server, ups, [0], [1]) is ups
    assert Attack("sign").uploads(server, ups, [], []) is ups


@pytest.mark.parametrize("wrong", [{"kind": "evil"}, {"share": 0.0}, {"share": 1.0}, {"factor": 0.0}])
def test_what_is_no_attack_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Attack(**wrong)  # type: ignore[arg-type]
