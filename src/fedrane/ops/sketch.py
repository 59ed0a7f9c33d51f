"""Count sketches: m numbers for a deviation of d, whose inner products are on average those of the deviations.

Every coordinate is added, with a random sign, to one of m numbers (Charikar, Chen and Farach-Colton, "Finding Frequent
Items in Data Streams", ICALP 2002). Here the coordinates come in runs of m, each rotated by a random amount: two of the
same run never meet, others with probability 1/m. The variance depends on nothing else:

    E[s(a)ᵀs(b)] = aᵀb        Var[s(a)ᵀs(b)] ≤ (‖a‖²‖b‖² + (aᵀb)²) / m ≤ 2 ‖a‖²‖b‖² / m

A sum of rotated runs is made of plain additions in a fixed order. So a sketch has the same bits on every device and
whether clients are sketched one by one or together; up to d = m inner products are exact but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane.data import streams
from fedrane.ops.matrices import Dense, Factored, Matrix
from fedrane.tree import Tensors

RANGES = {"sketch": (8, 1_000_000)}
"""How many numbers a sketch may have."""


class Sketches(NamedTuple):
    """The sketches of stacked deviations, one in each row, and what else a client tells of its deviation."""

    numbers: Tensor
    norms: Tensor
    """‖Δ_k‖, exactly: one number more."""

    def usable(self) -> Tensor:
        """Whose deviation and sketch are finite and not zero."""
        squares = self.numbers.square().sum(1) * self.norms.square().clamp(max=1)
        return torch.isfinite(squares) & (squares > np.finfo(float).tiny)

    def cosines(self, used: NDArray[np.bool_]) -> Matrix:
        """Between the sketches that are used, by factors if they are more than each has numbers."""
        factor = self.numbers.detach().double().cpu().numpy()[used]
        factor /= np.linalg.norm(factor, axis=1, keepdims=True)
        return Dense(factor @ factor.T) if len(factor) <= factor.shape[1] else Factored(factor)

    def squares(self, weights: Tensor) -> Tensor:
        """‖Σ_k weights_k Δ_k‖² for each row of weights, estimated."""
        used = (weights != 0).any(0)
        return (weights[:, used] @ self.numbers[used].double()).square().sum(1)


def sketched(base: Tensors, rows: Tensors, width: int, seed: int, round: int) -> Sketches:
    """The sketches of Δ_k = rows_k − base, over the names in ``rows``: a group that bargains by itself.

    Signs and rotations are drawn from the run's seed, the round and the names. So all clients have the same ones, those
    of another round or group are independent, and a resumed run repeats them. A client sketches its own upload as a
    stack of one; the server joins what it receives to one stack.

    >>> apart = sketched({"w": torch.zeros(4)}, {"w": torch.eye(2, 4)}, 8, seed=0, round=1)
    >>> apart.numbers @ apart.numbers.T, apart.norms
    (tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    names = sorted(rows)  # the order of a dict is no part of a message
    size = sum(base[name].numel() for name in names)
    clients, device = len(rows[names[0]]), rows[names[0]].device
    width = min(width, size)
    total, squares = torch.zeros(2, clients, width, dtype=torch.float64, device=device)
    signs, rotations = (streams.bits(seed, "sketch", what, round, *names) for what in ("signs", "rotations"))
    turns = (rotations.random_raw(-(-size // width)) % np.uint64(width)).tolist()
    packed = signs.random_raw(-(-size // 64)).astype("<u8").view(np.uint8)
    sign = torch.from_numpy(np.unpackbits(packed, count=size).view(np.int8)).to(device).mul_(2).sub_(1)
    for name, piece, at in _pieces({name: base[name].numel() for name in names}, width):
        origin = base[name].flatten()[piece].double()
        run, begin = divmod(at, width)
        deviations = rows[name].flatten(1)[:, piece].double() - origin
        squares[:, begin : begin + len(origin)] += deviations.square()
        deviations *= sign[at : at + len(origin)]
        begin = (begin + turns[run]) % width
        end = min(begin + len(origin), width)
        total[:, begin:end] += deviations[:, : end - begin]
        total[:, : len(origin) - (end - begin)] += deviations[:, end - begin :]
    return Sketches(total, _row_sums(squares).sqrt())


def _pieces(sizes: dict[str, int], width: int) -> Iterator[tuple[str, slice, int]]:
    """All coordinates in order, in pieces of one parameter and one run each, with the number of the piece's first."""
    at = 0
    for name, size in sizes.items():
        begin = 0
        while begin < size:
            end = min(size, begin + width - at % width)
            yield name, slice(begin, end), at
            at, begin = at + end - begin, end


def _row_sums(matrix: Tensor) -> Tensor:
    """By halves: the order of additions, and so every bit, is the same on every device and for any number of rows."""
    while matrix.shape[1] > 1:
        half = -(-matrix.shape[1] // 2)
        rest = matrix[:, half:]
        matrix = torch.cat([matrix[:, : rest.shape[1]] + rest, matrix[:, rest.shape[1] : half]], 1)
    return matrix[:, 0]
