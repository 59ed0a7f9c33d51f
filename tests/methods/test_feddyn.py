"""FedDyn: its fixed point is the joint optimum; its duals sum to the server's; minimisers in closed form."""

from __future__ import annotations

import pytest
import torch

import fedrane
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.feddyn import FedDyn
from fedrane.task import State
from problems import DOUBLE, Quadratics, quick


def test_the_fixed_point_is_the_joint_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of (1/N) Σ f_i, also with partial participation; there each g_k is its client's gradient and h is 0."""
    problem = Quadratics(monkeypatch)
    method, fed = FedDyn(strength=1.0), problem.federation
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in range(1, 101):
        cohort = [0, 1, 2] if round % 3 else [round % 2, 2]
        sent = Sequential(method, fed).train_round(server, client_states, cohort, round, 0.2, 10)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    pulls = (problem.curvatures @ problem.centres[..., None])[..., 0]
    optimum = torch.linalg.solve(problem.curvatures.sum(0), pulls.sum(0))
    point = problem.point(server.model.params)
    torch.testing.assert_close(point, optimum, rtol=0, atol=1e-10)
    for k in range(3):
        gradient = problem.curvatures[k] @ (optimum - problem.centres[k])
        torch.testing.assert_close(problem.point(client_states[k].extra["dual"]), gradient, rtol=0, atol=1e-9)
    assert float(problem.point(server.extra["dual"]).norm()) < 1e-10


def test_the_clients_minimiser_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """(H + αI)⁻¹ (H a + g + αθ): the sign of g, the square and its half all matter."""
    problem = Quadratics(monkeypatch)
    method, fed = FedDyn(strength=0.7), problem.federation
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in (1, 2, 3):
        sent = Sequential(method, fed).train_round(server, client_states, [0, 1, 2], round, 0.3, 100)
        origin = problem.point(server.model.params)
        for k in range(3):
            dual = problem.point(client_states[k].extra["dual"]) if client_states else torch.zeros(4, dtype=DOUBLE)
            matrix = problem.curvatures[k] + 0.7 * torch.eye(4, dtype=DOUBLE)
            expected = torch.linalg.solve(matrix, problem.curvatures[k] @ problem.centres[k] + dual + 0.7 * origin)
            minimiser = problem.point({name: examples[k] for name, examples in sent.ups.model.params.items()})
            torch.testing.assert_close(minimiser, expected, rtol=1e-9, atol=1e-9)
            kept = problem.point(sent.client_states[k].extra["dual"])
            torch.testing.assert_close(kept, dual - 0.7 * (minimiser - origin), rtol=1e-9, atol=1e-9)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states


def test_the_servers_step_by_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """h ← h − (α/N) Σ (θ_k − θ), then θ ← mean of θ_k − h / α with the new h; a part of the clients, unequal sizes."""
    problem = Quadratics(monkeypatch)
    method, fed = FedDyn(strength=0.7), problem.federation
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round, cohort in enumerate(([0, 1], [2], [0, 2]), 1):
        sent = Sequential(method, fed).train_round(server, client_states, cohort, round, 0.1, 3)
        origin, dual = problem.point(server.model.params), problem.point(server.extra["dual"])
        ends = torch.stack([problem.point(tree.row(sent.ups.model.params, k)) for k in range(len(cohort))])
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
        dual = dual - 0.7 / 3 * (ends - origin).sum(0)
        torch.testing.assert_close(problem.point(server.extra["dual"]), dual, rtol=1e-12, atol=1e-12)
        expected = ends.mean(0) - dual / 0.7
        torch.testing.assert_close(problem.point(server.model.params), expected, rtol=1e-12, atol=1e-12)


def test_duals_sum_to_the_servers_under_sampling_and_loss() -> None:
    """Σ g_k / N = h over the whole population."""
    e = quick(method=FedDyn(0.1), clients=8, rounds=6, participation=0.5, client_dropout=0.3, precision="float64")
    result = fedrane.run(e)
    for name, value in result.server.extra["dual"].items():
        total = sum(client_state.extra["dual"][name] for client_state in result.client_states.values())
        torch.testing.assert_close(total / 8, value, rtol=1e-9, atol=1e-12)
    assert float(tree.norm(result.server.extra["dual"])) > 1e-4


def test_a_strength_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="strength"):
        FedDyn(strength=0.0)
