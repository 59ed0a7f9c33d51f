"""Features on the unit sphere and a fixed orthonormal head (SphereFed, Dong et al. 2022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError
from fedrane.task import Batch, Task, masked_mean


def unit(features: Tensor) -> Tensor:
    """Each row divided by its norm; a zero row stays zero, with a finite gradient."""
    return features * torch.rsqrt(features.square().sum(-1, keepdim=True).clamp(min=1e-12))


class OrthonormalHead(nn.Linear):
    """A linear head without bias and with random orthonormal rows."""

    def __init__(self, width: int, classes: int) -> None:
        if classes > width:
            raise ConfigError(
                f"an orthonormal head for {classes} classes on {width} features",
                "there cannot be more orthonormal vectors than features",
                "Use a wider model (fedrane also has method.head=linear)",
            )
        super().__init__(width, classes, bias=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)


HEADS = ("orthonormal", "linear", "mlp")
SCALE_NEEDS = {"head=orthonormal": ("scale",), "loss=ce": ("scale",)}
"""When a method's field ``scale``, which multiplies the scores of unit features, has an effect."""


def with_head(task: Task, head: str) -> Task:
    """The task with that head, one of ``HEADS``; ``linear`` keeps the network's."""
    if head == "orthonormal":
        return task.add("head", OrthonormalHead(task.width, task.classes))
    if head == "mlp":
        layers = nn.Linear(task.width, task.width), nn.ReLU(), nn.Linear(task.width, task.classes)
        return task.add("head", nn.Sequential(*layers))
    return task


def squared_error(scores: Tensor, batch: Batch) -> Tensor:
    """The mean of ½‖scores − e_y‖² without padding."""
    target = batch.targets(scores.shape[-1]).to(scores.dtype)
    return masked_mean(0.5 * (scores - target).square().sum(-1), batch.mask)


class Moments(NamedTuple):
    """Sums over examples in float64, enough to solve for the best linear head. Those of several clients add up."""

    gram: Tensor
    """Σ z zᵀ."""
    cross: Tensor
    """Σ z e_yᵀ."""
    examples: Tensor

    @classmethod
    def zeros(cls, width: int, classes: int, device: torch.device) -> Moments:
        return cls(
            *(torch.zeros(size, dtype=torch.float64, device=device) for size in ((width,) * 2, (width, classes), ()))
        )

    @classmethod
    def of(cls, features: Tensor, batch: Batch, classes: int) -> Moments:
        z = torch.where(batch.mask[:, None], features, 0).double()
        return cls(z.mT @ z, z.mT @ batch.targets(classes).double(), batch.mask.sum().double())

    def ridge_regression(self, ridge: float) -> Tensor:
        """The head W that minimises Σ ‖Wz − e_y‖² + ridge ‖W‖²."""
        eye = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        transposed: Tensor = torch.linalg.solve(self.gram + ridge * eye, self.cross)
        return transposed.mT

    def squared_error(self, head: Tensor) -> Tensor:
        """The mean of ½‖Wz − e_y‖² over the examples; ‖e_y‖ is 1."""
        head = head.double()
        total = (head @ self.gram * head).sum() - 2 * (head * self.cross.mT).sum() + self.examples
        return 0.5 * total / self.examples.clamp(min=1)
