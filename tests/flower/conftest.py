"""For the tests of federations."""

from __future__ import annotations

import pytest

from fedrane.flower import simulation


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a reply that does not come."""
    original = simulation.NodePool
    monkeypatch.setattr(
        simulation, "NodePool", lambda *a, **k: original(*a, **{"timeout": 0.2, "poll_interval": 0.01, **k})
    )
