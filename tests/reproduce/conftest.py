"""Short sweeps: tiny cells of the tables on digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedrane.reproduce.results import ResultStore
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Selection, cells, targets

QUICK = ("model=mlp", "clients=4", "epochs=1", "batch=256", "rounds=2", "device=cpu", "checkpoint_every=1")


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Sweep]:
    """``sweep("cosine", methods=…)``: each call makes a new sweep on the same folders."""

    def make(name: str = "table-gfl", words: tuple[str, ...] = (), retry: bool = False, **selection: Any) -> Sweep:
        asked = {"datasets": ("digits",), "alphas": (0.5,), "seeds": (0,), "methods": ("fedavg",)} | selection
        (target,) = targets(name)
        taken = {target.vary, *(word.partition("=")[0] for word in words)}
        quick = [word for word in QUICK if word.partition("=")[0] not in taken]
        wanted = cells(target, Selection(words=(*quick, *words), **asked))
        return Sweep(wanted, ResultStore(tmp_path / "results"), tmp_path / "cells", retry=retry)

    return make
