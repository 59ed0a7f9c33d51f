"""GPU kernels for a stack of clients: convolution and BatchNorm of all of them in one launch each.

The usual libraries have no fast convolution whose weights differ from client to client. These take the clients as one
more dimension of the grid: implicit matrix products over channels-last maps (no patches are written out), parameters
read and gradients written in their own float32, sums in float32. Nothing is added atomically, so that a run repeats
itself bit for bit. The layers in ``stacked`` are their oracle.

Shapes: x (S, N, H, W, C), weight (S, O, KH, KW, C), y (S, N, H', W', O), all contiguous; live (S, N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Sides = tuple[int, int, int, int]
"""The first live tap and the number of live taps, for rows and for columns."""
FEW = 16
"""Channels, of which a block would be mostly empty."""
ENOUGH = 4 * 132
"""Programs that keep a large GPU busy."""


@triton.jit
def _forward(
    x, weight, bias, y, rows, height, width, pitch, run, out_height, out_width, outputs, taps_wide, low_h, low_w,
    size_h, size_w, taps, stride, padding,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tap sees ``run`` values that lie together; the next place of the map begins ``pitch`` values on."""
    blocks = tl.cdiv(outputs, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    x += s * (rows // (out_height * out_width)) * height * width * pitch
    weight += s * outputs * size_h * size_w * run
    top = m // out_width % out_height * stride - padding
    left = m % out_width * stride - padding
    first = m // (out_width * out_height) * height * width
    chunks = tl.cdiv(run, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(taps * chunks):
        tap = t // chunks
        c = t % chunks * K + tl.arange(0, K)
        i, j = low_h + tap // taps_wide, low_w + tap % taps_wide
        h, w = top + i, left + j
        seen = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        place = (first + h * width + w) * pitch
        here = tl.load(x + place[:, None] + c[None, :], mask=seen[:, None] & (c < run)[None, :], other=0.0)
        at = weight + (i * size_w + j) * run
        known = (c < run)[:, None] & (o < outputs)[None, :]
        by = tl.load(at + o[None, :] * (size_h * size_w * run) + c[:, None], mask=known, other=0.0)
        total = tl.dot(here, by.to(here.dtype), total, allow_tf32=TF32)
    if BIASED:
        total += tl.load(bias + s * outputs + o, mask=o < outputs, other=0.0)[None, :]
    whole = (m < rows)[:, None] & (o < outputs)[None, :]
    tl.store(y + s * rows * outputs + m[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), mask=whole)


@triton.jit
def _by_input(
    slope, weight, by_x, rows, height, width, channels, out_height, out_width, outputs, taps_wide, low_h, low_w, size_h,
    size_w, taps, stride, padding,
    TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    c = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    slope += s * (rows // (height * width)) * out_height * out_width * outputs
    weight += s * outputs * size_h * size_w * channels
    row = m // width % height + padding
    column = m % width + padding
    first = m // (width * height) * out_height * out_width
    chunks = tl.cdiv(outputs, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(taps * chunks):
        tap = t // chunks
        o = t % chunks * K + tl.arange(0, K)
        i, j = low_h + tap // taps_wide, low_w + tap % taps_wide
        h, w = row - i, column - j
        seen = (m < rows) & (h >= 0) & (w >= 0) & (h % stride == 0) & (w % stride == 0)
        h, w = h // stride, w // stride
        seen = seen & (h < out_height) & (w < out_width)
        place = (first + h * out_width + w) * outputs
        here = tl.load(slope + place[:, None] + o[None, :], mask=seen[:, None] & (o < outputs)[None, :], other=0.0)
        at = weight + (i * size_w + j) * channels
        known = (o < outputs)[:, None] & (c < channels)[None, :]
        by = tl.load(at + o[:, None] * (size_h * size_w * channels) + c[None, :], mask=known, other=0.0)
        total = tl.dot(here, by.to(here.dtype), total, allow_tf32=TF32)
    whole = (m < rows)[:, None] & (c < channels)[None, :]
    tl.store(
        by_x + s * rows * channels + m[:, None] * channels + c[None, :], total.to(by_x.dtype.element_ty), mask=whole
    )


@triton.jit
def _by_weight(
    x, slope, found, biases, rows, height, width, pitch, run, out_height, out_width, outputs, taps_wide, low_h, low_w,
    size_h, size_w, stride, padding, share,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(outputs, N)
    chunks = tl.cdiv(run, K)
    t = tl.program_id(0) // blocks
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    x += s * (rows // (out_height * out_width)) * height * width * pitch
    slope += s * rows * outputs
    tap = t // chunks
    c = t % chunks * K + tl.arange(0, K)
    i, j = low_h + tap // taps_wide, low_w + tap % taps_wide
    total = tl.zeros((N, K), dtype=tl.float32)
    sums = tl.zeros((N,), dtype=tl.float32)
    for begin in range(part * share, min(rows, (part + 1) * share), M):
        m = begin + tl.arange(0, M)
        h = m // out_width % out_height * stride - padding + i
        w = m % out_width * stride - padding + j
        seen = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        place = ((m // (out_width * out_height) * height + h) * width + w) * pitch
        here = tl.load(x + place[:, None] + c[None, :], mask=seen[:, None] & (c < run)[None, :], other=0.0)
        known = (m < rows)[None, :] & (o < outputs)[:, None]
        by = tl.load(slope + m[None, :] * outputs + o[:, None], mask=known, other=0.0)
        total = tl.dot(by, here, total, allow_tf32=TF32)
        sums += tl.sum(by.to(tl.float32), 1)
    if BIASED:
        known = (o < outputs) & (t == 0)
        tl.store(biases + (part * tl.num_programs(1) + s) * outputs + o, sums, mask=known)
    found += (part * tl.num_programs(1) + s) * outputs * size_h * size_w * run + (i * size_w + j) * run
    whole = (o < outputs)[:, None] & (c < run)[None, :]
    tl.store(found + o[:, None] * (size_h * size_w * run) + c[None, :], total, mask=whole)


@triton.jit
def _sums(
    a, b, live, pivot, out, rows, places, channels, share,
    PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Over live rows: Σ(a − a₀) and Σ(a − a₀)², a₀ the first row; or with PRODUCT Σa and Σ a (b − pivot)."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    inside = c < channels
    images = rows // places
    a += s * rows * channels
    b += s * rows * channels
    if PRODUCT:
        shift = tl.load(pivot + s * channels + c, mask=inside, other=0.0)
    else:
        shift = tl.load(a + c, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    for begin in range(part * share, min(rows, (part + 1) * share), M):
        m = begin + tl.arange(0, M)
        counts = tl.load(live + s * images + m // places, mask=m < rows, other=0).to(tl.int1)
        seen = (counts & (m < rows))[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        left = tl.load(a + at, mask=seen, other=0.0).to(tl.float32)
        if PRODUCT:
            right = tl.load(b + at, mask=seen, other=0.0).to(tl.float32) - shift[None, :]
            first += tl.sum(left, 0)
            second += tl.sum(tl.where(seen, left * right, 0.0), 0)
        else:
            centred = tl.where(seen, left - shift[None, :], 0.0)
            first += tl.sum(centred, 0)
            second += tl.sum(centred * centred, 0)
    to = out + ((part * tl.num_programs(1) + s) * 2) * channels + c
    tl.store(to, first, mask=inside)
    tl.store(to + channels, second, mask=inside)


@triton.jit
def _gathered(partial, live, s, c, inside, images, places, channels, parts, I: tl.constexpr):
    """The parts of two sums together, each divided by the number of live values; and that number."""
    lives = tl.zeros((I,), dtype=tl.int32)
    for begin in range(0, images, I):
        n = begin + tl.arange(0, I)
        lives += tl.load(live + s * images + n, mask=n < images, other=0).to(tl.int32)
    count = (tl.sum(lives, 0) * places).to(tl.float32)
    first = tl.zeros_like(c).to(tl.float32)
    second = tl.zeros_like(c).to(tl.float32)
    for part in range(parts):
        at = partial + ((part * tl.num_programs(1) + s) * 2) * channels + c
        first += tl.load(at, mask=inside, other=0.0)
        second += tl.load(at + channels, mask=inside, other=0.0)
    return first, second, count


@triton.jit
def _statistics(
    partial, x, live, weight, bias, old, out, eps, momentum, images, places, channels, parts, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """(S, 6, C): the running mean and variance after this batch, the mean, 1 / deviation, and y's two factors."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    first, second, count = _gathered(partial, live, s, c, inside, images, places, channels, parts, I)
    some = tl.maximum(count, 1.0)
    shift = tl.load(x + s * images * places * channels + c, mask=inside, other=0.0).to(tl.float32)
    rest = first / some
    mean = shift + rest
    var = tl.maximum(second / some - rest * rest, 0.0)
    inverse = 1.0 / tl.sqrt_rn(var + eps)
    scale = tl.load(weight + s * channels + c, mask=inside, other=0.0) * inverse
    offset = tl.load(bias + s * channels + c, mask=inside, other=0.0) - mean * scale
    follow = tl.where(count > 0, momentum, 0.0)
    old_mean = tl.load(old + s * 2 * channels + c, mask=inside, other=0.0)
    old_var = tl.load(old + (s * 2 + 1) * channels + c, mask=inside, other=0.0)
    unbiased = var * count / tl.maximum(count - 1, 1.0)
    out += s * 6 * channels + c
    tl.store(out, old_mean + follow * (mean - old_mean), mask=inside)
    tl.store(out + channels, old_var + follow * (unbiased - old_var), mask=inside)
    tl.store(out + 2 * channels, mean, mask=inside)
    tl.store(out + 3 * channels, inverse, mask=inside)
    tl.store(out + 4 * channels, scale, mask=inside)
    tl.store(out + 5 * channels, offset, mask=inside)


@triton.jit
def _slopes(
    partial, live, weight, mean, inverse, out, images, places, channels, parts, C: tl.constexpr, I: tl.constexpr
):  # fmt: skip
    """(S, 5, C): the slopes by weight and by bias, and the three factors of the slope by x."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    total, along, count = _gathered(partial, live, s, c, inside, images, places, channels, parts, I)
    some = tl.maximum(count, 1.0)
    turn = tl.load(inverse + s * channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + s * channels + c, mask=inside, other=0.0) * turn
    along = along * turn
    pull = -scale * turn * along / some
    out += s * 5 * channels + c
    tl.store(out, along, mask=inside)
    tl.store(out + channels, total, mask=inside)
    tl.store(out + 2 * channels, scale, mask=inside)
    tl.store(out + 3 * channels, pull, mask=inside)
    centre = tl.load(mean + s * channels + c, mask=inside, other=0.0)
    tl.store(out + 4 * channels, -scale * total / some - pull * centre, mask=inside)


@triton.jit
def _scale(
    a, b, live, factors, out, rows, places, channels, lines,
    BACK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """a · f₀ + f₁; with BACK a · f₀ + b · f₁ + f₂ where the row is live, else 0. The factors end (S, lines, C)."""
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < rows * channels
    c = at % channels
    row = at // channels
    a += s * rows * channels
    b += s * rows * channels
    out += s * rows * channels
    live += s * (rows // places)
    left = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    factors += (s + 1) * lines * channels + c
    if BACK:
        right = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        f0 = tl.load(factors - 3 * channels, mask=inside, other=0.0)
        f1 = tl.load(factors - 2 * channels, mask=inside, other=0.0)
        f2 = tl.load(factors - channels, mask=inside, other=0.0)
        counts = tl.load(live + row // places, mask=inside, other=0).to(tl.int1)
        value = tl.where(counts, left * f0 + right * f1 + f2, 0.0)
    else:
        f0 = tl.load(factors - 2 * channels, mask=inside, other=0.0)
        f1 = tl.load(factors - channels, mask=inside, other=0.0)
        value = left * f0 + f1
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pool(
    x, y, which, height, width, channels, out_height, out_width, size, stride, padding, SIZE: tl.constexpr
):  # fmt: skip
    """The largest of each window, and its place there; the first of equals."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < out_height * out_width * channels
    c = at % channels
    column = at // channels % out_width
    row = at // channels // out_width
    x += image * height * width * channels
    y += image * out_height * out_width * channels
    which += image * out_height * out_width * channels
    best = tl.full((SIZE,), -float("inf"), dtype=tl.float32)
    place = tl.zeros((SIZE,), dtype=tl.int32)
    for tap in range(size * size):
        h = row * stride + tap // size - padding
        w = column * stride + tap % size - padding
        seen = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        here = tl.load(x + (h * width + w) * channels + c, mask=seen, other=-float("inf"))
        here = here.to(tl.float32)
        more = (here > best) | (here != here)
        best = tl.where(more, here, best)
        place = tl.where(more, tap, place)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=inside)
    tl.store(which + at, place.to(tl.uint8), mask=inside)


@triton.jit
def _unpool(
    slope, which, by_x, height, width, channels, out_height, out_width, size, stride, padding, SIZE: tl.constexpr
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < height * width * channels
    c = at % channels
    column = at // channels % width
    row = at // channels // width
    slope += image * out_height * out_width * channels
    which += image * out_height * out_width * channels
    by_x += image * height * width * channels
    sum = tl.zeros((SIZE,), dtype=tl.float32)
    for tap in range(size * size):
        h = row + padding - tap // size
        w = column + padding - tap % size
        seen = inside & (h >= 0) & (w >= 0) & (h % stride == 0) & (w % stride == 0)
        h, w = h // stride, w // stride
        seen = seen & (h < out_height) & (w < out_width)
        place = (h * out_width + w) * channels + c
        mine = tl.load(which + place, mask=seen, other=255).to(tl.int32) == tap
        sum += tl.load(slope + place, mask=seen & mine, other=0.0).to(tl.float32)
    tl.store(by_x + at, sum.to(by_x.dtype.element_ty), mask=inside)


class _Map(NamedTuple):
    """What a kernel is told of a convolution's input; ``of`` merges few channels with the columns of a tap."""

    x: Tensor
    weight: tuple[int, ...]
    run: int
    low: tuple[int, int]
    taps: tuple[int, int]
    padding: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, sides: Sides, padding: int) -> _Map:
        _, outputs, high, wide, channels = weight.shape
        low, taps = (sides[0], sides[2]), (sides[1], sides[3])
        if channels < FEW and wide > 1 and taps == (high, wide):
            x = torch.nn.functional.pad(x, (0, 0, padding, padding, padding, padding))
            return cls(x.contiguous(), (outputs, high, 1), wide * channels, (0, 0), (high, 1), 0)
        return cls(x.contiguous(), (outputs, high, wide), channels, low, taps, padding)

    def arguments(self, out_height: int, out_width: int) -> tuple[int, ...]:
        height, width, pitch = self.x.shape[2:]
        outputs, size_h, size_w = self.weight
        rows = self.x.shape[1] * out_height * out_width
        sizes = (rows, height, width, pitch, self.run, out_height, out_width, outputs)
        return (*sizes, self.taps[1], *self.low, size_h, size_w)


def _tiles(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The sides of a block, and how much of the depth it takes at a time; the best of those tried on an H200."""
    m = 128 if rows >= 128 else max(16, triton.next_power_of_2(rows))
    n, k = (max(16, min(most, triton.next_power_of_2(v))) for most, v in ((64, columns), (32, depth)))
    return m, n, k


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Sides, stride: int, padding: int) -> Tensor:
    weight = weight.contiguous()
    outputs = weight.shape[1]
    sizes = zip(x.shape[2:4], weight.shape[2:4], strict=True)
    out_height, out_width = ((n + 2 * padding - k) // stride + 1 for n, k in sizes)
    y = x.new_empty(*x.shape[:2], out_height, out_width, outputs)
    map = _Map.of(x, weight, sides, padding)
    rows = x.shape[1] * out_height * out_width
    m, n, k = _tiles(rows, outputs, map.run)
    _forward[(triton.cdiv(rows, m) * triton.cdiv(outputs, n), len(x))](
        map.x, weight, y if bias is None else bias.contiguous(), y, *map.arguments(out_height, out_width),
        map.taps[0] * map.taps[1], stride, map.padding, BIASED=bias is not None, TF32=_tf32(), M=m, N=n, K=k,
    )  # fmt: skip
    return y


def by_input(slope: Tensor, weight: Tensor, like: Tensor, sides: Sides, stride: int, padding: int) -> Tensor:
    slope, weight = slope.contiguous(), weight.contiguous()
    images, height, width, channels = like.shape[1:]
    outputs, size_h, size_w = weight.shape[1:4]
    low_h, taps_h, low_w, taps_w = sides
    found = torch.empty(like.shape, dtype=slope.dtype, device=slope.device)
    rows = images * height * width
    m, n, k = _tiles(rows, channels, outputs)
    _by_input[(triton.cdiv(rows, m) * triton.cdiv(channels, n), len(slope))](
        slope, weight, found, rows, height, width, channels, *slope.shape[2:4], outputs, taps_w, low_h, low_w, size_h,
        size_w, taps_h * taps_w, stride, padding, TF32=_tf32(), M=m, N=n, K=k,
    )  # fmt: skip
    return found


def by_weight(
    x: Tensor, slope: Tensor, like: Tensor, biased: bool, sides: Sides, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """The slopes by the weight and, where there is one, by the bias."""
    slope = slope.contiguous()
    map = _Map.of(x, like, sides, padding)
    rows, outputs, taps = slope.shape[1:4].numel(), slope.shape[-1], map.taps[0] * map.taps[1]
    m = 64
    n, k = (max(16, min(64, triton.next_power_of_2(v))) for v in (outputs, map.run))
    tiles = taps * triton.cdiv(map.run, k) * triton.cdiv(outputs, n)
    parts = min(max(1, ENOUGH // (tiles * len(x))), max(1, rows // (4 * m)))
    share = triton.cdiv(triton.cdiv(rows, parts), m) * m
    whole = taps == map.weight[1] * map.weight[2]
    found = (torch.empty if whole else torch.zeros)(parts, *like.shape, dtype=like.dtype, device=x.device)
    biases = torch.empty(parts, len(x), outputs if biased else 0, dtype=like.dtype, device=x.device)
    _by_weight[(tiles, len(x), parts)](
        map.x, slope, found, biases, *map.arguments(*slope.shape[2:4]), stride, map.padding, share,
        BIASED=biased, TF32=_tf32(), M=m, N=n, K=k,
    )  # fmt: skip
    return (found[0], biases[0]) if parts == 1 else (found.sum(0), biases.sum(0))


def statistics(
    x: Tensor, live: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
) -> Tensor:
    """See :func:`_statistics`; ``old`` is the running mean and variance, (S, 2, C)."""
    x, live, weight, bias, old = (v.contiguous() for v in (x, live, weight, bias, old))
    partial, grid, rest = _parts(x, None, live, x)
    out = torch.empty(len(x), 6, x.shape[-1], dtype=torch.float32, device=x.device)
    _statistics[grid](partial, x, live, weight, bias, old, out, eps, momentum, *rest, I=128)
    return out


def slopes(slope: Tensor, x: Tensor, live: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """See :func:`_slopes`."""
    slope, x, live, weight, mean, inverse = (v.contiguous() for v in (slope, x, live, weight, mean, inverse))
    partial, grid, rest = _parts(slope, x, live, mean)
    out = torch.empty(len(x), 5, x.shape[-1], dtype=torch.float32, device=x.device)
    _slopes[grid](partial, live, weight, mean, inverse, out, *rest, I=128)
    return out


def _parts(a: Tensor, b: Tensor | None, live: Tensor, pivot: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, ...]]:
    """The sums of pieces, then the grid and the sizes with which they are put together."""
    stack, images, channels = a.shape[0], a.shape[1], a.shape[-1]
    places = a.shape[2:-1].numel()
    rows, m = images * places, 64
    wide = max(16, min(64, triton.next_power_of_2(channels)))
    columns = triton.cdiv(channels, wide)
    parts = min(max(1, ENOUGH // (columns * stack)), max(1, rows // (2 * m)))
    share = triton.cdiv(triton.cdiv(rows, parts), m) * m
    out = torch.empty(parts, stack, 2, channels, dtype=torch.float32, device=a.device)
    _sums[(columns, stack, parts)](
        a, a if b is None else b, live, pivot, out, rows, places, channels, share, PRODUCT=b is not None, M=m, C=wide
    )
    return out, (columns, stack), (images, places, channels, parts, wide)


def scale(a: Tensor, b: Tensor | None, live: Tensor, factors: Tensor) -> Tensor:
    """See :func:`_scale`."""
    a, live, factors = a.contiguous(), live.contiguous(), factors.contiguous()
    rows = a.shape[1:-1].numel()
    out, size = torch.empty_like(a), 2048
    _scale[(triton.cdiv(rows * a.shape[-1], size), len(a))](
        a, a if b is None else b.contiguous(), live, factors, out, rows, rows // a.shape[1], a.shape[-1],
        factors.shape[1], BACK=b is not None, SIZE=size,
    )  # fmt: skip
    return out


def pool(x: Tensor, size: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Max-pooling of (S, N, H, W, C), and where in its window each largest lies."""
    x = x.contiguous()
    height, width, channels = x.shape[2:]
    shape = [(n + 2 * padding - size) // stride + 1 for n in (height, width)]
    y = x.new_empty(*x.shape[:2], *shape, channels)
    which = torch.empty_like(y, dtype=torch.uint8)
    _pool[(y.shape[:2].numel(), triton.cdiv(y.shape[2:].numel(), 1024))](
        x, y, which, height, width, channels, *shape, size, stride, padding, SIZE=1024
    )
    return y, which


def unpool(slope: Tensor, which: Tensor, like: Tensor, size: int, stride: int, padding: int) -> Tensor:
    slope, found = slope.contiguous(), torch.empty(like.shape, dtype=slope.dtype, device=slope.device)
    height, width, channels = like.shape[2:]
    _unpool[(found.shape[:2].numel(), triton.cdiv(found.shape[2:].numel(), 1024))](
        slope, which.contiguous(), found, height, width, channels, *slope.shape[2:4], size, stride, padding, SIZE=1024
    )
    return found


def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)
