"""MOON: its loss by hand, which model is the previous one, and FedAvg without the contrast."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedrane
from asserts import same_bytes
from fedrane import Algorithm, tree
from fedrane.algorithm import PERSONAL
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.moon import MOON
from fedrane.task import Batch, Context, Model, State, Task
from fedrane.testing import conformance
from objectives import differences_agree
from problems import dense, federation, quick, slow_except, table

HALVES = [list(range(20)), list(range(20, 60))]


def without(**settings: Any) -> MOON:
    with pytest.warns(UserWarning, match="is FedAvg"):
        return MOON(strength=0.0, **settings)


def prepared(method: Algorithm, **settings: Any) -> Federation:
    fed = federation(table(60), HALVES, batch=8, **settings)
    return replace(fed, task=method.prepare(fed.task))


def later(method: MOON, **settings: Any) -> tuple[Task, Context, Model, Batch]:
    """Client 1 in its third round: the sent, the current and the previous model all differ."""
    fed = prepared(method, **settings)
    engine, server, client_states = Sequential(method, fed), method.init(fed.task, fed.roster), {}
    for round in (1, 2):
        sent = engine.train_round(server, client_states, [0, 1], round, 0.1, 2)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states = dict(sent.client_states)
    ctx = engine.context(server, client_states[1], fed.client(1, 3, 0.1, 1))
    work = method.begin(fed.task, ctx)
    for batch in engine.batches(1, 3, 1):
        work = method.step(fed.task, ctx, work, batch)
    return fed.task, ctx, work.model, batch


# ---- the loss


@pytest.mark.parametrize("projection", ["branch", "inline"])
def test_the_loss_by_a_double_loop(projection: str) -> None:
    """Over examples and the two models they are compared with, on a network defined here."""
    method = MOON(strength=3.0, temperature=0.7, width=9, projection=projection)
    task, ctx, model, batch = later(method)

    def forward(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(p["body.0.weight"] @ x + p["body.0.bias"])
        hidden = (p["project.0.weight"] @ features + p["project.0.bias"]).clamp(min=0)
        return features, p["project.2.weight"] @ hidden + p["project.2.bias"]

    total = 0.0
    for i in range(len(batch.y)):
        features, z = forward(model.params, batch.x[i])
        below = []
        for other in (ctx.down.model.params, ctx.client_state.extra["previous"]["params"]):
            there = forward(other, batch.x[i])[1]
            below.append(math.exp(float(z @ there / (z.norm() * there.norm())) / 0.7))
        scores = model.params["head.weight"] @ (z if projection == "inline" else features) + model.params["head.bias"]
        chance = math.exp(float(scores[batch.y[i]])) / sum(math.exp(float(s)) for s in scores)
        total -= math.log(chance) + 3.0 * math.log(below[0] / sum(below))
    loss, outcome = method.objective(task, ctx, model, batch)
    assert float(loss) == pytest.approx(total / len(batch.y), rel=1e-12)
    assert float(outcome.metrics["loss"] + 3.0 * outcome.metrics["contrast"]) == pytest.approx(float(loss))


def test_the_other_two_are_predictions_of_fixed_models() -> None:
    """Running statistics, no dropout; only z comes from a model in training mode."""
    method = MOON()
    result = conformance.trained(method, rounds=2)
    task, ctx = result.task, conformance.Bench(result, method).context(0)
    batch = next(Sequential(method, result.federation).batches(0, 3, 1))
    model = method.start(task, ctx)
    net = task.training(model, batch)
    z = net.part("project", net.body(batch.x))
    similar = []
    for other in (model, Model(**ctx.client_state.extra["previous"])):
        fixed = task.evaluating(other, batch.mask)
        similar.append(torch.cosine_similarity(z, fixed.part("project", fixed.body(batch.x))))
    expected = -torch.stack(similar, 1).div(0.5).log_softmax(1)[:, 0].mean()
    torch.testing.assert_close(method.objective(task, ctx, model, batch)[1].metrics["contrast"], expected)


@pytest.mark.parametrize("projection", ["branch", "inline"])
def test_the_whole_gradient_by_finite_differences(projection: str) -> None:
    method = MOON(width=9, projection=projection)
    task, ctx, model, batch = later(method)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return method.objective(task, ctx, Model(params, {}), batch)[0]

    differences_agree(loss, model.params)


def test_only_the_model_in_training_has_a_gradient() -> None:
    """The other two affect the loss but get no gradient."""
    method = MOON()
    task, ctx, model, batch = later(method)

    def of_sent(params: dict[str, Tensor]) -> Tensor:
        return method.objective(task, ctx._replace(down=State(Model(params, {}), {})), model, batch)[0]

    def of_previous(params: dict[str, Tensor]) -> Tensor:
        client_state = ctx.client_state._replace(extra={"previous": {"params": params, "stats": {}}})
        return method.objective(task, ctx._replace(client_state=client_state), model, batch)[0]

    for loss, params in ((of_sent, ctx.down.model.params), (of_previous, ctx.client_state.extra["previous"]["params"])):
        assert all(bool((gradient == 0).all()) for gradient in torch.func.grad(loss)(params).values())
        assert float(loss(params)) != float(loss(tree.scale(params, 1.1)))


def test_in_its_first_round_the_contrast_is_the_constant_log_2() -> None:
    method = MOON()
    fed = prepared(method)
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    moved = State(tree.map(lambda leaf: leaf + 0.1, server.model), {})  # also for a client that joins late
    ctx = engine.context(moved, None, fed.client(0, 9, 0.1, 1))
    batch = next(engine.batches(0, 9, 1))
    model = method.begin(fed.task, ctx).model
    _, outcome = method.objective(fed.task, ctx, model, batch)
    assert float(outcome.metrics["contrast"]) == pytest.approx(math.log(2), rel=1e-15)
    sent = engine.train_round(moved, {}, [0], 9, 0.1, 1)
    plain = Sequential(without(), fed).train_round(moved, {}, [0], 9, 0.1, 1)
    for name, examples in sent.ups.model.params.items():
        torch.testing.assert_close(examples, plain.ups.model.params[name], rtol=1e-12, atol=1e-14)


# ---- the previous model


def test_the_former_model_is_the_clients_own_last_one() -> None:
    """From the last round whose upload was aggregated; lost uploads do not change it."""
    settings: dict[str, Any] = {"clients": 6, "participation": 0.7, "client_dropout": 0.4}
    method = MOON(width=16)
    runs = {rounds: fedrane.run(quick(method=method, rounds=rounds, **settings)) for rounds in range(1, 6)}
    history = runs[5].history
    assert any(k in runs[5].client_states and k in record["lost"] for record in history[2:] for k in range(6))
    checked = 0
    for k, client_state in runs[5].client_states.items():
        last = max(record["round"] for record in history if k in record["cohort"])
        if last > 1:
            before = runs[last - 1]
            engine = Sequential(method, before.federation)
            again = engine.train_round(before.server, before.client_states, [k], last, 0.1, 1)
            uploaded = tree.pick(tree.row(again.ups.model.params, 0), lambda name: not name.startswith("head."))
            same_bytes(client_state.extra["previous"]["params"], uploaded)
            checked += 1
    assert checked >= 3


def test_it_stays_with_its_client() -> None:
    """Only the model is sent in both directions; the server keeps nothing else."""
    method = MOON()
    fed = prepared(method)
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.1, 1)
    assert (
        sent.ups.extra
        == server.extra
        == engine.context(server, sent.client_states[0], fed.client(0, 2, 0.1, 1)).down.extra
    )
    assert sent.ups.extra == {}
    assert not tree.equal(sent.client_states[0], sent.client_states[1])


def test_with_local_normalisation_the_previous_model_has_its_own_layers() -> None:
    result = conformance.trained(MOON(), norm="local", rounds=2)
    assert result.algorithm.models_on(result.task) == (PERSONAL,)
    for client_state in result.client_states.values():
        former = {**client_state.extra["previous"]["params"], **client_state.extra["previous"]["stats"]}
        for name, value in {**client_state.model.params, **client_state.model.stats}.items():
            assert torch.equal(former[name], value)


# ---- without the contrast


def test_without_strength_it_is_fedavg() -> None:
    """Bit for bit on every parameter outside the projection, with a warning."""
    settings = {"rounds": 4, "momentum": 0.5, "weight_decay": 0.01, "participation": 0.5, "clients": 6}
    mine, plain = (fedrane.run(quick(method=m, **settings)) for m in (without(), FedAvg()))
    same_bytes(tree.pick(mine.server.model.params, lambda n: not n.startswith("project.")), plain.server.model.params)
    for a, b in zip(mine.history, plain.history, strict=True):
        assert (a["global/accuracy"], a["global/loss"]) == (b["global/accuracy"], b["global/loss"])


class Longer(FedAvg):
    """FedAvg on the network with the projection in its head, from the same start."""

    def init(self, task: Task, roster: Any) -> State:
        inline = without(width=9, projection="inline")
        start = inline.init(inline.prepare(federation(table(60), HALVES).task), roster).model
        return State(Model({self.renamed(name): value for name, value in start.params.items()}, {}), {})

    @staticmethod
    def renamed(name: str) -> str:
        return (
            name.replace("project.", "head.")
            .replace("head.weight", "head.3.weight")
            .replace("head.bias", "head.3.bias")
        )


def test_inline_without_strength_is_fedavg_on_the_longer_network() -> None:
    def longer(shape: tuple[int, ...], classes: int) -> nn.Module:
        body, act, _ = dense(shape, classes)
        head = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 9), nn.Linear(9, classes))
        return nn.Sequential(body, act, head)

    ends = []
    for method, fed in (
        (without(width=9, projection="inline"), prepared(without(width=9, projection="inline"))),
        (Longer(), federation(table(60), HALVES, longer, batch=8)),
    ):
        engine, server, client_states = Sequential(method, fed), method.init(fed.task, fed.roster), {}
        for round in (1, 2, 3):
            sent = engine.train_round(server, client_states, [0, 1], round, 0.1, 2)
            server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
            client_states = dict(sent.client_states)
        x = fed.test.take(fed.split.train[0])[0]
        ends.append((server.model.params, method.predict(fed.task, server.model, x, torch.ones(len(x), dtype=bool))))
    (mine, predictions), (plain, expected) = ends
    same_bytes({Longer.renamed(name): value for name, value in mine.items()}, plain)
    assert torch.equal(predictions, expected)


def test_the_contrast_draws_to_the_global_model_and_away_from_the_former() -> None:
    """From the same state, a round with the contrast ends nearer to the global and further from the previous model."""
    task, ctx, _, _ = later(MOON(1e-3))
    fed = prepared(MOON())
    x, y = fed.train.take(fed.split.train[1])

    def seen(model: Model) -> Tensor:
        net = task.evaluating(model, torch.ones(len(y), dtype=torch.bool))
        return net.part("project", net.body(x))

    sent, former = (seen(model) for model in (ctx.down.model, Model(**ctx.client_state.extra["previous"])))
    ends = []
    for method in (MOON(2.0), without()):
        work = method.begin(task, ctx)
        for batch in Sequential(method, fed).batches(1, 3, 2):
            work = method.step(task, ctx, work, batch)
        near, far = (torch.cosine_similarity(seen(work.model), other).mean() for other in (sent, former))
        ends.append(float(near - far))
    assert ends[0] > ends[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"strength": -1.0}, "strength"), ({"temperature": 0.0}, "temperature"), ({"projection": "inlined"}, "'inline'")],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MOON(**settings)


def test_inline_without_its_term_warns() -> None:
    with pytest.warns(UserWarning, match="longer head"):
        MOON(strength=0.0, projection="inline")


@pytest.mark.parametrize("law", slow_except(["it_learns"], [law.__name__ for law in conformance.LAWS]))
def test_inline_keeps_every_law(law: str) -> None:
    assert conformance.check(MOON(projection="inline"), getattr(conformance, law)) is None
