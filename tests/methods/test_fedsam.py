"""FedSAM: on quadratics its steps and where they end, in closed form; on a network the gradient at the worst point."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from asserts import close
from fedrane import Model, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedsam import FedSAM
from fedrane.testing import conformance
from objectives import differences_agree, midway
from problems import DOUBLE, Quadratics


def test_steps_on_a_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """w ← w − η H (w − a + ρ g/‖g‖) with g = H (w − a)."""
    problem = Quadratics(monkeypatch)
    method, fed = FedSAM(radius=0.7), problem.federation
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.2, epochs=3)
    for k in range(3):
        w = problem.point(server.model.params)
        for _ in range(3):
            away = w - problem.centres[k]
            g = problem.curvatures[k] @ away
            w = w - 0.2 * problem.curvatures[k] @ (away + 0.7 * g / g.norm())
        reached = problem.point(tree.row(sent.ups.model.params, k))
        torch.testing.assert_close(reached, w, rtol=1e-10, atol=1e-12)


def test_around_a_minimum_it_swings_by_the_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """With H = hI at a distance of η ρ h / (2 − η h): it stays nearer to a flatter minimum."""
    problem = Quadratics(monkeypatch)
    for k, h in enumerate((0.5, 1.0, 3.0)):
        problem.curvatures[k] = h * torch.eye(4, dtype=DOUBLE)
    method, fed = FedSAM(radius=0.3), problem.federation
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.3, epochs=150)
    for k, h in enumerate((0.5, 1.0, 3.0)):
        distance = (problem.point(tree.row(sent.ups.model.params, k)) - problem.centres[k]).norm()
        assert float(distance) == pytest.approx(0.3 * 0.3 * h / (2 - 0.3 * h), rel=1e-6)


def test_at_a_minimum_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no direction: no division by zero."""
    problem = Quadratics(monkeypatch)
    method, fed = FedSAM(), problem.federation
    server = method.init(fed.task, fed.roster)
    problem.centres[:] = problem.point(server.model.params)
    sent = Sequential(method, fed).train_round(server, {}, [0], 1, 0.2, epochs=2)
    assert tree.equal(tree.row(sent.ups.model.params, 0), server.model.params)


@dataclass(frozen=True)
class FrozenHead(FedSAM):
    """Its frozen parameters are not part of the distance."""

    def trains(self, name: str) -> bool:
        return not name.startswith("head.")


@pytest.mark.parametrize("method", [FedSAM(0.4), FrozenHead(0.4)], ids=["all", "frozen head"])
def test_the_gradient_is_that_at_the_worst_point_and_the_record_is_from_here(method: FedSAM) -> None:
    client = midway(method)
    plain = tree.pick(client.gradient(FedAvg()), method.trains)
    away = tree.scale(plain, 0.4 / float(tree.norm(plain)))
    worst = client._replace(params={**client.params, **tree.add(tree.pick(client.params, method.trains), away)})
    gradient = tree.pick(client.gradient(method), method.trains)
    close(gradient, tree.pick(worst.gradient(FedAvg()), method.trains), 1e-12)
    differences_agree(lambda params: client.loss(FedAvg(), params), worst.params)
    loss, outcome = method.objective(client.task, client.ctx, Model(client.params, {}), client.batch)
    torch.testing.assert_close(loss, worst.loss(FedAvg(), worst.params))
    torch.testing.assert_close(outcome.metrics["loss"], client.loss(FedAvg(), client.params))
    assert float(loss) > float(outcome.metrics["loss"])


def test_weight_decay_and_momentum_are_those_at_the_model_itself() -> None:
    """Two steps by the formula: the decay is of θ, not of the worst point."""
    method = FedSAM(0.4)
    result = conformance.trained(method, False, rounds=1, momentum=0.5, weight_decay=0.1)
    bench = conformance.Bench(result, method)
    task, ctx, engine = result.task, bench.context(0), bench.engine
    first, second = list(engine.batches(0, 2, 2))[:2]
    work = method.begin(task, ctx)
    params, velocity = work.model.params, tree.zeros_like(work.model.params)
    for batch in (first, second):
        here = Model(params, {})
        gradient = torch.func.grad(lambda p, b=batch: method.objective(task, ctx, Model(p, {}), b)[0])(here.params)
        velocity = tree.add(tree.scale(velocity, 0.5), tree.add(gradient, tree.scale(params, 0.1)))
        params = tree.sub(params, tree.scale(velocity, ctx.client.lr))
        work = method.step(task, ctx, work, batch)
    close(work.model.params, params, 1e-12)


def test_statistics_change_once_in_a_step() -> None:
    """By the pass at θ: after one step they are FedAvg's."""
    result = conformance.trained(FedSAM(2.0), rounds=1)
    bench = conformance.Bench(result, FedSAM(2.0))
    batch = next(bench.engine.batches(0, 2, 1))
    ctx = bench.context(0)
    ours, plain = (m.step(result.task, ctx, m.begin(result.task, ctx), batch) for m in (FedSAM(2.0), FedAvg()))
    assert ours.model.stats
    assert tree.equal(ours.model.stats, plain.model.stats)
    assert not tree.equal(ours.model.params, plain.model.params)


def test_bad_radii_are_refused_and_zero_is_reported() -> None:
    with pytest.raises(ConfigError, match="radius"):
        FedSAM(radius=-0.1)
    with pytest.warns(UserWarning, match="is FedAvg"):
        FedSAM(radius=0.0)
