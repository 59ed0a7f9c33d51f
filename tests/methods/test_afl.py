"""AFL: the mixture and the model by the formulas, and the best worst client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.afl import AFL
from fedrane.methods.fedavg import FedAvg
from fedrane.task import State
from problems import DOUBLE, Quadratics, federation, quick, table

CLIENTS = [list(range(8)), list(range(8, 20)), list(range(20, 60)), []]


def nearest(point: Tensor) -> Tensor:
    """On the simplex, by bisection for the shift."""
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(200):
        shift = (low + high) / 2
        low, high = (shift, high) if float((point - shift).clamp(min=0).sum()) > 1 else (low, shift)
    return (point - low).clamp(min=0)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [0, 2]], ids=["all", "sampled"])
def test_a_round_by_the_formulas(cohort: list[int]) -> None:
    """The model moves by the last mixture; the mixture by the losses of the model that was sent."""
    fed = federation(table(60), CLIENTS, batch=8)
    method = AFL(0.3)
    server = method.init(fed.task, fed.roster)
    torch.testing.assert_close(server.extra["mixture"], torch.tensor([8.0, 12, 40, 0], dtype=DOUBLE) / 60)
    engine = Sequential(method, fed)
    for round in (1, 2, 3):
        sent = engine.train_round(server, {}, cohort, round, 0.3, 2)
        mixture = server.extra["mixture"]
        shares = mixture[cohort] / mixture[cohort].sum()
        expected = server.model.params
        gradient = torch.zeros(4, dtype=DOUBLE)
        for row, k in enumerate(cohort):
            change = tree.sub(tree.row(sent.ups.model.params, row), server.model.params)
            expected = tree.add(expected, tree.scale(change, shares[row]))
            if fed.split.train[k].size:
                gradient[k] = float(engine.predict(server.model, fed.train, fed.split.train[k]).losses.mean())
        gradient[cohort] = 4 / len(cohort) * (gradient[cohort] - gradient[cohort].mean())
        server, record = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        close(server.model.params, expected, 1e-12)
        torch.testing.assert_close(server.extra["mixture"], nearest(mixture + 0.3 * gradient), rtol=0, atol=1e-12)
        torch.testing.assert_close(record["afl/weights"], shares)
        assert float(server.extra["mixture"][3]) == 0, "a client without examples never counts"


def test_it_finds_the_best_worst_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the saddle point all clients that count have the same loss, no other has a larger one, and θ is the minimiser
    of their mixture."""
    problem = Quadratics(monkeypatch)
    fed, method = problem.federation, AFL(0.02)
    server = method.init(fed.task, fed.roster)
    for round in range(1, 401):
        sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], round, 0.2, 1)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    mixture, point = server.extra["mixture"], problem.point(server.model.params)
    there = problem.losses(point)
    assert float(there[mixture > 1e-3].min()) == pytest.approx(float(there.max()), rel=1e-4)
    pulls = (problem.curvatures @ problem.centres[..., None])[..., 0]
    optimum = torch.linalg.solve(torch.tensordot(mixture, problem.curvatures, 1), mixture @ pulls)
    torch.testing.assert_close(point, optimum, rtol=0, atol=1e-3)
    average = torch.tensor([4.0, 5.0, 6.0], dtype=DOUBLE)
    mean = torch.linalg.solve(torch.tensordot(average, problem.curvatures, 1), average @ pulls)
    assert float(there.max()) < 0.95 * float(problem.losses(mean).max()), "FedAvg's minimiser is worse for somebody"


def test_with_a_tiny_lr_it_is_fedavg() -> None:
    e = quick(precision="float64", participation=0.5)
    ours, plain = (fedrane.run(e.replace(method=each)).server.model for each in (AFL(1e-9), FedAvg()))
    close(ours.params, plain.params, 1e-7)


def test_a_round_in_which_nobody_counts_leaves_the_model() -> None:
    fed = federation(table(60), CLIENTS)
    method = AFL()
    server = method.init(fed.task, fed.roster)
    server = State(server.model, {"mixture": torch.tensor([0.0, 1, 0, 0], dtype=DOUBLE)})
    sent = Sequential(method, fed).train_round(server, {}, [0, 2], 1, 0.1, 1)
    after, record = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    assert tree.equal(after.model, server.model)
    assert "does not move" in record["messages"][0]
    assert float(after.extra["mixture"].sum()) == pytest.approx(1, abs=1e-12)


def test_the_mixture_is_resumed(tmp_path: object) -> None:
    e = quick(method=AFL(0.1), rounds=4)
    whole = fedrane.run(e).server
    fedrane.run(e.replace(rounds=2), f"{tmp_path}/run")
    assert tree.equal(fedrane.resume(f"{tmp_path}/run", rounds=4).server, whole)


def test_an_lr_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixture_lr"):
        AFL(0.0)
