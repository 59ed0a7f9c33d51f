"""Weights λ ≥ 0 with Σ λ = 1: the nearest to a point, and those of the shortest mix of vectors.

The shortest mix d = Σ λ_k g_k (MGDA, Désidéri 2012) has the same inner product with all vectors that it uses and a
larger one with the others: every client gains from it. If d = 0, no step is good for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
EXACT, ROUNDING = 1e-14, 1e-11
"""The gap of a solution, relative to the longest vector's square; and the one from which on only rounding may keep it
from falling."""
PATIENCE = 20
"""Vertices tried then."""
RESIDUAL = 1e-9
"""Of a linear system that counts as regular."""
MAX_VERTICES = 50
"""Vertices tried for each vector. The algorithm is finite; this bounds what rounding may do to it."""


def projection(point: Tensor) -> Tensor:
    """The nearest λ ≥ 0 with Σ λ = 1: max(0, v − τ) for the one τ that gives this sum.

    >>> projection(torch.tensor([0.5, 1.5, -3.0]))
    tensor([0., 1., 0.])
    """
    falling = point.sort(descending=True).values
    counts = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    shifts = (falling.cumsum(0) - 1) / counts  # τ, if the largest 1, 2, … are those that stay positive
    positive = (falling > shifts).sum().clamp(min=1)
    return (point - shifts[positive - 1]).clamp(min=0)


class Mix(NamedTuple):
    """The weights of a shortest mix."""

    weights: Array
    gap: float
    """By how much its squared length may exceed the least one."""


def shortest_mix(gram: Array, low: Array, high: Array) -> Mix:
    """The λ that minimises ‖Σ λ_k g_k‖², where Σ λ = 1 and low ≤ λ ≤ high, from the inner products of the g.

    Wolfe's algorithm (1976) for the point of a polytope that is nearest to zero: it keeps a few vertices, and the
    nearest point of their hull. It is finite, and also exact where the vectors depend on each other. The gap λᵀMλ −
    min_v λᵀMv over all vertices v is zero only at the solution.

    >>> shortest_mix(np.diag([1.0, 4.0]), np.zeros(2), np.ones(2)).weights.round(6).tolist()
    [0.8, 0.2]
    """
    scale = max(float(gram.diagonal().max()), 1e-300)
    matrix = gram / scale
    vertices = _vertex(matrix @ ((low + high) / 2), low, high)[None]
    shares = np.ones(1)
    best, since = Mix(vertices[0], np.inf), 0
    for _ in range(MAX_VERTICES * len(gram)):
        point = shares @ vertices
        gradient = matrix @ point
        vertex = _vertex(gradient, low, high)
        gap = float(gradient @ (point - vertex))
        best, since = (Mix(point, gap), 0) if gap < best.gap else (best, since + 1)
        if gap <= EXACT or (best.gap <= ROUNDING and since > PATIENCE):
            break
        vertices, shares = _nearest(matrix, np.vstack([vertices, vertex]), np.append(shares, 0.0))
    return Mix(best.weights, max(best.gap, 0.0) * scale)


def _vertex(cost: Array, low: Array, high: Array) -> Array:
    """The vertex of least cost: what is left above ``low`` goes to the cheapest first, up to ``high``."""
    order = np.argsort(cost, kind="stable")
    room = (high - low)[order]
    before = np.cumsum(room) - room
    vertex = low.copy()
    vertex[order] += np.clip(1 - low.sum() - before, 0, room)
    return vertex


def _nearest(matrix: Array, vertices: Array, shares: Array) -> tuple[Array, Array]:
    """The nearest point to zero in the hull of the vertices, and the vertices that it uses, from one of its points.

    The nearest point of their affine hull, unless that lies outside: then the last point before the border, and again
    without the vertices whose share is zero there.
    """
    while True:
        affine = _solved(vertices @ matrix @ vertices.T + 1)  # + 1: regular also if the hull contains zero
        affine /= affine.sum()
        if affine.min() > 0:
            return vertices, affine
        outside = affine <= 0
        length = float((shares[outside] / (shares[outside] - affine[outside]).clip(min=1e-300)).min())
        shares = shares + min(length, 1.0) * (affine - shares)
        kept = shares > 1e-15
        kept[np.argmin(np.where(outside, shares, np.inf))] = False  # rounding must not keep the one that left
        vertices, shares = vertices[kept], shares[kept] / shares[kept].sum()


def _solved(matrix: Array) -> Array:
    """The x with matrix @ x = 1, or nearly so if the matrix is singular to rounding."""
    ones = np.ones(len(matrix))
    try:
        x = np.asarray(np.linalg.solve(matrix, ones), np.float64)
    except np.linalg.LinAlgError:
        x = np.zeros(len(matrix))
    if np.abs(matrix @ x - 1).max() > RESIDUAL:
        x = np.asarray(np.linalg.lstsq(matrix, ones, rcond=None)[0], np.float64)
    return x
