"""Client sampling and batches, as a pure function of (seed, round, client).

Nothing here depends on the method, so every method sees the same cohorts and the same batches. No state is kept between
rounds, so a resumed run needs no generator state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import streams
from fedrane.system import memory

_PER_DRAWN = 25
"""Bytes of one example of a batch: its number, its mask, and the two arrays that are sorted to draw it."""


@dataclass(frozen=True)
class Steps:
    """A number of local steps in a round, where otherwise a number of epochs is given."""

    count: int


Span = float | Steps
"""How long a client trains in a round: for so many epochs, or for so many steps."""


def local_steps(size: int, batch: int, epochs: Span) -> int:
    """How many steps a client with so many examples makes; a fraction of an epoch is rounded up to whole batches."""
    if not size:
        return 0
    if isinstance(epochs, Steps):
        return epochs.count
    return math.ceil(epochs * -(-size // batch) - 1e-9)  # 0.14 · 50 is a little more than 7


def _passes(size: int, batch: int, epochs: Span) -> int:
    """The number of passes over the examples; the last may end early."""
    return -(-local_steps(size, batch, epochs) // -(-size // batch)) if size else 0


def examples_trained(size: int, batch: int, epochs: Span) -> int:
    """On how many examples a client with so many trains, padding not counted."""
    if not size:
        return 0
    passes, rest = divmod(local_steps(size, batch, epochs), -(-size // batch))
    return passes * size + min(rest * batch, size)


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


def batches(seed: int, round: int, sizes: Mapping[int, int], batch: int, epochs: Span) -> dict[int, Batches]:
    """Return shuffled passes over each client's examples, cut into batches; the last one of a pass is padded.

    They end after so many epochs, or after so many steps wherever in a pass that is.
    """
    drawn = sum(_passes(size, batch, epochs) * -(-size // batch) * batch for size in sizes.values())
    asked, remedy = f"epochs={epochs}", "Use fewer epochs"
    if isinstance(epochs, Steps):
        asked, remedy = f"steps={epochs.count}", "Use fewer steps"
    memory.require(_PER_DRAWN * drawn, f"{drawn} examples drawn for round {round} ({asked})", remedy)
    batches_of: dict[int, Batches] = {}
    for size in sorted(set(sizes.values())):  # clients of one size together: far faster for small clients
        clients = [client for client, examples in sizes.items() if examples == size]
        steps, total = -(-size // batch), local_steps(size, batch, epochs)
        passes = _passes(size, batch, epochs)
        examples = np.zeros((len(clients), passes, steps * batch), dtype=np.int64)
        names: list[tuple[int | str, ...]] = [("batches", round, client) for client in clients]
        examples[:, :, :size] = streams.permutations(size, passes, seed, names)
        mask = np.zeros((passes, steps * batch), dtype=np.bool_)
        mask[:, :size] = True
        firsts = np.array([streams.key(seed, "noise", round, client) for client in clients], dtype=np.int64)
        keys = (firsts[:, None] + np.arange(total, dtype=np.int64)) & np.int64(2**62 - 1)
        drawn_of = examples.reshape(len(clients), passes * steps, batch)[:, :total]
        for client, steps_of, key in zip(clients, drawn_of, keys, strict=True):
            batches_of[client] = Batches(steps_of, mask.reshape(passes * steps, batch)[:total], key)
    return batches_of
