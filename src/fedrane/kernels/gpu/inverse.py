"""Inverses and inverse roots of many small matrices at a time, for the relations of batches (``fedrane.ops.graph``).

``graph`` has the same computation in PyTorch, and the formulas. A matrix fits in the registers of one multiprocessor,
where Gauss-Jordan elimination inverts it. An inverse root is a sum of shifted inverses, each computed by its own
multiprocessor. An alternation is then five launches; matrix products alone would take about eighty.
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
def _inverted(a, row, scratch, size, P: tl.constexpr):
    """Of a symmetric positive matrix with no number above 1 on its diagonal; what is beyond ``size`` is left alone.

    Step k turns a into a − vvᵀ / p, where v is its row k less the unit vector and p its entry (k, k). That is the
    elimination in place but for 2 at (k, k), which nothing reads again; and as p ≤ 1, nothing is lost in v. The row
    goes to its readers through memory, alternating between two positions, so that one barrier a step is enough.
    """
    for k in range(size):
        here = row == k
        line_at = scratch + k % 2 * P
        tl.store(line_at + row[None, :] + tl.zeros((P, 1), tl.int32), a, mask=here[:, None] & (row >= 0)[None, :])
        tl.debug_barrier()
        line = tl.load(line_at + row) - tl.where(here, 1.0, 0.0)
        a -= (line / tl.load(line_at + k))[:, None] * line[None, :]
    return tl.where((row[:, None] == row[None, :]) & (row < size)[None, :], 2.0, 0.0) - a


@triton.jit
def _apart(a, real, row):
    """The matrix, with the rows and columns of padding replaced by the identity's."""
    both = real[:, None] & real[None, :]
    return tl.where(both, a, tl.where(row[:, None] == row[None, :], 1.0, 0.0))


@triton.jit
def _roots(product, mask, shifts, shares, out, scratch, floor, size, P: tl.constexpr):
    """One term of (BBᵀ + floor I)^(-1/2), given BBᵀ."""
    row = tl.arange(0, P)
    at = row[:, None] * size + row[None, :]
    inside = (row < size)[:, None] & (row < size)[None, :]
    s, term = tl.program_id(0).to(tl.int64), tl.program_id(1)
    real = tl.load(mask + s * size + row, mask=row < size, other=0).to(tl.int1)
    same = row[:, None] == row[None, :]
    a = tl.load(product + s * size * size + at, mask=inside, other=0.0) + tl.where(same, floor, 0.0)
    inner = tl.where(real[:, None] & real[None, :], a, 0.0)
    norm = tl.maximum(tl.sqrt_rn(tl.sum(tl.sum(inner * inner, 1), 0)), 1e-12)
    shift = tl.load(shifts + term)
    a = (_apart(inner / norm, real, row) + tl.where(same, shift, 0.0)) / (1.0 + shift)
    which = s * tl.num_programs(1) + term
    root = _inverted(a, row, scratch + which * 2 * P, size, P)
    root *= tl.load(shares + term) / (tl.sqrt_rn(norm) * (1.0 + shift))
    tl.store(out + which * size * size + at, root, mask=inside)


@triton.jit
def _inverse(square, roots, terms, mask, penalty, out, scratch, strength, tiny, size, P: tl.constexpr):
    """S = 2 · strength · Φ and (PᵀP + S)⁻¹, given PᵀP and the terms of Φ (none of them: Φ is I)."""
    row = tl.arange(0, P)
    at = row[:, None] * size + row[None, :]
    inside = (row < size)[:, None] & (row < size)[None, :]
    same = row[:, None] == row[None, :]
    s = tl.program_id(0).to(tl.int64)
    real = tl.load(mask + s * size + row, mask=row < size, other=0).to(tl.int1)
    total = tl.where(same & inside & (terms == 0), 1.0, 0.0)
    for term in range(terms):
        total += tl.load(roots + (s * terms + term) * size * size + at, mask=inside, other=0.0)
    total *= 2 * strength
    tl.store(penalty + s * size * size + at, total, mask=inside)
    total += tl.load(square + s * size * size + at, mask=inside, other=0.0)
    diagonal = tl.sum(tl.where(same, total, 0.0), 0)
    more = tiny * tl.sum(diagonal, 0)
    scale = tl.max(diagonal, 0) + more
    total = _apart((total + tl.where(same, more, 0.0)) / scale, real, row)
    tl.store(out + s * size * size + at, _inverted(total, row, scratch + s * 2 * P, size, P) / scale, mask=inside)


