"""Convolution of a stack of clients whose weights differ, forward and backward, one launch each.

The libraries have no fast convolution whose weights differ from client to client. Here the clients are one more
dimension of the grid. A convolution is an implicit matrix product over channels-last maps; patches are written out only
where there are few channels, which would leave most of a block empty. Products are added up in float32, and gradients
of parameters have the parameters' dtype. Nothing is added atomically, so a run repeats bit for bit.

With all kernels of this package, FedAvg's rounds of 20 clients are 4.0 times as fast as with the library's convolutions
grouped by ``vmap`` (ResNet-18; 2.5 times with the ConvNet; bf16, one H200, rows (d) and (e) of benchmarks/engines.py).

Shapes: x (S, N, H, W, C), weight (S, O, KH, KW, C), y (S, N, H', W', O), all contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedrane.kernels.gpu.grid import MIN_GRID_PROGRAMS, SPLIT_GRID_PROGRAMS

Taps = tuple[int, int, int, int]
"""The first tap that sees more than padding and the number of such taps, for rows and for columns."""
MIN_CHANNELS = 16
"""With fewer channels a block would be mostly empty: patches are written out, padded to a multiple of it."""
MIN_CAST_CLIENTS, MIN_CAST_ROWS = 6, 512
"""Clients, and rows of each, from which on weights are cast to the map's dtype once, before the launch."""
PATCH_POSITIONS, PATCH_VALUES = 256, 32
"""Positions and values that one program writes out as patches."""


