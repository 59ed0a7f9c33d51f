"""Ditto: personal models in closed form, and a global one that is FedAvg's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import same_bytes
from fedrane import Model, State, tree
from fedrane.engines.sequential import Sequential
from fedrane.methods.ditto import Ditto
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.local import Local
from fedrane.testing import conformance
from problems import DOUBLE, Quadratics, quick


@pytest.mark.parametrize("strength", [0.1, 1.0, 5.0])
def test_the_personal_model_in_closed_form(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With w fixed and steps to convergence: (H + λI)⁻¹ (H a + λ w)."""
    problem = Quadratics(monkeypatch)
    method, fed = Ditto(strength, personal_steps=2), problem.federation
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.15, 150)
    sent_down = problem.point(server.model.params)
    for k in range(3):
        matrix = problem.curvatures[k] + strength * torch.eye(4, dtype=DOUBLE)
        expected = torch.linalg.solve(matrix, problem.curvatures[k] @ problem.centres[k] + strength * sent_down)
        torch.testing.assert_close(problem.point(sent.client_states[k].model.params), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
def test_one_personal_step_by_the_formula(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the v_k that was kept, towards the w that was sent, when all three models differ."""
    problem = Quadratics(monkeypatch)
    method, fed, lr = Ditto(0.8, personal_steps=steps), problem.federation, 0.1
    server = method.init(fed.task, fed.roster)
    nothing: dict[str, Tensor] = {}
    kept = State(tree.map(lambda p: p + 1.5, server.model), {"global": Model(nothing, nothing)._asdict()})
    sent = Sequential(method, fed).train_round(server, {1: kept}, [1], 1, lr, 1)
    personal, origin = problem.point(kept.model.params), problem.point(server.model.params)
    for _ in range(steps):
        gradient = problem.curvatures[1] @ (personal - problem.centres[1]) + 0.8 * (personal - origin)
        personal = personal - lr * gradient
    torch.testing.assert_close(problem.point(sent.client_states[1].model.params), personal, rtol=1e-12, atol=1e-12)


def test_the_global_model_is_fedavgs() -> None:
    """Bit for bit: personal training does not affect it."""
    settings = {"rounds": 4, "momentum": 0.5, "participation": 0.5, "clients": 6}
    runs = [fedrane.run(quick(method=method, **settings)) for method in (Ditto(), FedAvg())]
    same_bytes(runs[0].server, runs[1].server)
    assert runs[0].history[-1]["bytes_up"] == runs[1].history[-1]["bytes_up"], "v_k never leaves"


def test_personal_models_go_on_from_round_to_round() -> None:
    """And differ from client to client."""
    result = fedrane.run(quick(method=Ditto(), rounds=2, lr=0.3))
    more = fedrane.run(quick(method=Ditto(), rounds=6, lr=0.3))
    assert more.history[-1]["personal/loss"] < result.history[-1]["personal/loss"]
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    assert not torch.equal(more.personal(0)(x), more.personal(1)(x))


def test_without_its_pull_it_is_reported_to_be_local_training() -> None:
    """And it is, bit for bit, with momentum and normalisation statistics."""
    with pytest.warns(UserWarning, match="local training"):
        method = Ditto(strength=0.0)
    pulled, alone = (conformance.trained(m, momentum=0.5) for m in (method, Local()))
    same_bytes(pulled.client_states[1].model, alone.client_states[1].model)
    assert alone.client_states[1].model.stats
