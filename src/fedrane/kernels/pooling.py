"""Max-pooling by the GPU's kernels; where there are none, PyTorch's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack

MAX_WINDOW_SIDE = 16
"""The largest side of a window whose positions fit in eight bits."""


def max_pool(*args: Any, **kwargs: Any) -> Tensor:
    """``F.max_pool2d`` with its arguments, without indices."""
    if window := _window(*args, **kwargs):
        x, *how = window
        y: Tensor = _MaxPool.apply(x.permute(0, 2, 3, 1), *how)[0]  # type: ignore[no-untyped-call]
        return y.permute(0, 3, 1, 2)
    return F.max_pool2d_with_indices(*args, **kwargs)[0]


def _window(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, int, int, int] | None:
    """The arguments of a max-pooling that the kernels can do: square, not dilated."""
    stride = kernel_size if stride is None else stride
    sizes = [set(v) if isinstance(v, (tuple, list)) else {v} for v in (kernel_size, stride, padding, dilation)]
    plain = input.dim() == 4 and sizes[3] == {1} and not ceil_mode and not return_indices
    if not plain or any(len(v) != 1 for v in sizes) or not dispatch.gpu_kernels(input, "pooling"):
        return None
    size, step, border = (v.pop() for v in sizes[:3])
    return (input, size, step, border) if size <= MAX_WINDOW_SIDE else None


class _MaxPool(Function):
    """Of (N, H, W, C) by the kernels; ties go to the first, as in PyTorch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        kernels = dispatch.gpu_kernels(x, "pooling")
        y, taken = on_stack(kernels.max_pool, x, size, stride, padding)  # type: ignore[union-attr]
        return y, taken

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, taken = ctx.saved_tensors
        backward = dispatch.gpu_kernels(x, "pooling").max_pool_backward  # type: ignore[union-attr]
        return on_stack(backward, grad_outputs[0], taken, x, *ctx.how), None, None, None