@triton.jit(do_not_specialize=["patch_width"])  # else each thread takes adjacent values, and a warp's reads scatter
def _patches(
    x, out, size, line, skip, channels, run, depth, patch_width, out_width, positions, stride,
    M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """What each output position sees of a padded map, a row of taps being a ``run``; zeros from ``depth`` on."""
    image = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * M + tl.arange(0, M)
    k = tl.program_id(2) * K + tl.arange(0, K)
    at = m // out_width * stride * line + m % out_width * stride * channels
    offset = skip + k // run * line + k % run
    x += image * size
    values = tl.load(x + at[:, None] + offset[None, :], mask=(m < positions)[:, None] & (k < depth)[None, :], other=0.0)
    out += image * positions * patch_width
    out_mask = (m < positions)[:, None] & (k < patch_width)[None, :]
    tl.store(out + m[:, None] * patch_width + k[None, :], values, mask=out_mask)


@triton.jit
def _forward(
    x, weight, bias, y, rows, height, width, channels, out_height, out_width, outputs,
    stride_client, stride_output, stride_row, taps, taps_w, stride, pad_h, pad_w,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(outputs, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    x += s * (rows // (out_height * out_width)) * height * width * channels
    weight += s * stride_client
    top = m // out_width % out_height * stride - pad_h
    left = m % out_width * stride - pad_w
    first = m // (out_width * out_height) * height * width
    chunks = tl.cdiv(channels, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(taps * chunks):
        tap = t // chunks
        c = t % chunks * K + tl.arange(0, K)
        i, j = tap // taps_w, tap % taps_w
        h, w = top + i, left + j
        x_mask = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        position = (first + h * width + w) * channels
        x_block = tl.load(x + position[:, None] + c[None, :], mask=x_mask[:, None] & (c < channels)[None, :], other=0.0)
        weight_mask = (c < channels)[:, None] & (o < outputs)[None, :]
        at = weight + i * stride_row + j * channels
        weight_block = tl.load(at + o[None, :] * stride_output + c[:, None], mask=weight_mask, other=0.0)
        total = tl.dot(x_block, weight_block.to(x_block.dtype), total, allow_tf32=TF32)
    if BIASED:
        total += tl.load(bias + s * outputs + o, mask=o < outputs, other=0.0)[None, :]
    out_mask = (m < rows)[:, None] & (o < outputs)[None, :]
    tl.store(y + s * rows * outputs + m[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), mask=out_mask)


@triton.jit
def _grad_input(
    grad_output, weight, grad_input, images, height, width, channels, out_height, out_width, outputs,
    stride_client, stride_output, stride_row, taps_h, taps_w, stride, pad_h, pad_w,
    TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program has positions of the map that are a stride apart: the same taps see all of them."""
    blocks = tl.cdiv(channels, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    c = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    below, beside = tl.program_id(2) // stride, tl.program_id(2) % stride
    grad_output += s * images * out_height * out_width * outputs
    weight += s * stride_client
    cells_h, cells_w = tl.cdiv(height, stride), tl.cdiv(width, stride)
    row = m // cells_w % cells_h * stride + below
    column = m % cells_w * stride + beside
    image = m // (cells_w * cells_h)
    inside = (image < images) & (row < height) & (column < width)
    first_i, first_j = (below + pad_h) % stride, (beside + pad_w) % stride
    count_i, count_j = tl.cdiv(taps_h - first_i, stride), tl.cdiv(taps_w - first_j, stride)
    chunks = tl.cdiv(outputs, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(count_i * count_j * chunks):
        tap = t // chunks
        o = t % chunks * K + tl.arange(0, K)
        i, j = first_i + tap // count_j * stride, first_j + tap % count_j * stride
        h, w = row + pad_h - i, column + pad_w - j
        grad_mask = inside & (h >= 0) & (w >= 0)
        h, w = h // stride, w // stride
        grad_mask = grad_mask & (h < out_height) & (w < out_width)
        position = ((image * out_height + h) * out_width + w) * outputs
        read_mask = grad_mask[:, None] & (o < outputs)[None, :]
        grad_block = tl.load(grad_output + position[:, None] + o[None, :], mask=read_mask, other=0.0)
        at = weight + i * stride_row + j * channels
        weight_mask = (o < outputs)[:, None] & (c < channels)[None, :]
        weight_block = tl.load(at + o[:, None] * stride_output + c[None, :], mask=weight_mask, other=0.0)
        total = tl.dot(grad_block, weight_block.to(grad_block.dtype), total, allow_tf32=TF32)
    grad_input += s * images * height * width * channels
    at = ((image * height + row) * width + column) * channels
    out_mask = inside[:, None] & (c < channels)[None, :]
    tl.store(grad_input + at[:, None] + c[None, :], total.to(grad_input.dtype.element_ty), mask=out_mask)


@triton.jit
def _grad_weight(
    x, grad_output, grad_weight, grad_bias, rows, height, width, channels, out_height, out_width, outputs,
    taps_w, stride, pad_h, pad_w, low_h, low_w, size_h, size_w, share,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The weight has ``size`` taps, of which those from ``low`` on see more than padding."""
    blocks = tl.cdiv(outputs, N)
    chunks = tl.cdiv(channels, K)
    t = tl.program_id(0) // blocks
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    x += s * (rows // (out_height * out_width)) * height * width * channels
    grad_output += s * rows * outputs
    tap = t // chunks
    c = t % chunks * K + tl.arange(0, K)
    i, j = tap // taps_w, tap % taps_w
    total = tl.zeros((N, K), dtype=tl.float32)
    sums = tl.zeros((N,), dtype=tl.float32)
    for begin in range(part * share, min(rows, (part + 1) * share), M):
        m = begin + tl.arange(0, M)
        h = m // out_width % out_height * stride - pad_h + i
        w = m % out_width * stride - pad_w + j
        x_mask = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        position = ((m // (out_width * out_height) * height + h) * width + w) * channels
        x_block = tl.load(x + position[:, None] + c[None, :], mask=x_mask[:, None] & (c < channels)[None, :], other=0.0)
        grad_mask = (m < rows)[None, :] & (o < outputs)[:, None]
        grad_block = tl.load(grad_output + m[None, :] * outputs + o[:, None], mask=grad_mask, other=0.0)
        total = tl.dot(grad_block, x_block, total, allow_tf32=TF32)
        if BIASED:
            sums += tl.sum(grad_block.to(tl.float32), 1)
    if BIASED:
        to = grad_bias + (part * tl.num_programs(1) + s) * outputs + o
        tl.store(to, sums, mask=o < tl.where(t == 0, outputs, 0))
    grad_weight += (part * tl.num_programs(1) + s) * outputs * size_h * size_w * channels
    grad_weight += ((low_h + i) * size_w + low_w + j) * channels
    out_mask = (o < outputs)[:, None] & (c < channels)[None, :]
    tl.store(grad_weight + o[:, None] * (size_h * size_w * channels) + c[None, :], total, mask=out_mask)


class _Map(NamedTuple):
    """A convolution's input as the kernels take it, and how they go over it."""

    x: Tensor
    taps: tuple[int, int]
    stride: int
    pads: tuple[int, int]
    after: tuple[int, int]
    depth: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, taps_used: Taps, stride: int, padding: int) -> _Map:
        """With few channels and several taps: its patches, each of which is then all channels of one position."""
        x, channels = x.contiguous(), x.shape[-1]
        low_h, taps_h, low_w, taps_w = taps_used
        out_height, out_width = ((x.shape[d] + 2 * padding - weight.shape[d]) // stride + 1 for d in (2, 3))
        after = out_height, out_width
        pads = padding - low_h, padding - low_w
        if channels >= MIN_CHANNELS or taps_h * taps_w == 1:
            return cls(x, (taps_h, taps_w), stride, pads, after, channels)
        depth, positions = taps_h * taps_w * channels, out_height * out_width
        patch_width = triton.cdiv(depth, MIN_CHANNELS) * MIN_CHANNELS
        x = torch.nn.functional.pad(x, (0, 0, *(padding,) * 4)) if padding else x
        patches, line = x.new_empty(*x.shape[:2], *after, patch_width), x.shape[3] * channels
        m, k = PATCH_POSITIONS, PATCH_VALUES
        _patches[(x.shape[:2].numel(), triton.cdiv(positions, m), triton.cdiv(patch_width, k))](
            x, patches, x.shape[2] * line, line, low_h * line + low_w * channels, channels, taps_w * channels, depth,
            patch_width, out_width, positions, stride, M=m, K=k,
        )  # fmt: skip
        return cls(patches, (1, 1), 1, (0, 0), after, depth)

    @property
    def channels(self) -> int:
        return self.x.shape[-1]

    @property
    def rows(self) -> int:
        return self.x.shape[1] * self.after[0] * self.after[1]

    def sizes(self, outputs: int) -> tuple[int, ...]:
        return (self.rows, *self.x.shape[2:4], self.channels, *self.after, outputs)


def _used_taps(weight: Tensor, taps_used: Taps, dtype: torch.dtype, rows: int) -> Tensor:
    """The taps that see more than padding; where many rows are multiplied by them, cast once beforehand."""
    low_h, taps_h, low_w, taps_w = taps_used
    used = weight.contiguous()[:, :, low_h : low_h + taps_h, low_w : low_w + taps_w]
    return used.to(dtype).contiguous() if len(weight) >= MIN_CAST_CLIENTS and rows >= MIN_CAST_ROWS else used


class _Tile(NamedTuple):
    """What one program computes: its sides, the depth it takes at a time, and the stages it prefetches."""

    m: int
    n: int
    k: int
    stages: int = 3

    def options(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k, "num_stages": self.stages}


def _tile(rows: int, columns: int, depth: int, stack: int, x: torch.dtype, weight: torch.dtype) -> _Tile:
    """For products of (rows, depth) and (depth, columns): the largest that keeps an H200 busy."""
    same_dtype = (64, 128, 64) if columns > 64 else (128, 64, 64)
    sizes = rows, columns, depth
    for largest in (same_dtype if x == weight else (128, 64, 32), (64, 64, 64), (32, 64, 64), (32, 32, 128)):
        m, n, k = (max(16, min(side, triton.next_power_of_2(v))) for side, v in zip(largest, sizes, strict=True))
        if stack * triton.cdiv(rows, m) * triton.cdiv(columns, n) >= MIN_GRID_PROGRAMS:
            break
    return _Tile(m, n, max(16, k * 2 // x.itemsize))


def _weight_tile(outputs: int, channels: int, dtype: torch.dtype) -> _Tile:
    """For products of (outputs, rows) and (rows, channels); small GPUs have the shared memory for it, too."""
    n, k = (max(16, min(largest, triton.next_power_of_2(v))) for largest, v in ((128, outputs), (64, channels)))
    return _Tile(64, n, k, stages=3 if dtype.itemsize == 2 else 2)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, taps_used: Taps, stride: int, padding: int) -> Tensor:
    outputs = weight.shape[1]
    inputs = _Map.of(x, weight, taps_used, stride, padding)
    used = _used_taps(weight, taps_used, x.dtype, inputs.rows)
    if inputs.channels != x.shape[-1]:  # patches
        used = used.reshape(len(x), outputs, 1, 1, -1)
        used = torch.nn.functional.pad(used, (0, inputs.channels - inputs.depth))
    y = x.new_empty(*x.shape[:2], *inputs.after, outputs)
    tile = _tile(inputs.rows, outputs, inputs.channels, len(x), x.dtype, used.dtype)
    _forward[(triton.cdiv(inputs.rows, tile.m) * triton.cdiv(outputs, tile.n), len(x))](
        inputs.x, used, y if bias is None else bias.contiguous(), y, *inputs.sizes(outputs), *used.stride()[:3],
        inputs.taps[0] * inputs.taps[1], inputs.taps[1], inputs.stride, *inputs.pads,
        BIASED=bias is not None, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    return y


def grad_input(grad_output: Tensor, weight: Tensor, like: Tensor, taps_used: Taps, stride: int, padding: int) -> Tensor:
    grad_output = grad_output.contiguous()
    images, height, width, channels = like.shape[1:]
    low_h, taps_h, low_w, taps_w = taps_used
    out = torch.empty(like.shape, dtype=grad_output.dtype, device=grad_output.device)
    rows = images * triton.cdiv(height, stride) * triton.cdiv(width, stride)
    used = _used_taps(weight, taps_used, grad_output.dtype, rows)
    stack, dtype = len(grad_output), grad_output.dtype
    tile = _tile(rows, channels, grad_output.shape[-1], stack * stride * stride, dtype, used.dtype)
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(channels, tile.n), stack, stride * stride)
    _grad_input[grid](
        grad_output, used, out, images, height, width, channels, *grad_output.shape[2:5], *used.stride()[:3],
        taps_h, taps_w, stride, padding - low_h, padding - low_w, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    return out


def grad_weight(
    x: Tensor, grad_output: Tensor, like: Tensor, biased: bool, taps_used: Taps, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """The gradients of the weight and, where there is one, of the bias."""
    grad_output, outputs = grad_output.contiguous(), grad_output.shape[-1]
    inputs = _Map.of(x, like, taps_used, stride, padding)
    low, size = ((taps_used[0], taps_used[2]), like.shape[2:4]) if inputs.channels == x.shape[-1] else ((0, 0), (1, 1))
    tile, taps = _weight_tile(outputs, inputs.channels, x.dtype), inputs.taps[0] * inputs.taps[1]
    tiles = taps * triton.cdiv(inputs.channels, tile.k) * triton.cdiv(outputs, tile.n)
    parts = min(max(1, SPLIT_GRID_PROGRAMS // (tiles * len(x))), max(1, inputs.rows // (4 * tile.m)))
    share = triton.cdiv(triton.cdiv(inputs.rows, parts), tile.m) * tile.m
    make = torch.empty if taps == size[0] * size[1] else torch.zeros  # taps that see padding alone have no gradient
    partial = make(parts, len(x), outputs, *size, inputs.channels, dtype=like.dtype, device=x.device)
    partial_bias = torch.empty(parts, len(x), outputs if biased else 0, dtype=like.dtype, device=x.device)
    _grad_weight[(tiles, len(x), parts)](
        inputs.x, grad_output, partial, partial_bias, *inputs.sizes(outputs), inputs.taps[1], inputs.stride,
        *inputs.pads, *low, *size, share,
        BIASED=biased, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    grad, grad_bias = (partial[0], partial_bias[0]) if parts == 1 else (partial.sum(0), partial_bias.sum(0))
    return (grad if grad.shape == like.shape else _unpatched(grad[..., : inputs.depth], like, taps_used)), grad_bias


def _unpatched(grad: Tensor, like: Tensor, taps_used: Taps) -> Tensor:
    """A weight's gradient from that of the patches' matrix, which has the used taps alone."""
    low_h, taps_h, low_w, taps_w = taps_used
    used = grad.reshape(*like.shape[:2], taps_h, taps_w, like.shape[-1])
    unused = (0, 0, low_w, like.shape[3] - low_w - taps_w, low_h, like.shape[2] - low_h - taps_h)
    return torch.nn.functional.pad(used, unused)


def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)
