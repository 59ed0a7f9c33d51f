"""Tables in a federation: each node reads its own CSV file, by the form of the sample's columns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer
from typer.testing import CliRunner

from fedrane.cli.commands import app as command
from fedrane.errors import DataError
from fedrane.flower.app import node_examples
from fedrane.flower.project import AppConfig
from fedrane.flower.server import _test_data

SAMPLE = 60


@pytest.fixture(scope="module")
def patients() -> pd.DataFrame:
    whole = load_breast_cancer(as_frame=True)
    frame = whole.data.iloc[:, :4].copy()
    frame["ward"] = np.where(np.arange(len(frame)) % 3 == 0, "day", "icu")
    return cast(pd.DataFrame, frame.assign(diagnosis=whole.target_names[whole.target]))


@pytest.fixture
def config(patients: pd.DataFrame, tmp_path: Path) -> AppConfig:
    """Of an app that was made with a sample."""
    patients[:SAMPLE].to_csv(tmp_path / "sample.csv", index=False)
    words = [f"dataset={tmp_path / 'sample.csv'}", "label=diagnosis", "clients=2", "rounds=2", "device=cpu"]
    done = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "app"), *words])
    assert done.exit_code == 0, done.output
    return AppConfig.read(tmp_path / "app" / "app_app")


def examples(config: AppConfig, path: Path) -> tuple[np.ndarray, np.ndarray]:
    context: Any = SimpleNamespace(node_config={"data": str(path), "partition-id": 0})
    return node_examples(context, *config)


def test_a_node_reads_its_own_table_by_the_form_of_the_sample(
    patients: pd.DataFrame, config: AppConfig, tmp_path: Path
) -> None:
    mine = patients[SAMPLE:][patients["ward"][SAMPLE:] == "icu"]
    columns = ["diagnosis", "ward", *patients.columns[:4][::-1]]
    mine[columns].to_csv(tmp_path / "mine.csv", index=False, sep=";")
    x, y = examples(config, tmp_path / "mine.csv")
    assert (x[:, :4] == mine.iloc[:, :4].to_numpy(np.float32)).all()
    assert x[:, 4:].tolist() == [[0, 1]] * len(mine)
    assert [config.inputs.classes[label] for label in y] == list(mine["diagnosis"])
    pool = config.pool(x, y, config.task())
    inputs, _ = pool.take(np.arange(len(y)))
    plain = (x[:, :4] - np.array(config.inputs.mean[:4])) / np.array(config.inputs.std[:4])
    assert inputs[:, :4].numpy() == pytest.approx(plain, abs=1e-4)
    mine.drop(columns="mean area").to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(DataError, match="no column 'mean area'"):
        examples(config, tmp_path / "less.csv")
    mine.assign(ward="surgery").to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DataError, match="'surgery' in column 'ward', line 2"):
        examples(config, tmp_path / "other.csv")


def test_the_server_s_test_examples_have_the_form_of_the_sample(
    patients: pd.DataFrame, config: AppConfig, tmp_path: Path
) -> None:
    later = patients[SAMPLE:][patients["ward"][SAMPLE:] == "icu"]
    later.to_csv(tmp_path / "later.csv", index=False)
    data = _test_data(str(tmp_path / "later.csv"), config)
    assert data.shape == config.inputs.shape
    assert data.x_test[:, 4:].tolist() == [[0, 1]] * len(data.y_test)


def test_what_is_dealt_of_a_table_comes_back_with_its_labels(config: AppConfig, tmp_path: Path) -> None:
    """Also if classes are called by numbers, of which a client has only some."""
    numbered = pd.DataFrame({"a": np.arange(60.0), "y": [1, 2, 3] * 20, "who": [*[0] * 30, *[1] * 30]})
    numbered.loc[30:, "y"] = np.where(numbered["y"][30:] == 1, 2, numbered["y"][30:])
    numbered.to_csv(tmp_path / "n.csv", index=False)
    words = [f"dataset={tmp_path / 'n.csv'}", "label=y", "client=who"]
    for order in (["new", str(tmp_path / "n"), *words], ["deal", str(tmp_path / "n"), str(tmp_path / "data")]):
        done = CliRunner().invoke(command, ["flower", *order])
        assert done.exit_code == 0, done.output
    config = AppConfig.read(tmp_path / "n" / "app_n")
    assert config.inputs.classes == ("1", "2", "3")
    x, y = examples(config, tmp_path / "data" / "client-1.npz")
    assert [int(config.inputs.classes[label]) for label in y] == [numbered["y"][int(a)] for a in x[:, 0]]
    assert set(y.tolist()) == {1, 2}
