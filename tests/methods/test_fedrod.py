"""Fed-RoD: two independent losses, a personal part that is never sent, and labels that stay on the client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrane
from asserts import same_bytes
from fedrane import tree
from fedrane.algorithm import Outcome
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedrod import FedRoD
from fedrane.ops.balance import balanced_cross_entropy
from fedrane.task import Batch, Context, Model, State, Task, cross_entropy
from fedrane.testing import conformance
from problems import DOUBLE, federation, quick, table


def prepared(method: FedRoD, clients: list[list[int]] | None = None) -> Federation:
    fed = federation(table(60), clients or [list(range(20)), list(range(20, 60))], batch=8)
    return replace(fed, task=method.prepare(fed.task))


def generic(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return tree.pick(params, lambda name: not name.startswith("personal."))


def trained(method: FedRoD, rounds: int = 2) -> tuple[Federation, State, dict[int, State], Context]:
    fed = prepared(method)
    engine, server, client_states = Sequential(method, fed), method.init(fed.task, fed.roster), {}
    for round in range(1, rounds + 1):
        sent = engine.train_round(server, client_states, [0, 1], round, 0.2, 2)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states = dict(sent.client_states)
    return fed, server, client_states, engine.context(server, client_states[0], fed.client(0, rounds + 1, 0.2, 1))


@dataclass(frozen=True)
class Scaled(FedRoD):
    """Fed-RoD with its personal loss multiplied."""

    factor: float = 1.0

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss + (self.factor - 1) * outcome.metrics["personal"], outcome


def test_the_generic_part_knows_nothing_of_the_personal_loss() -> None:
    """Its trajectory is the same to the bit, for any factor of the personal loss."""
    settings: dict[str, Any] = {"rounds": 4, "momentum": 0.5, "weight_decay": 0.01, "participation": 0.7, "clients": 6}
    runs = [fedrane.run(quick(method=Scaled(factor=f), **settings)) for f in (1.0, 0.0, -3.0, 50.0)]
    for other in runs[1:]:
        same_bytes(other.server, runs[0].server)
        assert [r["global/loss"] for r in other.history] == [r["global/loss"] for r in runs[0].history]
        assert other.client_states.keys() == runs[0].client_states.keys()
        assert not any(
            tree.equal(other.client_states[k], client_state) for k, client_state in runs[0].client_states.items()
        )


def test_the_two_losses() -> None:
    """Balanced softmax of the generic scores; cross entropy of the sum."""
    method = FedRoD(balance=0.7)
    fed, _, _, ctx = trained(method)
    batch = next(Sequential(method, fed).batches(0, 3, 1))
    p = method.start(fed.task, ctx).params
    features = torch.tanh(batch.x @ p["body.0.weight"].T + p["body.0.bias"])
    scores = features @ p["head.weight"].T + p["head.bias"]
    added = features @ p["personal.weight"].T + p["personal.bias"]
    assert float(added.abs().max()) > 1e-3
    counts = torch.from_numpy(fed.labels[0]).double()
    loss, outcome = method.objective(fed.task, ctx, Model(p, {}), batch)
    torch.testing.assert_close(outcome.metrics["loss"], balanced_cross_entropy(scores, counts, batch, 0.7))
    torch.testing.assert_close(outcome.metrics["personal"], cross_entropy(scores + added, batch))
    torch.testing.assert_close(loss, outcome.metrics["loss"] + outcome.metrics["personal"])


def test_each_gradient_by_finite_differences() -> None:
    """The personal head under its loss, everything else under the generic loss."""
    method = FedRoD()
    fed, _, _, ctx = trained(method)
    batch = next(Sequential(method, fed).batches(0, 3, 1))
    params = method.start(fed.task, ctx).params

    def losses(params: dict[str, Tensor]) -> tuple[Tensor, Outcome]:
        return method.objective(fed.task, ctx, Model(params, {}), batch)

    gradient = torch.func.grad(lambda p: losses(p)[0])(params)
    draws = torch.Generator().manual_seed(2)
    for name, value in params.items():
        along = torch.randn(value.shape, generator=draws, dtype=DOUBLE)
        which = "personal" if name.startswith("personal.") else "loss"
        ends = [float(losses(params | {name: value + s * along})[1].metrics[which]) for s in (1e-6, -1e-6)]
        assert float((gradient[name] * along).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9)
    of_personal = torch.func.grad(lambda p: losses(p)[1].metrics["personal"])(params)
    assert all(bool((value == 0).all()) for value in generic(of_personal).values())


def test_a_class_the_client_lacks_is_not_pushed_down() -> None:
    """Its row of the generic head has no gradient; cross entropy would lower it."""
    y = table(60).y
    fed = prepared(FedRoD(), [np.flatnonzero(y != 2).tolist(), np.flatnonzero(y == 2).tolist()])
    method = FedRoD()
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.2, 3)
    before, after = server.model.params["head.weight"], sent.ups.model.params["head.weight"]
    assert torch.equal(after[0, 2], before[2])
    assert torch.equal(after[1], before), "a client of one class has nothing to learn"
    assert not torch.equal(after[0, 0], before[0])
    plain = Sequential(FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.2, 3)
    assert not torch.equal(plain.ups.model.params["head.weight"][0, 2], before[2])


def test_the_personal_part_and_the_labels_never_travel() -> None:
    method = FedRoD()
    fed, server, client_states, ctx = trained(method)
    engine = Sequential(method, fed)
    sent = engine.train_round(server, client_states, [0, 1], 3, 0.2, 1)
    for travels in (ctx.down, sent.ups):
        assert not any(name.startswith("personal.") for name in travels.model.params)
        assert travels.extra == {}
    assert sent.cohort.labels is None
    assert all(
        set(client_state.model.params) == {"personal.weight", "personal.bias"}
        for client_state in client_states.values()
    )
    assert all(client_state.extra == {} for client_state in client_states.values())
    assert not tree.equal(client_states[0], client_states[1])
    assert bool((server.model.params["personal.weight"] == 0).all()), "the server has only the start of it"
    mine, plain = (fedrane.run(quick(method=m, rounds=2)) for m in (method, FedAvg()))
    for a, b in zip(mine.history, plain.history, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])


def test_the_predictions() -> None:
    """The server's model is only the generic part; a client adds its personal part."""
    result = fedrane.run(quick(method="fedrod", rounds=1, lr=0.3, participation=0.5, clients=6))
    x = (torch.arange(7 * 64) * 37 % 256).to(torch.uint8).reshape(7, 1, 8, 8)
    whole = result.model
    assert set(whole.parts) == {"body", "head"}
    same_bytes(dict(whole.parts.named_parameters()), generic(result.server.model.params))
    taken = [k for k in range(6) if k in result.client_states]
    assert 0 < len(taken) < 6
    for k in range(6):
        mine = result.personal(k)
        features = whole.parts["body"]((x / 255 - result.inputs.mean[0]) / result.inputs.std[0])
        added = mine.parts["personal"](features)
        torch.testing.assert_close(mine(x), whole(x) + added)
        assert (k in taken) == (float(added.detach().abs().max()) > 0), (
            "a client that never took part predicts as the server does"
        )


def test_without_balance_the_global_model_is_fedavgs() -> None:
    with pytest.warns(UserWarning, match="FedAvg's global model"):
        method = FedRoD(balance=0.0)
    mine, plain = (fedrane.run(quick(method=m, rounds=3, momentum=0.5)) for m in (method, FedAvg()))
    same_bytes(generic(mine.server.model.params), plain.server.model.params)
    with pytest.raises(ConfigError, match="balance"):
        FedRoD(balance=-1.0)


def test_with_local_normalisation_both_parts_stay() -> None:
    result = conformance.trained(FedRoD(), norm="local", rounds=2)
    client_state = result.client_states[0].model
    assert {name.split(".")[0] for name in client_state.params} == {"body", "personal"}
    assert "global/accuracy" not in result.history[-1]
