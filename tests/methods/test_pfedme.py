"""pFedMe: the personal model is the proximal minimiser, the outer step the gradient of the Moreau envelope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

import fedrane
from asserts import same_bytes
from fedrane import Callback, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.pfedme import PFedMe
from fedrane.ops.sgd import SGD
from fedrane.task import State
from problems import DOUBLE, Quadratics, quick


def minimiser(problem: Quadratics, k: int, around: Tensor, strength: float) -> Tensor:
    """(H + λI)⁻¹ (H a + λ w)."""
    h, a = problem.curvatures[k], problem.centres[k]
    return torch.linalg.solve(h + strength * torch.eye(len(a), dtype=DOUBLE), h @ a + strength * around)


@pytest.mark.parametrize(("strength", "inner_lr"), [(0.5, 0.2), (15.0, 0.05)])
def test_one_batch_is_a_gradient_step_on_the_moreau_envelope(
    strength: float, inner_lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the inner loop run to convergence: θ is the minimiser, and w ← w − η ∇ min_θ (f(θ) + λ/2 ‖θ − w‖²)."""
    problem = Quadratics(monkeypatch)
    fed, method = problem.federation, PFedMe(strength, 160, inner_lr, outer_lr=0.02)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.1, 1)
    origin = problem.point(server.model.params)

    def envelope(w: Tensor, k: int) -> Tensor:
        theta = minimiser(problem, k, w, strength)
        away, pull = theta - problem.centres[k], theta - w
        return 0.5 * away @ problem.curvatures[k] @ away + strength / 2 * pull @ pull

    for k in range(3):
        theta = problem.point(sent.client_states[k].model.params)
        torch.testing.assert_close(theta, minimiser(problem, k, origin, strength), rtol=1e-9, atol=1e-9)
        local = problem.point(tree.row(sent.ups.model.params, k))
        torch.testing.assert_close(local, origin - 0.02 * strength * (origin - theta), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(local, origin - 0.02 * grad(envelope)(origin, k), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_batches_follow_one_another_as_in_the_authors_code(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ continues from batch to batch, w moves once per batch; the experiment's momentum applies to the inner steps."""
    problem = Quadratics(monkeypatch)
    fed = problem.federation
    object.__setattr__(fed.task, "optimizer", SGD(momentum=momentum, weight_decay=0.01))
    method = PFedMe(strength=3.0, inner_steps=4, inner_lr=0.07, outer_lr=0.1)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [1], 1, 0.1, 6)
    theta = local = problem.point(server.model.params)
    velocity = torch.zeros_like(theta)
    for _ in range(6):
        for _ in range(4):
            gradient = problem.curvatures[1] @ (theta - problem.centres[1]) + 3.0 * (theta - local) + 0.01 * theta
            velocity = momentum * velocity + gradient
            theta = theta - 0.07 * velocity
        local = local - 0.1 * 3.0 * (local - theta)
    torch.testing.assert_close(problem.point(sent.client_states[1].model.params), theta, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(problem.point(tree.row(sent.ups.model.params, 0)), local, rtol=1e-9, atol=1e-12)


def test_the_server_goes_by_its_blend(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the way to the mean by examples, half of it, or twice."""
    problem = Quadratics(monkeypatch)
    fed, ends = problem.federation, {}
    for blend in (1.0, 0.5, 2.0):
        method = PFedMe(blend=blend)
        server = method.init(fed.task, fed.roster)
        sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.1, 3)
        after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        ends[blend] = problem.point(after.model.params) - problem.point(server.model.params)
    shares = torch.tensor([4.0, 5.0, 6.0], dtype=DOUBLE) / 15
    local = torch.stack([problem.point(tree.row(sent.ups.model.params, k)) for k in range(3)])
    torch.testing.assert_close(ends[1.0], shares @ local - problem.point(server.model.params))
    assert float(ends[1.0].norm()) > 1e-3
    for blend in (0.5, 2.0):
        torch.testing.assert_close(ends[blend], blend * ends[1.0])


def test_like_clients_end_at_their_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both w and every θ, since the envelope and the loss then have the same minimum."""
    problem = Quadratics(monkeypatch)
    problem.centres[:], problem.curvatures[:] = problem.centres[0].clone(), problem.curvatures[0].clone()
    fed, method = problem.federation, PFedMe(strength=5.0, inner_steps=10, inner_lr=0.1, outer_lr=0.35)
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in range(1, 101):
        sent = Sequential(method, fed).train_round(server, client_states, [round % 3, (round + 1) % 3], round, 0.1, 1)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    torch.testing.assert_close(problem.point(server.model.params), problem.centres[0], rtol=1e-6, atol=1e-6)
    for client_state in client_states.values():
        torch.testing.assert_close(problem.point(client_state.model.params), problem.centres[0], rtol=1e-4, atol=1e-4)


def test_the_personal_model_is_trained_and_no_alias_of_the_global_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each θ is better on its own client's loss than the global model, and different from it and from w_k."""
    problem = Quadratics(monkeypatch)
    fed, method = problem.federation, PFedMe()
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in range(1, 21):
        sent = Sequential(method, fed).train_round(server, client_states, [0, 1, 2], round, 0.1, 2)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    for k in range(3):
        ctx = Sequential(method, fed).context(server, client_states[k], fed.client(k, 21, 0.1, 1))
        personal = problem.point(method.personal_model(fed.task, ctx).params)
        away, common = personal - problem.centres[k], problem.point(server.model.params) - problem.centres[k]
        assert away @ problem.curvatures[k] @ away < common @ problem.curvatures[k] @ common
        assert float((personal - problem.point(tree.row(sent.ups.model.params, k))).norm()) > 1e-3


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_the_experiments_lr_is_not_used_and_that_is_reported_once() -> None:
    messages = Messages()
    runs = [fedrane.run(quick(method=PFedMe(), rounds=3, lr=lr), callbacks=[messages]) for lr in (0.1, 0.7)]
    same_bytes(runs[0].server, runs[1].server)
    same_bytes(
        {str(k): v for k, v in runs[0].client_states.items()}, {str(k): v for k, v in runs[1].client_states.items()}
    )
    assert len([text for text in messages.texts if "lr and its schedule are not used" in text]) == len(runs)


@pytest.mark.parametrize(
    "settings", [{"outer_lr": 0.14}, {"inner_lr": 0.14}, {"blend": 0.0}, {"strength": 0.0}], ids=str
)
def test_what_would_run_away_or_stand_still_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PFedMe(**settings)
