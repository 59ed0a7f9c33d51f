"""FedNova: clients count by their examples, whatever their numbers of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asserts import close
from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.engines.sequential import Sequential
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fednova import FedNova, added_gradients
from fedrane.ops.sgd import SGD
from fedrane.task import Model
from problems import DOUBLE, Quadratics, federation, table


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9], ids=["plain", "some", "much"])
def test_how_many_gradients_a_change_adds_up_to(momentum: float) -> None:
    """A constant gradient of one, by SGD itself."""
    sgd, lr = SGD(momentum=momentum), torch.tensor(1.0, dtype=DOUBLE)
    for steps in (1, 2, 7):
        here = {"x": torch.zeros(1, dtype=DOUBLE)}
        velocity = sgd.init(here)
        for _ in range(steps):
            here, velocity = sgd.update(here, {"x": torch.ones(1, dtype=DOUBLE)}, velocity, lr)
        added = added_gradients(torch.tensor([float(steps)], dtype=DOUBLE), momentum)
        torch.testing.assert_close(-here["x"], added, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "much"])
def test_the_servers_step_by_the_formula(momentum: float) -> None:
    """Clients of 8 and 40 examples make 1 and 5 steps."""
    fed = federation(table(60), [list(range(8)), list(range(8, 48))], batch=8, sgd=SGD(momentum=momentum))
    method = FedNova()
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.1, 1)
    assert sent.cohort.steps.tolist() == [1, 5]
    after, record = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    lengths = [1.0, sum((1 - momentum**s) / (1 - momentum) for s in range(1, 6))]
    effective = lengths[0] / 6 + 5 * lengths[1] / 6
    assert float(record["nova/steps"]) == pytest.approx(effective)
    change = [tree.sub(tree.row(sent.ups.model.params, k), server.model.params) for k in (0, 1)]
    scaled = [tree.scale(change[k], ratio * effective / lengths[k]) for k, ratio in ((0, 1 / 6), (1, 5 / 6))]
    close(after.model.params, tree.add(server.model.params, tree.add(*scaled)), 1e-12)


def test_with_equal_numbers_of_steps_it_is_fedavg() -> None:
    fed = federation(table(60), [list(range(9)), list(range(9, 25)), list(range(25, 40))], batch=16)
    server = FedNova().init(fed.task, fed.roster)
    sent = Sequential(FedNova(), fed).train_round(server, {}, [0, 1, 2], 1, 0.1, 3)
    ours, plain = (m.aggregate(fed.task, server, sent.ups, sent.cohort)[0] for m in (FedNova(), FedAvg()))
    close(ours.model.params, plain.model.params, 1e-12)


def test_it_stays_at_the_optimum_where_fedavg_follows_the_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the minimiser of Σ (n_k/n) f_k, with 1 to 3 small steps a client, its step is of second order in lr."""
    problem = Quadratics(monkeypatch)
    fed = replace(problem.federation, batch=2)
    sizes = torch.tensor([4.0, 5.0, 6.0], dtype=DOUBLE)
    pulls = (problem.curvatures @ problem.centres[..., None])[..., 0]
    optimum = torch.linalg.solve((sizes[:, None, None] * problem.curvatures).sum(0), sizes @ pulls)

    def length(method: Algorithm, lr: float) -> float:
        server = method.init(fed.task, fed.roster)
        weight = server.model.params["head.weight"].flatten().clone()
        weight[: len(optimum)] = optimum
        start = {**server.model.params, "head.weight": weight.reshape(server.model.params["head.weight"].shape)}
        server = server._replace(model=Model(start, {}))
        sent = Sequential(method, fed).train_round(server, {}, [0, 1, 2], 1, lr, 1)
        after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        return float((problem.point(after.model.params) - optimum).norm()) / lr

    assert length(FedNova(), 1e-5) < 1e-3
    assert length(FedAvg(), 1e-5) > 1e-2
