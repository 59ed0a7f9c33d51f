"""The relations of a batch: a sparse-plus-low-rank self-expression of its Pearson matrix, and messages along it.

The paper's Eq. (3) asks for the B that minimises ½‖P − PB‖² + λ Tr(BᵀΦB) with a zero diagonal, and alternates it with
Φ = (BBᵀ)^(-1/2). With S = λ(Φ + Φᵀ) and H = (PᵀP + S)^(-1) the minimiser is

    B = I − H (S + diag γ),        γ_j = (1 − [HS]_jj) / H_jj        (``exact``),

which is the paper's −H_ij / H_jj only where Φ is a multiple of I (``paper``). With Φ = (BBᵀ + εI)^(-1/2) the exact
form lowers ½‖P − PB‖² + 2λ Tr((BBᵀ + εI)^(1/2)) at every alternation; see docs/paper.md.

Everything is batched over leading dimensions, has a fixed number of steps, and asks the host nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError
from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack

FLOOR = 1e-3
"""ε, the floor under the eigenvalues of BBᵀ: keeps Φ finite, and float32 safe."""
LOWEST = 2e-3
"""The least root of an eigenvalue of BBᵀ + εI, beside the root of its Frobenius norm: enough for FLOOR beside the
graphs of batches of up to hundreds."""
MAX_KERNEL_NODES = 128
"""Nodes of a graph that the kernels for a GPU can hold."""
TINY = 1e-12


FORMS = ("exact", "paper")
MAX_PAPER_ALTERNATIONS = 10
"""Alternations of the paper's form after which float64 still has digits left."""
ATTENTIONS = ("softmax", "dot")
FACTS = ("degree", "rank", "homophily", "change")
FIELDS = (
    *("relation", "alternations", "closed_form", "graph_gradient", "steps", "attention", "residual", "neighbours"),
    *("contrast", "temperature", "projection", "augmented", "predict_on"),
)
"""A method's fields that say how rows are related and what is made of it."""
RANGES = {
    "relation": (1e-6, 1e6),
    "alternations": (1, 1000),
    "steps": (1, 100),
    "neighbours": (0, 1e9),
    "contrast": (0, 1e6),
    "temperature": (1e-3, 1e3),
    "projection": (0, 1e6),
    "augmented": (0, 1),
}
"""What those that are numbers may be."""


class Relations(NamedTuple):
    """What was mined from a batch."""

    adjacency: Tensor
    """A = (|B| + |B|ᵀ) / 2: symmetric, non-negative, zero on the diagonal and at rows that are not live."""
    weights: Tensor
    """B."""
    change: Tensor
    """The relative change of B in the last alternation."""


def pearson(rows: Tensor, live: Tensor) -> Tensor:
    """The correlation of each row with each other; 0 for rows that are constant or not live."""
    return normed(rows, live) @ normed(rows, live).mT


def normed(rows: Tensor, live: Tensor) -> Tensor:
    """Rows less their mean, of length 1: their inner products are Pearson's coefficients."""
    rows = torch.where(live[..., None], rows, 0)
    centred = rows - rows.mean(-1, keepdim=True)
    # A constant row leaves rounding alone behind; beside what it was made of, that is nothing.
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    centred = centred / scale
    length = centred.square().sum(-1, keepdim=True)
    noise = (4 * torch.finfo(rows.dtype).eps) ** 2 * rows.shape[-1]
    return torch.where(length > noise, centred * torch.rsqrt(length.clamp(min=noise)), 0)


def check_alternations(closed_form: str, alternations: int) -> None:
    if closed_form == "paper" and alternations > MAX_PAPER_ALTERNATIONS:
        raise ConfigError(
            f"method.alternations={alternations} with method.closed_form=paper",
            "on batches of tight clusters each alternation of that form multiplies rounding by about thirteen, so that "
            f"after more than {MAX_PAPER_ALTERNATIONS} of them nothing but rounding may be left, in float64 too",
            f"Use at most {MAX_PAPER_ALTERNATIONS}, or method.closed_form=exact, which settles",
        )


