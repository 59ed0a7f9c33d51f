"""Adam and AdamW compared with torch's, alone and in the rounds of a client; which methods refuse them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from asserts import close, same_bytes
from fedrane.algorithm import Algorithm
from fedrane.engines import make
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods import METHODS
from fedrane.methods.apple import APPLE
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.feddyn import FedDyn
from fedrane.methods.scaffold import Scaffold
from fedrane.ops import adam
from fedrane.ops.adam import Adam, AdamConstants
from fedrane.ops.sgd import SGD
from fedrane.task import State
from problems import DOUBLE, Quadratics, dense, federation, table

ODD = AdamConstants(momentum=0.5, decay=0.7, floor=0.1)
CASES = {
    "plain": Adam(),
    "constants": Adam(ODD),
    "no-memory": Adam(AdamConstants(momentum=0.0, decay=0.0)),
    "decay": Adam(weight_decay=0.1),
    "clip": Adam(ODD, weight_decay=0.1, clip=0.5),
    "adamw": Adam(weight_decay=0.5, decoupled=True),
    "adamw-clip": Adam(ODD, weight_decay=0.5, clip=0.5, decoupled=True),
}
FEDADAM, FEDADAMW = Adam(), Adam(weight_decay=0.1, decoupled=True)


def torchs(ours: Adam, params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if ours.decoupled else torch.optim.Adam
    c = ours.constants
    return kind(params, lr, (c.momentum, c.decay), c.floor, weight_decay=ours.weight_decay)


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_torchs(case: str) -> None:
    """With another learning rate in each step; the last gradients are tiny."""
    ours, draws = CASES[case], torch.Generator().manual_seed(3)
    params = {name: torch.randn(4, 3, generator=draws, dtype=DOUBLE) for name in "ab"}
    theirs = [p.clone().requires_grad_() for p in params.values()]
    optimiser = torchs(ours, theirs, 0.1)
    state = ours.init(params)
    for step in range(20):
        lr = 0.1 / (1 + step)
        size = 1.0 if step < 15 else 1e-7
        grads = {name: size * torch.sin(p * (step + 1)) for name, p in params.items()}
        for p, grad in zip(theirs, grads.values(), strict=True):
            p.grad = grad.clone()
        if ours.clip:
            torch.nn.utils.clip_grad_norm_(theirs, ours.clip)
        optimiser.param_groups[0]["lr"] = lr
        optimiser.step()
        params, state = ours.update(params, grads, state, torch.tensor(lr, dtype=DOUBLE))
    for mine, p in zip(params.values(), theirs, strict=True):
        torch.testing.assert_close(mine, p.detach(), rtol=1e-12, atol=1e-12)


def test_the_first_step_is_lr_long_in_float32_too() -> None:
    """Where 1 − β₂ᵗ is a thousandth, a float32 keeps its digits."""
    params, grads = {"a": torch.zeros(3)}, {"a": torch.tensor([2.0, -0.5, 1e-3])}
    moved, _ = Adam().update(params, grads, Adam().init(params), torch.tensor(1e-3))
    torch.testing.assert_close(moved["a"], -1e-3 * torch.sign(grads["a"]), rtol=2e-5, atol=0)
    weights = torch.stack([adam._weight(0.999, torch.tensor(float(t))) for t in (1, 2, 50)])
    exact = torch.tensor([1 - 0.999**t for t in (1, 2, 50)])
    torch.testing.assert_close(weights, exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "threaded"])
@pytest.mark.parametrize("case", ["plain", "adamw-clip"])
def test_a_client_is_torchs_adam_on_the_same_batches(case: str, engine: str) -> None:
    """50 examples in batches of 16: the last has 2, padded where clients are stacked. Each round starts without
    moments."""
    ours = CASES[case]
    fed = federation(table(60), [list(range(50)), list(range(50, 60))], batch=16, optimizer=ours)
    method, server = FedAvg(), FedAvg().init(fed.task, fed.roster)
    used = make(engine, method, fed)
    for round in (1, 2):
        sent = used.train_round(server, {}, [0, 1], round, 0.01, 2)
        module = dense((6,), 3).double()
        values = server.model.params
        module.load_state_dict({name.replace("head", "2").removeprefix("body."): v for name, v in values.items()})
        optimiser = torchs(ours, list(module.parameters()), 0.01)
        plan = fed.batches(round, [0], 2)[0]
        for examples, mask in zip(plan.examples, plan.mask, strict=True):
            x, y = fed.train.take(fed.split.train[0][examples[mask]])
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            if ours.clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), ours.clip)
            optimiser.step()
        up = {name: value[0] for name, value in sent.ups.model.params.items()}
        theirs = dict(zip(up, (p.detach() for p in module.parameters()), strict=True))
        close(up, theirs, 1e-12)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)


def test_frozen_parameters_have_no_moments() -> None:
    fed = federation(table(40), [list(range(40))], batch=8, optimizer=FEDADAMW)
    for name in ("fedbabu", "spherefed"):
        method = METHODS[name].cls()
        task = method.prepare(fed.task)
        ctx = Sequential(method, replace(fed, task=task)).context(
            method.init(task, fed.roster), None, fed.client(0, 1, 0.1, 1)
        )
        work = method.begin(task, ctx)
        assert set(work.optimizer["mean"]) == set(work.optimizer["square"]) == {*filter(method.trains, task.init()[0])}


def test_feddyns_dual_is_the_gradient_where_adam_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Quadratics(monkeypatch)
    fed = replace(problem.federation, task=replace(problem.federation.task, optimizer=FEDADAM))
    method = FedDyn(strength=0.7)
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    sent = Sequential(method, fed).train_round(server, client_states, [0, 1, 2], 1, 0.02, 500)
    for k in range(3):
        end = problem.point({name: rows[k] for name, rows in sent.ups.model.params.items()})
        gradient = problem.curvatures[k] @ (end - problem.centres[k])
        dual = problem.point(sent.client_states[k].extra["dual"])
        torch.testing.assert_close(dual, gradient, rtol=0, atol=1e-3)


def test_scaffolds_first_control_is_the_gradient_with_adam_too() -> None:
    """Option I, a full batch: g at the server's model, with Adam's weight decay and without AdamW's."""
    for used, share in ((Adam(weight_decay=0.1), 0.1), (FEDADAMW, 0.0)):
        fed = federation(table(40), [list(range(40))], optimizer=used)
        method = Scaffold(option="I")
        server = method.init(fed.task, fed.roster)
        engine = Sequential(method, fed)
        sent = engine.train_round(server, {}, [0], 1, 0.01, 3)
        (batch,) = engine.batches(0, 1, 1)

        def loss(params: Any, batch: Any = batch, fed: Any = fed, server: Any = server) -> torch.Tensor:
            net = fed.task.training(server.model._replace(params=params), batch)
            return F.cross_entropy(net.head(net.body(batch.x)), batch.y)

        gradient = torch.func.grad(loss)(server.model.params)
        expected = {name: g + share * server.model.params[name] for name, g in gradient.items()}
        close(sent.client_states[0].extra["control"], expected, 1e-12)


