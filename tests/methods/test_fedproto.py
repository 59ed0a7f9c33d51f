"""FedProto: prototypes by their definition, and the pull towards them by its formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

import fedrane
from asserts import close
from fedrane import Context, Model, State, tree
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedproto import FedProto
from problems import DOUBLE, federation, quick, table

CLASSES = [[0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15], [*range(20, 36)]]
"""The first client has two of the three classes: example i is of class i mod 3."""


def prepared(method: FedProto, batch: int = 4) -> Federation:
    fed = federation(table(60), CLASSES, batch=batch)
    return replace(fed, task=method.prepare(fed.task))


def sent_down(server: State, known: list[float]) -> State:
    """A server with prototypes of some classes; what stands for the others has no effect."""
    points = 0.5 * torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    return server._replace(extra={"prototypes": points, "known": torch.tensor(known, dtype=DOUBLE)})


def features(fed: Federation, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, params["body.0.weight"], params["body.0.bias"]))


@pytest.mark.parametrize("strength", [0.5, 3.0])
@pytest.mark.parametrize("known", [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], ids=["all", "one", "none"])
def test_the_loss_and_its_gradient_by_the_formula(strength: float, known: list[float]) -> None:
    """Cross entropy + λ · mean over examples and features of (z − C^y)²; zero for a class without a prototype."""
    method = FedProto(strength)
    fed = prepared(method, batch=9)
    server = sent_down(method.init(fed.task, fed.roster), known)
    engine = Sequential(method, fed)
    ctx = engine.context(server, None, fed.client(1, 2, 0.1, 1))
    batch = next(engine.batches(1, 2, 1))
    params = ctx.client_state.model.params

    def expected(params: dict[str, Tensor]) -> Tensor:
        z = features(fed, params, batch.x)
        loss = F.cross_entropy(F.linear(z, params["head.weight"], params["head.bias"]), batch.y)
        for example, label in zip(z, batch.y.tolist(), strict=True):
            if known[label]:
                away = (example - server.extra["prototypes"][label]).square().mean()
                loss = loss + strength * away / len(batch.y)
        return loss

    def ours(params: dict[str, Tensor]) -> Tensor:
        return method.objective(fed.task, ctx, Model(params, {}), batch)[0]

    torch.testing.assert_close(ours(params), expected(params), rtol=1e-12, atol=1e-12)
    by_hand = {name: value.clone().requires_grad_() for name, value in params.items()}
    gradients = torch.autograd.grad(expected(by_hand), list(by_hand.values()))
    close(grad(ours)(params), dict(zip(params, gradients, strict=True)), 1e-12)


@pytest.mark.parametrize("weighting", ["examples", "clients"])
def test_prototypes_are_the_mean_features_of_each_class(weighting: str) -> None:
    """At a learning rate of zero, over two epochs of short batches: of one epoch, each example once."""
    method = FedProto(weighting=weighting)
    fed = prepared(method)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.0, 2)
    for k in (0, 1):
        x, y = fed.train.take(fed.split.train[k])
        z = features(fed, server.model.params, x)
        for c in range(3):
            count = int((y == c).sum())
            expected = z[y == c].mean(0) if count else torch.zeros(5, dtype=DOUBLE)
            torch.testing.assert_close(sent.ups.extra["prototypes"][k, c], expected, rtol=1e-12, atol=1e-12)
            assert sent.ups.extra["weights"][k, c] == (count if weighting == "examples" else count > 0)
    assert sent.ups.extra["weights"][0, 2] == 0, "a class without examples has no prototype"


def test_prototypes_are_of_the_model_as_it_is_after_each_step() -> None:
    """One batch in an epoch: then they are those of the model that the client keeps."""
    method = FedProto()
    fed = prepared(method, batch=100)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [1], 1, 0.5, 3)
    x, y = fed.train.take(fed.split.train[1])
    z = features(fed, sent.client_states[1].model.params, x)
    expected = torch.stack([z[y == c].mean(0) for c in range(3)])
    torch.testing.assert_close(sent.ups.extra["prototypes"][0], expected, rtol=1e-12, atol=1e-12)


def test_the_server_averages_over_those_who_have_the_class() -> None:
    """And keeps the prototype of a class that nobody has in a round."""
    method = FedProto()
    fed = prepared(method)
    server = sent_down(method.init(fed.task, fed.roster), [0.0, 0.0, 1.0])
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.3, 1)
    points, weights = sent.ups.extra["prototypes"], sent.ups.extra["weights"]
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for c in (0, 1):
        expected = (weights[0, c] * points[0, c] + weights[1, c] * points[1, c]) / weights[:, c].sum()
        torch.testing.assert_close(after.extra["prototypes"][c], expected)
    torch.testing.assert_close(after.extra["prototypes"][2], points[1, 2])
    assert after.extra["known"].tolist() == [1, 1, 1]
    alone = Sequential(method, fed).train_round(server, {}, [0], 1, 0.3, 1)
    after, _ = method.aggregate(fed.task, server, alone.ups, alone.cohort)
    torch.testing.assert_close(after.extra["prototypes"][:2], alone.ups.extra["prototypes"][0, :2])
    assert torch.equal(after.extra["prototypes"][2], server.extra["prototypes"][2])
    assert after.extra["known"].tolist() == [1, 1, 1]
    never, _ = method.aggregate(fed.task, method.init(fed.task, fed.roster), alone.ups, alone.cohort)
    assert never.extra["known"].tolist() == [1, 1, 0]


def predictions(method: FedProto, known: list[float], client: int) -> tuple[Tensor, Tensor, Context, Federation]:
    fed = prepared(method)
    server = sent_down(method.init(fed.task, fed.roster), known)
    ctx = Sequential(method, fed).context(server, None, fed.client(client, 2, 0.1, 1))
    x, _ = fed.test.take(torch.arange(30))
    model = method.personal_model(fed.task, ctx)
    return method.predict(fed.task, model, x, torch.ones(30, dtype=torch.bool)), x, ctx, fed


def test_a_client_predicts_the_nearest_of_its_classes() -> None:
    """Of those it has examples of, and that have a prototype."""
    for client, known, classes in (
        (1, [1.0, 1.0, 1.0], [0, 1, 2]),
        (1, [1.0, 0.0, 1.0], [0, 2]),
        (0, [1.0] * 3, [0, 1]),
    ):
        scores, x, ctx, fed = predictions(FedProto(), known, client)
        z = features(fed, ctx.client_state.model.params, x)
        distances = torch.cdist(z, ctx.down.extra["prototypes"][classes])
        assert scores.argmax(1).tolist() == [classes[best] for best in distances.argmin(1).tolist()]
        torch.testing.assert_close(scores[:, classes], -distances.square())


@pytest.mark.parametrize(("classifier", "known"), [("head", [1.0] * 3), ("prototypes", [0.0] * 3)])
def test_by_wish_or_without_prototypes_it_predicts_with_the_head(classifier: str, known: list[float]) -> None:
    scores, x, ctx, fed = predictions(FedProto(classifier=classifier), known, 1)
    params = ctx.client_state.model.params
    expected = F.linear(features(fed, params, x), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(scores, expected)


def test_no_model_travels() -> None:
    """Up and down go one prototype and one number for each class."""
    result = fedrane.run(quick(method=FedProto(), rounds=2))
    record, width = result.history[-1], result.task.width
    assert record["bytes_up"] == record["bytes_down"] == 4 * 4 * (10 * width + 10)
    first = result.algorithm.init(result.task, result.federation.roster).model
    assert tree.equal(result.server.model, first)
    models = [state.model.params for state in result.client_states.values()]
    assert not tree.equal(models[0], models[1])


@pytest.mark.parametrize("settings", [{"strength": -1.0}, {"classifier": "nearest"}, {"weighting": "equal"}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FedProto(**settings)


def test_without_its_pull_it_warns() -> None:
    """That it is local training is held by the laws of reductions."""
    with pytest.warns(UserWarning, match="local training"):
        FedProto(0.0)
