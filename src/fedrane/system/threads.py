"""The number of threads of an operation.

Small operations gain nothing from a second thread. If other processes use the cores, each operation also waits for its
slowest thread, and a run takes many times as long (docs/performance.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

MAX_THREADS = 1024
"""Larger values are mistakes, and the system would kill the process."""


@contextmanager
def limited(number: int) -> Iterator[int]:
    """Limit torch, BLAS and OpenMP to this number of threads inside the context.

    Yields the number from before: set by the caller, by ``OMP_NUM_THREADS`` or by the machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with threadpool_limits(number):
            yield before
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
