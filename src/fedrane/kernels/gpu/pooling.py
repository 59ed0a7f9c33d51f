"""Max-pooling of channels-last maps (S, N, H, W, C), forward and backward; ties go to the first, as in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _max_pool(
    x, y, taken, height, width, channels, out_height, out_width, size, stride, padding, SIZE: tl.constexpr
):  # fmt: skip
    """The largest of each window, and which tap it is; the first of equals."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < out_height * out_width * channels
    c = at % channels
    column = at // channels % out_width
    row = at // channels // out_width
    x += image * height * width * channels
    y += image * out_height * out_width * channels
    taken += image * out_height * out_width * channels
    best = tl.full((SIZE,), -float("inf"), dtype=tl.float32)
    best_tap = tl.zeros((SIZE,), dtype=tl.int32)
    for tap in range(size * size):
        h = row * stride + tap // size - padding
        w = column * stride + tap % size - padding
        valid = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        value = tl.load(x + (h * width + w) * channels + c, mask=valid, other=-float("inf"))
        value = value.to(tl.float32)
        more = (value > best) | (value != value)
        best = tl.where(more, value, best)
        best_tap = tl.where(more, tap, best_tap)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=inside)
    tl.store(taken + at, best_tap.to(tl.uint8), mask=inside)


@triton.jit
def _max_pool_backward(
    grad_output, taken, grad_input, height, width, out_height, out_width, size, stride, padding, reach,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``reach`` windows of a side can share a position."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < height * width * CHANNELS
    c = at % CHANNELS
    column = at // CHANNELS % width + padding
    row = at // CHANNELS // width + padding
    grad_output += image * out_height * out_width * CHANNELS
    taken += image * out_height * out_width * CHANNELS
    grad_input += image * height * width * CHANNELS
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for number in range(reach * reach):
        h, w = row // stride - number // reach, column // stride - number % reach
        i, j = row - h * stride, column - w * stride
        valid = inside & (h >= 0) & (w >= 0) & (h < out_height) & (w < out_width) & (i < size) & (j < size)
        position = (h * out_width + w) * CHANNELS + c
        mine = tl.load(taken + position, mask=valid, other=255).to(tl.int32) == i * size + j
        total += tl.load(grad_output + position, mask=valid & mine, other=0.0).to(tl.float32)
    tl.store(grad_input + at, total.to(grad_input.dtype.element_ty), mask=inside)


def max_pool(x: Tensor, size: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Max-pooling of (S, N, H, W, C), and which tap of its window each largest is."""
    x = x.contiguous()
    height, width, channels = x.shape[2:]
    shape = [(n + 2 * padding - size) // stride + 1 for n in (height, width)]
    y = x.new_empty(*x.shape[:2], *shape, channels)
    taken = torch.empty_like(y, dtype=torch.uint8)
    _max_pool[(y.shape[:2].numel(), triton.cdiv(y.shape[2:].numel(), 1024))](
        x, y, taken, height, width, channels, *shape, size, stride, padding, SIZE=1024
    )
    return y, taken


def max_pool_backward(grad_output: Tensor, taken: Tensor, like: Tensor, size: int, stride: int, padding: int) -> Tensor:
    grad_output = grad_output.contiguous()
    grad_input = torch.empty(like.shape, dtype=grad_output.dtype, device=grad_output.device)
    height, width, channels = like.shape[2:]
    _max_pool_backward[(grad_input.shape[:2].numel(), triton.cdiv(grad_input.shape[2:].numel(), 1024))](
        grad_output, taken.contiguous(), grad_input, height, width, *grad_output.shape[2:4], size, stride, padding,
        triton.cdiv(size, stride), CHANNELS=channels, SIZE=1024,
    )  # fmt: skip
    return grad_input
