"""GPU kernels for a stack of clients: convolution and BatchNorm of all of them in one launch each.

The usual libraries have no fast convolution whose weights differ from client to client. These take the clients as one
more dimension of the grid: implicit matrix products over channels-last maps (patches are written out only of a few
channels, which lie too close to be read fast), gradients in the parameters' own float32, sums in float32. Nothing is
added atomically, so that a run repeats itself bit for bit. The layers in ``stacked`` are their oracle.

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
"""Channels, of which a block would be mostly empty; patches are as wide as a multiple of it."""
MANY, LONG = 6, 512
"""Clients, and rows of each, from which on it is worth a kernel to shorten their weights first."""
BUSY, ENOUGH = 256, 4 * 132
"""Programs that keep a large GPU busy: those of one length, and those of which some end early."""
PATCHES = 256, 32
"""Places and values that one program lays out."""
SHORT = 512
"""Values of a channel that one program may read twice."""


@triton.jit(do_not_specialize=["wide"])  # else a thread takes values side by side, and a warp reads from many places
def _patches(
    x, out, size, line, skip, channels, run, depth, wide, out_width, places, stride, M: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """What each place of the output sees of a padded map, a tap's row being a ``run``; zeros from ``depth`` on."""
    image = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * M + tl.arange(0, M)
    k = tl.program_id(2) * K + tl.arange(0, K)
    at = m // out_width * stride * line + m % out_width * stride * channels
    inner = skip + k // run * line + k % run
    x += image * size
    here = tl.load(x + at[:, None] + inner[None, :], mask=(m < places)[:, None] & (k < depth)[None, :], other=0.0)
    out += image * places * wide
    tl.store(out + m[:, None] * wide + k[None, :], here, mask=(m < places)[:, None] & (k < wide)[None, :])


