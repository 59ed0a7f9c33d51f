"""Layers for clients trained side by side, one stack of them as one tensor under ``torch.func.vmap``.

A convolution whose weights differ from client to client is a grouped one to the usual libraries, which are slow at it.
Here it is a product of matrices, one for each client in one call, over patches laid out channels last; taps that only
ever see padding (eight of nine on a 1 × 1 map) are left out, which changes no number. BatchNorm over the live rows has
its derivative written out, for the same reason. Both are exact: the plain layers are their oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


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
        seen = [tap for tap in range(taps) if tap - padding < length and last + tap - padding >= 0]
        low, high = seen[0], seen[-1] + 1
        before = padding - low
        return cls(low, high, before, last + high - padding - length)


def _patches(x: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    """(N, H, W, C) to (N, H', W', taps · taps · C)."""
    if rows.before or rows.after or columns.before or columns.after:  # a negative pad crops
        x = F.pad(x, (0, 0, columns.before, columns.after, rows.before, rows.after))
    if rows.taps == columns.taps == 1:
        return x[:, ::stride, ::stride]
    x = x.unfold(1, rows.taps, stride).unfold(2, columns.taps, stride).permute(0, 1, 2, 4, 5, 3)
    return x.reshape(*x.shape[:3], -1)


def _unpatch(columns_: Tensor, x: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    """The transpose of :func:`_patches`, for a strided convolution: patches added up where they came from."""
    n, high, wide, channels = x.shape
    parts = columns_.reshape(*columns_.shape[:3], rows.taps, columns.taps, channels)
    height, width = high + rows.before + rows.after, wide + columns.before + columns.after
    whole = torch.zeros_like(x[:, :1, :1]).expand(n, height, width, channels).clone()
    for i in range(rows.taps):
        for j in range(columns.taps):
            place = whole[:, i : i + stride * parts.shape[1] : stride, j : j + stride * parts.shape[2] : stride]
            place += parts[:, :, :, i, j]
    return F.pad(whole, (0, 0, -columns.before, -columns.after, -rows.before, -rows.after))


class _OfStack(Function):
    """A function of stacked tensors as one of a client's: under ``vmap`` it is called once for all."""

    @staticmethod
    def forward(function: Callable[..., Any], *values: Any) -> Any:
        found = function(*(v[None] if isinstance(v, Tensor) else v for v in values))
        return tuple(part[0] for part in found) if isinstance(found, tuple) else found[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Any], *values: Any) -> Any:
        def stacked(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        found = function(*(stacked(v, d) for v, d in zip(values, in_dims[1:], strict=True)))
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


def of_stack(function: Callable[..., Any], *values: Any) -> Any:
    return _OfStack.apply(function, *values)  # type: ignore[no-untyped-call]


class _Convolve(Function):
    """(N, H, W, C) and (O, k, k, C) to (N, H', W', O)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        rows, columns = _sides(x, weight, stride, padding)
        if kernels := kernels_for(x):
            live = (rows.low, rows.taps, columns.low, columns.taps)
            found: Tensor = of_stack(kernels.convolve, x, weight, bias, live, stride, padding)
            return found
        y = _patches(x, rows, columns, stride) @ _matrix(weight, rows, columns).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        slope, (x, weight) = slopes[0], ctx.saved_tensors
        rows, columns = _sides(x, weight, ctx.stride, ctx.padding)
        if kernels := kernels_for(x):
            live = (rows.low, rows.taps, columns.low, columns.taps)
            how = (live, ctx.stride, ctx.padding)
            by_weight, by_bias = of_stack(kernels.by_weight, x, slope, weight, ctx.biased, *how)
            by_x = of_stack(kernels.by_input, slope, weight, x, *how) if ctx.needs_input_grad[0] else None
        else:  # of the inputs alone, so that it can be differentiated again
            patches = _patches(x, rows, columns, ctx.stride)
            by_weight = _weight_slope(patches, slope, weight, rows, columns)
            by_bias = slope.sum((0, 1, 2)).to(weight.dtype)
            by_x = _input_slope(x, slope, weight, rows, columns, ctx.stride) if ctx.needs_input_grad[0] else None
        return by_x, by_weight, by_bias if ctx.biased else None, None, None


def _weight_slope(patches: Tensor, slope: Tensor, weight: Tensor, rows: _Side, columns: _Side) -> Tensor:
    outputs, height, width, channels = weight.shape
    found = slope.reshape(-1, outputs).mT @ patches.reshape(-1, patches.shape[-1])
    dead = (0, 0, columns.low, width - columns.high, rows.low, height - rows.high)
    return F.pad(found.reshape(outputs, rows.taps, columns.taps, channels).to(weight.dtype), dead)


def _input_slope(x: Tensor, slope: Tensor, weight: Tensor, rows: _Side, columns: _Side, stride: int) -> Tensor:
    if stride > 1:
        back = slope @ _matrix(weight, rows, columns).to(x.dtype).mT
        return _unpatch(back, x, rows, columns, stride)
    # With stride 1 the derivative is a convolution too, by the taps turned round.
    live = weight[:, rows.low : rows.high, columns.low : columns.high]
    turned = live.flip(1, 2).permute(1, 2, 0, 3).reshape(-1, weight.shape[-1])
    sides = [_Side(0, s.taps, s.taps - 1 - s.before, s.taps - 1 - s.after) for s in (rows, columns)]
    return _patches(slope, sides[0], sides[1], 1) @ turned.to(x.dtype)


def _sides(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[_Side, _Side]:
    rows, columns = (_Side.of(x.shape[1 + d], weight.shape[1 + d], stride, padding) for d in (0, 1))
    return rows, columns


def _matrix(weight: Tensor, rows: _Side, columns: _Side) -> Tensor:
    live = weight[:, rows.low : rows.high, columns.low : columns.high]
    return live.reshape(weight.shape[0], -1).mT


def kernels_for(x: Tensor, module: str = "fedrane.models.kernels") -> ModuleType | None:
    """Those for a GPU, where there are any for numbers of this kind."""
    return _load_kernels(module) if x.is_cuda and x.dtype != torch.float64 else None


@cache
def _load_kernels(module: str) -> ModuleType | None:
    return import_module(module) if kernels_available() else None


def kernels_available() -> bool:
    return find_spec("triton") is not None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A convolution of (N, C, H, W), channels last in memory; the weight may have more digits than ``x``."""
    last = (0, 2, 3, 1)
    y = _Convolve.apply(x.permute(last), weight.permute(last), bias, stride, padding)  # type: ignore[no-untyped-call]
    out: Tensor = y.permute(0, 3, 1, 2)
    return out


class _Normalise(Function):
    """(N, …, C), of which some rows are live, to mean 0 and deviation 1 over those.

    A single value of a channel becomes the bias and leaves the running statistics as they are (torch refuses it).
    Gives the output and lines of C numbers: the running mean and variance after this batch, then what kernels need.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, live: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
    ) -> tuple[Tensor, Tensor]:
        if kernels := kernels_for(x):
            y, facts = of_stack(kernels.normalise, x, live, weight, bias, old, eps, momentum)
            return y, facts
        count = live.sum() * x.shape[1:-1].numel()
        wide = x.to(weight.dtype)
        mean, var = _moments(wide, live)
        fresh = torch.stack([mean, var * count / (count - 1).clamp(min=1)])
        # A single value has no variance: taken for 0 it would draw the running one down, and blow up the dead rows.
        new = torch.where(count > 1, old + momentum * (fresh - old), old)
        scale = torch.where(count > 1, weight * torch.rsqrt(var + eps), 0)
        y = torch.addcmul(bias, wide - mean, scale)  # of a single value exactly the bias: a ReLU sees its sign
        return y.to(x.dtype), new

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, live, weight, *_, ctx.eps, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, live, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        slope, (x, live, weight, facts) = slopes[0], ctx.saved_tensors
        if kernels := kernels_for(x):
            by_x, found = of_stack(kernels.normalise_slopes, slope, x, live, weight, facts)
            return by_x, None, found[0], found[1], None, None, None
        some = (live.sum() * x.shape[1:-1].numel()).clamp(min=1)
        wide = x.to(weight.dtype)
        mean, var = _moments(wide, live)  # of the inputs alone, so that it can be differentiated again
        inverse = torch.rsqrt(var + ctx.eps)
        dims, mask, scale = tuple(range(x.dim() - 1)), _rows(live, x), weight * inverse
        slope = torch.where(mask, slope, 0).to(weight.dtype)
        normal = torch.where(mask, (wide - mean) * inverse, 0)
        by_bias, by_weight = slope.sum(dims), (slope * normal).sum(dims)
        by_x = torch.where(mask, scale * (slope - (by_bias + normal * by_weight) / some), 0).to(x.dtype)
        return by_x, None, by_weight, by_bias, None, None, None


def _moments(x: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of (N, …, C) over live rows."""
    some, dims = (live.sum() * x.shape[1:-1].numel()).clamp(min=1), tuple(range(x.dim() - 1))
    mask = _rows(live, x)
    mean = torch.where(mask, x, 0).sum(dims) / some
    return mean, torch.where(mask, x - mean, 0).square().sum(dims) / some


def _rows(live: Tensor, like: Tensor) -> Tensor:
    return live.reshape(-1, *(1,) * (like.dim() - 1))


def normalise(
    x: Tensor, live: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """BatchNorm of (N, C, …) over live rows; ``old`` and the second result are the running mean and variance."""
    y, facts = _Normalise.apply(x.movedim(1, -1), live, weight, bias, old, eps, momentum)  # type: ignore[no-untyped-call]
    return y.movedim(-1, 1), facts[:2]


class _Pool(Function):
    """Max-pooling of (N, H, W, C) by the kernels; ties go to the first, as in the usual libraries."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        kernels = kernels_for(x)
        y, which = of_stack(kernels.pool, x, size, stride, padding)  # type: ignore[union-attr]
        return y, which

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, which = ctx.saved_tensors
        return of_stack(kernels_for(x).unpool, slopes[0], which, x, *ctx.how), None, None, None  # type: ignore[union-attr]


class _Descend(Function):
    """A step down the slopes, by the kernels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(params: Tensor, slopes: Tensor, rate: Tensor) -> Tensor:
        found: Tensor = of_stack(kernels_for(params).descend, params, slopes, rate)  # type: ignore[union-attr]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, (by, rate) = slopes[0], ctx.saved_tensors
        return slope, -rate * slope, -(slope * by).sum()


def descend(params: Tensor, slopes: Tensor, rate: Tensor) -> Tensor:
    """params − rate · slopes; of a stack, whose clients have a rate each, the library's own is half as fast."""
    if as_products() and kernels_for(params) and rate.dim() == 0 and params.shape == slopes.shape:
        found: Tensor = _Descend.apply(params, slopes, rate)  # type: ignore[no-untyped-call]
        return found
    return torch.addcmul(params, slopes, rate, value=-1)


WIDEST = 16
"""The side of a window whose places are numbers of eight bits."""
_active: ContextVar[bool] = ContextVar("as products", default=False)


def as_products() -> bool:
    """Whether clients are stacked now; a convolution may then be given a weight with more digits than its input."""
    return _active.get()


class AsProducts(TorchFunctionMode):
    """Within it, every plain convolution is done as above, whoever calls it."""

    def __enter__(self) -> AsProducts:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._token = _active.set(True)
        return self

    def __exit__(self, *error: Any) -> None:
        _active.reset(self._token)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            plain = _plain(*args, **(kwargs or {}))
            if plain:
                return convolve(*plain)
        if func is F.linear and len(args) == 3 and args[2] is not None and not kwargs:
            product = F.linear(*args[:2])  # with a bias, a stack is also multiplied by one
            return product + args[2].to(product.dtype)
        if func is F.adaptive_avg_pool2d and args[1:] in ((1,), ((1, 1),)) and not kwargs:
            return args[0].mean(
                (-2, -1), keepdim=True
            )  # the library's own asks how its input lies, which a stack hides
        if func is F.group_norm:
            return _group_norm(*args, **(kwargs or {}))
        if func in (F.max_pool2d, torch.max_pool2d) and not (kwargs or {}).get("return_indices"):
            window = _window(*args, **(kwargs or {}))
            if window:
                x, *how = window
                return _Pool.apply(x.permute(0, 2, 3, 1), *how)[0].permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
            return F.max_pool2d_with_indices(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The library's own asks how its input lies, too."""
    wide = torch.promote_types(input.dtype, torch.float32)
    groups = input.reshape(input.shape[0], num_groups, -1).to(wide)
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
    """The arguments of :func:`convolve`, if it can do this convolution: square, whole, and of one group."""
    strides, paddings, dilations = (
        set(v) if isinstance(v, (tuple, list)) else {v} for v in (stride, padding, dilation)
    )
    if input.dim() != 4 or groups != 1 or dilations != {1} or len(strides) != 1 or len(paddings) != 1:
        return None
    step, border = strides.pop(), paddings.pop()
    return None if isinstance(border, str) else (input, weight, bias, step, border)


def _window(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, int, int, int] | None:
    """The arguments of a max-pooling the kernels can do."""
    stride = kernel_size if stride is None else stride
    sizes = [set(v) if isinstance(v, (tuple, list)) else {v} for v in (kernel_size, stride, padding, dilation)]
    plain = input.dim() == 4 and sizes[3] == {1} and not ceil_mode and not return_indices
    if not plain or any(len(v) != 1 for v in sizes) or not kernels_for(input):
        return None
    size, step, border = (v.pop() for v in sizes[:3])
    return (input, size, step, border) if size <= WIDEST else None
