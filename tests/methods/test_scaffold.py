"""SCAFFOLD: control variates are correct, sum to the server's under loss and sampling, and remove the drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad

import fedrane
from asserts import close, same_bytes
from fedrane import Algorithm, Experiment, Model, tree
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.scaffold import Scaffold
from fedrane.ops.sgd import SGD
from fedrane.task import Batch, State
from fedrane.testing.conformance import blobs, network
from problems import Quadratics, dense, federation, quick, table


@pytest.mark.parametrize("option", ["I", "II"])
def test_after_one_full_batch_step_the_control_is_the_gradient(option: str) -> None:
    """c_i is the client's gradient at the model it was sent, with the right sign; Σ c_i / N = c."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))])
    method = Scaffold(option)
    server = method.init(fed.task, fed.roster)
    engine = Sequential(method, fed)
    client_states: dict[int, State] = {}
    for round in (1, 2):
        sent = engine.train_round(server, client_states, [0, 1], round, 0.1, 1)
        for k in (0, 1):
            x, y = fed.train.take(fed.split.train[k])
            batch = Batch(x, y, torch.ones(len(y), dtype=torch.bool), y[0], True)
            ctx = engine.context(server, client_states.get(k), fed.client(k, round, 0.1, 1))
            gradient = grad(lambda p, b=batch, c=ctx: FedAvg().objective(fed.task, c, Model(p, {}), b)[0])(
                server.model.params
            )
            for name, value in gradient.items():
                torch.testing.assert_close(sent.client_states[k].extra["control"][name], value, rtol=1e-9, atol=1e-11)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states = dict(sent.client_states)
        mean = tree.scale(tree.add(client_states[0].extra["control"], client_states[1].extra["control"]), 0.5)
        for name, value in server.extra["control"].items():
            torch.testing.assert_close(value, mean[name])


def kept(method: Scaffold, fed: Federation, seed: int) -> tuple[State, State]:
    """A server and a client in the middle of a run: controls that are neither zero nor equal."""
    draws = torch.Generator().manual_seed(seed)
    server = method.init(fed.task, fed.roster)
    noise = [tree.map(lambda p: torch.randn(p.shape, generator=draws, dtype=p.dtype), c) for c in [server.extra] * 2]
    return server._replace(extra=noise[0]), State(Model({}, {}), noise[1])


def gradient_at(fed: Federation, params: tree.Tensors, batch: Batch) -> tree.Tensors:
    """The gradient of the plain loss, by autograd."""
    loss = FedAvg().objective
    ctx: Any = None  # FedAvg's objective does not use it
    return grad(lambda p: loss(fed.task, ctx, Model(p, {}), batch)[0])(params)


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_local_step_by_the_formula(option: str) -> None:
    """y ← y − η_l (g_i(y) − c_i + c), with each sign, over several steps."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    method, engine = Scaffold(option), Sequential(Scaffold(option), fed)
    server, client_state = kept(method, fed, 1)
    sent = engine.train_round(server, {0: client_state}, [0], 1, 0.1, 2)
    here = server.model.params
    for batch in engine.batches(0, 1, 2):
        gradient = gradient_at(fed, here, batch)
        c, mine = server.extra["control"], client_state.extra["control"]
        here = {name: here[name] - 0.1 * (gradient[name] - mine[name] + c[name]) for name in here}
    close(tree.row(sent.ups.model.params, 0), here, 1e-12)


def test_option_one_is_the_gradient_of_all_rows_at_the_start() -> None:
    """Not at the current model; every example counts once, although the last batch is shorter."""
    fed = federation(table(60), [list(range(21)), list(range(21, 60))], batch=8)
    method, engine = Scaffold("I"), Sequential(Scaffold("I"), fed)
    server, client_state = kept(method, fed, 2)
    sent = engine.train_round(server, {0: client_state}, [0], 1, 0.1, 3)
    x, y = fed.train.take(fed.split.train[0])
    whole = Batch(x, y, torch.ones(len(y), dtype=torch.bool), y[0], True)
    close(sent.client_states[0].extra["control"], gradient_at(fed, server.model.params, whole), 1e-12)


def test_option_two_is_the_mean_gradient_of_the_way() -> None:
    """c_i − c + (x − y) / (K η_l): the mean of the plain gradients over the K steps."""
    fed = federation(table(60), [list(range(24)), list(range(24, 60))], batch=8)
    method, engine = Scaffold(), Sequential(Scaffold(), fed)
    server, client_state = kept(method, fed, 3)
    ctx = engine.context(server, client_state, fed.client(0, 1, 0.1, 2))
    work, gradients = method.begin(fed.task, ctx), []
    for batch in engine.batches(0, 1, 2):
        gradients.append(gradient_at(fed, work.model.params, batch))
        work = method.step(fed.task, ctx, work, batch)
    mean = tree.map(lambda examples: examples.mean(0), tree.stack(gradients))
    assert len(gradients) == 6
    close(method.finish(fed.task, ctx, work).client_state.extra["control"], mean, 1e-12)


def test_the_global_lr_lengthens_the_servers_step() -> None:
    """x + η_g (1/|S|) Σ (y_i − x), and nothing else."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    method = Scaffold(global_lr=1.5)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.1, 1)
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    usual, _ = Scaffold().aggregate(fed.task, server, sent.ups, sent.cohort)
    before = server.model.params
    expected = tree.add(before, tree.scale(tree.sub(usual.model.params, before), 1.5))
    close(after.model.params, expected, 1e-12)
    same_bytes(after.extra, usual.extra)


