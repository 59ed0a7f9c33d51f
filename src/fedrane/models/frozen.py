"""Frozen parts of a network: their parameters become constants of its layers.

What is no parameter is in no model. So no method trains, decays, averages or sends it, and no checkpoint stores it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError, nearest
from fedrane.models.layers import MaskedBatchNorm
from fedrane.tree import Tensors


def matching(names: Collection[str], patterns: Iterable[str]) -> set[str]:
    """The names that match a pattern, in which ``*`` stands for anything; an error for a pattern without a match."""
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigError(
                f"freeze={pattern} matches no parameter",
                "names are part.layer.weight, and * stands for anything",
                nearest(pattern, names),
            )
        chosen |= matched
    return chosen


def freeze(module: nn.Module, part: str, values: Tensors) -> nn.Module:
    """A copy of the module whose parameters of these names are constants with these values.

    A BatchNorm layer whose statistics are among them always uses these statistics, in training too.
    """
    module = copy.deepcopy(module)
    shared = dict(module.named_parameters())  # a parameter that two layers share has the name of the first
    constants = {id(p): values[f"{part}.{n}"] for n, p in shared.items() if f"{part}.{n}" in values}
    for path, layer in list(module.named_modules()):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if id(parameter) in constants:
                delattr(layer, name)
                layer.register_buffer(name, constants[id(parameter)])
        if isinstance(layer, MaskedBatchNorm) and f"{layer.name}.running_mean" in values:
            fixed = FixedBatchNorm(layer, values)
            if not path:
                return fixed
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, fixed)
    return module


class FixedBatchNorm(nn.Module):
    """BatchNorm by constant statistics."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: MaskedBatchNorm, values: Tensors) -> None:
        super().__init__()
        self.eps = layer.eps
        for name, affine in (("weight", layer.weight), ("bias", layer.bias)):
            if isinstance(affine, nn.Parameter):
                self.register_parameter(name, affine)
            else:
                self.register_buffer(name, affine)
        self.register_buffer("mean", values[f"{layer.name}.running_mean"])
        self.register_buffer("var", values[f"{layer.name}.running_var"])

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(self.get_buffer("var") + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -self.get_buffer("mean") * scale
        shift = shift if self.bias is None else shift + self.bias
        return (x.movedim(1, -1) * scale + shift).movedim(-1, 1)

    def extra_repr(self) -> str:
        return f"{len(self.get_buffer('mean'))}, eps={self.eps}"
