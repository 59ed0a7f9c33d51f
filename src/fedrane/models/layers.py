"""Layers that need more than their input: the mask of the batch, and the key of its noise.

A batch is padded to a fixed length, so BatchNorm must leave padding out of its statistics; and dropout must draw from
the batch's key, so that every engine, and a resumed run, sees the same dropout masks. Both read what they need
from the :class:`Pass` in progress and write nothing but to it: the network stays a pure function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrane.data.noise import uniform
from fedrane.kernels import dispatch
from fedrane.kernels.batch_norm import normalise


@dataclass
class Pass:
    """One evaluation of a network: the mode, the mask of the batch, the key of its noise, and the new statistics."""

    train: bool
    mask: Tensor
    full: bool
    key: Tensor | None = None
    fresh: dict[str, Tensor] = field(default_factory=dict)
    """BatchNorm's running statistics as they are after this pass."""


_current: ContextVar[Pass | None] = ContextVar("pass", default=None)


@contextmanager
def within(now: Pass) -> Iterator[None]:
    token = _current.set(now)
    try:
        yield
    finally:
        _current.reset(token)


class MaskedBatchNorm(nn.Module):
    """BatchNorm that ignores padding. ``tracked``: evaluation uses running statistics; otherwise each batch its own."""

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, channels: int, eps: float, momentum: float, affine: bool, tracked: bool, name: str) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum, self.tracked, self.name = channels, eps, momentum, tracked, name
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels) if tracked else None)
        self.register_buffer("running_var", torch.ones(channels) if tracked else None)

    def forward(self, x: Tensor) -> Tensor:
        now = _current.get()
        if self.tracked and not (now.train if now else self.training):
            return self._with_running_statistics(x)
        if now is None or now.full:
            return self._without_padding(x, now)
        return self._masked(x, now)

    def _with_running_statistics(self, x: Tensor) -> Tensor:
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        if not dispatch.stacked():
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        return (x.movedim(1, -1) * scale + shift).movedim(-1, 1)

    def _without_padding(self, x: Tensor, now: Pass | None) -> Tensor:
        if x.numel() == x.shape[1]:  # one value per channel is its own mean: the output is the bias
            mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
            return self._masked(x, now or Pass(self.training, mask, True))
        if not self.tracked or now is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self.get_buffer("running_mean").clone(), self.get_buffer("running_var").clone()
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        self._record(now, mean, var)
        return y

    def _masked(self, x: Tensor, now: Pass) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = x.new_ones(self.channels, dtype=dtype) if self.weight is None else self.weight
        bias = x.new_zeros(self.channels, dtype=dtype) if self.bias is None else self.bias
        running = (self.running_mean, self.running_var) if self.tracked else (bias, weight)
        old = torch.stack([value.detach() for value in running if value is not None])
        y, new = normalise(x, now.mask, weight, bias, old, self.eps, self.momentum)
        if self.tracked:
            self._record(now, new[0], new[1])
        return y

    def _record(self, now: Pass, mean: Tensor, var: Tensor) -> None:
        now.fresh[f"{self.name}.running_mean"] = mean.detach()
        now.fresh[f"{self.name}.running_var"] = var.detach()

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}, tracked={self.tracked}"


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the batch's key, the layer's number and the position: no generator."""

    def __init__(self, p: float, layer: int, by_channel: bool) -> None:
        super().__init__()
        self.p, self.layer, self.by_channel = p, layer, by_channel
        self.batch_axis = 0

    def forward(self, x: Tensor) -> Tensor:
        now = _current.get()
        if now is None or not now.train or now.key is None or self.p == 0:
            return x
        first = x.movedim(self.batch_axis, 0)  # so that an example's mask does not depend on how many others there are
        shape = first.shape[:2] + (1,) * (x.dim() - 2) if self.by_channel else first.shape
        position = torch.arange(shape.numel(), device=x.device).reshape(shape)
        kept = (uniform(now.key, self.layer, position) >= self.p).movedim(0, self.batch_axis)
        return x * kept / (1 - self.p) if self.p < 1 else x * 0

    def extra_repr(self) -> str:
        return f"p={self.p}"
