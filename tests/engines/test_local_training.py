"""Adam, a number of steps and a part of an epoch: every engine ends where the sequential one ends, also after a
resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedrane
from asserts import close, same_bytes, untimed
from fedrane import tree
from fedrane.data.sampling import Steps
from fedrane.engines import make
from fedrane.errors import ConfigError
from fedrane.methods import METHODS
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fednova import FedNova
from fedrane.ops.adam import Adam
from fedrane.testing import conformance
from harness import same_run
from problems import FORKS, Listener, federation, quick, slow_except, table

ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "schedule": {"warmup": 1}}
STEPS = {"epochs": 5, "steps": 5}  # the default of epochs, which steps replace
ADAMW = Adam(weight_decay=0.1, decoupled=True)
REFUSE = ("fednova", "scaffold")
BY_EPOCHS = ("fedrep", "fedala")
"""Some of their steps come before the experiment's, and are counted in epochs."""
QUICK = ("fedavg", "ditto", "apple", "fedbabu")
"""An optimiser of their own besides: Ditto for v_k, APPLE for p."""
ENGINES = ["sequential", "stacked", "threaded", pytest.param("processes", marks=FORKS)]


@pytest.mark.parametrize("name", slow_except(QUICK, [name for name in METHODS if name not in REFUSE]))
def test_with_adam_every_method_ends_where_the_sequential_engine_ends(name: str) -> None:
    """All clients make 5 steps, and one of the three epochs of batches is not used up."""
    entry = METHODS[name]
    length = {"epochs": 1} if name in BY_EPOCHS else STEPS
    runs = [
        conformance.trained(
            entry.cls(**entry.preset), engine=engine, participation=0.6, client_dropout=0.2, **length, **ADAM
        )
        for engine in ("sequential", "stacked", "threaded")
    ]
    for other in runs[1:]:
        close(conformance.states(runs[0]), conformance.states(other), 1e-9)
        for a, b in zip(untimed(runs[0].history), untimed(other.history), strict=True):
            for key in a.keys() - {"gne/iterations"}:
                assert a[key] == pytest.approx(b[key], abs=1e-7), key


@pytest.mark.parametrize("engine", ENGINES)
def test_so_many_steps_are_so_many_epochs(engine: str) -> None:
    """Two clients of 20 examples in batches of 8 make 3 steps in an epoch."""
    fed = federation(table(60), [list(range(20)), list(range(20, 40))], batch=8, optimizer=ADAMW)
    server = FedAvg().init(fed.task, fed.roster)
    steps, epochs = (make(engine, FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.01, n) for n in (Steps(6), 2))
    same_bytes(steps.ups, epochs.ups)
    assert steps.cohort.steps.tolist() == epochs.cohort.steps.tolist() == [6, 6]
    assert steps.examples == epochs.examples == 80
    assert steps.metrics == epochs.metrics


@pytest.mark.parametrize("engine", ENGINES)
def test_all_clients_make_as_many_steps_and_count_by_their_examples(engine: str) -> None:
    fed = federation(table(60), [list(range(10)), list(range(10, 50))], batch=8)
    server = FedAvg().init(fed.task, fed.roster)
    sent = make(engine, FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.1, Steps(3))
    assert sent.cohort.steps.tolist() == [3, 3]
    assert sent.examples == (8 + 2 + 8) + 3 * 8
    after, _ = FedAvg().aggregate(fed.task, server, sent.ups, sent.cohort)
    for name, rows in sent.ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], (rows[0] + 4 * rows[1]) / 5, rtol=1e-12, atol=1e-12)
    ours, _ = FedNova().aggregate(fed.task, server, sent.ups, sent.cohort)
    close(ours.model.params, after.model.params, 1e-12)  # as with equal numbers of steps


def test_a_part_of_an_epoch_ends_within_it() -> None:
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    server = FedAvg().init(fed.task, fed.roster)
    sent = make("sequential", FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.1, 0.5)
    assert sent.cohort.steps.tolist() == [2, 3]
    assert sent.examples == 16 + 24


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    e = quick(rounds=3, client_dropout=0.2, **STEPS, **ADAM)
    fedrane.run(e, tmp_path / "whole")
    asked = iter([True])
    fedrane.run(e, tmp_path / "stopped", stop=lambda: next(asked))
    fedrane.resume(tmp_path / "stopped")
    same_run(tmp_path / "whole", tmp_path / "stopped")


def test_post_training_keeps_its_own_number_of_epochs() -> None:
    """FedBABU's tuning: 2 epochs, whatever the rounds' steps are."""
    entry = METHODS["fedbabu"]
    result = conformance.trained(entry.cls(tune_epochs=2), rounds=1, epochs=5, steps=3)
    examples = sum(len(own) for own in result.federation.split.train)
    assert result.history[-1]["train/examples"] == 2 * examples
    assert result.history[0]["train/examples"] < 2 * examples


def test_what_is_refused_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    for settings, message in (
        ({"method": "fednova", **ADAM}, "fednova with optimizer=adam"),
        ({"method": "fedavg", "optimizer": "adamw", "lr": 0.01}, "without weight decay it is Adam"),
    ):
        with pytest.raises(ConfigError, match=message):
            fedrane.run(quick(**settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_learning_rate_of_sgd_is_reported_with_adam() -> None:
    for settings, reported in (({"optimizer": "adam"}, 1), ({"optimizer": "adam", "lr": 0.003}, 0), ({}, 0)):
        listener = Listener()
        fedrane.run(quick(rounds=1, **settings), callbacks=[listener])
        assert len(listener.messages) == reported
        assert all("lr=0.1 with optimizer=adam" in text for text in listener.messages)


def test_the_moments_are_those_of_the_round_alone() -> None:
    """Two runs whose first rounds differ, but not the model that the second starts from, end alike."""
    fed = federation(table(40), [list(range(40))], batch=8, optimizer=ADAMW)
    server = FedAvg().init(fed.task, fed.roster)
    for name in ("sequential", "stacked", "threaded"):
        used, fresh = (make(name, FedAvg(), fed) for _ in range(2))
        used.train_round(server, {}, [0], 1, 0.5, 2)
        ups = [engine.train_round(server, {}, [0], 2, 0.01, 1).ups for engine in (used, fresh)]
        same_bytes(*ups)
        assert not tree.equal(ups[0], make(name, FedAvg(), fed).train_round(server, {}, [0], 1, 0.01, 1).ups)
