"""For all tests: property tests have no deadline (a loaded machine is no defect) and are the same in every run; without
a GPU its kernels are interpreted."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():  # Triton must know before it is imported, by whomever
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis"):  # a GPU host may lack it: the tests for a GPU do without
    from hypothesis import settings

    settings.register_profile("project", deadline=None, derandomize=True)
    settings.load_profile("project")
