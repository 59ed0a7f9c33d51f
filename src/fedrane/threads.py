"""How many threads an operation is spread over.

Small operations gain nothing from a second thread, and where other processes want the cores each operation waits until
all its threads have had their turn: a run then takes many times as long (docs/performance.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

MOST = 1024
"""More can be asked for by mistake alone, and the system's answer to that is to end the process."""


@contextmanager
def limited(number: int) -> Iterator[int]:
    """Operations of torch, and of other libraries' linear algebra and loops, on so many threads; then as before.

    Gives the number of before: what the caller, ``OMP_NUM_THREADS`` or else the machine says.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with threadpool_limits(number):
            yield before
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
