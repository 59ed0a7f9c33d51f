"""Conflicts between gradients, removed by projections (FedFV, Wang et al. 2021).

Two gradients conflict if their inner product is negative. All vectors here are mixes of given rows, and only the rows'
inner products are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kept(share: float, count: int) -> int:
    """How many of this many gradients stay as they are: the share, rounded up."""
    return math.ceil(share * count - 1e-9)


def projected(inner: Tensor, losses: Tensor, keep: int) -> Tensor:
    """The gradients without internal conflicts, as a matrix of coefficients of the rows.

    Each of the first ``len(losses)`` rows is projected, where it conflicts, onto the plane orthogonal to each other
    one, in the order of rising losses: the client with the largest loss comes last, and so nothing conflicts with it.
    The ``keep`` gradients with the largest losses stay as they are.
    """
    count = len(losses)
    order = losses.sort(stable=True).indices.tolist()
    mixes = torch.eye(count, len(inner), dtype=inner.dtype, device=inner.device)
    stays = torch.zeros(count, dtype=torch.bool, device=inner.device)
    stays[order[count - keep :]] = True
    for other in order:
        products = mixes @ inner[:, other]
        products[other] = 0
        conflicts = ~stays & (products < 0)  # so the other one is not zero
        shares = torch.where(conflicts, products / inner[other, other].clamp(min=1e-300), 0)
        mixes[:, other] = mixes[:, other] - shares
    return mixes


def without_absent(inner: Tensor, mix: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """The mix, projected in turn against each group of rows: against the sum of those with which it conflicts."""
    for group in groups:
        conflicting = [row for row in group if mix @ inner[:, row] < 0]
        total = torch.zeros_like(mix).index_fill(0, torch.tensor(conflicting, dtype=torch.int64, device=mix.device), 1)
        product = mix @ inner @ total
        if product < 0:
            mix = mix - product / (total @ inner @ total) * total
    return mix


def as_long_as(inner: Tensor, mix: Tensor, other: Tensor) -> Tensor:
    """The mix, scaled to the length of another one; itself if it is zero."""
    length, wanted = (each @ inner @ each for each in (mix, other))
    return mix * (wanted / length).sqrt() if length > 1e-24 * wanted else mix
