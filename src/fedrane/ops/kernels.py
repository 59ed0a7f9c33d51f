"""GPU kernels for the relations of many batches at a time: ``graph`` is their oracle, and says what they compute.

A batch's matrices are small enough for one multiprocessor to hold one in its registers, where it is inverted by Gauss
and Jordan's elimination. An inverse root is a sum of shifted inverses, each made by a multiprocessor of its own. So an
alternation is three launches where products alone would take some eighty.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from scipy.special import ellipj, ellipkm1
from torch import Tensor


@triton.jit
def _inverted(a, row, size):
    """Of a symmetric positive matrix, in place; what is beyond ``size`` stays as it is."""
    for k in range(size):
        here = row == k
        line = tl.sum(tl.where(here[None, :], a, 0.0), 1)
        over = 1.0 / tl.sum(tl.where(here, line, 0.0), 0)
        a -= (line * over)[:, None] * line[None, :]
        a = tl.where(here[:, None], (line * over)[None, :], a)
        a = tl.where(here[None, :], (tl.where(here, -1.0, line) * over)[:, None], a)
    return -a


@triton.jit
def _apart(a, alive, row):
    """The live rows and columns of a matrix; the others are the identity's."""
    both = alive[:, None] & alive[None, :]
    return tl.where(both, a, tl.where(row[:, None] == row[None, :], 1.0, 0.0))


@triton.jit
def _roots(product, live, shifts, shares, out, floor, size, P: tl.constexpr):
    """One term of (BBᵀ + floor I)^(-1/2), given BBᵀ."""
    row = tl.arange(0, P)
    at = row[:, None] * size + row[None, :]
    inside = (row < size)[:, None] & (row < size)[None, :]
    s, term = tl.program_id(0).to(tl.int64), tl.program_id(1)
    alive = tl.load(live + s * size + row, mask=row < size, other=0).to(tl.int1)
    same = row[:, None] == row[None, :]
    a = tl.load(product + s * size * size + at, mask=inside, other=0.0) + tl.where(same, floor, 0.0)
    inner = tl.where(alive[:, None] & alive[None, :], a, 0.0)
    norm = tl.maximum(tl.sqrt_rn(tl.sum(tl.sum(inner * inner, 1), 0)), 1e-12)
    a = _apart(inner / norm, alive, row) + tl.where(same, tl.load(shifts + term), 0.0)
    found = _inverted(a, row, size) * (tl.load(shares + term) / tl.sqrt_rn(norm))
    tl.store(out + (s * tl.num_programs(1) + term) * size * size + at, found, mask=inside)


@triton.jit
def _weigh(
    square, roots, terms, live, penalties, weights, change, settled, strength, tolerance, tiny, size,
    EXACT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The next B, given PᵀP and the terms of Φ (none of them: Φ is I); left as it is where it has settled."""
    row = tl.arange(0, P)
    at = row[:, None] * size + row[None, :]
    inside = (row < size)[:, None] & (row < size)[None, :]
    same = row[:, None] == row[None, :]
    s = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + s * size + row, mask=row < size, other=0).to(tl.int1)
    penalty = tl.where(same & inside & (terms == 0), 1.0, 0.0)
    for term in range(terms):
        penalty += tl.load(roots + (s * terms + term) * size * size + at, mask=inside, other=0.0)
    penalty *= 2 * strength
    whole = tl.load(square + s * size * size + at, mask=inside, other=0.0) + penalty
    trace = tl.sum(tl.sum(tl.where(same, whole, 0.0), 1), 0)
    whole = _apart(whole + tl.where(same, tiny * trace, 0.0), alive, row)
    tl.store(penalties + s * size * size + at, penalty, mask=inside)  # out of the registers for a while
    inverse = _inverted(whole, row, size)
    tl.debug_barrier()
    penalty = tl.load(penalties + s * size * size + at, mask=inside, other=0.0)
    diagonal = tl.sum(tl.where(same, inverse, 0.0), 0)
    if EXACT:
        spread = tl.dot(inverse, penalty, input_precision="ieee")
        gamma = (1.0 - tl.sum(tl.where(same, spread, 0.0), 0)) / diagonal
        found = -(spread + inverse * gamma[None, :])
    else:
        found = -inverse / diagonal[None, :]
    found = tl.where(alive[:, None] & alive[None, :] & (row[:, None] != row[None, :]), found, 0.0)
    old = tl.load(weights + s * size * size + at, mask=inside, other=0.0)
    gap = found - old
    length = tl.maximum(tl.sqrt_rn(tl.sum(tl.sum(found * found, 1), 0)), 1e-12)
    moved = tl.sqrt_rn(tl.sum(tl.sum(gap * gap, 1), 0)) / length
    done = tl.load(settled + s)
    tl.store(weights + s * size * size + at, tl.where(done > 0, old, found), mask=inside)
    tl.store(change + s, tl.where(done > 0, tl.load(change + s), moved))
    tl.store(settled + s, tl.where(moved < tolerance, 1, done))


def relate(
    square: Tensor,
    live: Tensor,
    strength: float,
    alternations: int,
    exact: bool,
    floor: float,
    tolerance: float,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """B, and the change in the last alternation, for PᵀP (…, n, n); ``lowest`` as in ``graph.inverse_root``."""
    shape, size = square.shape, square.shape[-1]
    square, live = square.reshape(-1, size, size).contiguous(), live.reshape(-1, size).contiguous()
    many, kind = len(square), {"P": max(16, triton.next_power_of_2(size)), "num_warps": 8}
    weights = torch.zeros_like(square)
    change, settled = square.new_ones(many), torch.zeros(many, dtype=torch.int32, device=square.device)
    shifts, shares = _poles(lowest**2, square.device)
    roots, penalties = square.new_empty(many, len(shifts), size, size), torch.empty_like(square)
    for number in range(alternations):
        if number:
            _roots[(many, len(shifts))](
                torch.bmm(weights, weights.mT), live, shifts, shares, roots, floor, size, **kind
            )  # fmt: skip
        _weigh[(many,)](
            square, roots, len(shifts) if number else 0, live, penalties, weights, change, settled, strength,
            tolerance, torch.finfo(square.dtype).eps, size, EXACT=exact, **kind,
        )  # fmt: skip
    return weights.reshape(shape), change.reshape(shape[:-2])


@cache
def _poles(lowest: float, device: torch.device, error: float = 1e-7) -> tuple[Tensor, Tensor]:
    """Shifts σ and shares w with x^(-1/2) ≈ Σ w / (x + σ) for x from ``lowest`` to 1; every share is positive.

    The trapezoidal rule after a change of variables to Jacobi's elliptic functions (Hale, Higham and Trefethen 2008,
    method 3). Kept on the device: a captured step can bring nothing from the host.
    """
    quarter = float(ellipkm1(lowest))
    many = int(np.ceil(-np.log(error) * quarter / np.pi**2)) + 1
    sn, cn, dn, _ = ellipj((np.arange(many) + 0.5) * quarter / many, 1 - lowest)
    shares = 2 * quarter * np.sqrt(lowest) / (np.pi * many) * dn / cn**2
    shifts, shares = (torch.tensor(v, dtype=torch.float32, device=device) for v in (lowest * (sn / cn) ** 2, shares))
    return shifts, shares
