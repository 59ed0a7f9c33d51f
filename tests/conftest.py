"""For all tests: property tests have no deadline (a loaded machine is no defect) and are the same in every run."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hypothesis"):  # a GPU host may lack it: the tests for a GPU do without
    from hypothesis import settings

    settings.register_profile("project", deadline=None, derandomize=True)
    settings.load_profile("project")
