"""Aggregation that a minority of hostile uploads cannot move far.

Everything is computed from the deviations Δ_k = θ_k − θ, so uploads equal to the server's model leave it unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrane import tree
from fedrane.ops.nash import gram
from fedrane.tree import Tensors


def tolerated(share: float, count: int) -> int:
    """How many of this many uploads may be hostile: the share, rounded up, but always fewer than half."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


def middle(base: Tensors, rows: Tensors, cut: int) -> Tensors:
    """For each number the mean of what is left when the ``cut`` largest and smallest are dropped.

    With (K − 1) // 2 of K that is the median: of an even number, the mean of the two in the middle.
    """
    result = dict(base)
    for name, stacked in rows.items():
        flat, origin = stacked.flatten(1), base[name].flatten()
        width = max(1, tree.BLOCK_SIZE // len(flat))
        pieces = [
            origin[begin : begin + width]
            + _trimmed(flat[:, begin : begin + width] - origin[begin : begin + width], cut)
            for begin in range(0, flat.shape[1], width)
        ]
        result[name] = torch.cat(pieces).reshape(base[name].shape) if pieces else base[name]
    return result


def _trimmed(deviations: Tensor, cut: int) -> Tensor:
    return deviations.sort(0).values[cut : len(deviations) - cut].mean(0)


def distances(base: Tensors, rows: Tensors) -> Tensor:
    """The squared distances of all pairs of uploads, in float64."""
    inner = gram(base, rows)
    squares = inner.diagonal()
    return (squares[:, None] + squares - 2 * inner).clamp(min=0).fill_diagonal_(0)


def krum(squares: Tensor, hostile: int, keep: int) -> Tensor:
    """Weights that average the ``keep`` uploads with the least score: the sum of the squared distances to the K − f − 2
    nearest others, of K uploads with f hostile ones."""
    count = len(squares)
    nearest = squares.sort(1).values[:, 1 : 1 + max(1, count - hostile - 2)]  # each is the nearest of its own
    chosen = nearest.sum(1).sort(stable=True).indices[:keep]
    return torch.zeros_like(squares[0]).index_fill(0, chosen, 1 / keep)


def geometric_median(squares: Tensor, weights: Tensor, smoothing: float, iterations: int) -> Tensor:
    """Weights c, Σ c = 1, of the point v = Σ c_k θ_k that minimises Σ weights_k ‖v − θ_k‖, by Weiszfeld's algorithm.

    ‖v − θ_j‖² = (D c)_j − ½ cᵀDc for the squared distances D.
    """
    c = weights / weights.sum()
    for _ in range(iterations):
        away = (squares @ c - c @ squares @ c / 2).clamp(min=0).sqrt()
        c = weights / away.clamp(min=smoothing)
        c = c / c.sum()
    return c
