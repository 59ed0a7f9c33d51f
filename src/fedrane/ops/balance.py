"""Balanced softmax (Ren et al. 2020): what a class's frequency explains need not be learnt."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrane.task import Batch, cross_entropy


def prior(counts: Tensor, strength: float = 1.0) -> Tensor:
    """log n_c^γ, which is added to the scores; with γ = 0 it is 0 for all classes.

    An absent class is excluded by a number that is large and finite: with −∞ the loss of a row that is not live, and
    holds such a class, would be infinite, and that of a client without rows NaN.
    """
    absent = torch.finfo(counts.dtype).min / 4 if strength else 0.0
    return torch.where(counts > 0, strength * counts.clamp(min=1).log(), absent)


def balanced_cross_entropy(scores: Tensor, counts: Tensor, batch: Batch, strength: float = 1.0) -> Tensor:
    """−log( n_y^γ e^{s_y} / Σ_c n_c^γ e^{s_c} ), the mean over live rows; ``counts`` are the n, ``strength`` is γ."""
    return cross_entropy(scores + prior(counts, strength), batch)
