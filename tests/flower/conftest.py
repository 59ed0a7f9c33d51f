"""For the tests of federations."""

from __future__ import annotations

import pytest

from fedrane.engines import simulation


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for an answer that does not come."""
    original = simulation.Fleet
    monkeypatch.setattr(simulation, "Fleet", lambda *a, **k: original(*a, **{"timeout": 0.2, "pause": 0.01, **k}))
