"""FedALA: the weights and the mix by their formulas, first the weights and then the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close, same_bytes
from fedrane import State, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedala import FedALA
from fedrane.methods.fedavg import FedAvg
from fedrane.ops.sgd import SGD
from fedrane.testing import conformance
from problems import DOUBLE, Quadratics, federation, quick, table


def kept(server: State, names: list[str]) -> State:
    """A client whose last model is away from the global one, with weights between 0 and 1."""

    def spread(p: Tensor, low: float, high: float) -> Tensor:
        return torch.linspace(low, high, p.numel(), dtype=DOUBLE).reshape(p.shape)

    away = tree.map(lambda p: p + spread(p, -2, 1), server.model)
    return State(away, {"weights": {name: spread(server.model.params[name], 0.1, 0.9) for name in names}})


HEAD = ["head.weight", "head.bias"]


@pytest.mark.parametrize("weight_lr", [0.01, 30.0], ids=["small", "clipped"])
@pytest.mark.parametrize("examples", [0.4, 1.0], ids=["some", "all"])
def test_the_weights_and_then_the_model_by_the_formula(
    examples: float, weight_lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 has five examples in three batches: weights learn from the first or all of an epoch, then it trains."""
    problem, lr = Quadratics(monkeypatch), 0.1
    method, fed = FedALA(1, examples, weight_lr), replace(problem.federation, batch=2)
    assert method.local_epochs(1) == 2
    server = method.init(fed.task, fed.roster)
    client = kept(server, HEAD)
    sent = Sequential(method, fed).train_round(server, {1: client}, [1], 1, lr, 2)
    own, origin = problem.point(client.model.params), problem.point(server.model.params)
    weights = client.extra["weights"]["head.weight"].flatten()[:4]

    def gradient(point: Tensor) -> Tensor:
        return problem.curvatures[1] @ (point - problem.centres[1])

    bounded = False
    for _ in range(1 if examples < 0.5 else 3):
        moved = weights - weight_lr * gradient(own + (origin - own) * weights) * (origin - own)
        weights = moved.clamp(0, 1)
        bounded |= not torch.equal(moved, weights)
    point = own + (origin - own) * weights
    for _ in range(3):
        point = point - lr * gradient(point)
    after = sent.client_states[1]
    close({"weights": after.extra["weights"]["head.weight"].flatten()[:4]}, {"weights": weights}, 1e-12)
    close({"point": problem.point(after.model.params)}, {"point": point}, 1e-12)
    close({"up": problem.point(tree.row(sent.ups.model.params, 0))}, {"up": point}, 1e-12)
    assert bounded == (weight_lr > 1)
    assert not sent.ups.extra, "weights never leave"


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_only_the_top_layers_are_mixed(layers: int) -> None:
    """Those below are the global model's."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    method = FedALA(layers)
    server = method.init(fed.task, fed.roster)
    mixed = [name for name in server.model.params if layers > 1 or name.startswith("head.")]
    assert list(method.join(fed.task, server, fed.client(0, 1, 0.1, 1)).extra["weights"]) == mixed
    client = kept(server, mixed)
    ctx = Sequential(method, fed).context(server, client, fed.client(0, 2, 0.1, 2))
    start = method.start(fed.task, ctx).params
    for name, value in start.items():
        own, sent = client.model.params[name], server.model.params[name]
        weight = client.extra["weights"].get(name, 1.0)
        torch.testing.assert_close(value, own + (sent - own) * weight, rtol=1e-12, atol=1e-12)


def test_while_weights_are_learned_nothing_else_moves() -> None:
    """Neither the layers below, nor statistics, nor momentum; in the rest of that epoch nothing at all."""
    method = FedALA(examples=0.5, weight_lr=50.0)
    (bench,) = conformance.benches(method, momentum=0.9, weight_decay=0.1, batch=8)
    largest = int(bench.result.federation.roster.sizes.argmax())
    ctx, task = bench.context(largest), bench.result.task
    works = [method.begin(task, ctx)]
    for batch in bench.engine.batches(largest, 2, 2):
        works.append(method.step(task, ctx, works[-1], batch))
    steps = (len(works) - 1) // 2
    assert steps > 1, "the last one of the epoch is idle"
    first, learned, idle, trained = works[0], works[steps - 1], works[steps], works[steps + 1]
    same_bytes(first.model.stats, idle.model.stats)
    same_bytes(first.optimizer, idle.optimizer)
    assert not tree.equal(first.extra, learned.extra)
    changed = {name for name, value in first.model.params.items() if not torch.equal(value, learned.model.params[name])}
    assert changed == set(HEAD)
    same_bytes({"model": learned.model, "weights": learned.extra}, {"model": idle.model, "weights": idle.extra})
    same_bytes(idle.extra, trained.extra)
    for before, after in ((idle.model.params, trained.model.params), (idle.model.stats, trained.model.stats)):
        assert not any(torch.equal(value, after[name]) for name, value in before.items())


def test_in_the_first_round_the_weights_stay_ones() -> None:
    """And training starts from the global model: a client that never took part has nothing to mix."""
    result = fedrane.run(quick(method=FedALA(), rounds=1))
    for state in result.client_states.values():
        assert all(torch.equal(value, torch.ones_like(value)) for value in state.extra["weights"].values())
    later = fedrane.run(quick(method=FedALA(weight_lr=10.0), rounds=3))
    assert any(bool((value < 1).any()) for value in later.client_states[0].extra["weights"].values())


def test_with_an_lr_of_zero_it_is_fedavg() -> None:
    """On whole batches, to rounding: the order of examples within a batch is that of another epoch."""
    with pytest.warns(UserWarning, match="as FedAvg"):
        method = FedALA(weight_lr=0.0)
    settings: dict[str, Any] = {"batch": 10_000, "rounds": 3, "momentum": 0.5, "precision": "float64", "epochs": 2}
    ours, plain = (fedrane.run(quick(method=each, **settings)) for each in (method, FedAvg()))
    close(ours.server.model, plain.server.model, 1e-12)


def test_a_client_predicts_with_the_model_that_it_trained() -> None:
    result = conformance.trained(FedALA(layers=9), norm="local")
    same_bytes(dict(result.personal(1).parts.named_parameters()), result.client_states[1].model.params)
    assert not any(".norm." in name for name in result.client_states[1].extra["weights"])


@pytest.mark.parametrize("settings", [{"layers": 0}, {"examples": 0.0}, {"examples": 1.5}, {"weight_lr": -1.0}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FedALA(**settings)


def test_weights_have_no_momentum_and_no_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step is the same whatever the clients' optimiser."""
    problem = Quadratics(monkeypatch)
    ends = []
    for sgd in (SGD(), SGD(momentum=0.9, weight_decay=0.1, clip=0.1)):
        fed = replace(problem.federation, batch=2, task=replace(problem.federation.task, optimizer=sgd))
        server = FedALA().init(fed.task, fed.roster)
        sent = Sequential(FedALA(), fed).train_round(server, {2: kept(server, HEAD)}, [2], 1, 0.1, 2)
        ends.append(sent.client_states[2].extra)
    same_bytes(*ends)
