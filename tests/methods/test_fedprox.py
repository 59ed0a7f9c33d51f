"""FedProx: its limit on quadratics in closed form; without its term it is FedAvg."""

from __future__ import annotations

import pytest
import torch

import fedrane
from asserts import same_bytes
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedprox import FedProx
from fedrane.testing.conformance import states
from problems import DOUBLE, Quadratics, quick


@pytest.mark.parametrize("strength", [0.01, 0.3, 2.0])
def test_a_client_ends_at_the_proximal_minimiser(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """(H + μI)⁻¹ (H a + μ θ): half the square of the distance, not the distance, nor the whole square."""
    problem = Quadratics(monkeypatch)
    method, fed = FedProx(strength), problem.federation
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.2, epochs=260)
    origin = problem.point(server.model.params)
    for k in range(3):
        curvature, centre = problem.curvatures[k], problem.centres[k]
        pulled = curvature + strength * torch.eye(len(centre), dtype=DOUBLE)
        expected = torch.linalg.solve(pulled, curvature @ centre + strength * origin)
        minimiser = problem.point({name: examples[k] for name, examples in sent.ups.model.params.items()})
        torch.testing.assert_close(minimiser, expected, rtol=1e-10, atol=1e-10)


def test_without_its_term_it_is_fedavg() -> None:
    """Bit for bit, with a warning."""
    with pytest.warns(UserWarning, match="is FedAvg"):
        method = FedProx(strength=0.0)
    runs = [fedrane.run(quick(method=m, rounds=3, momentum=0.5, participation=0.5)) for m in (method, FedAvg())]
    same_bytes(states(runs[0]), states(runs[1]))


def test_the_pull_holds_clients_back() -> None:
    """A stronger term keeps a client nearer to the model it was sent."""

    def distance(strength: float) -> float:
        result = fedrane.run(quick(method=FedProx(strength), rounds=1, epochs=5))
        start = result.algorithm.init(result.task, result.federation.roster).model.params
        return float(fedrane.tree.norm(fedrane.tree.sub(result.server.model.params, start)))

    assert distance(10.0) < 0.5 * distance(0.01)


def test_bad_strengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="strength"):
        FedProx(strength=-1.0)
