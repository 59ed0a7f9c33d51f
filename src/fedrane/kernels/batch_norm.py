"""BatchNorm over a batch without its padding, with its gradient written out: fast under ``torch.func.vmap``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack


def normalise(
    x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """BatchNorm of (N, C, …) without padding; ``old`` and the second result are the running mean and variance."""
    y, saved = _Normalise.apply(x.movedim(1, -1), mask, weight, bias, old, eps, momentum)  # type: ignore[no-untyped-call]
    return y.movedim(-1, 1), saved[:2]


class _Normalise(Function):
    """(N, …, C), to mean 0 and deviation 1 over the examples in the mask.

    A single value of a channel becomes the bias and leaves the running statistics as they are (torch refuses it).
    Gives the output and lines of C numbers: the running mean and variance after this batch, then what kernels need.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, old: Tensor, eps: float, momentum: float
    ) -> tuple[Tensor, Tensor]:
        if kernels := dispatch.gpu_kernels(x, "batch_norm"):
            y, saved = on_stack(kernels.normalise, x, mask, weight, bias, old, eps, momentum)
            return y, saved
        count = mask.sum() * x.shape[1:-1].numel()
        values = x.to(weight.dtype)
        mean, var = _moments(values, mask)
        fresh = torch.stack([mean, var * count / (count - 1).clamp(min=1)])
        # A single value has no variance. Taking 0 for it would pull the running one down and blow up the padding.
        new = torch.where(count > 1, old + momentum * (fresh - old), old)
        scale = torch.where(count > 1, weight * torch.rsqrt(var + eps), 0)
        y = torch.addcmul(bias, values - mean, scale)  # of a single value exactly the bias: a ReLU sees its sign
        return y.to(x.dtype), new

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, mask, weight, *_, ctx.eps, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, mask, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_output, (x, mask, weight, saved) = grad_outputs[0], ctx.saved_tensors
        if kernels := dispatch.gpu_kernels(x, "batch_norm"):
            grad_input, gradients = on_stack(kernels.normalise_backward, grad_output, x, mask, weight, saved)
            return grad_input, None, gradients[0], gradients[1], None, None, None
        divisor = (mask.sum() * x.shape[1:-1].numel()).clamp(min=1)
        values = x.to(weight.dtype)
        mean, var = _moments(values, mask)  # of the inputs alone, so that it can be differentiated again
        inverse = torch.rsqrt(var + ctx.eps)
        dims, mask, scale = tuple(range(x.dim() - 1)), _mask(mask, x), weight * inverse
        grad_output = torch.where(mask, grad_output, 0).to(weight.dtype)
        normal = torch.where(mask, (values - mean) * inverse, 0)
        grad_bias, grad_weight = grad_output.sum(dims), (grad_output * normal).sum(dims)
        grad_input = scale * (grad_output - (grad_bias + normal * grad_weight) / divisor)
        return torch.where(mask, grad_input, 0).to(x.dtype), None, grad_weight, grad_bias, None, None, None


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of (N, …, C) over the examples in the mask."""
    divisor, dims = (mask.sum() * x.shape[1:-1].numel()).clamp(min=1), tuple(range(x.dim() - 1))
    mask = _mask(mask, x)
    mean = torch.where(mask, x, 0).sum(dims) / divisor
    return mean, torch.where(mask, x - mean, 0).square().sum(dims) / divisor


def _mask(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(-1, *(1,) * (like.dim() - 1))
