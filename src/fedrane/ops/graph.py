"""The relations of a batch: a sparse-plus-low-rank self-expression of its Pearson matrix, and messages along it.

The paper's Eq. (3) asks for the B that minimises ½‖P − PB‖² + λ Tr(BᵀΦB) with a zero diagonal, and alternates it with
Φ = (BBᵀ)^(-1/2). With S = λ(Φ + Φᵀ) and H = (PᵀP + S)^(-1) the minimiser is

    B = I − H (S + diag γ),        γ_j = (1 − [HS]_jj) / H_jj        (``exact``),

which is the paper's −H_ij / H_jj only where Φ is a multiple of I (``paper``). With Φ = (BBᵀ + εI)^(-1/2) the exact
form lowers ½‖P − PB‖² + 2λ Tr((BBᵀ + εI)^(1/2)) at every alternation; see docs/paper.md.

Everything is batched over leading dimensions, has a fixed number of steps, and never synchronises with the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError
from fedrane.kernels import dispatch
from fedrane.kernels.dispatch import on_stack

FLOOR = 1e-3
"""ε, the lower bound on the eigenvalues of BBᵀ + εI. It keeps Φ finite, and accurate in float32."""
MIN_ROOT = 2e-3
"""A lower bound on √(λ_min / ‖·‖_F) of BBᵀ + εI; holds with FLOOR for batches of up to some hundred examples."""
MAX_KERNEL_SIZE = 128
"""The largest graph, in examples, that the GPU kernels can hold."""
TINY = 1e-12


MAX_PAPER_ALTERNATIONS = 10
"""After more alternations of the paper's form, float64 may have no correct digits left."""
FIELDS = (
    *("relation", "alternations", "closed_form", "graph_gradient", "steps", "attention", "residual", "neighbours"),
    *("contrast", "temperature", "projection", "augmented", "predict_on"),
)
"""The fields of a method that configure the graph and its use."""
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
"""The bounds of the numbers among them."""
CHOICES = {"closed_form": ("exact", "paper"), "attention": ("softmax", "dot"), "predict_on": ("direct", "relational")}


class _Inverses(NamedTuple):
    """How inverses of symmetric positive matrices are computed, given the mask of their rows."""

    inverse: Callable[[Tensor, Tensor], Tensor]
    """M^(-1)."""
    root: Callable[[Tensor, float, Tensor], Tensor]
    """(M + εI)^(-1/2)."""


class Relations(NamedTuple):
    """The graph of a batch."""

    adjacency: Tensor
    """A = (|B| + |B|ᵀ) / 2: symmetric, non-negative, zero on the diagonal and for padding."""
    weights: Tensor
    """B."""
    change: Tensor
    """The relative change of B in the last alternation."""


def pearson(features: Tensor, mask: Tensor) -> Tensor:
    """The correlation of each pair of rows; 0 for constant rows and padding."""
    rows = normed(features, mask)
    return rows @ rows.mT


def normed(features: Tensor, mask: Tensor) -> Tensor:
    """The rows minus their mean, with norm 1: their inner products are Pearson's coefficients."""
    features = torch.where(mask[..., None], features, 0)
    centred = features - features.mean(-1, keepdim=True)
    # A constant row leaves only rounding errors, which are recognised by their size relative to the row.
    # The result does not depend on that size, so it needs no gradient.
    scale = features.detach().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(features.dtype).tiny)
    centred = centred / scale
    length = centred.square().sum(-1, keepdim=True)
    noise = (4 * torch.finfo(features.dtype).eps) ** 2 * features.shape[-1]
    return torch.where(length > noise, centred * torch.rsqrt(length.clamp(min=noise)), 0)


def check_alternations(closed_form: str, alternations: int) -> None:
    if closed_form == "paper" and alternations > MAX_PAPER_ALTERNATIONS:
        raise ConfigError(
            f"method.alternations={alternations} with method.closed_form=paper",
            "on batches of tight clusters each alternation of that form multiplies rounding errors by about thirteen, "
            f"so after more than {MAX_PAPER_ALTERNATIONS} of them no digit may be correct, even in float64",
            f"Use at most {MAX_PAPER_ALTERNATIONS}, or method.closed_form=exact, which converges",
        )


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Multiply matrices in full float32 on a GPU: TF32 is too inexact for inverses."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@_without_tf32()
def relations(
    features: Tensor,
    mask: Tensor,
    strength: float,
    alternations: int = 5,
    closed_form: str = "exact",
    floor: float = FLOOR,
    tolerance: float = 1e-4,
    differentiable: bool = True,
) -> Relations:
    """The graph of ``features`` (…, examples, width); ``mask`` (…, examples) is false for padding.

    A graph whose B changes by less than ``tolerance`` stays as it is from then on. The paper's form is computed in
    float64: on batches of tight clusters each of its alternations multiplies rounding errors by about thirteen, and
    after five of them the error of float32 is several times the largest edge. So is what LAPACK does on a CPU: its
    ``eigh`` in float32 loses the small eigenvalues.
    """
    dtype = features.dtype
    inverses = _BY_PRODUCTS if differentiable or features.device.type != "cpu" else _BY_LAPACK
    features = features.double() if closed_form == "paper" or inverses is _BY_LAPACK else features
    correlation = pearson(features, mask)
    square = correlation.mT @ correlation
    fits = square.shape[-1] <= MAX_KERNEL_SIZE and not differentiable
    if fits and (kernels := dispatch.gpu_kernels(square, "inverse")):
        settings = (strength, alternations, floor, tolerance, MIN_ROOT)
        weights, change = on_stack(kernels.relate, square, mask, *settings)
    else:
        weights, change = _alternate(square, mask, strength, alternations, closed_form, floor, tolerance, inverses)
    weights = weights.to(dtype)
    size = weights.abs()
    return Relations((size + size.mT) / 2, weights, change.to(dtype))


