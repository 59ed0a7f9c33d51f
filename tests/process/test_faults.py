"""A file operation or an allocation that fails once, and kills of every method: the same bytes in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrane.methods import METHODS
from fuzz.faults import Faults
from fuzz.kills import Kills
from harness import Driver
from problems import SLOW


@pytest.mark.parametrize("stride", [200, pytest.param(8, marks=SLOW)])
def test_a_fault_costs_no_more_than_a_message(fedrane: Driver, tmp_path: Path, stride: int) -> None:
    """All points: ``make fuzz``."""
    faults = Faults(fedrane, tmp_path)
    outcomes = [faults.check(point) for point in faults.points(stride)]
    assert outcomes.count("an error") > len(outcomes) / 2


@SLOW
def test_kills_of_every_method(fedrane: Driver, tmp_path: Path) -> None:
    """A hundred; a thousand: ``make fuzz``."""
    kills = Kills(fedrane, tmp_path, 0, list(METHODS))
    kills.until(50)
    kills.until(100)
    assert not kills.failures
    assert kills.kills.total() == 100
    assert max(kills.runs[name] for name in METHODS) - min(kills.runs[name] for name in METHODS) <= 1