@pytest.mark.parametrize("option", ["I", "II"])
def test_controls_sum_to_the_servers_under_sampling_and_loss(option: str) -> None:
    """(1/N) Σ c_i = c, with zero for clients never sampled; lost uploads change neither."""
    e = quick(
        method=Scaffold(option),
        clients=8,
        rounds=6,
        epochs=2,
        participation=0.5,
        client_dropout=0.3,
        precision="float64",
    )
    result = fedrane.run(e)
    assert any(r["lost"] for r in result.history)
    for name, value in result.server.extra["control"].items():
        total = sum(client_state.extra["control"][name] for client_state in result.client_states.values())
        torch.testing.assert_close(total / 8, value, rtol=1e-9, atol=1e-12)
    assert float(tree.norm(result.server.extra["control"])) > 1e-3


@pytest.mark.parametrize("option", ["I", "II"])
def test_it_reaches_the_optimum_where_fedavg_does_not(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On heterogeneous quadratics with several local steps: the minimiser of (1/N) Σ f_i."""
    problem = Quadratics(monkeypatch)
    fed = problem.federation
    optimum = torch.linalg.solve(
        problem.curvatures.sum(0), (problem.curvatures @ problem.centres[..., None]).sum(0)[:, 0]
    )

    def distance(method: Algorithm) -> float:
        engine, server, client_states = Sequential(method, fed), method.init(fed.task, fed.roster), {}
        for round in range(1, 151):
            sent = engine.train_round(server, client_states, [0, 1, 2], round, 0.05, 5)
            server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
            client_states = dict(sent.client_states)
        return float((problem.point(server.model.params) - optimum).norm())

    assert distance(Scaffold(option)) < 1e-8
    assert distance(FedAvg()) > 1e-2


def test_a_clients_share_does_not_depend_on_its_samples() -> None:
    fed = federation(table(60), [list(range(5)), list(range(5, 60))])
    method = Scaffold()
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.1, 1)
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for name, examples in sent.ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], examples.mean(0))


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"clip": 1.0}])
def test_option_two_refuses_what_it_cannot_read(settings: dict[str, float]) -> None:
    e = Experiment(method=Scaffold(), clients=3, rounds=1, model_head="head", **settings)
    with pytest.raises(ConfigError, match=r"method.option=I"):
        fedrane.run(e, dataset=blobs(), model=network())
    allowed = e.replace(method=Scaffold("I"))
    assert fedrane.run(allowed, dataset=blobs(), model=network()).finished


def test_weight_decay_is_part_of_the_gradient() -> None:
    """Both options agree after one full-batch step, decay included."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], dense, sgd=SGD(weight_decay=0.1))
    controls = []
    for option in ("I", "II"):
        method = Scaffold(option)
        server = method.init(fed.task, fed.roster)
        controls.append(
            Sequential(method, fed).train_round(server, {}, [0], 1, 0.1, 1).client_states[0].extra["control"]
        )
    for name in controls[0]:
        torch.testing.assert_close(controls[0][name], controls[1][name], rtol=1e-9, atol=1e-11)
