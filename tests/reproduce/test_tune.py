"""Tuning reads no test example, and reproduce uses its result."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedrane.config import effects
from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.reproduce import tune
from fedrane.reproduce.results import ResultStore
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Condition, Selection, cells, targets
from fedrane.training.setup import make_partition
from problems import table

CONDITION = Condition("digits", 0.5)
ENTRY = "[[tuned]]\nmethod = {}\ndataset = {}\nalpha = {}\nsettings = {}\n"
WORDS = ("model=mlp", "clients=4", "epochs=1", "batch=32", "rounds=2", "device=cpu")


def numbered(examples: int = 240) -> Dataset:
    """Each example has its number in its first column."""
    made = table(examples)
    x = made.x.copy()
    x[:, 0] = np.arange(examples)
    return replace(made, x=x)


def real_split(wanted: Experiment, dataset: Dataset) -> partitions.Split:
    """As a run of the table cuts them."""
    return partitions.split(make_partition(wanted, dataset), wanted.seed, wanted.partition.test)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_trial_s_examples_are_the_clients_training_examples(seed: int) -> None:
    dataset = numbered()
    wanted = Experiment(clients=5, seed=seed, partition=partitions.Partitioning("dirichlet", alpha=0.3))
    split = real_split(wanted, dataset)
    left = tune.without_test(dataset, wanted, 0.2)
    assert left.client is not None
    for client, train in enumerate(split.train):
        mine = left.x[left.client == client, 0].astype(int)  # type: ignore[call-overload]
        assert sorted(mine) == sorted(train), "of each client its own"
    tested = set(np.concatenate(split.test).tolist())
    seen = {int(n) for n in left.x[:, 0]} | {int(n) for n in left.x_test[:, 0]}  # type: ignore[call-overload]
    assert not seen & tested
    inner = partitions.split(partitions.partition(left.y, 3, 0, natural(0.2), seed, left.client), seed, 0.2)
    aside = np.sort(left.x[np.concatenate(inner.test), 0])  # type: ignore[call-overload]
    assert np.array_equal(aside, np.sort(left.x_test[:, 0])), "the global model is evaluated on the same examples"  # type: ignore[call-overload]


def natural(share: float) -> partitions.Partitioning:
    return partitions.Partitioning("natural", test=share)


def scores(folder: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> tuple[tune.Tuned, list[float | None]]:
    monkeypatch.setattr(tune, "as_dataset", lambda experiment, given: dataset)
    selection = Selection(seeds=(0,), words=WORDS)
    trials = tune.trials("fedprox", CONDITION, {"lr": (0.1, 0.5), "method.strength": (0.01, 1.0)}, selection, 0.2)
    every = [cell for trial in trials for cell in trial.cells]
    sweep = Sweep(every, ResultStore(folder / "results"), folder / "cells", source=tune.TrialData(trials, 0.2))
    assert sweep.go()
    return tune.choose(sweep, trials, CONDITION, "global"), [tune.score(sweep, trial, "global") for trial in trials]


def test_no_test_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no official test set, and the clients' test examples are poisoned: nothing changes."""
    clean = numbered()
    expected = scores(tmp_path / "clean", clean, monkeypatch)
    wanted = tune.trials("fedprox", CONDITION, {"lr": (0.1,)}, Selection(seeds=(0,), words=WORDS), 0.2)[0].wanted[0]
    poison = clean.x.copy()
    poison[np.concatenate(real_split(wanted, clean).test)] = np.nan
    poisoned = replace(clean, x=poison)
    for part in ("x_test", "y_test"):
        object.__setattr__(poisoned, part, None)
    assert scores(tmp_path / "poisoned", poisoned, monkeypatch) == expected
    assert len(set(expected[1])) > 1, "the trials differ, so that there was something to choose"


def test_poison_in_a_training_row_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    dataset = numbered()
    dataset.x[:] = np.nan
    with pytest.raises(ConfigError, match="no trial"):
        scores(tmp_path, dataset, monkeypatch)


