"""FedMTL: the local gradient is the joint penalty's, Ω is optimal, and related clients move together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

import fedrane
from asserts import same_bytes
from fedrane import Callback, Context, Model, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError, Diverged
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedmtl import FedMTL, covariance
from fedrane.task import State
from problems import DOUBLE, Quadratics, federation, quick, table


def columns(rows: dict[str, Tensor]) -> Tensor:
    """W, a client's model in each column."""
    return torch.cat([stacked.flatten(1) for stacked in rows.values()], 1).T


def penalty(w: Tensor, omega: Tensor) -> Tensor:
    return torch.trace(w @ torch.linalg.inv(omega) @ w.T)


def spread(rows: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Different rows, as after some training."""
    draws = torch.Generator().manual_seed(seed)
    return {name: v + 0.3 * torch.randn(v.shape, generator=draws, dtype=v.dtype) for name, v in rows.items()}


def random_covariances(count: int, size: int, least: float) -> list[Tensor]:
    """Of trace 1, with no eigenvalue below ``least``."""
    draws = torch.Generator().manual_seed(1)
    matrices = []
    for _ in range(count):
        vectors = torch.linalg.qr(torch.randn(size, size, generator=draws, dtype=DOUBLE))[0]
        shares = torch.rand(size, generator=draws, dtype=DOUBLE) ** 3
        values = least + (1 - size * least) * shares / shares.sum()
        matrices.append((vectors * values) @ vectors.T)
    return matrices


def test_the_local_gradient_is_that_of_the_joint_penalty() -> None:
    """The gradient in w_k of f_k + (λ/N) tr(W Ω⁻¹ Wᵀ), by autograd through the trace."""
    fed = federation(table(60), [list(range(20)), list(range(20, 45)), list(range(45, 60))])
    method = FedMTL(strength=0.7, floor=0.05)
    server = method.init(fed.task, fed.roster)
    rows = spread(server.extra["rows"])
    server = State(server.model, {"rows": rows, "covariance": covariance(rows, 0.05)})
    for k in range(3):
        ctx = Sequential(method, fed).context(server, None, fed.client(k, 2, 0.1, 1))
        batch = next(Sequential(method, fed).batches(k, 2, 1))
        here = ctx.client_state.model.params

        def loss(p: dict[str, Tensor], algorithm: FedMTL | FedAvg, ctx: Context = ctx) -> Tensor:
            return algorithm.objective(fed.task, ctx, Model(p, {}), batch)[0]  # noqa: B023 - called at once

        def joint(p: dict[str, Tensor], k: int = k) -> Tensor:
            replaced = {name: torch.stack([p[name] if j == k else v[j] for j in range(3)]) for name, v in rows.items()}
            return 0.7 / 3 * penalty(columns(replaced), server.extra["covariance"])

        whole, plain, added = grad(loss)(here, method), grad(loss)(here, FedAvg()), grad(joint)(here)
        for name in here:
            torch.testing.assert_close(whole[name], plain[name] + added[name], rtol=1e-9, atol=1e-10)
        assert float(tree.norm(added)) > 0.1 * float(tree.norm(plain)), "the pull counts"


@pytest.mark.parametrize("floor", [1e-3, 0.5, 0.9, 1.0])
def test_omega_is_the_best_for_its_models(floor: float) -> None:
    """Trace 1, symmetric, no eigenvalue below floor / N; and no other such matrix has a lower penalty."""
    fed = federation(table(60), [list(range(k, 60, 6)) for k in range(6)])
    rows = spread(FedMTL().init(fed.task, fed.roster).extra["rows"])
    omega, w = covariance(rows, floor), columns(rows)
    torch.testing.assert_close(omega, omega.T)
    torch.testing.assert_close(torch.trace(omega), torch.tensor(1.0, dtype=DOUBLE))
    assert float(torch.linalg.eigvalsh(omega).min()) >= floor / 6 - 1e-12
    best = float(penalty(w, omega))
    others = random_covariances(300, 6, floor / 6)
    nearby = [0.95 * omega + 0.05 * other for other in others]
    assert all(float(penalty(w, other)) >= best - 1e-9 for other in others + nearby)


def test_above_the_floor_omega_is_the_papers() -> None:
    fed = federation(table(60), [list(range(k, 60, 4)) for k in range(4)])
    rows = spread(FedMTL().init(fed.task, fed.roster).extra["rows"])
    values, vectors = torch.linalg.eigh(columns(rows).T @ columns(rows))
    root = (vectors * values.sqrt()) @ vectors.T
    torch.testing.assert_close(covariance(rows, 1e-3), root / torch.trace(root), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_like_models_leave_omega_finite(scale: float) -> None:
    """WᵀW has rank one at the start, and rank zero if all weights are zero."""
    rows = {"a": torch.full((5, 3), scale, dtype=DOUBLE)}
    values = torch.linalg.eigvalsh(covariance(rows, 0.1))
    torch.testing.assert_close(values.sum(), torch.tensor(1.0, dtype=DOUBLE))
    assert float(values.min()) >= 0.1 / 5 - 1e-12


def two_clusters(monkeypatch: pytest.MonkeyPatch, method: FedMTL) -> tuple[float, float]:
    """After training on two groups of quadratics: the distances within and between the groups."""
    problem = Quadratics(monkeypatch, clients=6)
    problem.curvatures[:] = torch.eye(4, dtype=DOUBLE)
    near = 0.5 * problem.centres
    problem.centres[:] = near + torch.tensor([[3.0, 0, 0, 0]] * 3 + [[0, -3.0, 0, 0]] * 3, dtype=DOUBLE)
    fed, client_states = problem.federation, dict[int, State]()
    server = method.init(fed.task, fed.roster)
    for round in range(1, 21):
        sent = Sequential(method, fed).train_round(
            server, client_states, [k for k in range(6) if (k + round) % 4], round, 0.3, 8
        )
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    points = torch.stack([problem.point(tree.row(server.extra["rows"], k)) for k in range(6)])
    apart = torch.cdist(points, points)
    within = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    return float(apart[within].sum() / 12), float(apart[~within].mean())


@pytest.mark.filterwarnings("ignore:FedMTL with method.strength=0")
def test_related_clients_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with local training, and more than unrelated clients."""
    (near, far), (alone, apart) = (two_clusters(monkeypatch, FedMTL(strength)) for strength in (0.3, 0.0))
    assert near < 0.8 * alone
    assert near / alone < 0.9 * far / apart


def test_without_its_pull_it_is_reported_to_be_local_training() -> None:
    with pytest.warns(UserWarning, match="local training"):
        method = FedMTL(strength=0.0)
    settings = {"rounds": 4, "clients": 6, "participation": 0.5, "client_dropout": 0.2, "momentum": 0.5}
    alone, pulled = (fedrane.run(quick(method=each, **settings)) for each in ("local", method))
    assert alone.client_states.keys() == pulled.client_states.keys()
    for k, client_state in alone.client_states.items():
        same_bytes(pulled.client_states[k].model, client_state.model)


def test_a_client_keeps_its_row_and_absent_rows_stay() -> None:
    """W on the server always equals the clients' models, also after lost uploads."""
    result = fedrane.run(quick(method=FedMTL(), clients=8, rounds=4, participation=0.5, client_dropout=0.3))
    assert any(record["lost"] for record in result.history)
    first = FedMTL().init(result.task, result.federation.roster).extra["rows"]
    for k in range(8):
        kept = result.client_states[k].model.params if k in result.client_states else tree.row(first, k)
        same_bytes(tree.row(result.server.extra["rows"], k), kept)
    before = result.server
    sent = Sequential(FedMTL(), result.federation).train_round(before, result.client_states, [1, 6], 5, 0.1, 1)
    after, _ = FedMTL().aggregate(result.task, before, sent.ups, sent.cohort)
    for k in range(8):
        stayed = tree.equal(tree.row(after.extra["rows"], k), tree.row(before.extra["rows"], k))
        assert stayed == (k not in (1, 6))
    for name, rows in after.extra["rows"].items():
        torch.testing.assert_close(after.model.params[name], rows.mean(0))


def test_a_download_has_the_size_of_one_model() -> None:
    """The weighted sum of the others and a number, for any number of clients."""
    for clients in (3, 9):
        record = fedrane.run(quick(method=FedMTL(), clients=clients, rounds=1)).history[0]
        assert record["bytes_down"] == record["bytes_up"] + 4 * clients


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize(("strength", "momentum", "expected"), [(2.1, 0.0, True), (2.1, 0.5, False), (1.9, 0.0, False)])
def test_a_pull_too_stiff_for_the_lr_is_reported(strength: float, momentum: float, expected: bool) -> None:
    """lr · 2λ / floor is compared with 2 (1 + momentum), only in the first round."""
    messages = Messages()
    e = quick(method=FedMTL(strength, floor=0.2), rounds=2, lr=0.1, momentum=momentum, clip=1.0)
    fedrane.run(e, callbacks=[messages])
    assert len([text for text in messages.texts if "unstable" in text]) == int(expected)


def test_the_stability_bound_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """On flat losses only the pull matters: below the bound training converges, well above it it diverges."""
    for strength, converges in ((1.9, True), (2.6, False)):
        problem = Quadratics(monkeypatch, clients=6)
        problem.curvatures[:] = 0
        method, fed = FedMTL(strength, floor=0.2), problem.federation
        server = method.init(fed.task, fed.roster)
        nudged = tree.map(lambda leaf: leaf + 0.01, method.join(fed.task, server, fed.client(0, 1, 0.1, 1)))
        sent = Sequential(method, fed).train_round(server, {0: nudged}, [0], 1, 0.1, 60)
        moved = tree.sub(sent.client_states[0].model, nudged.model)
        assert (float(tree.norm(moved)) < 1) == converges


def test_a_model_that_is_not_finite_ends_the_run_by_its_name() -> None:
    with pytest.raises(Diverged, match="from client"):
        fedrane.run(quick(method=FedMTL(), rounds=3, lr=1e30))


def test_a_floor_of_one_gives_a_warning_and_zero_is_refused() -> None:
    with pytest.warns(UserWarning, match="no relation"):
        FedMTL(floor=1.0)
    with pytest.raises(ConfigError, match="floor"):
        FedMTL(floor=0.0)
