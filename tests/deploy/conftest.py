"""One federation for all of these tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from deploy_federation import Federation


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The page's federation, up: SuperLink and three nodes with TLS and authentication."""
    made = Federation(tmp_path_factory.mktemp("federation"))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # asked to stop, it still cleans up
    try:
        made.do(made.prepare)
        made.start_link()
        made.start_nodes()
        yield made
    finally:
        made.close()
        signal.signal(signal.SIGTERM, before)