def test_the_best_is_chosen_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, each = scores(tmp_path, numbered(), monkeypatch)
    assert best.accuracy == max(value for value in each if value is not None)
    path = tmp_path / "tuned.toml"
    other = replace(best, method="ditto", settings={"lr": 0.01, "method.strength": 2.0})
    for tuned in (other, replace(best, accuracy=0.1, settings={"lr": 9.0}), best):
        tune.write(path, tuned)
    entries = tune.read(path)
    assert [(entry["method"], entry["accuracy"]) for entry in entries] == [
        ("ditto", pytest.approx(best.accuracy, abs=1e-5)),
        ("fedprox", pytest.approx(best.accuracy, abs=1e-5)),
    ], "one entry a method, the newest"
    target = targets("table-gfl")[0]
    for alpha in (0.5, 5.0):
        cell, plain = cells(target, Selection(("digits",), (alpha,), ("fedprox", "fedavg"), (0,), tuned=entries))
        assert {key: cell.settings[key] for key in best.settings} == best.settings, "at every α"
        assert plain.settings["lr"] == 0.1, "of another method nothing"
    (untouched,) = cells(target, Selection(("fmnist",), (0.5,), ("fedprox",), (0,), tuned=entries))
    assert untouched.settings["lr"] == 0.1, "nor on another dataset"


