"""A network's calls rerouted while clients are stacked: whoever calls ``conv2d`` gets ours, without a changed network.

Besides convolution and pooling, a few operations of PyTorch are written otherwise, because under ``vmap`` they are slow
or read the memory layout of their input, which a stack hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedrane.kernels import dispatch
from fedrane.kernels.convolution import convolve
from fedrane.kernels.pooling import max_pool


@contextmanager
def stacked_mode() -> Iterator[None]:
    """Around a call under ``vmap`` over clients; without effect where kernels are switched off."""
    if not dispatch.ENABLED:
        yield
        return
    with _StackedMode(), dispatch.stacking():
        yield


class _StackedMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            plain = _plain(*args, **(kwargs or {}))
            if plain:
                return convolve(*plain)
        if func is F.linear and len(args) == 3 and args[2] is not None and not kwargs:
            product = F.linear(*args[:2])  # with a bias, a stack would also be multiplied by one
            return product + args[2].to(product.dtype)
        if func is F.adaptive_avg_pool2d and args[1:] in ((1,), ((1, 1),)) and not kwargs:
            return args[0].mean((-2, -1), keepdim=True)  # PyTorch's reads the memory layout
        if func is F.group_norm:
            return _group_norm(*args, **(kwargs or {}))
        if func in (F.max_pool2d, torch.max_pool2d) and not (kwargs or {}).get("return_indices"):
            return max_pool(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """PyTorch's reads the memory layout, too."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    groups = input.reshape(input.shape[0], num_groups, -1).to(dtype)
    var, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    y = ((groups - mean) * torch.rsqrt(var + eps)).reshape(input.shape)
    channel = (-1,) + (1,) * (input.dim() - 2)
    y = y if weight is None else y * weight.reshape(channel)
    return (y if bias is None else y + bias.reshape(channel)).to(input.dtype)


def _plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, int, int] | None:
    """The arguments of :func:`convolve`, if it can do this convolution: square, not dilated, and of one group."""
    strides, paddings, dilations = (
        set(v) if isinstance(v, (tuple, list)) else {v} for v in (stride, padding, dilation)
    )
    if input.dim() != 4 or groups != 1 or dilations != {1} or len(strides) != 1 or len(paddings) != 1:
        return None
    step, border = strides.pop(), paddings.pop()
    return None if isinstance(border, str) else (input, weight, bias, step, border)
