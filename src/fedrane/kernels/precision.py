"""A network's arithmetic in another dtype than its parameters' (bf16)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedrane.kernels import dispatch
from fedrane.kernels.onednn import CompleteGradients


def call_in(
    dtype: torch.dtype, module: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...], keep: Set[str]
) -> Tensor:
    """What the module, with these parameters and buffers, computes in that dtype; those in ``keep`` are not cast.

    Stacked convolutions take weights in their own dtype, so those are not cast either.
    """
    stacked = dispatch.stacked()
    constants = {name: value for name, value in module.named_buffers() if value.is_floating_point()}
    cast = {
        name: value if name in keep or (stacked and value.dim() == 4) else value.to(dtype)
        for name, value in {**constants, **tensors}.items()
    }
    inputs = tuple(value.to(dtype) if value.is_floating_point() else value for value in inputs)
    mended = CompleteGradients() if inputs[0].device.type == "cpu" and not stacked else nullcontext()
    with mended:
        out: Tensor = functional_call(module, cast, inputs, strict=False)
    return out