def test_two_tunings_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while another has read the file, and not yet written it, waits."""
    path, write = tmp_path / "tuned.toml", tune.write_atomically
    first, second = (tune.Tuned(name, "digits", 0.5, {"lr": 0.1}, 0.9, "both", 4) for name in ("fedavg", "ditto"))
    other = threading.Thread(target=tune.write, args=(path, second))

    def meanwhile(path: Path, content: str) -> None:
        monkeypatch.setattr(tune, "write_atomically", write)
        other.start()
        other.join(0.2)
        write(path, content)

    monkeypatch.setattr(tune, "write_atomically", meanwhile)
    tune.write(path, first)
    other.join()
    assert [entry["method"] for entry in tune.read(path)] == ["fedavg", "ditto"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1", "no entry"),
        ("[[tuned]]\nmethod = 'fedavg'", "the dataset of an entry is missing, or is no str"),
        (ENTRY.format("['x']", "'digits'", "0.5", "{}"), "the method of an entry"),
        (ENTRY.format("'fedavg'", "3", "0.5", "{}"), "the dataset of an entry"),
        (ENTRY.format("'fedavg'", "'digits'", "true", "{}"), "the alpha of an entry"),
        (ENTRY.format("'fedavg'", "'digits'", "1", "3"), "the settings of an entry is missing, or is no dict"),
        ("tuned = 3", "has no entry"),
        ("tuned = [1]", "the method of an entry"),
        (f"x = {'[' * 5000}", "recursion"),
        ("[[tuned]]\nmethod = 'fedavgg'\ndataset = 'digits'\nalpha = 0.5\nsettings = {}", "'fedavgg' is not known"),
        ("x = ", "is not what fedrane tune writes"),
    ],
)
def test_a_file_that_tune_has_not_written_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tuned.toml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        tune.read(tmp_path / "tuned.toml")


def test_settings_of_a_method_that_lies_elsewhere_are_read(tmp_path: Path) -> None:
    entry = "[[tuned]]\nmethod = 'not/here.py:Own'\ndataset = 'digits'\nalpha = 0.5\nsettings = { lr = 0.1 }"
    (tmp_path / "tuned.toml").write_text(entry)
    assert tune.read(tmp_path / "tuned.toml")[0]["settings"] == {"lr": 0.1}


def test_a_tuned_alpha_wins_over_the_others(tmp_path: Path) -> None:
    entries = [{"method": "fedavg", "dataset": "digits", "alpha": a, "settings": {"lr": a}} for a in (0.1, 5.0)]
    target = targets("table-gfl")[0]
    lrs = [
        cells(target, Selection(("digits",), (a,), ("fedavg",), (0,), tuned=tuple(entries)))[0].settings["lr"]
        for a in (0.1, 5.0)
    ]
    assert lrs == [0.1, 5.0]


def test_a_trial_never_passes_for_a_cell_of_the_table() -> None:
    selection = Selection(seeds=(0,), words=WORDS)
    (trial,) = tune.trials("fedavg", CONDITION, {"lr": (0.1,)}, selection, 0.2)
    (cell,) = cells(targets("table-gfl")[0], Selection(("digits",), (0.5,), ("fedavg",), (0,), WORDS))
    assert trial.wanted[0] == cell.experiment, "they are the same experiment"
    assert trial.cells[0].key != cell.key


def test_grids() -> None:
    assert tune.grid_of("fedprox", ()) == {"lr": tune.LRS, "method.strength": (0.001, 0.01, 0.1, 1.0)}
    assert tune.grid_of("fedprox", ("lr=1,2",)) == {"lr": ("1", "2")}
    for mistake in ("lr", "lr="):
        with pytest.raises(ConfigError, match="key=value"):
            tune.grid_of("fedprox", (mistake,))
    with pytest.raises(ConfigError, match="unknown key"):
        tune.trials("fedprox", CONDITION, {"method.strenght": (1,)}, Selection(words=WORDS), 0.2)


def test_a_word_takes_the_place_of_a_key_s_values_in_the_grid() -> None:
    """And is part of what is found, so that reproduce uses it too."""
    selections = tune.for_each(
        ("fedprox", "ditto"), Selection(words=(*WORDS, "lr=0.3", "fedprox.strength=1", "ditto.lr=0.2"))
    )
    grid = tune.grid_of("fedprox", (), selections["fedprox"].words)
    assert grid == {"lr": ("0.3",), "method.strength": ("1",)}
    (trial,) = tune.trials("fedprox", CONDITION, grid, selections["fedprox"], 0.2)
    assert trial.values == {"lr": 0.3, "method.strength": 1.0}
    assert tune.grid_of("ditto", (), selections["ditto"].words) == {
        "lr": ("0.2",),
        "method.strength": (0.1, 0.5, 1.0, 2.0),
    }
    for grid in (("lr=1,2",), ("method.strength=1", "method.strength=2")):
        with pytest.raises(ConfigError, match="a key is set once"):
            tune.grid_of("fedprox", grid, ("lr=0.3",))
    with pytest.raises(ConfigError, match="a key has one value"):
        tune.trials("fedprox", CONDITION, {"lr": (0.1,)}, Selection(words=(*WORDS, "lr=0.3")), 0.2)


def test_a_field_without_effect_is_not_tuned() -> None:
    assert tune.grid_of("fedrane-wo-lra", ()) == {"lr": tune.LRS}
    assert len(tune.grid_of("fedrane-wo-gne", ())) == 3


@pytest.mark.parametrize(("method", "word"), [("spherefed", "method.calibrate=false"), ("fedrane", "method.lra=false")])
def test_a_field_that_a_word_leaves_without_effect_is_not_tuned(method: str, word: str) -> None:
    """Nor is an error made of it: the user never wrote it."""
    words = (*WORDS, word)
    grid = tune.grid_of(method, (), words)
    assert grid == {"lr": tune.LRS}
    assert len(tune.trials(method, CONDITION, grid, Selection(words=words), 0.2)) == len(tune.LRS)
    with pytest.raises(ConfigError, match="no such field"):
        tune.grid_of(method, (), (*WORDS, "method.strenght=1"))


def test_a_trial_s_own_partition_is_not_held_against_the_words() -> None:
    """A trial's examples have their clients already; the partition's settings were used before."""
    selection = Selection(seeds=(0,), words=(*WORDS, "partition.minimum=12"))
    (trial,) = tune.trials("fedavg", Condition("digits", 0.1), {"lr": (0.1,)}, selection, 0.2)
    experiment = trial.cells[0].experiment
    assert experiment is not None
    assert effects.settle(experiment) == (experiment, [])
    assert (trial.wanted[0].partition.minimum, trial.wanted[0].partition.alpha) == (12, 0.1)


def test_every_grid_is_of_fields_and_can_be_tried() -> None:
    from fedrane import methods

    for name, entry in methods.METHODS.items():
        for field, values in entry.cls.grid.items():
            for value in values:
                assert getattr(entry.cls(**{**entry.preset, field: value}), field) == value, (name, field)
