"""Contrastive discrimination (CD), the paper's Eq. (7): features should be closest to their own augmentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrane.ops.graph import normed


def discrimination(z: Tensor, augmented: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """−(1/n) Σ_i log( exp(s(z_i, z̃_i)/τ) / Σ_{j≠i} exp(s(z_i, ẑ_j)/τ) ), ẑ = [z; z̃], s Pearson's coefficient.

    Without padding: n anchors, and 2n − 1 terms in each denominator.
    """
    both = normed(torch.cat([z, augmented]), torch.cat([mask, mask]))
    scores = both[: len(z)] / temperature @ both.mT
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    others = torch.cat([mask & ~itself, mask.expand_as(itself)], -1)
    # Padding would have an empty denominator: it gets a finite number here and is masked below.
    left_out = torch.where(others | ~mask[:, None], 0, -torch.inf).to(scores.dtype)
    losses = torch.logsumexp(scores + left_out, -1) - scores[:, len(z) :].diagonal()
    return torch.where(mask, losses, 0).sum() / mask.sum().clamp(min=1)


def projection(inputs: int, outputs: int) -> nn.Sequential:
    """The projection head of a contrastive loss: linear, ReLU, linear."""
    return nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