@triton.jit
def _forward(
    x, weight, bias, y, rows, height, width, channels, out_height, out_width, outputs, by_client, by_output, by_row,
    taps, taps_wide, stride, pad_h, pad_w,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(outputs, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    x += s * (rows // (out_height * out_width)) * height * width * channels
    weight += s * by_client
    top = m // out_width % out_height * stride - pad_h
    left = m % out_width * stride - pad_w
    first = m // (out_width * out_height) * height * width
    chunks = tl.cdiv(channels, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(taps * chunks):
        tap = t // chunks
        c = t % chunks * K + tl.arange(0, K)
        i, j = tap // taps_wide, tap % taps_wide
        h, w = top + i, left + j
        seen = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        place = (first + h * width + w) * channels
        here = tl.load(x + place[:, None] + c[None, :], mask=seen[:, None] & (c < channels)[None, :], other=0.0)
        known = (c < channels)[:, None] & (o < outputs)[None, :]
        at = weight + i * by_row + j * channels
        by = tl.load(at + o[None, :] * by_output + c[:, None], mask=known, other=0.0)
        total = tl.dot(here, by.to(here.dtype), total, allow_tf32=TF32)
    if BIASED:
        total += tl.load(bias + s * outputs + o, mask=o < outputs, other=0.0)[None, :]
    whole = (m < rows)[:, None] & (o < outputs)[None, :]
    tl.store(y + s * rows * outputs + m[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), mask=whole)


@triton.jit
def _by_input(
    slope, weight, by_x, images, height, width, channels, out_height, out_width, outputs, by_client, by_output, by_row,
    taps_high, taps_wide, stride, pad_h, pad_w,
    TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program has places of the map that are a stride apart, for the same taps have seen all of them."""
    blocks = tl.cdiv(channels, N)
    m = tl.program_id(0) // blocks * M + tl.arange(0, M)
    c = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    below, beside = tl.program_id(2) // stride, tl.program_id(2) % stride
    slope += s * images * out_height * out_width * outputs
    weight += s * by_client
    cells_h, cells_w = tl.cdiv(height, stride), tl.cdiv(width, stride)
    row = m // cells_w % cells_h * stride + below
    column = m % cells_w * stride + beside
    image = m // (cells_w * cells_h)
    inside = (image < images) & (row < height) & (column < width)
    first_i, first_j = (below + pad_h) % stride, (beside + pad_w) % stride
    count_i, count_j = tl.cdiv(taps_high - first_i, stride), tl.cdiv(taps_wide - first_j, stride)
    chunks = tl.cdiv(outputs, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for t in range(count_i * count_j * chunks):
        tap = t // chunks
        o = t % chunks * K + tl.arange(0, K)
        i, j = first_i + tap // count_j * stride, first_j + tap % count_j * stride
        h, w = row + pad_h - i, column + pad_w - j
        seen = inside & (h >= 0) & (w >= 0)
        h, w = h // stride, w // stride
        seen = seen & (h < out_height) & (w < out_width)
        place = ((image * out_height + h) * out_width + w) * outputs
        here = tl.load(slope + place[:, None] + o[None, :], mask=seen[:, None] & (o < outputs)[None, :], other=0.0)
        at = weight + i * by_row + j * channels
        known = (o < outputs)[:, None] & (c < channels)[None, :]
        by = tl.load(at + o[:, None] * by_output + c[None, :], mask=known, other=0.0)
        total = tl.dot(here, by.to(here.dtype), total, allow_tf32=TF32)
    by_x += s * images * height * width * channels
    at = ((image * height + row) * width + column) * channels
    whole = inside[:, None] & (c < channels)[None, :]
    tl.store(by_x + at[:, None] + c[None, :], total.to(by_x.dtype.element_ty), mask=whole)


@triton.jit
def _by_weight(
    x, slope, found, biases, rows, height, width, channels, out_height, out_width, outputs, taps_wide, stride, pad_h,
    pad_w, low_h, low_w, size_h, size_w, share,
    BIASED: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The weight has ``size`` taps, of which those from ``low`` on are live."""
    blocks = tl.cdiv(outputs, N)
    chunks = tl.cdiv(channels, K)
    t = tl.program_id(0) // blocks
    o = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    x += s * (rows // (out_height * out_width)) * height * width * channels
    slope += s * rows * outputs
    tap = t // chunks
    c = t % chunks * K + tl.arange(0, K)
    i, j = tap // taps_wide, tap % taps_wide
    total = tl.zeros((N, K), dtype=tl.float32)
    sums = tl.zeros((N,), dtype=tl.float32)
    for begin in range(part * share, min(rows, (part + 1) * share), M):
        m = begin + tl.arange(0, M)
        h = m // out_width % out_height * stride - pad_h + i
        w = m % out_width * stride - pad_w + j
        seen = (m < rows) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        place = ((m // (out_width * out_height) * height + h) * width + w) * channels
        here = tl.load(x + place[:, None] + c[None, :], mask=seen[:, None] & (c < channels)[None, :], other=0.0)
        known = (m < rows)[None, :] & (o < outputs)[:, None]
        by = tl.load(slope + m[None, :] * outputs + o[:, None], mask=known, other=0.0)
        total = tl.dot(by, here, total, allow_tf32=TF32)
        if BIASED:
            sums += tl.sum(by.to(tl.float32), 1)
    if BIASED:
        to = biases + (part * tl.num_programs(1) + s) * outputs + o
        tl.store(to, sums, mask=o < tl.where(t == 0, outputs, 0))
    found += (part * tl.num_programs(1) + s) * outputs * size_h * size_w * channels
    found += ((low_h + i) * size_w + low_w + j) * channels
    whole = (o < outputs)[:, None] & (c < channels)[None, :]
    tl.store(found + o[:, None] * (size_h * size_w * channels) + c[None, :], total, mask=whole)


@triton.jit
def _added(
    a, b, live, shift, c, inside, begin, end, places, channels, PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Over a client's live rows: Σ(a − shift) and Σ(a − shift)²; or with PRODUCT Σa and Σ a (b − shift)."""
    first = tl.zeros((C,), dtype=tl.float32)
    second = tl.zeros((C,), dtype=tl.float32)
    for start in range(begin, end, M):
        m = start + tl.arange(0, M)
        counts = tl.load(live + m // places, mask=m < end, other=0).to(tl.int1)
        seen = (counts & (m < end))[:, None] & inside[None, :]
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
    return first, second


@triton.jit
def _sums(
    a, b, live, pivot, out, rows, places, channels, share,
    PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A part of :func:`_added`; the shift is the first row, with PRODUCT the pivot."""
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
    live += s * (rows // places)
    first, second = _added(a, b, live, shift, c, inside, begin, end, places, channels, PRODUCT, M, C)
    to = out + ((part * tl.num_programs(1) + s) * 2) * channels + c
    tl.store(to, first, mask=inside)
    tl.store(to + channels, second, mask=inside)


@triton.jit
def _gathered(partial, s, c, inside, channels, parts):
    """The parts of the two sums together."""
    first = tl.zeros_like(c).to(tl.float32)
    second = tl.zeros_like(c).to(tl.float32)
    for part in range(parts):
        at = partial + ((part * tl.num_programs(1) + s) * 2) * channels + c
        first += tl.load(at, mask=inside, other=0.0)
        second += tl.load(at + channels, mask=inside, other=0.0)
    return first, second


@triton.jit
def _count(live, s, images, places, I: tl.constexpr):
    """How many values of a channel are live."""
    lives = tl.zeros((I,), dtype=tl.int32)
    for begin in range(0, images, I):
        n = begin + tl.arange(0, I)
        lives += tl.load(live + s * images + n, mask=n < images, other=0).to(tl.int32)
    return (tl.sum(lives, 0) * places).to(tl.float32)


@triton.jit
def _told(first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels):
    """Writes (S, 6, C): the running mean and variance after this batch, then mean, 1 / deviation, scale and bias.

    A single value has no variance: it becomes the bias, and the running ones stay."""
    some = tl.maximum(count, 1.0)
    rest = first / some
    mean = shift + rest
    var = tl.maximum(second / some - rest * rest, 0.0)
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
def _told_back(total, along, count, weight, facts, out, s, c, inside, channels):
    """Writes (S, 5, C): the slopes by weight and by bias, and the three factors of the slope by x."""
    some = tl.maximum(count, 1.0)
    facts += s * 6 * channels + c
    mean = tl.load(facts + 2 * channels, mask=inside, other=0.0)
    turn = tl.load(facts + 3 * channels, mask=inside, other=0.0)
    scale = tl.load(weight + s * channels + c, mask=inside, other=0.0) * turn
    along = along * turn
    pull = -scale * turn * along / some
    rest = -scale * total / some - pull * mean
    out += s * 5 * channels + c
    tl.store(out, along, mask=inside)
    tl.store(out + channels, total, mask=inside)
    tl.store(out + 2 * channels, scale, mask=inside)
    tl.store(out + 3 * channels, pull, mask=inside)
    tl.store(out + 4 * channels, rest, mask=inside)
    return scale, pull, rest


@triton.jit
def _statistics(
    partial, x, live, weight, bias, old, out, eps, momentum, images, places, channels, parts, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    first, second = _gathered(partial, s, c, inside, channels, parts)
    shift = tl.load(x + s * images * places * channels + c, mask=inside, other=0.0).to(tl.float32)
    count = _count(live, s, images, places, I)
    _told(first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels)


@triton.jit
def _slopes(
    partial, live, weight, facts, out, images, places, channels, parts, C: tl.constexpr, I: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside = c < channels
    total, along = _gathered(partial, s, c, inside, channels, parts)
    _told_back(total, along, _count(live, s, images, places, I), weight, facts, out, s, c, inside, channels)


@triton.jit
def _normalise_short(
    x, live, weight, bias, old, y, out, eps, momentum, images, places, channels,
    C: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """All of BatchNorm in one launch, for maps so short that a program reads a channel of them twice."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside, rows = c < channels, images * places
    x += s * rows * channels
    shift = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    alive = live + s * images
    first, second = _added(x, x, alive, shift, c, inside, 0, rows, places, channels, False, M, C)
    count = _count(live, s, images, places, I)
    mean, scale, offset = _told(
        first, second, count, shift, weight, bias, old, out, eps, momentum, s, c, inside, channels
    )
    y += s * rows * channels
    for begin in range(0, rows, M):
        m = begin + tl.arange(0, M)
        seen = (m < rows)[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        here = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
        value = (here - mean[None, :]) * scale[None, :] + offset[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=seen)


@triton.jit
def _slopes_short(
    slope, x, live, weight, facts, by_x, out, images, places, channels,
    C: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.program_id(1).to(tl.int64)
    inside, rows = c < channels, images * places
    slope += s * rows * channels
    x += s * rows * channels
    mean = tl.load(facts + (s * 6 + 2) * channels + c, mask=inside, other=0.0)
    alive = live + s * images
    total, along = _added(slope, x, alive, mean, c, inside, 0, rows, places, channels, True, M, C)
    count = _count(live, s, images, places, I)
    scale, pull, rest = _told_back(total, along, count, weight, facts, out, s, c, inside, channels)
    by_x += s * rows * channels
    for begin in range(0, rows, M):
        m = begin + tl.arange(0, M)
        seen = (m < rows)[:, None] & inside[None, :]
        at = m[:, None] * channels + c[None, :]
        counts = tl.load(alive + m // places, mask=m < rows, other=0).to(tl.int1)
        left = tl.load(slope + at, mask=seen, other=0.0).to(tl.float32)
        right = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
        value = left * scale[None, :] + right * pull[None, :] + rest[None, :]
        tl.store(by_x + at, tl.where(counts[:, None], value, 0.0).to(by_x.dtype.element_ty), mask=seen)


@triton.jit
def _scale(
    a, b, live, factors, out, rows, places, channels, lines,
    BACK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The (S, lines, C) ``factors`` end with mean, 1 / deviation, scale and bias: (a − mean) · scale + bias, which of a
    single value is exactly the bias, whose sign a ReLU sees. With BACK they end with three:
    a · f₀ + b · f₁ + f₂ where the row is live, else 0."""
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
        mean = tl.load(factors - 4 * channels, mask=inside, other=0.0)
        scale = tl.load(factors - 2 * channels, mask=inside, other=0.0)
        bias = tl.load(factors - channels, mask=inside, other=0.0)
        value = (left - mean) * scale + bias
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _descend(start, slopes, rates, out, size, SIZE: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < size
    here = tl.load(start + s * size + at, mask=inside, other=0.0)
    slope = tl.load(slopes + s * size + at, mask=inside, other=0.0)
    tl.store(out + s * size + at, here - slope * tl.load(rates + s), mask=inside)


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
    slope, which, by_x, height, width, out_height, out_width, size, stride, padding, reach,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``reach`` windows of a side can have a place in common."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < height * width * CHANNELS
    c = at % CHANNELS
    column = at // CHANNELS % width + padding
    row = at // CHANNELS // width + padding
    slope += image * out_height * out_width * CHANNELS
    which += image * out_height * out_width * CHANNELS
    by_x += image * height * width * CHANNELS
    sum = tl.zeros((SIZE,), dtype=tl.float32)
    for number in range(reach * reach):
        h, w = row // stride - number // reach, column // stride - number % reach
        i, j = row - h * stride, column - w * stride
        seen = inside & (h >= 0) & (w >= 0) & (h < out_height) & (w < out_width) & (i < size) & (j < size)
        place = (h * out_width + w) * CHANNELS + c
        mine = tl.load(which + place, mask=seen, other=255).to(tl.int32) == i * size + j
        sum += tl.load(slope + place, mask=seen & mine, other=0.0).to(tl.float32)
    tl.store(by_x + at, sum.to(by_x.dtype.element_ty), mask=inside)


class _Map(NamedTuple):
    """A convolution's input as the kernels take it, and how they go over it."""

    x: Tensor
    taps: tuple[int, int]
    stride: int
    pads: tuple[int, int]
    after: tuple[int, int]
    depth: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, sides: Sides, stride: int, padding: int) -> _Map:
        """With few channels and several taps it is the patches, each of which is then all channels of one place."""
        x, channels = x.contiguous(), x.shape[-1]
        low_h, taps_h, low_w, taps_w = sides
        out_height, out_width = ((x.shape[d] + 2 * padding - weight.shape[d]) // stride + 1 for d in (2, 3))
        after = out_height, out_width
        pads = padding - low_h, padding - low_w
        if channels >= FEW or taps_h * taps_w == 1:
            return cls(x, (taps_h, taps_w), stride, pads, after, channels)
        depth, places = taps_h * taps_w * channels, out_height * out_width
        wide = triton.cdiv(depth, FEW) * FEW
        x = torch.nn.functional.pad(x, (0, 0, *(padding,) * 4)) if padding else x
        patches, line = x.new_empty(*x.shape[:2], *after, wide), x.shape[3] * channels
        m, k = PATCHES
        _patches[(x.shape[:2].numel(), triton.cdiv(places, m), triton.cdiv(wide, k))](
            x, patches, x.shape[2] * line, line, low_h * line + low_w * channels, channels, taps_w * channels, depth,
            wide, out_width, places, stride, M=m, K=k,
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


def _live(weight: Tensor, sides: Sides, kind: torch.dtype, rows: int) -> Tensor:
    """The live taps alone; where many rows are multiplied by them they are shortened once, not by every program."""
    low_h, taps_h, low_w, taps_w = sides
    live = weight.contiguous()[:, :, low_h : low_h + taps_h, low_w : low_w + taps_w]
    return live.to(kind).contiguous() if len(weight) >= MANY and rows >= LONG else live


class _Tile(NamedTuple):
    """What a program makes: its sides, how much of the depth it takes at a time, and how far it reads ahead."""

    m: int
    n: int
    k: int
    stages: int = 3

    def options(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k, "num_stages": self.stages}


def _tile(rows: int, columns: int, depth: int, stack: int, x: torch.dtype, weight: torch.dtype) -> _Tile:
    """For products of (rows, depth) and (depth, columns): the largest that keeps the GPU busy, as tried on an H200."""
    short = (64, 128, 64) if columns > 64 else (128, 64, 64)
    sizes = rows, columns, depth
    for most in (short if x == weight else (128, 64, 32), (64, 64, 64), (32, 64, 64), (32, 32, 128)):
        m, n, k = (max(16, min(side, triton.next_power_of_2(v))) for side, v in zip(most, sizes, strict=True))
        if stack * triton.cdiv(rows, m) * triton.cdiv(columns, n) >= BUSY:
            break
    return _Tile(m, n, max(16, k * 2 // x.itemsize))


def _weight_tile(outputs: int, channels: int, kind: torch.dtype) -> _Tile:
    """For products of (outputs, rows) and (rows, channels); also small GPUs have the shared memory for it."""
    n, k = (max(16, min(most, triton.next_power_of_2(v))) for most, v in ((128, outputs), (64, channels)))
    return _Tile(64, n, k, stages=3 if kind.itemsize == 2 else 2)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Sides, stride: int, padding: int) -> Tensor:
    outputs = weight.shape[1]
    map = _Map.of(x, weight, sides, stride, padding)
    live = _live(weight, sides, x.dtype, map.rows)
    if map.channels != x.shape[-1]:  # patches
        live = live.reshape(len(x), outputs, 1, 1, -1)
        live = torch.nn.functional.pad(live, (0, map.channels - map.depth))
    y = x.new_empty(*x.shape[:2], *map.after, outputs)
    tile = _tile(map.rows, outputs, map.channels, len(x), x.dtype, live.dtype)
    _forward[(triton.cdiv(map.rows, tile.m) * triton.cdiv(outputs, tile.n), len(x))](
        map.x, live, y if bias is None else bias.contiguous(), y, *map.sizes(outputs), *live.stride()[:3],
        map.taps[0] * map.taps[1], map.taps[1], map.stride, *map.pads,
        BIASED=bias is not None, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    return y


def by_input(slope: Tensor, weight: Tensor, like: Tensor, sides: Sides, stride: int, padding: int) -> Tensor:
    slope = slope.contiguous()
    images, height, width, channels = like.shape[1:]
    low_h, taps_h, low_w, taps_w = sides
    found = torch.empty(like.shape, dtype=slope.dtype, device=slope.device)
    rows = images * triton.cdiv(height, stride) * triton.cdiv(width, stride)
    live = _live(weight, sides, slope.dtype, rows)
    tile = _tile(rows, channels, slope.shape[-1], len(slope) * stride * stride, slope.dtype, live.dtype)
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(channels, tile.n), len(slope), stride * stride)
    _by_input[grid](
        slope, live, found, images, height, width, channels, *slope.shape[2:5], *live.stride()[:3], taps_h, taps_w,
        stride, padding - low_h, padding - low_w, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    return found


def by_weight(
    x: Tensor, slope: Tensor, like: Tensor, biased: bool, sides: Sides, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """The slopes by the weight and, where there is one, by the bias."""
    slope, outputs = slope.contiguous(), slope.shape[-1]
    map = _Map.of(x, like, sides, stride, padding)
    low, size = ((sides[0], sides[2]), like.shape[2:4]) if map.channels == x.shape[-1] else ((0, 0), (1, 1))
    tile, taps = _weight_tile(outputs, map.channels, x.dtype), map.taps[0] * map.taps[1]
    tiles = taps * triton.cdiv(map.channels, tile.k) * triton.cdiv(outputs, tile.n)
    parts = min(max(1, ENOUGH // (tiles * len(x))), max(1, map.rows // (4 * tile.m)))
    share = triton.cdiv(triton.cdiv(map.rows, parts), tile.m) * tile.m
    make = torch.empty if taps == size[0] * size[1] else torch.zeros  # dead taps have no slope
    found = make(parts, len(x), outputs, *size, map.channels, dtype=like.dtype, device=x.device)
    biases = torch.empty(parts, len(x), outputs if biased else 0, dtype=like.dtype, device=x.device)
    _by_weight[(tiles, len(x), parts)](
        map.x, slope, found, biases, *map.sizes(outputs), map.taps[1], map.stride, *map.pads, *low, *size, share,
        BIASED=biased, TF32=_tf32(), **tile.options(),
    )  # fmt: skip
    whole, of_bias = (found[0], biases[0]) if parts == 1 else (found.sum(0), biases.sum(0))
    return (whole if whole.shape == like.shape else _unpatched(whole[..., : map.depth], like, sides)), of_bias


def _unpatched(found: Tensor, like: Tensor, sides: Sides) -> Tensor:
    """A weight's slope from that of the patches' matrix, which has the live taps alone."""
    low_h, taps_h, low_w, taps_w = sides
    whole = found.reshape(*like.shape[:2], taps_h, taps_w, like.shape[-1])
    dead = (0, 0, low_w, like.shape[3] - low_w - taps_w, low_h, like.shape[2] - low_h - taps_h)
    return torch.nn.functional.pad(whole, dead)


def normalise(
    x: Tensor, live: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """The output, and the lines of :func:`_told`; ``old`` is the running mean and variance, (S, 2, C)."""
    x, live, weight, bias, old = (v.contiguous() for v in (x, live, weight, bias, old))
    facts = torch.empty(len(x), 6, x.shape[-1], dtype=torch.float32, device=x.device)
    if short := _short(x):
        y, (grid, rest) = torch.empty_like(x), short
        _normalise_short[grid](x, live, weight, bias, old, y, facts, eps, momentum, *rest, M=64, I=128)
        return y, facts
    partial, grid, rest = _parts(x, None, live, x)
    _statistics[grid](partial, x, live, weight, bias, old, facts, eps, momentum, *rest, I=128)
    return _scaled(x, None, live, facts), facts


def normalise_slopes(slope: Tensor, x: Tensor, live: Tensor, weight: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
    """The slope by x, and the lines of :func:`_told_back`."""
    slope, x, live, weight, facts = (v.contiguous() for v in (slope, x, live, weight, facts))
    found = torch.empty(len(x), 5, x.shape[-1], dtype=torch.float32, device=x.device)
    if short := _short(x):
        by_x, (grid, rest) = torch.empty_like(x), short
        _slopes_short[grid](slope, x, live, weight, facts, by_x, found, *rest, M=64, I=128)
        return by_x, found
    partial, grid, rest = _parts(slope, x, live, facts[:, 2].contiguous())
    _slopes[grid](partial, live, weight, facts, found, *rest, I=128)
    return _scaled(slope, x, live, found), found


def _short(x: Tensor) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """The grid and the sizes for a short map."""
    stack, images, channels, places = len(x), x.shape[1], x.shape[-1], x.shape[2:-1].numel()
    if images * places > SHORT:
        return None
    wide = 16 if stack * channels < 32 * BUSY else 32
    return (triton.cdiv(channels, wide), stack), (images, places, channels, wide)


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


def _scaled(a: Tensor, b: Tensor | None, live: Tensor, factors: Tensor) -> Tensor:
    rows = a.shape[1:-1].numel()
    out, size = torch.empty_like(a), 2048
    _scale[(triton.cdiv(rows * a.shape[-1], size), len(a))](
        a, a if b is None else b, live, factors, out, rows, rows // a.shape[1], a.shape[-1],
        factors.shape[1], BACK=b is not None, SIZE=size,
    )  # fmt: skip
    return out


def descend(params: Tensor, slopes: Tensor, rates: Tensor) -> Tensor:
    """params − rates · slopes, of (S, …) with a rate for each of the stack."""
    out, size = torch.empty_like(params), params[0].numel()
    if not out.stride() == params.stride() == slopes.stride() or out.stride(0) != size:
        params, slopes, out = params.contiguous(), slopes.contiguous(), params.new_empty(params.shape)
    _descend[(triton.cdiv(size, 2048), len(params))](params, slopes, rates.contiguous(), out, size, SIZE=2048)
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
        slope, which.contiguous(), found, height, width, *slope.shape[2:4], size, stride, padding,
        triton.cdiv(size, stride), CHANNELS=channels, SIZE=1024,
    )  # fmt: skip
    return found


def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)