@contextmanager
def _all_digits() -> Iterator[None]:
    """TF32 products of a GPU are too coarse for inverses."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@_all_digits()
def relations(
    features: Tensor,
    live: Tensor,
    strength: float,
    alternations: int = 5,
    closed_form: str = "exact",
    floor: float = FLOOR,
    tolerance: float = 1e-4,
    differentiable: bool = True,
) -> Relations:
    """Mine the relations of ``features`` (…, rows, width), of which ``live`` (…, rows) count.

    A graph whose B changes by less than ``tolerance`` is left as it is from then on. The paper's form is computed in
    float64: on batches of tight clusters each of its alternations multiplies rounding by about thirteen, and after five
    of them float32 is several times the largest edge off.
    """
    dtype = features.dtype
    features = features.double() if closed_form == "paper" else features
    correlation = pearson(features, live)
    square = correlation.mT @ correlation
    fits = square.shape[-1] <= MAX_KERNEL_NODES and not differentiable
    if fits and (kernels := dispatch.gpu_kernels(square, "inverse")):
        how = (strength, alternations, floor, tolerance, LOWEST)
        weights, change = on_stack(kernels.relate, square, live, *how)
    else:
        weights, change = _alternate(square, live, strength, alternations, closed_form, floor, tolerance)
    weights, size = weights.to(dtype), weights.abs()
    return Relations(((size + size.mT) / 2).to(dtype), weights, change.to(dtype))


def _alternate(
    square: Tensor,
    live: Tensor,
    strength: float,
    alternations: int,
    closed_form: str,
    floor: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """B given PᵀP, and how much it changed in the last alternation."""
    pairs = (live[..., :, None] & live[..., None, :]).to(square.dtype)
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    penalty = (2 * strength) * eye.expand_as(square)
    weights = torch.zeros_like(square)
    change = torch.ones_like(square[..., 0, 0])
    settled = torch.zeros_like(change, dtype=torch.bool)
    for number in range(alternations):
        if number:
            penalty = (2 * strength) * inverse_root(weights @ weights.mT + floor * eye, live)
        found = _solve(square, penalty, eye, live, closed_form) * pairs
        moved = torch.linalg.matrix_norm(found - weights) / torch.linalg.matrix_norm(found).clamp(min=TINY)
        change = torch.where(settled, change, moved)
        weights = torch.where(settled[..., None, None], weights, found)
        settled = settled | (moved < tolerance)
    return weights, change


def _solve(square: Tensor, penalty: Tensor, eye: Tensor, live: Tensor, closed_form: str) -> Tensor:
    """B for a fixed Φ, with an exactly zero diagonal."""
    whole = square + penalty
    # As much as rounding may take away: keeps the matrix positive in float32 also where the penalty is tiny.
    whole = whole + torch.finfo(whole.dtype).eps * whole.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * eye
    root = inverse_root(whole, live, _LOWEST[whole.dtype])
    inverse = root @ root.mT
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    if closed_form == "paper":
        return -inverse / diagonal[..., None, :] * (1 - eye)
    spread = inverse @ penalty
    gamma = (1 - spread.diagonal(dim1=-2, dim2=-1)) / diagonal
    return -(spread + inverse * gamma[..., None, :]) * (1 - eye)


def inverse_root(matrix: Tensor, live: Tensor, lowest: float = LOWEST) -> Tensor:
    """(…)^(-1/2) of a symmetric positive matrix by coupled Newton–Schulz iterations: products alone, no ``eigh``.

    Each iteration is scaled for the interval in which the roots of the eigenvalues still lie, which takes half as many
    of them; ``lowest`` is the least of these, beside the root of the Frobenius norm. Rows that are not live stand
    apart; they are given the largest eigenvalue, so that they cost no iteration.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    both = live[..., :, None] & live[..., None, :]
    inner = torch.where(both, matrix, 0)
    scale = torch.linalg.matrix_norm(inner, keepdim=True).clamp(min=TINY)
    shape, size = matrix.shape, matrix.shape[-1]
    left = torch.where(both, matrix / scale, eye * (~live)[..., None]).reshape(-1, size, size)
    right = None
    eye = eye.reshape(-1, size, size)
    for factor in _scales(lowest):
        by = -0.5 * factor**3
        if right is None:
            middle = right = 1.5 * factor * eye + by * left
        else:
            middle = torch.baddbmm(eye, right, left, beta=1.5 * factor, alpha=by)
            right = torch.bmm(middle, right)
        left = torch.bmm(left, middle)
    return torch.reshape(eye if right is None else right, shape) * torch.rsqrt(scale)


