"""q-FFL: the server's step by the formula, its objective by autograd, and losses that are more even."""

from __future__ import annotations

import pytest
import torch

import fedrane
from asserts import close
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.qffl import QFFL
from problems import DOUBLE, Quadratics, federation, quick, table

CLIENTS = [list(range(8)), list(range(8, 20)), list(range(20, 60))]


@pytest.mark.parametrize("power", [0.3, 1.0, 4.0])
def test_the_servers_step_by_the_formula(power: float) -> None:
    fed = federation(table(60), CLIENTS, batch=8)
    method = QFFL(power)
    server = method.init(fed.task, fed.roster)
    for round, lr in ((1, 0.3), (2, 0.1)):
        sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], round, lr, 2)
        change, heights = tree.zeros_like(server.model.params), 0.0
        for k, share in enumerate((8 / 60, 12 / 60, 40 / 60)):
            loss = Sequential(method, fed).predict(server.model, fed.train, fed.split.train[k]).losses.mean()
            d = tree.scale(tree.sub(server.model.params, tree.row(sent.ups.model.params, k)), 1 / lr)
            change = tree.add(change, tree.scale(d, share * loss**power))
            heights += share * (power * loss ** (power - 1) * float(tree.dot(d, d)) + loss**power / lr)
        expected = tree.sub(server.model.params, tree.scale(change, 1 / heights))
        server, record = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        close(server.model.params, expected, 1e-12)
        assert len(record["qffl/weights"]) == 3


def test_with_power_0_it_is_fedavg() -> None:
    with pytest.warns(UserWarning, match="is FedAvg"):
        method = QFFL(0.0)
    e = quick(precision="float64", participation=0.5, epochs=2)
    ours, plain = (fedrane.run(e.replace(method=each)).server.model for each in (method, FedAvg()))
    close(ours.params, plain.params, 1e-12)


def test_a_power_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.power=-1"):
        QFFL(-1.0)


def test_a_step_is_along_the_gradient_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one local step each: Σ p_k F_k^(q+1) / (q + 1), by autograd."""
    problem = Quadratics(monkeypatch)
    method, fed = QFFL(2.0), problem.federation
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.01, 1)
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    point = problem.point(server.model.params).clone().requires_grad_()
    shares = torch.tensor([4.0, 5.0, 6.0], dtype=DOUBLE) / 15
    (gradient,) = torch.autograd.grad((shares * problem.losses(point) ** 3 / 3).sum(), point)
    step = problem.point(after.model.params) - problem.point(server.model.params)
    torch.testing.assert_close(step / step.norm(), -gradient / gradient.norm(), rtol=1e-9, atol=1e-9)


def test_the_larger_the_power_the_more_even_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Quadratics(monkeypatch)
    fed = problem.federation
    spreads = []
    for method in (FedAvg(), QFFL(1.0), QFFL(10.0)):
        server = method.init(fed.task, fed.roster)
        for round in range(1, 151):
            sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], round, 0.1, 1)
            server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        spreads.append(float(problem.losses(problem.point(server.model.params)).std()))
    assert spreads[0] > 1.2 * spreads[1] > 1.2 * spreads[2], spreads


@pytest.mark.parametrize("power", [0.1, 1.0, 100.0])
def test_no_loss_and_a_huge_one_are_finite(power: float) -> None:
    """A client that is served perfectly has no change, and the others count as without it."""
    shares = torch.tensor([0.25, 0.25, 0.5], dtype=DOUBLE)
    lipschitz = torch.full((3,), 10.0, dtype=DOUBLE)
    squares = torch.tensor([0.0, 1.0, 2.0], dtype=DOUBLE)
    weights = QFFL(power).weights(shares, torch.tensor([0.0, 1e3, 1e-8], dtype=DOUBLE), squares, lipschitz)
    assert torch.isfinite(weights).all()
    assert float(weights[1]) > 0
    nothing = QFFL(power).weights(shares, torch.zeros(3, dtype=DOUBLE), 0 * squares, lipschitz)
    assert torch.isfinite(nothing).all()
