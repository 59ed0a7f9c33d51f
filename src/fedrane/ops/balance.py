"""Scores shifted by class counts: balanced softmax (Ren et al. 2020), whose scores need not learn the frequencies, and
FedLC's margins."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrane.task import Batch, cross_entropy


def prior(counts: Tensor, strength: float = 1.0) -> Tensor:
    """log n_c^γ, which is added to the scores; 0 for all classes if γ = 0."""
    return _of_present(strength * counts.clamp(min=1).log(), counts, strength)


def margin(counts: Tensor, strength: float) -> Tensor:
    """−τ n_c^(−1/4), which is added to the scores (FedLC, Zhang et al. 2022); 0 for all classes if τ = 0."""
    return _of_present(-strength * counts.clamp(min=1) ** -0.25, counts, strength)


def _of_present(values: Tensor, counts: Tensor, strength: float) -> Tensor:
    """The values of classes with examples.

    An absent class is excluded by a large finite number. With −∞ the loss of padding of that class would be infinite,
    and the loss of a client without examples NaN.
    """
    absent = torch.finfo(counts.dtype).min / 4 if strength else 0.0
    return torch.where(counts > 0, values, absent)


def balanced_cross_entropy(scores: Tensor, counts: Tensor, batch: Batch, strength: float = 1.0) -> Tensor:
    """The mean of −log( n_y^γ e^{s_y} / Σ_c n_c^γ e^{s_c} ) without padding; ``counts`` is n, ``strength`` is γ."""
    return cross_entropy(scores + prior(counts, strength), batch)
