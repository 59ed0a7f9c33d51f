"""Adaptive servers: their steps by the formulas, round by round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close
from fedrane import Algorithm, tree
from fedrane.errors import ConfigError
from fedrane.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedrane.tree import Tensors
from problems import quick, server_rounds

ADAPTIVE = [
    (FedAdagrad(0.05, 0.5, 0.01), lambda v, d: v + d**2),
    (FedAdam(0.05, 0.8, 0.01, 0.9), lambda v, d: 0.9 * v + 0.1 * d**2),
    (FedYogi(0.05, 0.8, 0.01, 0.9), lambda v, d: v - 0.1 * d**2 * torch.sign(v - d**2)),
]


@pytest.mark.parametrize(("method", "second_moment"), ADAPTIVE, ids=["FedAdagrad", "FedAdam", "FedYogi"])
def test_adaptive_steps_by_the_formula(method: FedAdagrad, second_moment: Callable[[Tensor, Tensor], Tensor]) -> None:
    """From m = 0 and v = τ²; the step uses the new v, its root, and τ outside of it."""
    m: Tensors = {}
    v: Tensors = {}
    for before, change, server in server_rounds(method):
        m = m or tree.zeros_like(before)
        v = v or tree.map(lambda p: torch.full_like(p, 1e-4), before)
        m = {name: method.momentum * m[name] + (1 - method.momentum) * d for name, d in change.items()}
        v = {name: second_moment(v[name], d) for name, d in change.items()}
        expected = {name: value + 0.05 * m[name] / (v[name].sqrt() + 0.01) for name, value in before.items()}
        close(server.model.params, expected, 1e-12)
        close(server.extra["variance"], v, 1e-12)


def test_yogi_lowers_the_second_moment_slower_than_adam() -> None:
    """From far above, each round takes off a part of the square, not of the second moment itself."""
    v, change = torch.tensor([4.0]), torch.tensor([0.1])
    assert FedAdam().second_moment(v, change) < 3.97
    assert 3.9998 < FedYogi().second_moment(v, change) < 4
    assert FedYogi().second_moment(change**2 / 2, change) > change**2 / 2, "and raises it from below"


def test_a_large_floor_is_fedavg_with_a_learning_rate() -> None:
    """τ = 1 is far above every change, so that √v + τ = 2 everywhere."""
    for before, change, server in server_rounds(FedAdagrad(global_lr=1.0, floor=1.0), 1):
        for name, value in tree.sub(server.model.params, before).items():
            torch.testing.assert_close(value, change[name] / 2, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("method", [FedAdam()], ids=lambda method: type(method).__name__)
def test_what_the_server_keeps_is_resumed(method: Algorithm, tmp_path: object) -> None:
    e = quick(method=method, rounds=4)
    whole = fedrane.run(e).server
    fedrane.run(e.replace(rounds=2), f"{tmp_path}/run")
    assert tree.equal(fedrane.resume(f"{tmp_path}/run", rounds=4).server, whole)


def test_a_learning_rate_of_zero_is_refused() -> None:
    for method in (FedAdagrad, FedAdam, FedYogi):
        with pytest.raises(ConfigError, match="global_lr"):
            method(global_lr=0.0)