def _alternate(
    square: Tensor,
    mask: Tensor,
    strength: float,
    alternations: int,
    closed_form: str,
    floor: float,
    tolerance: float,
    inverses: _Inverses,
) -> tuple[Tensor, Tensor]:
    """B for a given PᵀP, and its relative change in the last alternation.

    On a CPU an operation on a matrix this small costs as much as its call, so constants are made once.
    """
    related = mask & (square.diagonal(dim1=-2, dim2=-1) > 0)  # rounding would relate constant rows to others
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    # −1 for each pair that may have an edge, 0 for others and on the diagonal: both closed forms begin with a minus.
    pairs = (related[..., :, None] & related[..., None, :]).to(square.dtype) * (eye - 1)
    # Where Φ is a multiple of the identity, as at first, both forms are the same.
    weights = _solve(square, (2 * strength) * eye.expand_as(square), pairs, mask, "paper", inverses)
    size = torch.linalg.matrix_norm(weights)
    change = size / size.clamp(min=TINY)
    for _ in range(alternations - 1):
        moves = change >= tolerance
        penalty = inverses.root(weights @ weights.mT, floor, mask) * (2 * strength)
        new = _solve(square, penalty, pairs, mask, closed_form, inverses)
        step = new - weights
        moved = torch.linalg.matrix_norm(step) / torch.linalg.matrix_norm(new).clamp(min=TINY)
        change = torch.where(moves, moved, change)
        weights = torch.addcmul(weights, step, moves[..., None, None].to(step.dtype))
    return weights, change


def _solve(
    square: Tensor, penalty: Tensor, pairs: Tensor, mask: Tensor, closed_form: str, inverses: _Inverses
) -> Tensor:
    """B for a fixed Φ, times −``pairs``: with an exactly zero diagonal."""
    matrix = square + penalty
    # The possible rounding error, added so that the matrix stays positive in float32 even if the penalty is tiny.
    trace = matrix.diagonal(dim1=-2, dim2=-1)
    trace.add_(torch.finfo(matrix.dtype).eps * trace.sum(-1, keepdim=True))
    inverse = inverses.inverse(matrix, mask)
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    if closed_form == "paper":
        return inverse / diagonal[..., None, :] * pairs
    spread = inverse @ penalty
    gamma = (1 - spread.diagonal(dim1=-2, dim2=-1)) / diagonal
    return torch.addcmul(spread, inverse, gamma[..., None, :]) * pairs


