"""Contrastive discrimination, the paper's Eq. (7): a row and its augmented self are each other's nearest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrane.ops.graph import normed


def discrimination(z: Tensor, augmented: Tensor, live: Tensor, temperature: float) -> Tensor:
    """−(1/n) Σ_i log( exp(s(z_i, z̃_i)/τ) / Σ_{j≠i} exp(s(z_i, ẑ_j)/τ) ), ẑ = [z; z̃], s Pearson's coefficient.

    Over live rows: n of them as anchors, and 2n − 1 terms below the line.
    """
    before, after = normed(z, live), normed(augmented, live)
    among = before @ before.mT / temperature
    across = before @ after.mT / temperature
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    others = torch.cat([torch.where(live & ~itself, among, -torch.inf), torch.where(live, across, -torch.inf)], -1)
    # A row that is not live would have nothing below the line; it is given a number, and then not counted.
    others = torch.where(live[:, None], others, 0)
    lost = torch.logsumexp(others, -1) - across.diagonal()
    return torch.where(live, lost, 0).sum() / live.sum().clamp(min=1)


def projection(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers between features and what a contrast compares."""
    return nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
