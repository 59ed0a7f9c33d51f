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

import numpy as np
from numpy.typing import NDArray


def _digest(seed: int, where: tuple[int | str, ...]) -> bytes:
    # JSON keeps 1 and "1" apart, as well as ("ab",) and ("a", "b"); index() takes NumPy's integers and refuses floats.
    name = [part if isinstance(part, str) else int(operator.index(part)) for part in (seed, *where)]
    return hashlib.blake2b(json.dumps(name).encode(), digest_size=16).digest()


def _key(seed: int, where: tuple[int | str, ...]) -> NDArray[np.uint64]:
    return np.frombuffer(_digest(seed, where), "<u8").astype(np.uint64)


def bits(seed: int, *where: int | str) -> np.random.Philox:
    """The raw stream of this name."""
    return np.random.Philox(key=_key(seed, where))


class _Reused(threading.local):
    """A generator takes ten times as long to make as a round's worth of a small client's numbers."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64))
        self.first = self.bits.state

    def raw(self, n: int, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What a new generator of this key would give."""
        self.first["state"]["key"] = key
        self.bits.state = self.first
        found: NDArray[np.uint64] = self.bits.random_raw(n)
        return found


_reused = _Reused()


def key(seed: int, *where: int | str) -> int:
    """A non-negative integer of 63 bits, to seed a generator of another library."""
    return int.from_bytes(_digest(seed, where)[:8], "little") >> 1


def generator(seed: int, *where: int | str) -> np.random.Generator:
    """NumPy's distributions over the stream of this name."""
    return np.random.Generator(bits(seed, *where))


def uniform(n: int, seed: int, *where: int | str) -> NDArray[np.float64]:
    """``n`` numbers in [0, 1), each a multiple of 2⁻⁵³."""
    return (_reused.raw(n, _key(seed, where)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, seed: int, *where: int | str) -> NDArray[np.int64]:
    """The numbers 0 … ``n`` − 1 in random order."""
    return np.argsort(_reused.raw(n, _key(seed, where)), kind="stable").astype(np.int64)
