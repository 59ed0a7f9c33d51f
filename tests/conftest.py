"""For all tests: property tests have no deadline (a loaded machine is no defect) and are the same in every run; without
a GPU its kernels are interpreted. Hooks and engines that a test calls by itself compute on one thread, as a run of
their size would: on a busy machine more of them take many times as long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():  # Triton must know before it is imported, by whomever
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis"):  # a GPU host may lack it: the tests for a GPU do without
    from hypothesis import settings

    settings.register_profile("project", deadline=None, derandomize=True)
    settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not that of this account: what its user has registered there does not reach the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
