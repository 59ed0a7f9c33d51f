"""The race with other libraries: what an adapter must do, on the two programs that need no other library."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedrane.data.dataset import Dataset

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    before = sys.path.copy()
    sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("peers", BENCHMARKS / "peers.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def job(peers: ModuleType) -> Any:
    numbers = np.random.Generator(np.random.Philox(0))
    y = numbers.integers(0, 10, 1000)
    x = numbers.integers(0, 255, (1000, 1, 28, 28), dtype=np.uint8)
    examples = Dataset("noise", x[:900], y[:900], x[900:], y[900:], tuple("abcdefghij"), (0.5,), (0.5,))
    return peers.make_job(peers.with_classes(examples), rounds=2, epochs=1)


@pytest.mark.parametrize("name", ["plain loop", "FedRANE library"])
def test_an_adapter_does_the_job_and_reports_it(peers: ModuleType, job: Any, name: str, tmp_path: Path) -> None:
    """``run`` refuses any other."""
    peers.write(tmp_path / "job.npz", job)
    python = peers.prepare(peers.PROGRAMS[name], tmp_path, "torch")
    found = peers.run(name, python, job, tmp_path, threads=1, patience=300)
    assert found["samples_per_second"] > 0
    assert found["threads"] == 1
    assert 0 <= found["accuracy"] <= 1
    (row, failed) = peers.summary({name: [found, found]}, {"another": "why"})
    assert row["samples_per_second"] == found["samples_per_second"]
    assert failed == {"program": "another", "reason": "why"}


@pytest.mark.parametrize("what", ["sizes", "parameters", "steps", "examples", "marks"])
def test_a_report_of_another_job_is_refused(peers: ModuleType, job: Any, what: str) -> None:
    report = {"sizes": [len(each) for each in job.clients], "parameters": 46_730, "marks": [(0, 0)] * 3}
    report |= {"steps": job.steps, "examples": job.examples}
    peers.same_job(report, job)
    report[what] = report[what][1:] if isinstance(report[what], list) else report[what] + 1
    with pytest.raises(peers.FailedError, match="another job"):
        peers.same_job(report, job)


def test_the_job_survives_its_file(peers: ModuleType, job: Any, tmp_path: Path) -> None:
    peers.write(tmp_path / "job.npz", job)
    read = sys.modules["_job"].read(str(tmp_path / "job.npz"))
    for written, again in zip((*job.clients, job.pixels), (*read.clients, read.pixels), strict=True):
        assert torch.equal(written, again)
    assert (read.rounds, read.epochs, read.batch, read.lr) == (job.rounds, job.epochs, job.batch, job.lr)
    assert read.steps == job.steps


def test_what_is_not_timed(peers: ModuleType) -> None:
    """The first and the last round."""
    assert peers.timed([(0, 0), (9, 9), (10, 3), (13, 5), (50, 50)]) == (2.0, -2.0)
    assert peers.timed([(0, 0), (4, 2)]) == (4, 2)


def test_memory_is_that_of_the_whole_tree(peers: ModuleType) -> None:
    held = peers.memory(os.getpid())
    if held:  # Linux alone says
        assert held > 2**20
