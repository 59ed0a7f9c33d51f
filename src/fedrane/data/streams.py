"""The one place where random numbers come from: each use has a stream of its own, named by what it is for.

A stream is keyed by the run's seed and by words and numbers such as ``("batches", round, client)``. It therefore does
not matter who draws first, on which process, or after which checkpoint: the same name always gives the same numbers.
``permutation``, ``uniform`` and ``key`` use raw bits alone and are the same under every version of NumPy; the
distributions of ``generator`` are NumPy's, which may change them between versions.
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
    # JSON keeps 1 and "1" apart, as well as ("ab",) and ("a", "b"); index() takes NumPy's integers and refuses floats.
    parts = (_quoted(part) if isinstance(part, str) else str(int(operator.index(part))) for part in (seed, *where))
    return f"[{', '.join(parts)}]"


_quoted = lru_cache(json.dumps)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _keys(names: list[str]) -> NDArray[np.uint64]:
    """A row for each."""
    return np.frombuffer(b"".join(map(_digest, names)), "<u8").astype(np.uint64).reshape(-1, 2)


def bits(seed: int, *where: int | str) -> np.random.Philox:
    """The raw stream of this name."""
    return np.random.Philox(key=_keys([_name(seed, where)])[0])


class _Reused(threading.local):
    """A generator takes ten times as long to make as a round's worth of a small client's numbers."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64))
        self.first = self.bits.state

    def raw(self, n: int, names: list[str]) -> NDArray[np.uint64]:
        """What new generators of these names would give, a row each."""
        bits, first, found = self.bits, self.first, np.empty((len(names), n), dtype=np.uint64)
        for row, key in zip(found, _keys(names), strict=True):
            first["state"]["key"] = key
            bits.state = first
            row[:] = bits.random_raw(n)
        return found


_reused = _Reused()


def key(seed: int, *where: int | str) -> int:
    """A non-negative integer of 63 bits, to seed a generator of another library."""
    return int.from_bytes(_digest(_name(seed, where))[:8], "little") >> 1


def generator(seed: int, *where: int | str) -> np.random.Generator:
    """NumPy's distributions over the stream of this name."""
    return np.random.Generator(bits(seed, *where))


def uniform(n: int, seed: int, *where: int | str) -> NDArray[np.float64]:
    """``n`` numbers in [0, 1), each a multiple of 2⁻⁵³."""
    return (_reused.raw(n, [_name(seed, where)]).reshape(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, seed: int, *where: int | str) -> NDArray[np.int64]:
    """The numbers 0 … ``n`` − 1 in random order."""
    return _orders(n, [_name(seed, where)]).reshape(n)


def permutations(n: int, many: int, seed: int, wheres: list[tuple[int | str, ...]]) -> NDArray[np.int64]:
    """For each place, one a row, the permutations of ``(*where, 0)``, ``(*where, 1)`` and so on."""
    names = (_name(seed, where).removesuffix("]") for where in wheres)
    orders = _orders(n, [f"{name}, {number}]" for name in names for number in range(many)])
    return orders.reshape(len(wheres), many, n)


def _orders(n: int, names: list[str]) -> NDArray[np.int64]:
    orders: NDArray[np.int64] = np.argsort(_reused.raw(n, names), axis=1, kind="stable").astype(np.int64, copy=False)
    return orders
