"""Contrastive discrimination (CD), the paper's Eq. (7): features should be closest to their own augmentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrane.ops.graph import normed


def discrimination(z: Tensor, augmented: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """−(1/n) Σ_i log( exp(s(z_i, z̃_i)/τ) / Σ_{j≠i} exp(s(z_i, ẑ_j)/τ) ), ẑ = [z; z̃], s Pearson's coefficient.

    Without padding: n anchors, and 2n − 1 terms in each denominator.
    """
    before, after = normed(z, mask), normed(augmented, mask)
    among = before @ before.mT / temperature
    across = before @ after.mT / temperature
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    others = torch.cat([torch.where(mask & ~itself, among, -torch.inf), torch.where(mask, across, -torch.inf)], -1)
    # Padding would have an empty denominator: it gets a finite number here and is masked below.
    others = torch.where(mask[:, None], others, 0)
    losses = torch.logsumexp(others, -1) - across.diagonal()
    return torch.where(mask, losses, 0).sum() / mask.sum().clamp(min=1)


def projection(inputs: int, outputs: int) -> nn.Sequential:
    """The projection head of a contrastive loss: linear, ReLU, linear."""
    return nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
