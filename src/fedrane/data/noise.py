"""Random numbers on the device as a pure function of a key, for dropout layers and augmentation."""

from __future__ import annotations

from torch import Tensor

MASK32, MASK63 = 2**32 - 1, 2**63 - 1


def uniform(key: Tensor, stream: int, position: Tensor) -> Tensor:
    """Return numbers in [0, 1) from a 64-bit hash of (key, stream, position), the same on a GPU and a CPU."""
    z = key + position * 0x1E3779B97F4A7C15 + (stream * 0x3C6EF372FE94F82B & MASK63)
    z = (z ^ ((z >> 30) & (MASK32 << 2 | 3))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & (MASK32 << 5 | 31))) * -0x6B2FB644ECCEEE15
    z = z ^ ((z >> 31) & (MASK32 << 1 | 1))
    return (z & 0xFFFFFF).float() / 0x1000000
