"""Regression, from the data to the prediction: every method that can, every engine, and clear errors for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score
from typer.testing import CliRunner

import fedrane
from asserts import untimed
from fedrane import Experiment, data, report
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.cli.commands import app as command
from fedrane.config import effects
from fedrane.data.augment import Mixed
from fedrane.data.catalogue import load
from fedrane.engines.evaluation import headline
from fedrane.errors import ConfigError, DataError
from fedrane.methods import METHODS
from fedrane.task import Batch, cross_entropy, prediction_loss
from problems import FORKS, SLOW, quick, slow_except

NEEDS_CLASSES = ("fedlc", "fedntd", "fedproto", "fedrod", "spherefed", "fedrane", "fedrane-wo-lra", "fedrane-wo-gne")
OTHERS = [name for name in METHODS if name not in NEEDS_CLASSES]
FAST = ("fedavg", "scaffold", "moon", "q-ffl", "ditto", "pfedme", "fedbabu", "apple")


def numbers(**changes: Any) -> Experiment:
    settings = {"dataset": "diabetes", "clients": 5, "batch": 16, "lr": 0.05, "precision": "float64"}
    return quick(**(settings | changes))


# ---- data


@pytest.fixture(scope="module")
def patients() -> pd.DataFrame:
    frame = load_diabetes(as_frame=True).frame
    frame["hospital"] = np.arange(len(frame)) % 4
    return frame.assign(sex=np.where(frame["sex"] > 0, "f", "m"))


def test_the_built_in_dataset_is_scikit_learn_s_with_a_fifth_held_out() -> None:
    read, bunch = load("diabetes"), load_diabetes()
    assert (read.classes, len(read.y), len(read.y_test)) == ((), 354, 88)
    assert sorted([*read.y, *read.y_test]) == sorted(bunch.target)
    rows = {tuple(x): y for x, y in zip(bunch.data.astype(np.float32), bunch.target, strict=True)}
    assert all(rows[tuple(x)] == y for x, y in zip(read.x, read.y, strict=True))


def test_a_column_of_a_table_is_predicted_as_a_number(patients: pd.DataFrame, tmp_path: Path) -> None:
    patients.to_csv(tmp_path / "t.csv", index=False)
    read = data.from_csv(tmp_path / "t.csv", "target", client="hospital", task="regression")
    framed = data.from_frame(patients, "target", client="hospital", task="regression")
    assert read.y.dtype == np.float64
    assert read.classes == ()
    assert (read.y == framed.y).all()
    assert (read.x == framed.x).all()
    assert sorted([*read.y, *read.y_test]) == sorted(patients["target"])
    assert read.target is not None
    assert read.target.mean == pytest.approx(read.y.mean())  # and not of the test examples
    classes = data.from_csv(tmp_path / "t.csv", "target", client="hospital")
    assert len(classes.classes) > 100
    assert "task=regression" in classes.notes[-1]


def test_a_table_whose_numbers_to_predict_are_missing_or_no_numbers_is_refused(tmp_path: Path) -> None:
    for cell, message in (("", "missing values: 1 in 'y'"), ("much", "'much' in column 'y'")):
        (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i},{i}.5\n" for i in range(20)) + f"3,{cell}\n")
        with pytest.raises(DataError, match=message):
            data.from_csv(tmp_path / "t.csv", "y", task="regression")
    (tmp_path / "t.csv").write_text("a,y\n" + "1,2\n" * 20)
    with pytest.raises(DataError, match=r"are 2\.0: what is always the same"):
        data.from_csv(tmp_path / "t.csv", "y", task="regression")


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-capped", "shards", "pathological", "dirichlet-quantity"])
def test_partitions_by_class_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"partition.kind={kind} where a number is predicted.*Use partition.kind=iid"):
        fedrane.run(numbers(partition={"kind": kind}))


@pytest.mark.parametrize("kind", ["auto", "quantity", "consecutive"])
def test_partitions_without_labels_are_not(kind: str) -> None:
    result = fedrane.run(numbers(partition={"kind": kind}, rounds=1))
    assert result.experiment.partition.kind == ("iid" if kind == "auto" else kind)
    split = result.federation.split
    assert sum(len(examples) for part in (split.train, split.test) for examples in part) == 354


# ---- the loss


def test_the_loss_is_the_mean_squared_error_without_padding_and_with_mixed_targets() -> None:
    scores, y, other = (torch.tensor(values) for values in ([[1.0], [4.0], [9.0]], [0.0, 1.0, 5.0], [2.0, 1.0, 0.0]))
    key, mask = torch.tensor(0), torch.tensor([True, True, False])
    batch = Batch(scores, y, mask, key)
    assert float(prediction_loss(scores, batch)) == (1 + 9) / 2
    mixed = batch._replace(mixed=Mixed(other, torch.tensor([0.5, 0.5, 0.5])))
    assert float(prediction_loss(scores, mixed)) == (0 + 9) / 2
    with pytest.raises(ConfigError, match="Use prediction_loss"):
        cross_entropy(scores, batch)


# ---- methods and engines


@pytest.mark.parametrize("method", slow_except(FAST, OTHERS))
def test_every_other_method_learns_and_the_stacked_engine_agrees(method: str) -> None:
    one, many = (fedrane.run(numbers(method=method, rounds=5, epochs=2, engine=e)) for e in ("sequential", "stacked"))
    first, last = one.history[0], one.history[-1]
    for model in (GLOBAL, PERSONAL):
        if key := headline(last, model):
            assert last[key] == pytest.approx(many.history[-1][key], abs=1e-9)
            assert last[key] > min(0.3, first[key]) or method == "fedmgda"  # whose steps have a fixed length
    assert headline(last, GLOBAL) or headline(last, PERSONAL)


@pytest.mark.parametrize("method", NEEDS_CLASSES)
def test_methods_that_need_classes_say_why(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method={method} where a number is predicted \(regression\): its|it dist"):
        fedrane.run(numbers(method=method))


@pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=FORKS)])
def test_engines_agree_to_the_bit(engine: str) -> None:
    reference, other = (
        fedrane.run(numbers(rounds=2, validation=0.2, engine=e, device="cpu")) for e in ("sequential", engine)
    )
    assert untimed(other.history) == untimed(reference.history)
    assert "validation/r2" in reference.history[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attack": {"kind": "labels"}}, "attack.kind=labels where a number is predicted"),
        ({"positive": "yes"}, "positive=yes would have no effect"),
        ({"task": "regression"}, "task=regression would have no effect"),
    ],
)
def test_settings_of_classes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fedrane.run(numbers(**change))
    assert "task" in {rule.key for rule in effects.RULES}


# ---- results


def test_predictions_are_in_the_unit_of_the_target_and_have_the_r2_that_was_measured(tmp_path: Path) -> None:
    result = fedrane.run(numbers(rounds=8), tmp_path / "run")
    held = load("diabetes")
    for model in (result.model, fedrane.load(tmp_path / "run").model):
        predicted = model.predict(torch.from_numpy(held.x_test))
        assert r2_score(held.y_test, predicted) == pytest.approx(result.history[-1]["global/r2"], abs=1e-6)
    last = result.history[-1]
    assert last["global/rmse"] == pytest.approx(np.sqrt(np.mean((np.array(predicted) - held.y_test) ** 2)), rel=1e-5)
    assert result.summary["global/last"]["global/r2"] == last["global/r2"]
    assert not result.calibration
    with pytest.raises(ConfigError, match="a model of numbers gives no probabilities"):
        result.model.predict_proba(torch.from_numpy(held.x_test))


def test_a_run_that_is_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    whole = fedrane.run(numbers(rounds=4))
    fedrane.run(numbers(rounds=2), tmp_path / "run")
    assert untimed(fedrane.resume(tmp_path / "run", rounds=4).history)[-1] == untimed(whole.history)[-1]


def test_early_stopping_is_by_r2() -> None:
    """A client step of nothing gives the same R² each time."""
    result = fedrane.run(numbers(rounds=6, validation=0.2, patience=2, lr=1e-30))
    assert len(result.history) == 3


def test_a_comparison_is_of_r2_and_of_errors_on_request(tmp_path: Path) -> None:
    made = fedrane.compare(["fedavg", "local"], numbers(rounds=2), out=tmp_path)
    assert made.measure == "r2"
    assert "R² in %" in made.caption
    best = fedrane.compare(["fedavg", "local"], numbers(rounds=2), out=tmp_path, metric="rmse")  # from the folder
    assert best.rows == made.by("rmse").rows
    assert "RMSE in the unit of the number" in best.caption
    rmse = best.cell("fedavg", GLOBAL, "last").mean
    assert rmse is not None
    assert rmse > 10
    assert f"{rmse:.4g}" in best.to_markdown()
    page = report.write([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    shown = {words: words in page for words in ("R² in %, the share of the variance", ">RMSE<", ">R²<", ">Accuracy<")}
    assert list(shown.values()) == [True, True, True, False], shown


def test_runs_of_classes_and_of_numbers_have_no_common_page(tmp_path: Path) -> None:
    fedrane.run(numbers(rounds=1), tmp_path / "numbers")
    fedrane.run(quick(rounds=1), tmp_path / "classes")
    with pytest.raises(ConfigError, match="an accuracy and an R² cannot be compared"):
        report.write([tmp_path / "numbers", tmp_path / "classes"], tmp_path / "page.html")


def test_the_commands(patients: pd.DataFrame, tmp_path: Path) -> None:
    patients.to_csv(tmp_path / "t.csv", index=False)
    patients.drop(columns=["target", "hospital"])[:3].to_csv(tmp_path / "new.csv", index=False)
    words = [f"dataset={tmp_path / 't.csv'}", "label=target", "client=hospital", "task=regression", "rounds=2"]
    run = ["run", *words, "--out", str(tmp_path / "run"), "--quiet"]
    predict = ["predict", str(tmp_path / "run"), str(tmp_path / "new.csv")]
    for given in (run, predict, [*predict, "--json"], ["partition", *words]):
        done = CliRunner().invoke(command, given)
        assert done.exit_code == 0, done.output
        if given[-1] == "--json":
            assert all(20 < json.loads(line)["prediction"] < 400 for line in done.output.splitlines())
    assert "classes per client" not in done.output
    assert "label skew" not in done.output


@SLOW
def test_tuning_is_by_r2(tmp_path: Path) -> None:
    words = ["clients=4", "batch=16", "partition.kind=iid", "--rounds", "2", "--grid", "lr=1e-6,0.05"]
    done = CliRunner().invoke(command, ["tune", "fedavg", "--dataset", "diabetes", *words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "lr = 0.05" in (tmp_path / "tuned.toml").read_text()
