"""Text in a federation: each node reads its own file, by the alphabet of the sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedrane
from asserts import same_bytes
from fedrane.cli.commands import app as command
from fedrane.errors import DataError
from fedrane.flower.app import node_examples
from fedrane.flower.project import AppConfig
from fedrane.flower.server import _test_data
from fedrane.testing import conformance
from flower_grids import looped, small


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    """Of an app that was made with a sample of the letters a to c."""
    (tmp_path / "sample.txt").write_text("abc" * 40)
    words = [f"dataset={tmp_path / 'sample.txt'}", "window=4", "clients=2", "rounds=2", "device=cpu"]
    done = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "app"), *words])
    assert done.exit_code == 0, done.output
    return AppConfig.read(tmp_path / "app" / "app_app")


def test_a_node_reads_its_own_text_by_the_alphabet_of_the_sample(config: AppConfig, tmp_path: Path) -> None:
    assert (config.experiment.model, config.experiment.partition.kind) == ("lstm", "consecutive")
    (tmp_path / "mine.txt").write_text("cbbcxa")
    context: Any = SimpleNamespace(node_config={"data": str(tmp_path / "mine.txt"), "partition-id": 0})
    x, y = node_examples(context, *config)
    assert x.tolist() == [[2, 1, 1, 2], [1, 1, 2, 3]]
    assert y.tolist() == [3, 0], "x is unknown"
    inputs, _ = config.pool(x, y, config.task()).take(np.arange(2))
    assert inputs.tolist() == x.tolist()


def test_the_server_s_test_text_has_the_alphabet_of_the_sample(config: AppConfig, tmp_path: Path) -> None:
    (tmp_path / "later.txt").write_text("cb" * 30)
    data = _test_data(str(tmp_path / "later.txt"), config)
    assert (data.alphabet, data.shape) == ("abc", (4,))
    assert set(data.y_test.tolist()) == {1, 2}
    with pytest.raises(DataError, match="other characters"):
        _test_data("zen", config)


def test_a_run_over_flower_ends_as_it_does_locally(tmp_path: Path) -> None:
    chosen = small(dataset="zen", model="auto", window=5, rounds=2, partition={"kind": "auto"})
    local = fedrane.run(chosen)
    with looped(tmp_path):
        remote = fedrane.run(chosen.replace(engine="flower"))
    same_bytes(conformance.states(local), conformance.states(remote))
