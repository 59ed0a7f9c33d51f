"""FedRep: the head first, with the body frozen; then the body, with the head frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedrane
from asserts import close, same_bytes
from fedrane import Experiment
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedrep import FedRep
from fedrane.ops.adam import Adam
from fedrane.ops.sgd import SGD
from fedrane.testing import conformance
from problems import DOUBLE, Quadratics, dense, federation, table

HALVES = [list(range(20)), list(range(20, 60))]
NAMES = ("body.0.weight", "body.0.bias", "head.weight", "head.bias")


@pytest.mark.parametrize("head_epochs", [1, 4])
def test_the_head_makes_its_steps_and_no_more(head_epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a quadratic, with one step in an epoch: a + (I − η H)^K (w − a), and the body's epochs add nothing."""
    problem = Quadratics(monkeypatch)
    method, fed, lr = FedRep(head_epochs), problem.federation, 0.1
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, lr, method.local_epochs(3))
    for k in range(3):
        contraction = torch.eye(4, dtype=DOUBLE) - lr * problem.curvatures[k]
        away = torch.linalg.matrix_power(contraction, head_epochs) @ (
            problem.point(server.model.params) - problem.centres[k]
        )
        point = problem.point(sent.client_states[k].model.params)
        torch.testing.assert_close(point, problem.centres[k] + away, rtol=1e-12, atol=1e-12)


def test_a_round_is_plain_sgd_on_the_head_and_then_on_the_body() -> None:
    """torch's optimiser on each part, over the client's batches; the second round goes on with the client's head."""
    fed = federation(table(60), HALVES, batch=8, sgd=SGD(momentum=0.9, weight_decay=0.01))
    method = FedRep(2)
    assert method.local_epochs(3) == 5
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.1, 5)
    server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    again = engine.train_round(server, sent.client_states, [0, 1], 2, 0.1, 5)
    for k in (0, 1):
        network = dense((6,), 3).double()
        assert isinstance(network, nn.Sequential)
        first = {**server.model.params, **sent.client_states[k].model.params}
        for parameter, name in zip(network.parameters(), NAMES, strict=True):
            parameter.data = first[name].clone()
        batches = list(engine.batches(k, 2, 5))
        steps = len(batches) // 5
        for part, turn in ((network[2], batches[: 2 * steps]), (network[0], batches[2 * steps :])):
            optimiser = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            for batch in turn:
                network.zero_grad()
                F.cross_entropy(network(batch.x), batch.y).backward()
                optimiser.step()
        ours = {name: rows[k] for name, rows in again.ups.model.params.items()}
        theirs = dict(zip(NAMES, (parameter.detach() for parameter in network.parameters()), strict=True))
        close({**ours, **again.client_states[k].model.params}, theirs, 1e-12)


def test_heads_never_leave_and_bodies_are_averaged_by_examples() -> None:
    fed = federation(table(60), HALVES, batch=8)
    method = FedRep(1)
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.1, 2)
    assert set(sent.ups.model.params) == set(NAMES[:2])
    assert all(set(kept.model.params) == set(NAMES[2:]) for kept in sent.client_states.values())
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for name, bodies in sent.ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], bodies[0] / 3 + 2 * bodies[1] / 3)
    ctx = engine.context(after, sent.client_states[1], fed.client(1, 2, 0.1, 2))
    same_bytes(
        method.personal_model(fed.task, ctx).params, {**after.model.params, **sent.client_states[1].model.params}
    )


def test_statistics_follow_all_epochs() -> None:
    """Also those in which the body is frozen."""
    (bench,) = conformance.benches(FedRep(50), rounds=1)
    ctx, task = bench.context(0), bench.result.task
    work = bench.algorithm.begin(task, ctx)
    before = work.model
    for batch in bench.engine.batches(0, 2, 1):
        work = bench.algorithm.step(task, ctx, work, batch)
    assert all(not torch.equal(work.model.stats[name], value) for name, value in before.stats.items())
    moved = {name for name, value in before.params.items() if not torch.equal(work.model.params[name], value)}
    assert moved == {"head.weight", "head.bias"}


def test_without_epochs_of_the_head_it_warns() -> None:
    """That it is FedBABU without tuning is held by the laws of reductions."""
    with pytest.warns(UserWarning, match="never trains a head"):
        FedRep(0)
    with pytest.raises(ConfigError, match="head_epochs"):
        FedRep(-1)


@pytest.mark.parametrize("name", ["fedrep", "fedala"])
def test_a_number_of_steps_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"steps=3 with method={name}: .*counted in epochs.*Use epochs"):
        fedrane.run(Experiment.from_words([f"method={name}", "steps=3", "clients=2", "rounds=1", "partition.kind=iid"]))


def test_the_bodys_adam_starts_fresh() -> None:
    """Its first step is one of the learning rate's length in every parameter, as Adam's first step always is."""
    fed = federation(table(20), [list(range(10))], batch=10, optimizer=Adam())
    method = FedRep(head_epochs=3)
    server = method.init(fed.task, fed.roster)
    up = Sequential(method, fed).train_round(server, {}, [0], 1, 0.01, method.local_epochs(1)).ups
    moved = up.model.params["body.0.weight"][0] - server.model.params["body.0.weight"]
    assert float(moved.abs().max()) == pytest.approx(0.01, rel=1e-3)
