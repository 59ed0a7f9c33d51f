"""The optimiser compared with torch's, and the learning rate over rounds."""

from __future__ import annotations

import math

import pytest
import torch

from asserts import same_bytes
from fedrane.errors import ConfigError
from fedrane.ops.sgd import SGD, Schedule


@pytest.mark.parametrize(
    "sgd", [SGD(), SGD(momentum=0.9), SGD(0.9, 0.1), SGD(0.0, 0.1), SGD(0.9, 0.1, clip=0.5)], ids=str
)
def test_ten_steps_equal_torchs(sgd: SGD) -> None:
    params = {"a": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    theirs = [p.clone().requires_grad_() for p in params.values()]
    optimiser = torch.optim.SGD(theirs, 0.1, sgd.momentum, weight_decay=sgd.weight_decay)
    velocity = sgd.init(params)
    for step in range(10):
        grads = {name: torch.sin(p * (step + 1)) for name, p in params.items()}
        for p, grad in zip(theirs, grads.values(), strict=True):
            p.grad = grad.clone()
        if sgd.clip:
            torch.nn.utils.clip_grad_norm_(theirs, sgd.clip)
        optimiser.step()
        params, velocity = sgd.update(params, grads, velocity, torch.tensor(0.1, dtype=torch.float64))
    for ours, p in zip(params.values(), theirs, strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=1e-13, atol=1e-13)


def test_a_short_gradient_is_not_clipped() -> None:
    params = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    grads = {name: 1e-2 * p for name, p in params.items()}
    lr = torch.tensor(0.1, dtype=torch.float64)
    clipped, plain = (SGD(clip=clip).update(params, grads, {}, lr)[0] for clip in (5.0, 0.0))
    same_bytes(clipped, plain)


def test_schedules() -> None:
    assert Schedule().at(37, 50) == 1
    assert Schedule("exponential", 0.9).at(3, 50) == pytest.approx(0.81)
    assert [Schedule("step", 0.5, every=2).at(r, 9) for r in (1, 2, 3, 4, 5)] == [1, 1, 0.5, 0.5, 0.25]
    assert Schedule("cosine").at(1, 10) == 1
    assert Schedule("cosine").at(6, 10) == pytest.approx(0.5)
    assert Schedule("cosine").at(10, 10) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))


@pytest.mark.parametrize("kind", ["constant", "step", "exponential", "cosine"])
def test_a_warm_up_rises_evenly_to_where_the_schedule_starts(kind: str) -> None:
    plain, warm = Schedule(kind, 0.5, floor=0.1), Schedule(kind, 0.5, floor=0.1, warmup=4)
    assert [warm.at(r, 12) for r in range(1, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=1e-15)
    assert [warm.at(r, 12) for r in range(5, 13)] == [plain.at(r, 8) for r in range(1, 9)]


@pytest.mark.parametrize("bad", [{"kind": "cosin"}, {"factor": 0.0}, {"factor": 1.5}, {"every": 0}, {"warmup": -1}])
def test_bad_schedules_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        Schedule(**bad)
