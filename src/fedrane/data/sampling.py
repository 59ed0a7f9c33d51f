"""Client sampling and batches, as a pure function of (seed, round, client).

Nothing here depends on the method, so every method sees the same cohorts and the same batches. No state is kept between
rounds, so a resumed run needs no generator state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import streams
from fedrane.system import memory

_PER_DRAWN = 25
"""Bytes of one example of a batch: its number, its mask, and the two arrays that are sorted to draw it."""


class Batches(NamedTuple):
    """A client's batches in a round: the example indices of each step, padded with 0 where the mask is false."""

    examples: NDArray[np.int64]
    mask: NDArray[np.bool_]
    keys: NDArray[np.int64]


def cohort(seed: int, round: int, population: int, participation: float) -> list[int]:
    """Return the clients sampled for a round, sorted."""
    size = max(1, round_half_up(participation * population))
    return sorted(streams.permutation(population, seed, "cohort", round)[:size].tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


def lost(seed: int, round: int, clients: list[int], client_dropout: float) -> list[int]:
    """Return the clients of the cohort whose update is lost (simulated client dropout)."""
    return [k for k in clients if client_dropout and streams.uniform(1, seed, "dropout", round, k)[0] < client_dropout]


def batches(seed: int, round: int, sizes: Mapping[int, int], batch: int, epochs: int) -> dict[int, Batches]:
    """Return ``epochs`` shuffled passes over each client's examples, cut into batches; the last one is padded."""
    drawn = sum(epochs * -(-size // batch) * batch for size in sizes.values())
    memory.require(
        _PER_DRAWN * drawn, f"{drawn} examples drawn for round {round} (epochs={epochs})", "Use fewer epochs"
    )
    batches_of: dict[int, Batches] = {}
    for size in sorted(set(sizes.values())):  # clients of one size together: far faster for small clients
        clients = [client for client, examples in sizes.items() if examples == size]
        steps = -(-size // batch)
        total = epochs * steps
        examples = np.zeros((len(clients), epochs, steps * batch), dtype=np.int64)
        wheres: list[tuple[int | str, ...]] = [("batches", round, client) for client in clients]
        examples[:, :, :size] = streams.permutations(size, epochs, seed, wheres)
        mask = np.zeros((epochs, steps * batch), dtype=np.bool_)
        mask[:, :size] = True
        firsts = np.array([streams.key(seed, "noise", round, client) for client in clients], dtype=np.int64)
        keys = (firsts[:, None] + np.arange(total, dtype=np.int64)) & np.int64(2**62 - 1)
        for client, steps_of, key in zip(clients, examples.reshape(len(clients), total, batch), keys, strict=True):
            batches_of[client] = Batches(steps_of, mask.reshape(total, batch), key)
    return batches_of
