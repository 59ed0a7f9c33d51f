"""A work-around for a fault of oneDNN 3.12 in bf16 convolutions on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class CompleteGradients(TorchFunctionMode):
    """Within it, convolutions in bf16 on a CPU have every gradient written.

    Where the output has one position along a side that is shorter than the stride, oneDNN leaves gradients of the
    weight as the memory was. With one position the stride has no effect, so it is set to 1 there. Transposed
    convolutions have the same fault where their output is shorter than the stride; they are not mended.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CONVOLUTIONS:
            return _convolve(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolve(
    func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, *args: Any, **kwargs: Any
) -> Tensor:
    y: Tensor = func(input, weight, bias, stride, *args, **kwargs)
    sides, positions = (value.shape[2 - weight.dim() :] for value in (input, y))
    strides = list(stride) if isinstance(stride, tuple | list) else [stride] * len(sides)
    needed = [1 if n == 1 and side < step else step for side, n, step in zip(sides, positions, strides, strict=True)]
    if needed == strides:
        return y
    y = func(input, weight, bias, needed, *args, **kwargs)
    for dim, n in enumerate(positions, 2 - weight.dim()):
        y = y.narrow(dim, 0, n)
    return y.contiguous()
