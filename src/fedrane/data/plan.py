"""Who takes part in a round, and which rows a client sees in it: all a function of (seed, round, client).

Nothing here depends on the method, so every method sees the same cohorts and the same batches; nothing is remembered
between rounds, so a resumed run needs no generator's state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import streams


class Batches(NamedTuple):
    """A client's round: for each step, which of its rows; padded with row 0 where ``live`` is false."""

    rows: NDArray[np.int64]
    live: NDArray[np.bool_]
    keys: NDArray[np.int64]


def cohort(seed: int, round: int, population: int, participation: float) -> list[int]:
    """The clients sampled for a round, in order."""
    size = max(1, round_half_up(participation * population))
    return sorted(streams.permutation(population, seed, "cohort", round)[:size].tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


def lost(seed: int, round: int, clients: list[int], dropout: float) -> list[int]:
    """Those of the cohort whose answer never arrives (a simulation of dropouts)."""
    return [k for k in clients if dropout and streams.uniform(1, seed, "dropout", round, k)[0] < dropout]


def batches(seed: int, round: int, client: int, size: int, batch: int, epochs: int) -> Batches:
    """``epochs`` shuffled passes over ``size`` rows, each cut into batches, the last one padded."""
    steps = -(-size // batch)
    rows = np.zeros((epochs, steps * batch), dtype=np.int64)
    rows[:, :size] = streams.permutations(size, epochs, seed, "batches", round, client)
    live = np.zeros((epochs, steps * batch), dtype=np.bool_)
    live[:, :size] = True
    total = epochs * steps
    first = streams.key(seed, "noise", round, client)
    keys = (first + np.arange(total, dtype=np.int64)) & np.int64(2**62 - 1)
    return Batches(rows.reshape(total, batch), live.reshape(total, batch), keys)
