"""Regression in a federation: sums that add up, sums that cannot be, and what a client does not tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord
from sklearn.datasets import load_diabetes
from typer.testing import CliRunner

import fedrane
from asserts import untimed
from fedrane.cli.commands import app as command
from fedrane.errors import DataError
from fedrane.flower import messages
from fedrane.flower.app import node_examples
from fedrane.flower.codec import MessageError
from fedrane.flower.project import AppConfig
from fedrane.flower.server import _test_data
from fedrane.ops.regression import Residuals
from flower_grids import as_over_flower, looped, small

SUMS = Residuals(5, 1.0, 3.0, 2.0, 1.5)


def both_ways(scratch: Path, method: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    e = small(dataset="diabetes", method=method, partition={"kind": "iid"}, validation=0.2, rounds=2)
    with looped(scratch):
        simulated = fedrane.run(e.replace(engine="flower"))
    return untimed(simulated.history), as_over_flower(fedrane.run(e))


def test_a_simulation_gives_the_same_bits_as_a_local_run(tmp_path: Path) -> None:
    simulated, local = both_ways(tmp_path, "fedavg")
    assert simulated == local
    assert "global/local_r2" in local[-1]


def test_personal_models_are_evaluated_alike(tmp_path: Path) -> None:
    """But for the rounding of predictions, which depends on how many are made at once."""
    simulated, local = both_ways(tmp_path, "ditto")
    for ours, theirs in zip(local, simulated, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("personal/r2", "personal/rmse", "personal/clients", "validation/r2"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


def test_sums_that_can_be_are_read() -> None:
    assert messages.read_residuals(messages.count_record(SUMS, in_detail=True), 5) == SUMS
    silent = messages.read_residuals(messages.count_record(SUMS, in_detail=False), 5)
    assert silent == (5, 0.0, 5.0, 2.0, 1.5)
    assert messages.read_residuals(None, 0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"examples": 4},
        {"squares": 0.1},  # less than those of five numbers with the sum 1
        {"squares": -3.0},
        {"absolute": -2.0},
        {"loss": 0.1},
        {"loss": float("nan")},
        {"targets": float("inf")},
        {"targets": [1.0]},
        {"more": 1.0},
    ],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        messages.read_residuals(MetricRecord({**SUMS._asdict(), **change}), 5)


def test_sums_that_are_missing_are_refused() -> None:
    with pytest.raises(MessageError, match="no sums: of 5 examples"):
        messages.read_residuals(None, 5)
    with pytest.raises(MessageError):
        messages.read_residuals(MetricRecord({"examples": 5}), 5)


def test_nodes_and_server_read_numbers_by_the_form_of_the_sample(tmp_path: Path) -> None:
    frame = load_diabetes(as_frame=True).frame
    frame[:80].to_csv(tmp_path / "sample.csv", index=False)
    words = [f"dataset={tmp_path / 'sample.csv'}", "label=target", "task=regression", "clients=2", "rounds=1"]
    done = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "app"), *words, "device=cpu"])
    assert done.exit_code == 0, done.output
    config = AppConfig.read(tmp_path / "app" / "app_app")
    assert config.inputs.target is not None
    frame[80:120].to_csv(tmp_path / "mine.csv", index=False)
    np.savez(tmp_path / "mine.npz", x=frame.iloc[80:120, :10].to_numpy(np.float32), y=frame["target"][80:120])
    for name in ("mine.csv", "mine.npz"):
        context: Any = SimpleNamespace(node_config={"data": str(tmp_path / name), "partition-id": 0})
        x, y = node_examples(context, *config)
        assert y.tolist() == frame["target"][80:120].tolist()
        _, standardised = config.pool(x, y, config.task()).take(np.arange(len(y)))
        back = config.inputs.target.mean + config.inputs.target.std * standardised.double().numpy()
        assert back == pytest.approx(y, rel=1e-5)
    np.savez(tmp_path / "mine.npz", x=x, y=np.array(["much"] * len(x)))
    with pytest.raises(DataError, match="they are the numbers to predict"):
        node_examples(context, *config)
    assert set(_test_data(str(tmp_path / "mine.csv"), config).y) <= set(frame["target"])
    done = CliRunner().invoke(command, ["flower", "deal", str(tmp_path / "app"), str(tmp_path / "dealt")])
    assert done.exit_code == 0, done.output
    assert np.load(tmp_path / "dealt" / "client-0.npz")["y"].dtype == np.float64