@cache
def _scales(lowest: float, until: float = 1 - 1e-7) -> tuple[float, ...]:
    """The factors by which Newton–Schulz is scaled while numbers in [lowest, 1] go to 1 (Chen and Chow 2014)."""
    factors = []
    while lowest < until:
        factors.append(math.sqrt(3 / (1 + lowest + lowest**2)))
        lowest = 0.5 * factors[-1] * lowest * (3 - (factors[-1] * lowest) ** 2)
    return (*factors, 1.0)


_LOWEST = {dtype: math.sqrt(torch.finfo(dtype).eps) for dtype in (torch.float32, torch.float64)}
"""The root of what is added to a matrix before it is inverted, for its trace."""


def effective_rank(weights: Tensor) -> Tensor:
    """(Σσ²)² / Σσ⁴ of the singular values σ: how many directions carry B, without finding them."""
    product = weights @ weights.mT
    total = product.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total.square() / product.square().sum((-2, -1)).clamp(min=TINY)


def homophily(adjacency: Tensor, y: Tensor, live: Tensor) -> Tensor:
    """The share of edge weight between rows of one class, over the share of such pairs: 1 is chance."""
    others = 1 - torch.eye(len(y), dtype=adjacency.dtype, device=adjacency.device)
    pairs = (live[:, None] & live[None, :]).to(adjacency.dtype) * others
    same = (y[:, None] == y[None, :]).to(adjacency.dtype) * pairs
    prior = same.sum() / pairs.sum().clamp(min=1)
    share = (adjacency * same).sum() / adjacency.sum().clamp(min=TINY)
    return share / prior.clamp(min=TINY)


def facts(found: Relations, y: Tensor, live: Tensor) -> dict[str, Tensor]:
    """What is recorded of a graph, by the names in ``FACTS``."""
    return {
        "degree": mean_degree(found.adjacency, live),
        "rank": effective_rank(found.weights),
        "homophily": homophily(found.adjacency, y, live),
        "change": found.change,
    }


def mean_degree(adjacency: Tensor, live: Tensor) -> Tensor:
    return adjacency.sum((-2, -1)) / live.sum(-1).clamp(min=1)


class _Identity(nn.Linear):
    """A square map that starts as the identity: at first a message is the neighbour itself, so that z̃ leans towards
    its neighbours' mean from the first step on, and training decides what becomes of it."""

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)


class MessagePassing(nn.Module):
    """The paper's Eq. (5) and (6): ``steps`` rounds of attentive messages among a row's neighbours.

    ``softmax`` weighs neighbours by exp(score + log A), over all of them; ``dot`` is the paper's bare product.
    """

    def __init__(self, width: int, steps: int, attention: str, residual: bool, top: int) -> None:
        super().__init__()
        self.width, self.attention, self.residual, self.top = width, attention, residual, top
        self.receive, self.send, self.value = (
            nn.ModuleList(layer(width, width, bias=False) for _ in range(steps))
            for layer in (nn.Linear, nn.Linear, _Identity)
        )

    def forward(self, z: Tensor, adjacency: Tensor, live: Tensor) -> Tensor:
        if self.top:
            adjacency = strongest(adjacency, self.top)
        linked = (adjacency > 0) & live[..., None, :]
        h = z
        for receive, send, value in zip(self.receive, self.send, self.value, strict=True):
            score = receive(h) @ send(h).mT / math.sqrt(self.width)
            if self.attention == "softmax":
                score = score + torch.log(adjacency.clamp(min=TINY))
                score = score - torch.where(linked, score, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
                share = torch.where(linked, score.clamp(max=0).exp(), 0)
                score = share / share.sum(-1, keepdim=True).clamp(min=TINY)
            message = torch.where(linked, score, 0) @ value(h)
            h = h + message if self.residual else message
        return h


def strongest(adjacency: Tensor, top: int) -> Tensor:
    """Each row's ``top`` strongest edges, kept also by the row at their other end."""
    if top >= adjacency.shape[-1]:
        return adjacency
    least = adjacency.topk(top, dim=-1).values[..., -1:]
    kept = adjacency >= least
    return torch.where(kept | kept.mT, adjacency, 0)
