"""Features on the unit sphere and a fixed orthonormal head (SphereFed, Dong et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError
from fedrane.task import Batch, Task, mean_over_live


def unit(features: Tensor) -> Tensor:
    """Each row divided by its length; a zero row stays zero, with a finite gradient."""
    return features * torch.rsqrt(features.square().sum(-1, keepdim=True).clamp(min=1e-12))


class OrthonormalHead(nn.Linear):
    """A linear head without bias whose rows are orthonormal, drawn at random."""

    def __init__(self, width: int, classes: int) -> None:
        if classes > width:
            raise ConfigError(
                f"an orthonormal head for {classes} classes on {width} features",
                "there are no more orthonormal rows than features",
                "Use a wider model, or method.head=linear",
            )
        super().__init__(width, classes, bias=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)


HEADS = ("orthonormal", "linear", "mlp")


def with_head(task: Task, head: str) -> Task:
    """The task with that kind of head; ``linear`` leaves the network's own."""
    if head == "orthonormal":
        return task.add("head", OrthonormalHead(task.width, task.classes))
    if head == "mlp":
        layers = nn.Linear(task.width, task.width), nn.ReLU(), nn.Linear(task.width, task.classes)
        return task.add("head", nn.Sequential(*layers))
    return task


def squared_error(scores: Tensor, batch: Batch) -> Tensor:
    """½‖scores − e_y‖², the mean over live rows."""
    classes = torch.arange(scores.shape[-1], device=scores.device)
    target = (batch.y[:, None] == classes).to(scores.dtype)
    return mean_over_live(0.5 * (scores - target).square().sum(-1), batch.live)
