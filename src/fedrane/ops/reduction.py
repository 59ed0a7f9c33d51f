"""Sums over a cohort in a fixed order: the same bits, whoever adds up which part of it.

The clients of a round have positions 0, 1, … in the order of their numbers. Their sum is a binary tree: node (level, i)
is the sum over the positions from i · 2^level on, 2^level of them; its two halves are added in float64, and one that is
beyond the last client counts nothing. A part of a cohort holds the largest nodes that it has whole: of neighbours these
are few, the logarithm of their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Nodes = dict[tuple[int, int], list[Tensor]]
"""By level and number: the sums of every tensor and of the weights, term by term."""
BLOCK_SIZE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers added up at a time, by device: on a CPU they fit into its cache, and a stack is never copied as a whole."""


class Term(NamedTuple):
    """Σ_k w_k (rows_k − base) over some clients of a cohort. A row of weight zero may hold any value, including NaN."""

    rows: Tensors
    weights: Tensor | None = None
    """One for each client; without them each counts as 1."""
    base: Tensors | None = None
    """Without it, zero."""


class Total(NamedTuple):
    """A term's sums over the whole cohort, in float64."""

    base: Tensors | None
    sums: Tensors
    weight: Tensor
    """Σ_k w_k."""

    def mean(self, rate: float = 1.0) -> Tensors:
        """base + rate · Σ_k w_k (rows_k − base) / Σ_k w_k; the base if all weights are zero."""
        return self.added(self.base or {}, rate, torch.where(self.weight == 0, 1.0, self.weight))

    def added(self, base: Tensors, times: float | Tensor = 1.0, over: float | Tensor = 1.0) -> Tensors:
        """base + times · Σ / over, in the dtypes of the base. What the rows do not have stays.

        Where the sum is zero, the base stays to the last bit.
        """
        steps = {name: total * times / over for name, total in self.sums.items()}
        return base | {
            name: torch.where(step == 0, base[name], (base[name].double() + step).to(base[name].dtype))
            for name, step in steps.items()
        }


Summary = Mapping[str, Term]
Totals = Mapping[str, Total]


class Partial:
    """The sums of a summary over a part of a cohort. ``a + b`` is that over both parts, and changes neither."""

    def __init__(self, nodes: Nodes, terms: Mapping[str, tuple[Tensors | None, dict[str, torch.Size]]]) -> None:
        self._nodes, self._terms = nodes, terms

    @classmethod
    def of(cls, summary: Summary, first: int = 0) -> Partial:
        """Of clients side by side, the first of which has this position."""
        sums = [_sums(term, first) for term in summary.values()]
        nodes = {key: [leaf for of_term in sums for leaf in of_term[key]] for key in (sums[0] if sums else ())}
        shapes = {
            name: (term.base, {leaf: stacked.shape[1:] for leaf, stacked in term.rows.items()})
            for name, term in summary.items()
        }
        return cls(nodes, shapes)

    def __add__(self, other: Partial) -> Partial:
        nodes = dict(self._nodes)
        for (level, number), sums in other._nodes.items():
            while (beside := nodes.pop((level, number ^ 1), None)) is not None:
                left, right = (beside, sums) if number % 2 else (sums, beside)
                level, number, sums = level + 1, number // 2, [a + b for a, b in zip(left, right, strict=True)]
            nodes[level, number] = sums
        return Partial(nodes, other._terms)

    def totals(self, count: int) -> dict[str, Total]:
        """The sums over the cohort, which has that many clients."""
        if self._terms and self._nodes.keys() != set(_whole(0, count)):
            raise ValueError(f"the parts are not those of {count} clients, each once")
        sums: list[Tensor] = []
        for _, node in sorted(self._nodes.items()):  # the smallest is the last: what is beside it is beyond the cohort
            sums = [a + b for a, b in zip(node, sums, strict=True)] if sums else node
        left = iter(sums)
        return {
            name: Total(base, {leaf: next(left).reshape(shape) for leaf, shape in shapes.items()}, next(left))
            for name, (base, shapes) in self._terms.items()
        }


def _sums(term: Term, first: int) -> Nodes:
    count = len(next(iter(term.rows.values()))) if term.weights is None else len(term.weights)
    weights = None if term.weights is None else term.weights.double()
    skipped = None if weights is None or bool((weights != 0).all()) else (weights == 0)[:, None]
    nodes: Nodes = {}
    for level, number in _whole(first, first + count):
        rows = slice((number << level) - first, ((number + 1) << level) - first)
        among = (weights[rows, None] if weights is not None else None, skipped[rows] if skipped is not None else None)
        nodes[level, number] = [
            _node(stacked[rows], None if term.base is None else term.base[name], *among)
            for name, stacked in term.rows.items()
        ]
        ones = torch.ones(1 << level, 1, dtype=torch.float64)
        nodes[level, number].append(_halved(ones if among[0] is None else among[0]).reshape(()))
    return nodes


def _whole(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The largest nodes between two positions."""
    while begin < end:
        level = min((begin & -begin or end).bit_length(), (end - begin).bit_length()) - 1
        yield level, begin >> level
        begin += 1 << level


def _node(rows: Tensor, base: Tensor | None, weights: Tensor | None, skipped: Tensor | None) -> Tensor:
    flat = rows.detach().reshape(len(rows), rows[0].numel())
    origin = None if base is None else base.detach().flatten().double()
    total = torch.empty(flat.shape[1], dtype=torch.float64, device=flat.device)
    width = max(1, BLOCK_SIZE.get(flat.device.type, BLOCK_SIZE["cpu"]) // len(flat))
    for begin in range(0, flat.shape[1], width):
        piece = slice(begin, begin + width)
        block = flat[:, piece].to(torch.float64, copy=True)
        if origin is not None:
            block -= origin[piece]
        if weights is not None:
            block *= weights
        if skipped is not None:
            block.masked_fill_(skipped, 0)
        total[piece] = _halved(block)[0]
    return total


def _halved(rows: Tensor) -> Tensor:
    """The sum of rows whose number is a power of two: of neighbours, then of neighbouring sums, …"""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows
