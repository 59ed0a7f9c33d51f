"""Balanced softmax (Ren et al. 2020): the scores need not learn the class frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrane.task import Batch, cross_entropy


def prior(counts: Tensor, strength: float = 1.0) -> Tensor:
    """log n_c^γ, which is added to the scores; 0 for all classes if γ = 0.

    An absent class is excluded by a large finite number. With −∞ the loss of padding of that class would be infinite,
    and the loss of a client without examples NaN.
    """
    absent = torch.finfo(counts.dtype).min / 4 if strength else 0.0
    return torch.where(counts > 0, strength * counts.clamp(min=1).log(), absent)


def balanced_cross_entropy(scores: Tensor, counts: Tensor, batch: Batch, strength: float = 1.0) -> Tensor:
    """The mean of −log( n_y^γ e^{s_y} / Σ_c n_c^γ e^{s_c} ) without padding; ``counts`` is n, ``strength`` is γ."""
    return cross_entropy(scores + prior(counts, strength), batch)
