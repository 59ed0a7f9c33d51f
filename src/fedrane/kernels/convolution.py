"""A convolution whose weights differ from client to client, under ``torch.func.vmap``.

PyTorch turns it into a grouped convolution, which is slow. Here it is one batched matrix product over channels-last
patches. Taps that see nothing but padding (eight of nine on a 1 × 1 map) are left out, which changes no number. On a
GPU the kernels of ``gpu.convolution`` do it without writing patches out. ``F.conv2d`` is the oracle of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A convolution of (N, C, H, W), channels last in memory; the weight may have a higher precision than ``x``."""
    last = (0, 2, 3, 1)
    y = _Convolve.apply(x.permute(last), weight.permute(last), bias, stride, padding)  # type: ignore[no-untyped-call]
    out: Tensor = y.permute(0, 3, 1, 2)
    return out


class _Convolve(Function):
    """(N, H, W, C) and (O, k, k, C) to (N, H', W', O)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        rows, columns = _sides(x, weight, stride, padding)
        if kernels := dispatch.gpu_kernels(x, "convolution"):
            taps = (rows.low, rows.taps, columns.low, columns.taps)
            out: Tensor = on_stack(kernels.convolve, x, weight, bias, taps, stride, padding)
            return out
        y = _patches(x, rows, columns, stride) @ _matrix(weight, rows, columns).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        grad_output, (x, weight) = grad_outputs[0], ctx.saved_tensors
        rows, columns = _sides(x, weight, ctx.stride, ctx.padding)
        if kernels := dispatch.gpu_kernels(x, "convolution"):
            how = ((rows.low, rows.taps, columns.low, columns.taps), ctx.stride, ctx.padding)
            grad_weight, grad_bias = on_stack(kernels.grad_weight, x, grad_output, weight, ctx.biased, *how)
            grad_input = on_stack(kernels.grad_input, grad_output, weight, x, *how) if ctx.needs_input_grad[0] else None
        else:  # of the inputs alone, so that it can be differentiated again
            patches = _patches(x, rows, columns, ctx.stride)
            grad_weight = _grad_weight(patches, grad_output, weight, rows, columns)
            grad_bias = grad_output.sum((0, 1, 2)).to(weight.dtype)
            needed = ctx.needs_input_grad[0]
            grad_input = _grad_input(x, grad_output, weight, rows, columns, ctx.stride) if needed else None
        return grad_input, grad_weight, grad_bias if ctx.biased else None, None, None


class _Side(NamedTuple):
    """One dimension of a convolution, without the taps that see padding alone."""

    low: int
    high: int
    before: int
    after: int

    @property
    def taps(self) -> int:
        return self.high - self.low

    @classmethod
    def of(cls, length: int, taps: int, stride: int, padding: int) -> _Side:
        last = (length + 2 * padding - taps) // stride * stride  # where the last patch begins, on the padded side
        used = [tap for tap in range(taps) if tap - padding < length and last + tap - padding >= 0]
        low, high = used[0], used[-1] + 1
        before = padding - low
        return cls(low, high, before, last + high - padding - length)


def _sides(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[_Side, _Side]:
    rows, columns = (_Side.of(x.shape[1 + d], weight.shape[1 + d], stride, padding) for d in (0, 1))
    return rows, columns


def _patches(x: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    """(N, H, W, C) to (N, H', W', taps · taps · C)."""
    if rows.before or rows.after or columns.before or columns.after:  # a negative pad crops
        x = F.pad(x, (0, 0, columns.before, columns.after, rows.before, rows.after))
    if rows.taps == columns.taps == 1:
        return x[:, ::stride, ::stride]
    x = x.unfold(1, rows.taps, stride).unfold(2, columns.taps, stride).permute(0, 1, 2, 4, 5, 3)
    return x.reshape(*x.shape[:3], -1)


def _unpatch(patches: Tensor, x: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    """The transpose of :func:`_patches`, for a strided convolution: patches added up where they came from."""
    n, *sides, channels = x.shape
    parts = patches.reshape(*patches.shape[:3], rows.taps, columns.taps, channels)
    height, width = (n + side.before + side.after for n, side in zip(sides, (rows, columns), strict=True))
    padded = torch.zeros_like(x[:, :1, :1]).expand(n, height, width, channels).clone()
    for i in range(rows.taps):
        for j in range(columns.taps):
            seen = padded[:, i : i + stride * parts.shape[1] : stride, j : j + stride * parts.shape[2] : stride]
            seen += parts[:, :, :, i, j]
    return F.pad(padded, (0, 0, -columns.before, -columns.after, -rows.before, -rows.after))


def _matrix(weight: Tensor, rows: _Side, columns: _Side) -> Tensor:
    used = weight[:, rows.low : rows.high, columns.low : columns.high]
    return used.reshape(weight.shape[0], -1).mT


def _grad_weight(patches: Tensor, grad_output: Tensor, weight: Tensor, rows: _Side, columns: _Side) -> Tensor:
    outputs, height, width, channels = weight.shape
    grad = grad_output.reshape(-1, outputs).mT @ patches.reshape(-1, patches.shape[-1])
    unused = (0, 0, columns.low, width - columns.high, rows.low, height - rows.high)
    return F.pad(grad.reshape(outputs, rows.taps, columns.taps, channels).to(weight.dtype), unused)


def _grad_input(x: Tensor, grad_output: Tensor, weight: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    if stride > 1:
        grad_patches = grad_output @ _matrix(weight, rows, columns).to(x.dtype).mT
        return _unpatch(grad_patches, x, rows, columns, stride)
    # With stride 1 the gradient is a convolution too, by the flipped taps.
    used = weight[:, rows.low : rows.high, columns.low : columns.high]
    flipped = used.flip(1, 2).permute(1, 2, 0, 3).reshape(-1, weight.shape[-1])
    sides = [_Side(0, s.taps, s.taps - 1 - s.before, s.taps - 1 - s.after) for s in (rows, columns)]
    return _patches(grad_output, sides[0], sides[1], 1) @ flipped.to(x.dtype)
