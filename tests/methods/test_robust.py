"""Robust servers: what a minority sends does not decide, where an average follows it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fedrane
from asserts import close
from fedrane import Algorithm, Attack, Experiment, tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError, Diverged
from fedrane.methods.robust import RFA, Krum, Median, MultiKrum, TrimmedMean
from problems import SLOW, federation, quick, slow_except, table

ROBUST = ("median", "trimmed-mean", "krum", "multi-krum", "rfa")


def under_attack(method: str, kind: str) -> float:
    e = Experiment(method=method, dataset="digits", model="mlp", clients=10, rounds=12, batch=16, engine="stacked")
    changes = {} if kind == "none" else {"attack": Attack(kind)}
    result = fedrane.run(e.replace(partition=fedrane.Partitioning(alpha=0.5), **changes))
    assert ("hostile" in result.history[0]) == (kind != "none")
    return 100 * float(result.summary["global/last"]["global/accuracy"])


@pytest.mark.parametrize("method", slow_except(("median",), ROBUST))
def test_it_holds_where_fedavg_does_not(method: str) -> None:
    """Two of ten clients upload ten times the opposite of what they trained."""
    assert under_attack(method, "sign") > under_attack(method, "none") - 5


def test_fedavg_does_not_hold() -> None:
    with contextlib.suppress(Diverged):
        assert under_attack("fedavg", "sign") < 60


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) for kind in ("scale", "noise", "labels")])
def test_other_attacks_are_held_too(kind: str) -> None:
    for method in ("median", "trimmed-mean", "multi-krum", "rfa"):
        assert under_attack(method, kind) > under_attack(method, "none") - 5, method


@pytest.mark.parametrize("method", [Median, TrimmedMean, Krum, MultiKrum, RFA])
def test_one_upload_is_taken_as_it_is(method: type[Algorithm]) -> None:
    fed = federation(table(60), [list(range(20)), list(range(20, 60))])
    server = method().init(fed.task, fed.roster)
    sent = Sequential(method(), fed).train_round(server, {}, [1], 1, 0.1, 1)
    after, _ = method().aggregate(fed.task, server, sent.ups, sent.cohort)
    close(after.model.params, tree.row(sent.ups.model.params, 0), 1e-12)


def test_rfa_counts_by_examples_and_krum_names_whom_it_takes() -> None:
    fed = federation(table(60), [list(range(5)), list(range(5, 10)), list(range(10, 60))])
    server = RFA().init(fed.task, fed.roster)
    sent = Sequential(RFA(), fed).train_round(server, {}, [0, 1, 2], 1, 0.1, 1)
    after, record = RFA(smoothing=1e-9).aggregate(fed.task, server, sent.ups, sent.cohort)
    assert float(record["robust/weights"][2]) > 0.999, "more than half of the examples"
    close(after.model.params, tree.row(sent.ups.model.params, 2), 1e-3)
    after, record = Krum().aggregate(fed.task, server, sent.ups, sent.cohort)
    (chosen,) = record["robust/chosen"]
    close(after.model.params, tree.row(sent.ups.model.params, chosen), 1e-12)
    assert record["robust/tolerated"] == 1


def test_statistics_are_robust_too() -> None:
    """A hostile client's BatchNorm statistics are in the upload as well."""
    server = Median().init(federation(table(60), [[0], [1]]).task, None)  # type: ignore[arg-type]
    stats = {"running_mean": torch.zeros(2, dtype=torch.float64)}
    server = server._replace(model=server.model._replace(stats=stats))
    rows = {name: torch.stack([value] * 3) for name, value in server.model.params.items()}
    ups = server._replace(
        model=server.model._replace(
            params=rows, stats={"running_mean": torch.tensor([[0.0] * 2, [1.0] * 2, [1e9] * 2])}
        )
    )
    cohort = federation(table(60), [[0], [1], [2]]).cohort([0, 1, 2], 1, 0.1, 1)
    after, _ = Median().aggregate(None, server, ups, cohort)  # type: ignore[arg-type]
    assert after.model.stats["running_mean"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("method", [TrimmedMean, Krum, MultiKrum])
def test_half_cannot_be_tolerated(method: type[TrimmedMean]) -> None:
    with pytest.raises(ConfigError, match="share"):
        method(share=0.5)


def test_an_attack_is_resumed_to_the_same_bits(tmp_path: object) -> None:
    e = quick(method="trimmed-mean", rounds=4, attack=Attack("noise", 0.3))
    whole = fedrane.run(e).server
    fedrane.run(e.replace(rounds=2), f"{tmp_path}/run")
    assert tree.equal(fedrane.resume(f"{tmp_path}/run", rounds=4).server, whole)


def test_noise_differs_from_round_to_round() -> None:
    """With nothing learned: lr so small that noise is all that differs."""
    seen: list[torch.Tensor] = []

    class Keep(Median):
        def aggregate(self, task, server, ups, cohort):  # type: ignore[no-untyped-def]
            after, record = super().aggregate(task, server, ups, cohort)
            (row,) = [cohort.index.tolist().index(k) for k in hostile]
            name = next(iter(ups.model.params))
            away = ups.model.params[name][row] - server.model.params[name]
            seen.append(away / away.norm())
            return after, record

    attack = Attack("noise", 0.2, 1e3)
    hostile = attack.hostile(5, 0)
    fedrane.run(quick(method=Keep(), clients=5, rounds=2, attack=attack, lr=1e-3))
    assert abs(float((seen[0] * seen[1]).sum())) < 0.1
