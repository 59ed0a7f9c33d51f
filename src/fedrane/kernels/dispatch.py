"""Which implementation of an operation runs: the one switch for all kernels.

>>> gpu_kernels(torch.zeros(1), "convolution") is None  # a tensor on the CPU
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

ENABLED = True
"""Set to False to have PyTorch do everything, also for stacked clients (``vmap`` of its own operations)."""
_stacked: ContextVar[bool] = ContextVar("clients are stacked", default=False)
_disabled: ContextVar[bool] = ContextVar("GPU kernels are disabled", default=False)


def gpu_kernels(x: Tensor, module: str) -> ModuleType | None:
    """The module of ``fedrane.kernels.gpu`` for tensors like this one, or None where PyTorch does the work."""
    return _load(module) if ENABLED and not _disabled.get() and x.is_cuda and x.dtype != torch.float64 else None


@cache
def _load(module: str) -> ModuleType | None:
    return import_module(f"fedrane.kernels.gpu.{module}") if triton_available() else None


def triton_available() -> bool:
    return find_spec("triton") is not None


def stacked() -> bool:
    """Whether clients are stacked now; a convolution may then have a weight of higher precision than its input."""
    return _stacked.get()


def stacking() -> AbstractContextManager[None]:
    """Within it, clients are stacked."""
    return _true_within(_stacked)


def disabled() -> AbstractContextManager[None]:
    """Within it, PyTorch does the work of the GPU kernels."""
    return _true_within(_disabled)


@contextmanager
def _true_within(variable: ContextVar[bool]) -> Iterator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


class _OnStack(Function):
    """A function of stacked tensors as a function of one client's: under ``vmap`` it is called once for all."""

    @staticmethod
    def forward(function: Callable[..., Any], *values: Any) -> Any:
        out = function(*(v[None] if isinstance(v, Tensor) else v for v in values))
        return tuple(part[0] for part in out) if isinstance(out, tuple) else out[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Any], *values: Any) -> Any:
        def stack(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        out = function(*(stack(v, d) for v, d in zip(values, in_dims[1:], strict=True)))
        return out, (0,) * len(out) if isinstance(out, tuple) else 0


def on_stack(function: Callable[..., Any], *values: Any) -> Any:
    """Call a kernel, which takes a stack, with one client's values: under ``vmap`` it gets those of all clients."""
    return _OnStack.apply(function, *values)  # type: ignore[no-untyped-call]
