"""Class prototypes: their means over clients, and prediction by the nearest one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MARGIN = 10.0
"""How far the score of a class without a prototype is below the lowest distance's."""


def weighted(prototypes: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What is to be summed over clients: each one's weights of the classes, and its prototypes times these.

    ``prototypes`` is (clients, classes, features), ``weights`` (clients, classes); a prototype of weight zero may hold
    any value.
    """
    used = torch.where(weights[..., None] > 0, prototypes, 0)
    return {"prototypes": weights[..., None].double() * used, "weights": weights}


def mean_by_class(prototypes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean over clients of each class's prototype, and whether any client has one, from these sums."""
    return prototypes / torch.where(weights > 0, weights, 1)[:, None], weights > 0


class Nearest(nn.Module):
    """Scores −‖z − C^c‖²; without any prototype, the scores that are handed over."""

    points: Tensor
    known: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("points", torch.zeros(classes, width))
        self.register_buffer("known", torch.zeros(classes))

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        squares = features.square().sum(1, keepdim=True) + self.points.square().sum(1)
        nearness = 2 * features @ self.points.T - squares
        known = self.known > 0
        last = nearness.amin(1, keepdim=True) - MARGIN
        return torch.where(known.any(), torch.where(known, nearness, last), scores)
