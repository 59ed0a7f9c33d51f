"""Who takes part in a round, and which rows a client sees in it: all a function of (seed, round, client).

Nothing here depends on the method, so every method sees the same cohorts and the same batches; nothing is remembered
between rounds, so a resumed run needs no generator's state.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def batches(seed: int, round: int, sizes: Mapping[int, int], batch: int, epochs: int) -> dict[int, Batches]:
    """For each client ``epochs`` shuffled passes over its rows, each cut into batches, the last one padded."""
    found: dict[int, Batches] = {}
    for size in sorted(set(sizes.values())):  # those of one size together, which for small clients is far quicker
        clients = [client for client, own in sizes.items() if own == size]
        steps = -(-size // batch)
        total = epochs * steps
        rows = np.zeros((len(clients), epochs, steps * batch), dtype=np.int64)
        wheres: list[tuple[int | str, ...]] = [("batches", round, client) for client in clients]
        rows[:, :, :size] = streams.permutations(size, epochs, seed, wheres)
        live = np.zeros((epochs, steps * batch), dtype=np.bool_)
        live[:, :size] = True
        firsts = np.array([streams.key(seed, "noise", round, client) for client in clients], dtype=np.int64)
        keys = (firsts[:, None] + np.arange(total, dtype=np.int64)) & np.int64(2**62 - 1)
        for client, own, key in zip(clients, rows.reshape(len(clients), total, batch), keys, strict=True):
            found[client] = Batches(own, live.reshape(total, batch), key)
    return found