def inverse_root(matrix: Tensor, mask: Tensor, min_root: float = MIN_ROOT) -> Tensor:
    """M^(-1/2) of a symmetric positive matrix by coupled Newton–Schulz iterations: only products, no ``eigh``.

    Each iteration is scaled to the interval that still contains the roots of the eigenvalues, which halves their
    number. ``min_root`` is a lower bound on √(λ_min / ‖M‖_F). Padding gets the largest eigenvalue, so that it adds no
    iteration.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    both = mask[..., :, None] & mask[..., None, :]
    inner = torch.where(both, matrix, 0)
    scale = torch.linalg.matrix_norm(inner, keepdim=True).clamp(min=TINY)
    shape, size = matrix.shape, matrix.shape[-1]
    left = torch.where(both, matrix / scale, eye * (~mask)[..., None]).reshape(-1, size, size)
    right = None
    eye = eye.reshape(-1, size, size)
    for factor in _scales(min_root):
        cubic = -0.5 * factor**3
        if right is None:
            middle = right = 1.5 * factor * eye + cubic * left
        else:
            middle = torch.baddbmm(eye, right, left, beta=1.5 * factor, alpha=cubic)
            right = torch.bmm(middle, right)
        left = torch.bmm(left, middle)
    return torch.reshape(eye if right is None else right, shape) * torch.rsqrt(scale)


@cache
def _scales(lowest: float, until: float = 1 - 1e-7) -> tuple[float, ...]:
    """The scaling factors of Newton–Schulz that take all numbers in [lowest, 1] to 1 (Chen and Chow 2014)."""
    factors = []
    while lowest < until:
        factors.append(math.sqrt(3 / (1 + lowest + lowest**2)))
        lowest = 0.5 * factors[-1] * lowest * (3 - (factors[-1] * lowest) ** 2)
    return (*factors, 1.0)


_MIN_ROOT = {dtype: math.sqrt(torch.finfo(dtype).eps) for dtype in (torch.float32, torch.float64)}
"""The lower bound for :func:`_solve`, which adds eps times the trace to the diagonal."""


def _inverse_by_products(matrix: Tensor, mask: Tensor) -> Tensor:
    root = inverse_root(matrix, mask, _MIN_ROOT[matrix.dtype])
    return root @ root.mT


def _root_by_products(matrix: Tensor, floor: float, mask: Tensor) -> Tensor:
    return inverse_root(matrix + floor * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device), mask)


def _inverse_by_lapack(matrix: Tensor, mask: Tensor) -> Tensor:
    """Padding is a diagonal block of both matrices already, so the mask is not needed."""
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix)[0])
    return inverse.mT  # the same matrix by rows, as all others are: mixed layouts cost twice the time


def _root_by_lapack(matrix: Tensor, floor: float, mask: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    scaled: Tensor = vectors * (values.clamp(min=0) + floor).pow(-0.25)[..., None, :]
    return scaled @ scaled.mT


_BY_PRODUCTS = _Inverses(_inverse_by_products, _root_by_products)
"""Captured on a GPU, and with a gradient."""
_BY_LAPACK = _Inverses(_inverse_by_lapack, _root_by_lapack)
"""In float64, on a CPU, where it takes half the time. ``eigh`` has no gradient where eigenvalues are equal."""


def effective_rank(weights: Tensor) -> Tensor:
    """(Σσ²)² / Σσ⁴ of the singular values σ of B: its effective number of directions, without a decomposition."""
    product = weights @ weights.mT
    total = product.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total.square() / product.square().sum((-2, -1)).clamp(min=TINY)


def homophily(adjacency: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The share of edge weight within classes, divided by the share of pairs within classes: 1 is chance."""
    present = mask.to(adjacency.dtype)
    examples = present.sum()
    same = (y[:, None] == y[None, :]).to(adjacency.dtype)
    within = (present[None, :] @ same @ present[:, None]).sum() - examples  # without an example and itself
    prior = within / (examples * (examples - 1)).clamp(min=1)
    share = (adjacency * same).sum() / adjacency.sum().clamp(min=TINY)
    return share / prior.clamp(min=TINY)


def statistics(relations: Relations, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The recorded metrics of a graph."""
    return {
        "degree": mean_degree(relations.adjacency, mask),
        "rank": effective_rank(relations.weights),
        "homophily": homophily(relations.adjacency, y, mask),
        "change": relations.change,
    }


def mean_degree(adjacency: Tensor, mask: Tensor) -> Tensor:
    return adjacency.sum((-2, -1)) / mask.sum(-1).clamp(min=1)


class _Identity(nn.Linear):
    """A square linear map that is initialised to the identity: at first a message is the neighbour's feature itself,
    so z̃ is pulled towards the mean of its neighbours from the first step on."""

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)


class MessagePassing(nn.Module):
    """The paper's Eq. (5) and (6): ``steps`` rounds of attention over each example's neighbours.

    ``softmax`` weights neighbours by exp(score + log A), normalised; ``dot`` is the paper's plain product.
    """

    def __init__(self, width: int, steps: int, attention: str, residual: bool, top: int) -> None:
        super().__init__()
        self.width, self.attention, self.residual, self.top = width, attention, residual, top
        self.receive, self.send, self.value = (
            nn.ModuleList(layer(width, width, bias=False) for _ in range(steps))
            for layer in (nn.Linear, nn.Linear, _Identity)
        )

    def forward(self, z: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        if self.top:
            adjacency = strongest(adjacency, self.top)
        linked = (adjacency > 0) & mask[..., None, :]
        h = z
        for receive, send, value in zip(self.receive, self.send, self.value, strict=True):
            score = receive(h) @ send(h).mT / math.sqrt(self.width)
            if self.attention == "softmax":
                score = score + torch.where(linked, torch.log(adjacency.clamp(min=TINY)), -torch.inf)
                # The result does not depend on what is subtracted, so it needs no gradient.
                share = (score - score.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
                score = share / share.sum(-1, keepdim=True).clamp(min=TINY)
            else:
                score = torch.where(linked, score, 0)
            message = score @ value(h)
            h = h + message if self.residual else message
        return h


def strongest(adjacency: Tensor, top: int) -> Tensor:
    """The adjacency with only the ``top`` strongest edges of each row, kept in both directions."""
    if top >= adjacency.shape[-1]:
        return adjacency
    least = adjacency.topk(top, dim=-1).values[..., -1:]
    kept = adjacency >= least
    return torch.where(kept | kept.mT, adjacency, 0)
