"""BatchNorm over the examples of each client of a stack, without padding, forward and backward.

Sums are in float32 and in a fixed order, so a run repeats bit for bit. Small maps take one launch, larger ones three.

Shapes: x (S, N, …, C), contiguous; mask (S, N); weight and bias (S, C).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedrane.kernels.gpu.grid import MIN_GRID_PROGRAMS, SPLIT_GRID_PROGRAMS

MAX_ONE_LAUNCH_VALUES = 512
"""Values of a channel that one program may read twice."""


@triton.jit
def _sum_pair(
    a, b, mask, shift, c, inside, begin, end, positions, channels,
    PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Over a client's examples: Σ(a − shift) and Σ(a − shift)²; or with PRODUCT Σa and Σ a (b − shift)."""
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    for start in range(begin, end, M):
        m = start + tl.arange(0, M)
        counts = tl.load(mask + m // positions, mask=m < end, other=0).to(tl.int1)
        valid = (counts & (m < end))[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        left = tl.load(a + at, mask=valid, other=0.0).to(tl.float32)
        if PRODUCT:
            right = tl.load(b + at, mask=valid, other=0.0).to(tl.float32) - shift[None, :]
            first += tl.sum(left, 0)
            second += tl.sum(tl.where(valid, left * right, 0.0), 0)
        else:
            centred = tl.where(valid, left - shift[None, :], 0.0)
            first += tl.sum(centred, 0)
            second += tl.sum(centred * centred, 0)
    return first, second


@triton.jit
def _sums(
    a, b, mask, pivot, out, rows, positions, channels, share,
    PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A part of :func:`_sum_pair`; the shift is the first example, with PRODUCT the pivot."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    inside = c < channels
    a += s * rows * channels
    b += s * rows * channels
    if PRODUCT:
        shift = tl.load(pivot + s * channels + c, mask=inside, other=0.0)
    else:
        shift = tl.load(a + c, mask=inside, other=0.0).to(tl.float32)
    begin, end = part * share, min(rows, (part + 1) * share)
    mask += s * (rows // positions)
    first, second = _sum_pair(a, b, mask, shift, c, inside, begin, end, positions, channels, PRODUCT, M, C)
    to = out + ((part * tl.num_programs(1) + s) * 2) * channels + c
    tl.store(to, first, mask=inside)
    tl.store(to + channels, second, mask=inside)


@triton.jit
def _sum_parts(partial, s, c, inside, channels, parts):
    """The parts of the two sums together."""
    first = tl.zeros_like(c).to(tl.float32)
    second = tl.zeros_like(c).to(tl.float32)
    for part in range(parts):
        at = partial + ((part * tl.num_programs(1) + s) * 2) * channels + c
        first += tl.load(at, mask=inside, other=0.0)
        second += tl.load(at + channels, mask=inside, other=0.0)
    return first, second


@triton.jit
def _count(mask, s, images, positions, I: tl.constexpr):
    """The number of values of a channel without padding."""
    examples = tl.zeros((I,), dtype=tl.int32)
    for begin in range(0, images, I):
        n = begin + tl.arange(0, I)
        examples += tl.load(mask + s * images + n, mask=n < images, other=0).to(tl.int32)
    return (tl.sum(examples, 0) * positions).to(tl.float32)


@triton.jit
def _write_statistics(first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels):
    """Writes (S, 6, C): the running mean and variance after this batch, then mean, 1 / deviation, scale and bias.

    A single value has no variance: it becomes the bias, and the running ones stay."""
    divisor = tl.maximum(count, 1.0)
    rest = first / divisor
    mean = shift + rest
    var = tl.maximum(second / divisor - rest * rest, 0.0)
    inverse = 1.0 / tl.sqrt_rn(var + eps)
    scale = tl.where(count > 1, tl.load(weight + s * channels + c, mask=inside, other=0.0) * inverse, 0.0)
    offset = tl.load(bias + s * channels + c, mask=inside, other=0.0)
    old_mean = tl.load(old + s * 2 * channels + c, mask=inside, other=0.0)
    old_var = tl.load(old + (s * 2 + 1) * channels + c, mask=inside, other=0.0)
    unbiased = var * count / tl.maximum(count - 1, 1.0)
    out += s * 6 * channels + c
    new_mean = tl.where(count > 1, old_mean + momentum * (mean - old_mean), old_mean)
    new_var = tl.where(count > 1, old_var + momentum * (unbiased - old_var), old_var)
    tl.store(out, new_mean, mask=inside)
    tl.store(out + channels, new_var, mask=inside)
    tl.store(out + 2 * channels, mean, mask=inside)
    tl.store(out + 3 * channels, inverse, mask=inside)
    tl.store(out + 4 * channels, scale, mask=inside)
    tl.store(out + 5 * channels, offset, mask=inside)
    return mean, scale, offset


@triton.jit
def _write_gradients(total, product, count, weight, saved, out, s, c, inside, channels):
    """Writes (S, 5, C): the gradients of weight and bias, and the three factors of the gradient of x."""
    divisor = tl.maximum(count, 1.0)
    saved += s * 6 * channels + c
    mean = tl.load(saved + 2 * channels, mask=inside, other=0.0)
    inverse = tl.load(saved + 3 * channels, mask=inside, other=0.0)
    scale = tl.load(weight + s * channels + c, mask=inside, other=0.0) * inverse
    product = product * inverse
    x_factor = -scale * inverse * product / divisor
    rest = -scale * total / divisor - x_factor * mean
    out += s * 5 * channels + c
    tl.store(out, product, mask=inside)
    tl.store(out + channels, total, mask=inside)
    tl.store(out + 2 * channels, scale, mask=inside)
    tl.store(out + 3 * channels, x_factor, mask=inside)
    tl.store(out + 4 * channels, rest, mask=inside)
    return scale, x_factor, rest


@triton.jit
def _statistics(
    partial, x, mask, weight, bias, old, out, eps, momentum, images, positions, channels, parts, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    first, second = _sum_parts(partial, s, c, inside, channels, parts)
    shift = tl.load(x + s * images * positions * channels + c, mask=inside, other=0.0).to(tl.float32)
    count = _count(mask, s, images, positions, I)
    _write_statistics(first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels)


@triton.jit
def _gradients(
    partial, mask, weight, saved, out, images, positions, channels, parts, C: tl.constexpr, I: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    total, product = _sum_parts(partial, s, c, inside, channels, parts)
    _write_gradients(total, product, _count(mask, s, images, positions, I), weight, saved, out, s, c, inside, channels)


@triton.jit
def _normalise_one_launch(
    x, mask, weight, bias, old, y, out, eps, momentum, images, positions, channels,
    C: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """All of BatchNorm in one launch, for maps so small that a program can read a channel of them twice."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside, rows = c < channels, images * positions
    x += s * rows * channels
    shift = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    client_mask = mask + s * images
    first, second = _sum_pair(x, x, client_mask, shift, c, inside, 0, rows, positions, channels, False, M, C)
    count = _count(mask, s, images, positions, I)
    mean, scale, offset = _write_statistics(
        first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels
    )
    y += s * rows * channels
    for begin in range(0, rows, M):
        m = begin + tl.arange(0, M)
        valid = (m < rows)[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        here = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        value = (here - mean[None, :]) * scale[None, :] + offset[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _gradients_one_launch(
    grad_output, x, mask, weight, saved, grad_input, out, images, positions, channels,
    C: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside, rows = c < channels, images * positions
    grad_output += s * rows * channels
    x += s * rows * channels
    mean = tl.load(saved + (s * 6 + 2) * channels + c, mask=inside, other=0.0)
    client_mask = mask + s * images
    total, product = _sum_pair(grad_output, x, client_mask, mean, c, inside, 0, rows, positions, channels, True, M, C)
    count = _count(mask, s, images, positions, I)
    scale, x_factor, rest = _write_gradients(total, product, count, weight, saved, out, s, c, inside, channels)
    grad_input += s * rows * channels
    for begin in range(0, rows, M):
        m = begin + tl.arange(0, M)
        valid = (m < rows)[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        counts = tl.load(client_mask + m // positions, mask=m < rows, other=0).to(tl.int1)
        left = tl.load(grad_output + at, mask=valid, other=0.0).to(tl.float32)
        right = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        value = left * scale[None, :] + right * x_factor[None, :] + rest[None, :]
        tl.store(grad_input + at, tl.where(counts[:, None], value, 0.0).to(grad_input.dtype.element_ty), mask=valid)


@triton.jit
def _scale(
    a, b, mask, factors, out, rows, positions, channels, lines,
    BACKWARD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The (S, lines, C) ``factors`` end with mean, 1 / deviation, scale and bias: (a − mean) · scale + bias, which of a
    single value is exactly the bias, whose sign a ReLU sees. With BACKWARD they end with three:
    a · f₀ + b · f₁ + f₂ where the mask is True, else 0."""
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < rows * channels
    c = at % channels
    row = at // channels
    a += s * rows * channels
    b += s * rows * channels
    out += s * rows * channels
    mask += s * (rows // positions)
    left = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    factors += (s + 1) * lines * channels + c
    if BACKWARD:
        right = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        f0 = tl.load(factors - 3 * channels, mask=inside, other=0.0)
        f1 = tl.load(factors - 2 * channels, mask=inside, other=0.0)
        f2 = tl.load(factors - channels, mask=inside, other=0.0)
        counts = tl.load(mask + row // positions, mask=inside, other=0).to(tl.int1)
        value = tl.where(counts, left * f0 + right * f1 + f2, 0.0)
    else:
        mean = tl.load(factors - 4 * channels, mask=inside, other=0.0)
        scale = tl.load(factors - 2 * channels, mask=inside, other=0.0)
        bias = tl.load(factors - channels, mask=inside, other=0.0)
        value = (left - mean) * scale + bias
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def normalise(
    x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """The output, and the lines of :func:`_write_statistics`; ``old`` is the running mean and variance, (S, 2, C)."""
    x, mask, weight, bias, old = (v.contiguous() for v in (x, mask, weight, bias, old))
    saved = torch.empty(len(x), 6, x.shape[-1], dtype=torch.float32, device=x.device)
    if one_launch := _one_launch(x):
        y, (grid, rest) = torch.empty_like(x), one_launch
        _normalise_one_launch[grid](x, mask, weight, bias, old, y, saved, eps, momentum, *rest, M=64, I=128)
        return y, saved
    partial, grid, rest = _partial_sums(x, None, mask, x)
    _statistics[grid](partial, x, mask, weight, bias, old, saved, eps, momentum, *rest, I=128)
    return _scaled(x, None, mask, saved), saved


def normalise_backward(
    grad_output: Tensor, x: Tensor, mask: Tensor, weight: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the lines of :func:`_write_gradients`."""
    grad_output, x, mask, weight, saved = (v.contiguous() for v in (grad_output, x, mask, weight, saved))
    gradients = torch.empty(len(x), 5, x.shape[-1], dtype=torch.float32, device=x.device)
    if one_launch := _one_launch(x):
        grad_input, (grid, rest) = torch.empty_like(x), one_launch
        _gradients_one_launch[grid](grad_output, x, mask, weight, saved, grad_input, gradients, *rest, M=64, I=128)
        return grad_input, gradients
    partial, grid, rest = _partial_sums(grad_output, x, mask, saved[:, 2].contiguous())
    _gradients[grid](partial, mask, weight, saved, gradients, *rest, I=128)
    return _scaled(grad_output, x, mask, gradients), gradients


def _one_launch(x: Tensor) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """The grid and the sizes for a map that is small enough for one launch."""
    stack, images, channels, positions = len(x), x.shape[1], x.shape[-1], x.shape[2:-1].numel()
    if images * positions > MAX_ONE_LAUNCH_VALUES:
        return None
    block = 16 if stack * channels < 32 * MIN_GRID_PROGRAMS else 32
    return (triton.cdiv(channels, block), stack), (images, positions, channels, block)


def _partial_sums(
    a: Tensor, b: Tensor | None, mask: Tensor, pivot: Tensor
) -> tuple[Tensor, tuple[int, int], tuple[int, ...]]:
    """The sums of parts, then the grid and the sizes with which they are added up."""
    stack, images, channels = a.shape[0], a.shape[1], a.shape[-1]
    positions = a.shape[2:-1].numel()
    rows, m = images * positions, 64
    block = max(16, min(64, triton.next_power_of_2(channels)))
    columns = triton.cdiv(channels, block)
    parts = min(max(1, SPLIT_GRID_PROGRAMS // (columns * stack)), max(1, rows // (2 * m)))
    share = triton.cdiv(triton.cdiv(rows, parts), m) * m
    out = torch.empty(parts, stack, 2, channels, dtype=torch.float32, device=a.device)
    _sums[(columns, stack, parts)](
        a,
        a if b is None else b,
        mask,
        pivot,
        out,
        rows,
        positions,
        channels,
        share,
        PRODUCT=b is not None,
        M=m,
        C=block,
    )
    return out, (columns, stack), (images, positions, channels, parts, block)


def _scaled(a: Tensor, b: Tensor | None, mask: Tensor, factors: Tensor) -> Tensor:
    rows = a.shape[1:-1].numel()
    out, size = torch.empty_like(a), 2048
    _scale[(triton.cdiv(rows * a.shape[-1], size), len(a))](
        a, a if b is None else b, mask, factors, out, rows, rows // a.shape[1], a.shape[-1],
        factors.shape[1], BACKWARD=b is not None, SIZE=size,
    )  # fmt: skip
    return out
