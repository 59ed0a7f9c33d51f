"""APFL: both models and the weight of the mix by their formulas, and a global model that is FedAvg's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close, same_bytes
from fedrane import Model, State, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.apfl import APFL
from fedrane.methods.fedavg import FedAvg
from fedrane.testing import conformance
from problems import DOUBLE, Quadratics, quick

FIRST = 0.3


def kept(server: State, weight: float = FIRST) -> State:
    """A client whose personal model is away from the global one."""
    nothing: dict[str, Tensor] = {}
    away = tree.map(lambda p: p + torch.linspace(-1, 0.5, p.numel(), dtype=DOUBLE).reshape(p.shape), server.model)
    extra = {"weight": torch.tensor(weight, dtype=DOUBLE), "global": Model(nothing, nothing)._asdict()}
    return State(away, extra)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("steps", [1, 4])
def test_all_three_by_the_formulas(adaptive: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's gradients are those at the point before it."""
    problem, lr = Quadratics(monkeypatch), 0.05
    method, fed = APFL(adaptive=adaptive), problem.federation
    server = method.init(fed.task, fed.roster)
    client = kept(server)
    sent = Sequential(method, fed).train_round(server, {1: client}, [1], 1, lr, steps)
    w, v, weight = problem.point(server.model.params), problem.point(client.model.params), FIRST
    for _ in range(steps):
        mixed = weight * v + (1 - weight) * w
        gradient = problem.curvatures[1] @ (mixed - problem.centres[1])
        of_w = problem.curvatures[1] @ (w - problem.centres[1])
        moved = min(max(weight - lr * float((v - w) @ gradient), 0), 1)
        w, v = w - lr * of_w, v - lr * weight * gradient
        weight = moved if adaptive else weight
    after = sent.client_states[1]
    close({"v": problem.point(after.model.params)}, {"v": v}, 1e-12)
    close({"w": problem.point(tree.row(sent.ups.model.params, 0))}, {"w": w}, 1e-12)
    assert float(after.extra["weight"]) == pytest.approx(weight, abs=1e-12)
    assert sent.metrics["weight"] == [pytest.approx(weight, abs=1e-12)]
    assert (abs(weight - FIRST) > 1e-3) == adaptive


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_weight_stays_between_zero_and_one(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that would be far outside ends at the bound."""
    problem = Quadratics(monkeypatch)
    method, fed = APFL(adaptive=True), problem.federation
    server = method.init(fed.task, fed.roster)
    client = kept(server)
    mixed = tree.add(tree.scale(client.model.params, FIRST), tree.scale(server.model.params, 1 - FIRST))
    away = problem.point(client.model.params) - problem.point(server.model.params)
    # the minimum lies beyond the mix, on the side that raises the weight or lowers it
    problem.centres[0] = problem.point(mixed) + sign * 1e4 * torch.linalg.solve(problem.curvatures[0], away)
    sent = Sequential(method, fed).train_round(server, {0: client}, [0], 1, 0.05, 1)
    assert float(sent.client_states[0].extra["weight"]) == (sign > 0)


def test_with_no_weight_a_client_predicts_with_fedavgs_model() -> None:
    """And v_k never moves: its gradient has the factor α."""
    with pytest.warns(UserWarning, match="is FedAvg"):
        method = APFL(0.0)
    ours, plain = (conformance.trained(each, momentum=0.5, participation=0.6) for each in (method, FedAvg()))
    same_bytes(ours.server, plain.server)
    same_bytes(dict(ours.personal(1).parts.named_parameters()), plain.server.model.params)
    first = ours.algorithm.init(ours.task, ours.federation.roster).model.params
    joined = [state.model.params for state in ours.client_states.values()]
    assert any(tree.equal(params, first) for params in joined)


def test_a_client_predicts_with_the_mix_with_the_newest_global_model() -> None:
    result = fedrane.run(quick(method=APFL(0.3), rounds=3, precision="float64"))
    ours, newest = result.client_states[2].model.params, result.server.model.params
    expected = {name: 0.3 * value + 0.7 * newest[name] for name, value in ours.items()}
    predicting = {name: value.detach() for name, value in result.personal(2).parts.named_parameters()}
    close(predicting, expected, 1e-12)
    assert result.history[-1]["bytes_up"] == 8 * 4 * sum(p.numel() for p in newest.values()), "v_k never leaves"


def test_the_mix_has_statistics_of_its_own() -> None:
    """And with norm=local both models have layers of their own."""
    result = conformance.trained(APFL(0.3), norm="local")
    state = result.client_states[1]
    layers = state.extra["global"]
    assert layers["params"]
    assert layers["stats"]
    for name, value in {**layers["params"], **layers["stats"]}.items():
        assert not torch.equal(value, {**state.model.params, **state.model.stats}[name])
    ctx = conformance.Bench(result, result.algorithm).context(1)
    mixed, name = result.algorithm.personal_model(result.task, ctx), next(iter(layers["params"]))
    torch.testing.assert_close(mixed.params[name], 0.3 * state.model.params[name] + 0.7 * layers["params"][name])
    same_bytes(mixed.stats, state.model.stats)


@pytest.mark.parametrize(
    "law",
    [conformance.client_hooks_read_no_values, conformance.padding_changes_nothing, conformance.dtype_is_kept],
    ids=lambda law: law.__name__,
)
def test_a_learned_weight_keeps_the_laws(law: object) -> None:
    assert conformance.check(APFL(adaptive=True), law) is None  # type: ignore[arg-type]


def test_a_learned_weight_on_stacked_clients() -> None:
    one, other = (conformance.trained(APFL(adaptive=True), engine=engine) for engine in ("sequential", "stacked"))
    close(conformance.states(one), conformance.states(other), 1e-12)
    weights = {float(state.extra["weight"]) for state in one.client_states.values()}
    assert len(weights) == 5, "each client has its own"


def test_bad_weights_are_refused_and_idle_ones_reported() -> None:
    for weight in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="weight"):
            APFL(weight)
    with pytest.warns(UserWarning, match="is local training"):
        APFL(1.0)
    APFL(1.0, adaptive=True)
