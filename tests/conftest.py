"""For all tests: property tests have no deadline (a loaded machine is no defect) and are the same in every run; without
a GPU its kernels are interpreted. Hooks and engines that a test calls by itself compute on one thread, as a run of
their size would: on a busy machine more of them take many times as long."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec

import torch

torch.set_num_threads(1)

# What the tests run is not what the user of this account has named.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedrane-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

if not torch.cuda.is_available():  # Triton must know before it is imported, by whomever
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis"):  # a GPU host may lack it: the tests for a GPU do without
    from hypothesis import settings

    settings.register_profile("project", deadline=None, derandomize=True)
    settings.load_profile("project")
