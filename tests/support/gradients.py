"""A layer's output for each client of a stack, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def gradients_of(layer: Callable[..., Tensor], weights: Tensor, *inputs: Tensor) -> Tensors:
    """The output, and the gradient of a weighted sum of it by each input; for each client of a stack."""

    def one(weights: Tensor, *inputs: Tensor) -> Tensors:
        def total(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            y = layer(*inputs)
            return (y.to(weights.dtype) * weights).sum(), y

        gradients, y = torch.func.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
        return (y, *gradients)

    return torch.vmap(one)(weights, *inputs)
