"""FedFV: its rounds by plain vectors, with absent clients, and what is left of it where nobody conflicts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close
from fedrane import Model, State, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedfv import FedFV
from fedrane.tree import Tensors
from problems import federation, quick, table

CLIENTS = [[k + 3 * j for j in range(4 + 3 * (k % 2))] for k in range(6)]
"""Each has one class only, so that gradients conflict."""
COHORTS = ([0, 1, 2, 3], [4, 5], [0, 4], [1, 5], [2, 3])


def flat(params: Tensors) -> Tensor:
    return torch.cat([value.flatten() for value in params.values()])


def projected(vector: Tensor, other: Tensor) -> Tensor:
    return vector - (vector @ other) / (other @ other) * other if vector @ other < 0 else vector


@pytest.mark.parametrize(("share", "history"), [(0.0, 0), (0.3, 1), (0.6, 2), (0.1, 9)])
def test_rounds_by_plain_vectors(share: float, history: int) -> None:
    fed = federation(table(60), CLIENTS, batch=4)
    method = FedFV(share, history)
    server, engine = method.init(fed.task, fed.roster), Sequential(method, fed)
    last: dict[int, tuple[int, Tensor]] = {}
    changed = 0
    for round, cohort in enumerate(COHORTS, 1):
        sent = engine.train_round(server, {}, cohort, round, 0.3, 2)
        before = flat(server.model.params)
        rows = [before - flat(tree.row(sent.ups.model.params, row)) for row in range(len(cohort))]
        losses = [engine.predict(server.model, fed.train, fed.split.train[k]).losses.mean() for k in cohort]
        order = sorted(range(len(cohort)), key=losses.__getitem__)
        mine = list(rows)
        for k in order[: len(order) - -(-int(100 * share) * len(order) // 100)]:
            for j in order:
                mine[k] = mine[k] if j == k else projected(mine[k], rows[j])
        g = torch.stack(mine).mean(0)
        absent = {k: seen for k, seen in last.items() if k not in cohort}
        for back in range(history, 0, -1):
            conflicting = [old for when, old in absent.values() if when == round - back and g @ old < 0]
            if conflicting:
                changed += 1
                g = projected(g, torch.stack(conflicting).sum(0))
        g = g / g.norm() * torch.stack(rows).mean(0).norm()
        last |= {k: (round, row) for k, row in zip(cohort, rows, strict=True)}
        server, record = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        torch.testing.assert_close(flat(server.model.params), before - g, rtol=0, atol=1e-12)
        conflicts = sum(bool(a @ b < 0) for i, a in enumerate(rows) for b in rows[:i])
        assert int(record["fedfv/conflicts"]) == conflicts
    assert (changed > 0) == (history > 0), "the absent had something to say"


def test_without_conflicts_it_is_the_mean_of_the_clients() -> None:
    """Not weighted by examples, and one without any does not count."""
    fed = federation(table(60), [list(range(8)), list(range(8, 60)), []])
    method = FedFV(0.0)
    server = method.init(fed.task, fed.roster)
    rise = {name: torch.stack([value + 1, value + 3, value]) for name, value in server.model.params.items()}
    cohort = fed.cohort([0, 1, 2], 1, 0.1, 1)._replace(labels=None)
    ups = State(Model(rise, {}), {"loss": torch.tensor([1.0, 2.0, 0.0])})
    after, record = method.aggregate(fed.task, server, ups, cohort)
    close(after.model.params, {name: value + 2 for name, value in server.model.params.items()}, 1e-12)
    assert int(record["fedfv/conflicts"]) == 0


def test_clients_that_cancel_out_leave_the_model() -> None:
    fed = federation(table(60), [list(range(8)), list(range(8, 60))])
    server = FedFV().init(fed.task, fed.roster)
    apart = {name: torch.stack([value + 1, value - 1]) for name, value in server.model.params.items()}
    cohort = fed.cohort([0, 1], 1, 0.1, 1)._replace(labels=None)
    after, _ = FedFV(0.0).aggregate(fed.task, server, State(Model(apart, {}), {"loss": torch.ones(2)}), cohort)
    close(after.model.params, server.model.params, 1e-12)


def test_gradients_are_remembered_only_if_they_are_used() -> None:
    fed = federation(table(60), CLIENTS)
    assert FedFV(history=0).init(fed.task, fed.roster).extra == {}
    assert FedFV(history=1).init(fed.task, fed.roster).extra["gradients"]["head.weight"].shape[0] == 6


def test_what_the_server_remembers_is_resumed(tmp_path: object) -> None:
    e = quick(method=FedFV(history=2), rounds=4, participation=0.5)
    whole = fedrane.run(e).server
    fedrane.run(e.replace(rounds=2), f"{tmp_path}/run")
    assert tree.equal(fedrane.resume(f"{tmp_path}/run", rounds=4).server, whole)


def test_what_is_out_of_range_is_refused() -> None:
    for field, value in (("kept", 1.0), ("history", -1)):
        with pytest.raises(ConfigError, match=f"method.{field}"):
            FedFV(**{field: value})  # type: ignore[arg-type]
