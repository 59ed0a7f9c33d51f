"""One warm driver for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import Driver


@pytest.fixture(scope="session")
def fedrane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """The command, as a process of its own: ``fedrane("run", "rounds=3")``."""
    driver = Driver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()
