"""The gate in a run: honest clients notice nothing of it, one hostile client ruins nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedrane
from asserts import same_bytes, untimed
from fedrane import Callback, Experiment, Gate, tree
from fedrane.algorithm import Done
from fedrane.config import effects
from fedrane.engines.sequential import Sequential
from fedrane.errors import NoEffect
from fedrane.task import State
from fedrane.training.gating import loss_objection
from fedrane.training.run_folder import read
from problems import EVERY_METHOD, quick


class Listener(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def six(**changes: Any) -> Experiment:
    even = {"clients": 6, "rounds": 4, "device": "cpu", "engine": "sequential", "partition": {"kind": "iid"}}
    return quick(**(even | changes))


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Clients that multiply all that they upload."""

    def make(**factors: float) -> None:
        original = Sequential.train_client

        def train(self: Sequential, ctx: Any, k: int, round: int, epochs: int) -> Done:
            done = original(self, ctx, k, round, epochs)
            factor = factors.get(f"c{k}", 1.0) if round > 1 else 1.0
            return done if factor == 1 else done._replace(up=tree.scale(done.up, factor))

        monkeypatch.setattr(Sequential, "train_client", train)

    return make


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_honest_clients_end_in_the_same_bytes(name: str) -> None:
    experiment = six(method=name, rounds=2, participation=0.5, partition={"alpha": 0.3})
    plain, passed = fedrane.run(experiment), fedrane.run(experiment.replace(gate=Gate("refuse")))
    same_bytes(passed.server, plain.server)
    assert untimed(passed.history) == untimed(plain.history)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedrane", "feddyn"])
def test_two_hostile_clients_of_six_are_named_and_cost_little(
    name: str, hostile: Callable[..., None], tmp_path: Path
) -> None:
    experiment = six(method=name, gate=Gate("refuse"))
    honest = fedrane.run(experiment)
    hostile(c1=1e30, c4=-10.0)
    listener = Listener()
    result = fedrane.run(experiment, tmp_path / "run", callbacks=[listener])
    assert result.history[-1]["global/accuracy"] > honest.history[-1]["global/accuracy"] - 0.05
    assert [record["lost"] for record in result.history[:4]] == [[], [1, 4], [1, 4], [1, 4]]
    assert [list(record.get("refused", {})) for record in result.history[:4]] == [[], *[["1", "4"]] * 3]
    assert sum("client 4 is left out: the norm of its" in text for text in listener.messages) >= 3
    assert 'kind = "refuse"' in (tmp_path / "run" / "config.toml").read_text()


def test_an_outlier_can_be_clipped(hostile: Callable[..., None]) -> None:
    hostile(c1=1e30)
    result = fedrane.run(six(gate=Gate("clip", factor=2.0)))
    assert [list(record.get("clipped", {})) for record in result.history] == [[], ["1"], ["1"], ["1"]]
    assert result.history[-1]["cohort"] == [0, 1, 2, 3, 4, 5]
    assert result.history[-1]["global/accuracy"] > 0.5


def test_a_round_of_which_nothing_is_left_changes_nothing(hostile: Callable[..., None]) -> None:
    hostile(**{f"c{k}": 1e30 for k in range(6)})
    result = fedrane.run(six(gate=Gate("refuse")))
    assert [record["cohort"] for record in result.history] == [[0, 1, 2, 3, 4, 5], [], [], []]
    same_bytes(result.server, fedrane.run(six(rounds=1)).server)


def test_a_model_that_fails_its_check_never_replaces_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it: here a method that aggregates badly."""
    experiment = six(method="fedprox", gate=Gate("refuse"))
    original = type(experiment.algorithm).aggregate

    def aggregate(self: Any, task: Any, server: State, ups: State, cohort: Any) -> tuple[State, dict[str, Any]]:
        after, record = original(self, task, server, ups, cohort)
        factor = {2: -300.0, 3: 1e9}.get(int(cohort.round[0]), 1.0)
        return after._replace(model=tree.scale(after.model, factor)), record

    monkeypatch.setattr(type(experiment.algorithm), "aggregate", aggregate)
    listener = Listener()
    result = fedrane.run(experiment, tmp_path / "run", callbacks=[listener])
    first, second, third, last = result.history
    assert "its loss is" in second["rejected"]
    assert "would move by" in third["rejected"]
    assert "rejected" not in first | last
    assert second["global/accuracy"] == first["global/accuracy"]
    assert sum("not used" in text for text in listener.messages) == 2
    kept = fedrane.run(experiment.replace(rounds=1, gate=Gate("off")))
    saved = [path.stem for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert saved == ["round-000003", "round-000004"]
    same_bytes(read(tmp_path / "run" / "checkpoints" / "round-000003.safetensors").server, kept.server)


@pytest.mark.parametrize(
    ("loss", "earlier", "kept"), [(2.0, None, True), (30.0, None, False), (30.0, 5.0, True), (float("nan"), 1.0, False)]
)
def test_a_loss_is_compared_with_the_last_one_and_with_guessing(loss: float, earlier: Any, kept: bool) -> None:
    history = [{"global/loss": earlier}, {"round": 2}]
    assert (loss_objection(Gate(), {"global/loss": loss}, history, 10) == "") == kept
    assert not loss_objection(Gate(), {}, history, 10)


def test_bounds_without_a_gate_are_an_error() -> None:
    with pytest.raises(NoEffect, match=r"gate\.factor"):
        effects.settle(Experiment(gate=Gate(factor=3.0)))
