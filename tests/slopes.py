"""What a layer gives for each client of a stack, and its slopes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Slopes = tuple[Tensor, ...]


def slopes_of(layer: Callable[..., Tensor], weights: Tensor, *inputs: Tensor) -> Slopes:
    """The output, and the slopes of a weighted sum of it by each input; for each client of a stack."""

    def one(weights: Tensor, *inputs: Tensor) -> Slopes:
        def total(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            y = layer(*inputs)
            return (y.to(weights.dtype) * weights).sum(), y

        slopes, y = torch.func.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
        return (y, *slopes)

    return torch.vmap(one)(weights, *inputs)
