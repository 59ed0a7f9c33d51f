"""The switch for all kernels."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from asserts import close
from fedrane.kernels import convolution, dispatch, stacked_mode
from fedrane.methods import METHODS
from fedrane.testing import conformance


@pytest.mark.parametrize("enabled", [True, False])
def test_switched_off_pytorch_does_everything(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """A convolution under ``vmap`` is ours or PyTorch's, and the same either way."""
    monkeypatch.setattr(dispatch, "ENABLED", enabled)
    calls: list[Any] = []

    def spy(*args: Any) -> Any:
        calls.append(args)
        return convolution.convolve(*args)

    monkeypatch.setattr(stacked_mode, "convolve", spy)
    x, weight = torch.randn(2, 3, 4, 5, 5), torch.randn(2, 6, 4, 3, 3)
    with stacked_mode.stacked_mode():
        assert dispatch.stacked() == enabled
        y = torch.vmap(lambda x, weight: torch.conv2d(x, weight, padding=1))(x, weight)
    assert bool(calls) == enabled
    for k in range(2):
        torch.testing.assert_close(y[k], torch.conv2d(x[k], weight[k], padding=1), rtol=1e-4, atol=1e-4)


def test_a_run_without_kernels_ends_where_one_with_them_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    on = conformance.trained(METHODS["scaffold"].cls(), engine="stacked")
    monkeypatch.setattr(dispatch, "ENABLED", False)
    off = conformance.trained(METHODS["scaffold"].cls(), engine="stacked")
    close(conformance.states(on), conformance.states(off), 1e-12)


def test_nothing_but_the_gpus_kernels_imports_triton() -> None:
    """The library must run where Triton cannot be installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import fedrane, fedrane.cli\n"
        "fedrane.run(fedrane.Experiment(dataset='digits', clients=2, rounds=1, epochs=1, batch=64, engine='stacked'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
