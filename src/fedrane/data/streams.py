"""Named random streams: the only source of random numbers, with one stream per use.

A stream is keyed by the run's seed and by words and numbers such as ``("batches", round, client)``. The same name gives
the same numbers, independent of the order of draws, the process and checkpoints. ``permutation``, ``uniform`` and
``key`` use only raw bits and are the same under every version of NumPy. The distributions of ``generator`` are NumPy's,
and may change between versions.
"""

from __future__ import annotations

import hashlib
import json
import operator
import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def _name(seed: int, where: tuple[int | str, ...]) -> str:
    # JSON distinguishes 1 from "1" and ("ab",) from ("a", "b"). index() accepts NumPy integers and rejects floats.
    parts = (_quoted(part) if isinstance(part, str) else str(int(operator.index(part))) for part in (seed, *where))
    return f"[{', '.join(parts)}]"


_quoted = lru_cache(json.dumps)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _keys(names: list[str]) -> NDArray[np.uint64]:
    """Return one row of two words for each name."""
    return np.frombuffer(b"".join(map(_digest, names)), "<u8").astype(np.uint64).reshape(-1, 2)


def bits(seed: int, *where: int | str) -> np.random.Philox:
    """Return the raw stream of this name."""
    return np.random.Philox(key=_keys([_name(seed, where)])[0])


class _Reused(threading.local):
    """One reused generator per thread: creating one takes ten times as long as a round of a small client's numbers."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64))
        self.first = self.bits.state

    def raw(self, n: int, names: list[str]) -> NDArray[np.uint64]:
        """Return what new generators of these names would give, one row per name."""
        bits, first, numbers = self.bits, self.first, np.empty((len(names), n), dtype=np.uint64)
        for row, key in zip(numbers, _keys(names), strict=True):
            first["state"]["key"] = key
            bits.state = first
            row[:] = bits.random_raw(n)
        return numbers


_reused = _Reused()


def key(seed: int, *where: int | str) -> int:
    """Return a non-negative 63-bit integer, to seed a generator of another library."""
    return int.from_bytes(_digest(_name(seed, where))[:8], "little") >> 1


def generator(seed: int, *where: int | str) -> np.random.Generator:
    """Return NumPy's distributions over the stream of this name."""
    return np.random.Generator(bits(seed, *where))


def uniform(n: int, seed: int, *where: int | str) -> NDArray[np.float64]:
    """Return ``n`` numbers in [0, 1), each a multiple of 2⁻⁵³."""
    return (_reused.raw(n, [_name(seed, where)]).reshape(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, seed: int, *where: int | str) -> NDArray[np.int64]:
    """Return the numbers 0 … ``n`` − 1 in random order."""
    return _orders(n, [_name(seed, where)]).reshape(n)


def permutations(n: int, count: int, seed: int, wheres: list[tuple[int | str, ...]]) -> NDArray[np.int64]:
    """Return, for each ``where``, the permutations of the streams ``(*where, 0)``, ``(*where, 1)``, …."""
    names = (_name(seed, where).removesuffix("]") for where in wheres)
    orders = _orders(n, [f"{name}, {number}]" for name in names for number in range(count)])
    return orders.reshape(len(wheres), count, n)


def _orders(n: int, names: list[str]) -> NDArray[np.int64]:
    orders: NDArray[np.int64] = np.argsort(_reused.raw(n, names), axis=1, kind="stable").astype(np.int64, copy=False)
    return orders
