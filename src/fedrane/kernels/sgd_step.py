"""One step of SGD, also where clients are stacked and each has its own learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack


def sgd_step(params: Tensor, grads: Tensor, lr: Tensor) -> Tensor:
    """params − lr · grads; for stacked clients with one lr each, PyTorch's operation takes twice as long on a GPU."""
    kernels = dispatch.stacked() and dispatch.gpu_kernels(params, "sgd_step")
    if kernels and lr.dim() == 0 and params.shape == grads.shape:
        out: Tensor = _SgdStep.apply(params, grads, lr)  # type: ignore[no-untyped-call]
        return out
    return torch.addcmul(params, grads, lr, value=-1)


class _SgdStep(Function):
    """By the kernels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(params: Tensor, grads: Tensor, lr: Tensor) -> Tensor:
        kernels = dispatch.gpu_kernels(params, "sgd_step")
        out: Tensor = on_stack(kernels.sgd_step, params, grads, lr)  # type: ignore[union-attr]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_output, (grads, lr) = grad_outputs[0], ctx.saved_tensors
        return grad_output, -lr * grad_output, -(grad_output * grads).sum()
