"""FedMGDA+: no client is made worse, none counts for more by moving further, and the box holds."""

from __future__ import annotations

import math

import pytest
import torch

from asserts import close
from fedrane import Model, State, tree
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedmgda import FedMGDA
from fedrane.task import Client
from fedrane.tree import Tensors
from problems import DOUBLE, federation, table

CLIENTS = [list(range(8)), list(range(8, 20)), list(range(20, 60))]
SHARES = torch.tensor([8.0, 12, 40], dtype=DOUBLE) / 60


def trained(round: int = 1) -> tuple[Federation, State, State, Client]:
    fed = federation(table(60), CLIENTS, batch=8)
    server = FedMGDA().init(fed.task, fed.roster)
    sent = Sequential(FedMGDA(), fed).train_round(server, {}, [0, 1, 2], round, 0.3, 2)
    return fed, server, sent.ups, sent.cohort


def units(server: State, ups: State) -> list[Tensors]:
    changes = [tree.sub(tree.row(ups.model.params, k), server.model.params) for k in range(3)]
    return [tree.scale(change, 1 / tree.norm(change)) for change in changes]


@pytest.mark.parametrize("radius", [0.05, 0.2, 1.0])
def test_the_step_is_the_mix_and_its_weights_are_optimal_in_the_box(radius: float) -> None:
    fed, server, ups, cohort = trained()
    method = FedMGDA(radius, 0.7)
    after, record = method.aggregate(fed.task, server, ups, cohort)
    weights, each = record["fedmgda/weights"], units(server, ups)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert float((weights - SHARES).abs().max()) <= radius + 1e-12
    expected = server.model.params
    for weight, unit in zip(weights, each, strict=True):
        expected = tree.add(expected, tree.scale(unit, 0.7 * weight))
    close(after.model.params, expected, 1e-12)
    step = tree.scale(tree.sub(after.model.params, server.model.params), 1 / 0.7)
    assert float(record["fedmgda/length"]) == pytest.approx(float(tree.norm(step)))
    gains = torch.stack([tree.dot(unit, step) for unit in each])
    low, high = weights > (SHARES - radius).clamp(min=0) + 1e-9, weights < (SHARES + radius).clamp(max=1) - 1e-9
    assert float(gains[low].max()) <= float(gains[high].min()) + 1e-9, "no weight can go to where it shortens the step"


def test_with_free_weights_no_client_is_made_worse() -> None:
    """Every client gains at least ‖d‖² to first order, where the average harms one."""
    fed, server, ups, cohort = trained()
    each = units(server, ups)
    against = tree.sub(tree.scale(each[2], -1.0), tree.scale(each[1], 0.2))
    ups.model.params.update({n: torch.cat([rows[1:], rows[:1]]) for n, rows in ups.model.params.items()})
    for name, rows in ups.model.params.items():
        rows[2] = server.model.params[name] + against[name] + 0.5 * each[0][name]
    after, _ = FedMGDA(1.0).aggregate(fed.task, server, ups, cohort)
    step = tree.sub(after.model.params, server.model.params)
    worst = min(float(tree.dot(unit, step)) for unit in units(server, ups))
    assert worst == pytest.approx(float(tree.dot(step, step)), rel=1e-9)
    assert worst > 1e-3
    plain, _ = FedMGDA(1e-9).aggregate(fed.task, server, ups, cohort)
    average = tree.sub(plain.model.params, server.model.params)
    assert min(float(tree.dot(unit, average)) for unit in units(server, ups)) < -1e-2


def test_without_a_radius_it_is_the_average_of_normalised_changes() -> None:
    fed, server, ups, cohort = trained()
    with pytest.warns(UserWarning, match="only averages"):
        method = FedMGDA(0.0, 2.0)
    after, _ = method.aggregate(fed.task, server, ups, cohort)
    mean = server.model.params
    for share, unit in zip(SHARES, units(server, ups), strict=True):
        mean = tree.add(mean, tree.scale(unit, 2 * share))
    close(after.model.params, mean, 1e-12)


def test_moving_further_does_not_count() -> None:
    fed, server, ups, cohort = trained()
    first, _ = FedMGDA().aggregate(fed.task, server, ups, cohort)
    far = {name: rows.clone() for name, rows in ups.model.params.items()}
    for name, rows in far.items():
        rows[1] = server.model.params[name] + 50 * (rows[1] - server.model.params[name])
    second, _ = FedMGDA().aggregate(fed.task, server, ups._replace(model=Model(far, {})), cohort)
    close(first.model.params, second.model.params, 1e-10)


def test_the_lr_falls_with_the_rounds() -> None:
    lengths = []
    for round in (1, 3):
        fed, server, ups, cohort = trained()
        cohort = cohort._replace(round=torch.full_like(cohort.round, round))
        after, record = FedMGDA(decay=0.1).aggregate(fed.task, server, ups, cohort)
        lengths.append(float(tree.norm(tree.sub(after.model.params, server.model.params)) / record["fedmgda/length"]))
    assert lengths == pytest.approx([1, 0.81])


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0])
def test_who_has_no_finite_change_is_left_out(broken: float) -> None:
    """As if it had not been there, and named; so of the average of the statistics if its upload is broken."""
    fed, server, ups, cohort = trained()
    server = server._replace(model=server.model._replace(stats={"running_mean": torch.zeros(2, dtype=DOUBLE)}))
    rows = torch.arange(6.0, dtype=DOUBLE).reshape(3, 2)
    params = {name: value.clone() for name, value in ups.model.params.items()}
    for name, value in params.items():
        value[1] = server.model.params[name] + broken
    method = FedMGDA(0.3)
    after, record = method.aggregate(fed.task, server, State(Model(params, {"running_mean": rows}), {}), cohort)
    two = [0, 2]
    others = State(Model({n: v[two] for n, v in params.items()}, {"running_mean": rows[two]}), {})
    rest = cohort._replace(index=cohort.index[two], size=cohort.size[two], round=cohort.round[two])
    expected, _ = method.aggregate(fed.task, server, others, rest)
    close(after.model.params, expected.model.params, 1e-12)
    assert record["messages"] == ["clients [1] are left out: their change is zero or not finite"]
    assert float(record["fedmgda/weights"][1]) == 0
    mean = SHARES @ rows if broken == 0 else expected.model.stats["running_mean"]
    torch.testing.assert_close(after.model.stats["running_mean"], mean)


def test_nobody_with_a_change_and_opposites_leave_the_model() -> None:
    fed, server, _, cohort = trained()
    still = {name: torch.stack([value] * 3) for name, value in server.model.params.items()}
    after, record = FedMGDA().aggregate(fed.task, server, State(Model(still, {}), {}), cohort)
    assert tree.equal(after, server)
    assert record["messages"] == ["no client has a finite change"]
    ways = torch.tensor([1.0, -3.0, -1.0], dtype=DOUBLE)
    apart = {n: v + ways.reshape(3, *[1] * (v.dim() - 1)) for n, v in still.items()}
    after, _ = FedMGDA(1.0).aggregate(fed.task, server, State(Model(apart, {}), {}), cohort)
    close(after.model.params, server.model.params, 1e-7)


def test_what_is_out_of_range_is_refused() -> None:
    for field, value in (("radius", 1.5), ("global_lr", 0.0), ("decay", 1.0)):
        with pytest.raises(ConfigError, match=f"method.{field}"):
            FedMGDA(**{field: value})