@triton.jit
def _weigh(
    inverse, spread, mask, weights, change, settled, tolerance, size, P: tl.constexpr
):  # fmt: skip
    """The next B, given H and HS; left as it is where it has settled."""
    row = tl.arange(0, P)
    at = row[:, None] * size + row[None, :]
    inside = (row < size)[:, None] & (row < size)[None, :]
    same = row[:, None] == row[None, :]
    s = tl.program_id(0).to(tl.int64)
    real = tl.load(mask + s * size + row, mask=row < size, other=0).to(tl.int1)
    new = tl.load(inverse + s * size * size + at, mask=inside, other=0.0)
    diagonal = tl.sum(tl.where(same, new, 0.0), 0)
    moved = tl.load(spread + s * size * size + at, mask=inside, other=0.0)
    new = moved + new * ((1.0 - tl.sum(tl.where(same, moved, 0.0), 0)) / diagonal)[None, :]
    new = tl.where(real[:, None] & real[None, :] & (row[:, None] != row[None, :]), -new, 0.0)
    old = tl.load(weights + s * size * size + at, mask=inside, other=0.0)
    length = tl.maximum(tl.sqrt_rn(tl.sum(tl.sum(new * new, 1), 0)), 1e-12)
    gap = tl.sqrt_rn(tl.sum(tl.sum((new - old) * (new - old), 1), 0)) / length
    done = tl.load(settled + s)
    tl.store(weights + s * size * size + at, tl.where(done > 0, old, new), mask=inside)
    tl.store(change + s, tl.where(done > 0, tl.load(change + s), gap))
    tl.store(settled + s, tl.where(gap < tolerance, 1, done))


def relate(
    square: Tensor,
    mask: Tensor,
    strength: float,
    alternations: int,
    floor: float,
    tolerance: float,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """B in its exact form, and its last change, for PᵀP (…, n, n); ``lowest`` as in ``graph.inverse_root``."""
    shape, size = square.shape, square.shape[-1]
    square, mask = square.reshape(-1, size, size).contiguous(), mask.reshape(-1, size).contiguous()
    matrices, side = len(square), max(16, triton.next_power_of_2(size))
    options = {"P": side, "num_warps": 4}  # with more warps the barriers cost more than is gained
    weights, penalty, inverse = torch.zeros_like(square), torch.empty_like(square), torch.empty_like(square)
    change, settled = square.new_ones(matrices), torch.zeros(matrices, dtype=torch.int32, device=square.device)
    shifts, shares = _poles(lowest**2, square.device)
    roots, tiny = square.new_empty(matrices, len(shifts), size, size), torch.finfo(square.dtype).eps
    scratch = square.new_empty(matrices, len(shifts), 2, side)
    for number in range(alternations):
        if number:
            product = torch.bmm(weights, weights.mT)
            _roots[(matrices, len(shifts))](product, mask, shifts, shares, roots, scratch, floor, size, **options)
        terms = len(shifts) if number else 0
        _inverse[(matrices,)](square, roots, terms, mask, penalty, inverse, scratch, strength, tiny, size, **options)
        spread = torch.bmm(inverse, penalty)
        _weigh[(matrices,)](inverse, spread, mask, weights, change, settled, tolerance, size, **options)
    return weights.reshape(shape), change.reshape(shape[:-2])


@cache
def _poles(lowest: float, device: torch.device, error: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Shifts σ and shares w with x^(-1/2) ≈ Σ w / (x + σ) for x from ``lowest`` to 1; every share is positive.

    The trapezoidal rule after a change of variables to Jacobi's elliptic functions (Hale, Higham and Trefethen 2008,
    method 3). Kept on the device: a captured step can copy nothing from the host.
    """
    quarter = float(ellipkm1(lowest))
    terms = int(np.ceil(-np.log(error) * quarter / np.pi**2)) + 1
    sn, cn, dn, _ = ellipj((np.arange(terms) + 0.5) * quarter / terms, 1 - lowest)
    shares = 2 * quarter * np.sqrt(lowest) / (np.pi * terms) * dn / cn**2
    shifts, shares = (torch.tensor(v, dtype=torch.float32, device=device) for v in (lowest * (sn / cn) ** 2, shares))
    return shifts, shares