REFUSED = {"adam": {"fednova", "scaffold"}, "adamw": {"fednova", "scaffold", "feddyn", "pfedme"}}
"""Methods whose mathematics needs other steps than these."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_of_adam_names_the_reason(kind: str) -> None:
    task = federation(table(20), [list(range(20))], optimizer=FEDADAM if kind == "adam" else FEDADAMW).task
    refused = {}
    for name, entry in METHODS.items():
        try:
            entry.cls(**entry.preset).prepare(task)
        except ConfigError as error:
            refused[name] = error
    assert refused.keys() == REFUSED[kind]
    for name, error in refused.items():
        assert f"{name}" in error.problem
        assert f"with optimizer={kind}" in error.problem
        assert error.why
        assert "optimizer=sgd" in error.remedy
    assert "method.option=I" in refused["scaffold"].remedy
    Scaffold(option="I").prepare(task)


def test_a_method_written_for_sgd_is_not_run_with_another() -> None:
    task = federation(table(20), [list(range(20))], optimizer=FEDADAM).task
    with pytest.raises(ConfigError, match=r"with optimizer=adam: it is written for SGD\. Use optimizer=sgd"):
        _ = task.sgd
    assert replace(task, optimizer=SGD(0.5)).sgd == SGD(0.5)


def test_the_optimiser_of_a_name() -> None:
    assert adam.optimizer("sgd", ODD, 0.9, 0.1, 2.0) == SGD(0.9, 0.1, 2.0)
    assert adam.optimizer("adam", ODD, 0.0, 0.1, 2.0) == Adam(ODD, 0.1, 2.0)
    assert adam.optimizer("adamw", ODD, 0.0, 0.1, 2.0) == Adam(ODD, 0.1, 2.0, decoupled=True)
    with pytest.raises(ConfigError, match=r"without weight decay it is Adam\. Use optimizer=adam"):
        adam.optimizer("adamw", ODD, 0.0, 0.0, 0.0)
    for kind in adam.OPTIMIZERS:
        assert adam.name_of(adam.optimizer(kind, ODD, 0.0, 0.1, 0.0)) == kind


def test_a_factor_of_the_gradient_means_nothing_to_adam() -> None:
    """Why APPLE's ``core_lr`` is refused with it; with SGD it counts."""
    ends = {}
    for kind, used in (("sgd", SGD()), ("adam", Adam(AdamConstants(floor=1e-30)))):
        fed = federation(table(40), [list(range(20)), list(range(20, 40))], batch=8, optimizer=used)
        for factor in (1.0, 8.0):
            method: Algorithm = APPLE(core_lr=factor)
            server = method.init(fed.task, fed.roster)
            ends[kind, factor] = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.01, 1).ups
    close(ends["adam", 1.0], ends["adam", 8.0], 1e-9)
    with pytest.raises(AssertionError):
        close(ends["sgd", 1.0], ends["sgd", 8.0], 1e-9)
    same_bytes(ends["sgd", 1.0], ends["sgd", 1.0])
