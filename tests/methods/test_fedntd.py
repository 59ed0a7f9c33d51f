"""FedNTD: the divergence from the received model on all classes but the true one, and its gradient by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrane import Model, State, tree
from fedrane.data.augment import Mixed
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedntd import FedNTD
from fedrane.task import cross_entropy, masked_mean
from fedrane.testing import conformance
from fedrane.tree import Tensors
from objectives import Midway, differences_agree, midway
from problems import DOUBLE, federation, table

METHOD = FedNTD(strength=3.0, temperature=2.0)


def not_true(scores: Tensor, y: int, temperature: float = 2.0) -> list[float]:
    """The probabilities of all classes, of which the true one has none."""
    weights = [math.exp(float(s) / temperature) for s in scores]
    weights[y] = 0.0
    return [weight / sum(weights) for weight in weights]


def divergence(client: Midway, params: Tensors, y: Tensor) -> Tensor:
    """Of every example, by a loop over its classes that are not true."""
    values = []
    for sent, now, true in zip(client.scores(client.ctx.down.model.params), client.scores(params), y, strict=True):
        pairs = zip(not_true(sent, int(true)), not_true(now, int(true)), strict=True)
        values.append(sum(p * math.log(p / q) for p, q in pairs if p))
    return torch.tensor(values, dtype=DOUBLE)


def test_the_loss_by_a_double_loop() -> None:
    client = midway(METHOD)
    mask = client.batch.mask
    expected = masked_mean(divergence(client, client.params, client.batch.y), mask)
    assert float(expected) > 1e-3
    loss, outcome = METHOD.objective(client.task, client.ctx, Model(client.params, {}), client.batch)
    torch.testing.assert_close(outcome.metrics["distillation"], expected, rtol=1e-10, atol=0)
    plain = cross_entropy(client.scores(client.params), client.batch)
    torch.testing.assert_close(outcome.metrics["loss"], plain)
    torch.testing.assert_close(loss, plain + 3.0 * expected)


def test_the_gradient_by_hand() -> None:
    """By the score of class c: softmax_c − 1 at y, and β/τ (p_c − p̂_c) elsewhere, divided by the examples."""
    client = midway(METHOD)
    scores, sent = client.scores(client.params), client.scores(client.ctx.down.model.params)
    examples = float(client.batch.mask.sum())
    by_scores = torch.zeros_like(scores)
    for i, y in enumerate(client.batch.y.tolist()):
        if client.batch.mask[i]:
            now, before = (torch.tensor(not_true(s[i], y), dtype=DOUBLE) for s in (scores, sent))
            by_scores[i] = scores[i].softmax(0) - F.one_hot(torch.tensor(y), 3) + 3.0 / 2.0 * (now - before)
    by_scores /= examples
    gradient = client.gradient(METHOD)
    torch.testing.assert_close(gradient["head.bias"], by_scores.sum(0), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(
        gradient["head.weight"], by_scores.T @ client.features(client.params), rtol=1e-10, atol=1e-14
    )
    differences_agree(lambda params: client.loss(METHOD, params), client.params)


def test_scores_of_the_true_class_are_not_distilled() -> None:
    """However the two models differ in them."""
    y = torch.tensor([0, 2, 1, 1])
    draws = torch.Generator().manual_seed(0)
    sent, now = torch.randn(2, 4, 3, generator=draws, dtype=DOUBLE)
    true = F.one_hot(y, 3) * torch.tensor([[5.0], [-80.0], [0.3], [700.0]], dtype=DOUBLE)
    value = METHOD._divergences(sent, now, y)
    assert bool((value > 1e-4).all())
    torch.testing.assert_close(METHOD._divergences(sent + true, now - 2 * true, y), value)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_certain_models_have_finite_gradients(dtype: torch.dtype) -> None:
    scores = torch.tensor([[200.0, -300.0, 0.0], [0.0, 900.0, -900.0]], dtype=dtype)

    def total(now: Tensor) -> Tensor:
        return METHOD._divergences(scores.flip(0), now, torch.tensor([0, 1])).sum()

    gradient, value = torch.func.grad_and_value(total)(scores)
    assert bool(torch.isfinite(gradient).all())
    assert bool(torch.isfinite(value))
    assert bool((gradient[[0, 1], [0, 1]] == 0).all())


def test_the_first_step_of_a_round_is_fedavgs() -> None:
    """The divergence from itself is zero, and so is its gradient."""
    client = midway(METHOD)
    client = client._replace(params=client.ctx.down.model.params)
    ours, plain = client.gradient(METHOD), client.gradient(FedAvg())
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-15)


def test_the_received_model_has_no_gradient() -> None:
    client = midway(METHOD)

    def loss(sent: Tensors) -> Tensor:
        return client._replace(ctx=client.ctx._replace(down=State(Model(sent, {}), {}))).loss(METHOD, client.params)

    sent = client.ctx.down.model.params
    assert all(bool((gradient == 0).all()) for gradient in torch.func.grad(loss)(sent).values())
    assert float(loss(sent)) != float(loss(tree.scale(sent, 1.5)))


def test_the_received_model_is_fixed() -> None:
    """It is in evaluation mode: running statistics, no dropout."""
    method = FedNTD()
    result = conformance.trained(method, rounds=2)
    task, ctx = result.task, conformance.Bench(result, method).context(0)
    batch = next(Sequential(method, result.federation).batches(0, 3, 1))
    model = method.start(task, ctx)
    net, fixed = task.training(model, batch), task.evaluating(model, batch.mask)
    now, sent = (each.head(each.body(batch.x)) for each in (net, fixed))
    true = F.one_hot(batch.y, 3).bool()
    p, q = (scores[~true].reshape(-1, 2).softmax(1) for scores in (sent, now))
    expected = masked_mean((p * (p / q).log()).sum(1), batch.mask)
    assert float(expected) > 1e-5
    _, outcome = method.objective(task, ctx, model, batch)
    torch.testing.assert_close(outcome.metrics["distillation"], expected)


def test_both_labels_of_a_mixed_example_count_by_their_weights() -> None:
    client = midway(METHOD)
    other = (client.batch.y + 1) % 3
    weight = torch.linspace(0.1, 0.9, len(other), dtype=DOUBLE)
    batch = client.batch._replace(mixed=Mixed(other, weight))
    first, second = (divergence(client, client.params, y) for y in (client.batch.y, other))
    _, outcome = METHOD.objective(client.task, client.ctx, Model(client.params, {}), batch)
    expected = masked_mean((1 - weight) * first + weight * second, batch.mask)
    torch.testing.assert_close(outcome.metrics["distillation"], expected)


def test_what_makes_it_fedavg_is_reported() -> None:
    with pytest.warns(UserWarning, match="is FedAvg"):
        FedNTD(strength=0.0)
    with pytest.raises(ConfigError, match="temperature"):
        FedNTD(temperature=0.0)


@pytest.mark.parametrize("classes", [2, 3])
def test_on_two_classes_it_is_fedavg_and_the_first_round_reports_it(classes: int) -> None:
    """The one class that is not true always has probability 1."""
    whole = table(60)
    y, y_test = whole.y % classes, whole.y_test % classes
    dataset = replace(whole, y=y, y_test=y_test, classes=tuple("abc"[:classes]))
    fed = federation(dataset, [list(range(10)), list(range(10, 30))], batch=8)
    server = METHOD.init(fed.task, fed.roster)
    for round in (1, 2):
        sent, plain = (Sequential(m, fed).train_round(server, {}, [0, 1], round, 0.3, 2) for m in (METHOD, FedAvg()))
        gaps = tree.sub(sent.ups.model.params, plain.ups.model.params)
        assert (float(tree.norm(gaps)) < 1e-12) == (classes == 2)
        _, record = METHOD.aggregate(fed.task, server, sent.ups, sent.cohort)
        assert ("two classes is FedAvg" in str(record)) == (classes == 2 and round == 1)
