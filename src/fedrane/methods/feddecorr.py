"""FedDecorr: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", ICLR 2023.

Under label skew the features of local models, and so of the global one, fill only a few dimensions. With the matrix K
of correlations between the d features over the n examples of a batch, a client minimises

    CE + β ‖K‖_F² / d².

The official code has something else (``form="code"``): the products XᵀX of the standardised features, which are n − 1
times as large, without their diagonal, and divided by n,

    CE + β ‖(n − 1)(K − diag K)‖_F² / (n d (d − 1)),

which is about n times as strong for the same β.

As there, 1e-8 is added to variances: the correlations of a constant feature are zero.

*Deviations*: a batch of two examples has no penalty. Any two are perfectly correlated, so only the 1e-8 would have a
gradient, and a very large one; the official code leaves out single examples only. The features are those that the head
receives.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrane.algorithm import Algorithm, Choices, Grid, Outcome
from fedrane.errors import check_choices, check_ranges
from fedrane.task import Batch, Context, Model, Task, prediction_loss


@dataclass(frozen=True)
class FedDecorr(Algorithm):
    """FedAvg with a penalty on the correlations between features."""

    grid: ClassVar[Grid] = {"strength": (0.01, 0.1, 1.0)}
    choices: ClassVar[Choices] = {"form": ("paper", "code")}

    strength: float = 0.1
    """β, the weight of the penalty; 0 is FedAvg."""
    form: str = "paper"
    """The penalty as in the ``paper``, or as in the authors' ``code``, about the batch size times as strong."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6))
        check_choices(self)
        if self.strength == 0:
            warnings.warn("FedDecorr with method.strength=0 is FedAvg", stacklevel=3)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        features = net.body(batch.x)
        loss = prediction_loss(net.head(features), batch)
        penalty = self._penalty(features, batch.mask)
        return loss + self.strength * penalty, Outcome(net.stats, {"loss": loss, "correlation": penalty})

    def _penalty(self, features: Tensor, mask: Tensor) -> Tensor:
        squares, n, d = correlations(features, mask).square(), mask.sum(), features.shape[-1]
        if self.form == "paper":
            penalty = squares.sum() / d**2
        else:
            off_diagonal = squares.sum() - squares.diagonal().sum()
            penalty = off_diagonal / max(1, d * (d - 1)) * (n - 1).square() / n.clamp(min=1)
        return torch.where(n > 2, penalty, 0)  # any two examples are perfectly correlated


def correlations(features: Tensor, mask: Tensor) -> Tensor:
    """K, over the examples that are not padding."""
    n = mask.sum()
    x = torch.where(mask[:, None], features, 0)
    x = torch.where(mask[:, None], x - x.sum(0) / n.clamp(min=1), 0)
    degrees = (n - 1).clamp(min=1)
    x = x * torch.rsqrt(x.square().sum(0) / degrees + 1e-8)
    return x.mT @ x / degrees
