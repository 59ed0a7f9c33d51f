"""Clients on many cores: processes of one thread of arithmetic each, forked anew for every round.

Many threads of one process wait for Python's lock. A forked process has the models, the rows and the method as they
stand: nothing is sent to it, and a method of a notebook need not be known by name. What it has found comes back in
memory that both see. The hooks and their order are the sequential engine's.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from io import BytesIO
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedrane.algorithm import Algorithm
from fedrane.engines.sequential import Sequential
from fedrane.engines.threaded import Worker
from fedrane.errors import ConfigError, FedraneError
from fedrane.federation import Federation

T = TypeVar("T")


def impossible() -> str:
    """Why processes cannot be used here; nothing where they can."""
    if sys.platform != "linux":
        return "forking a process that computes is safe on Linux alone"
    if torch.cuda.is_available():
        return "what autograd keeps for a GPU does not outlive a fork"
    return ""


class Processes(Sequential):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        if why := impossible():
            raise ConfigError("engine=processes cannot be used here", why, "Use engine=threaded or engine=auto")
        super().__init__(algorithm, federation)
        self.number = torch.get_num_threads()
        self.worker = Worker(algorithm, federation)

    def each(self, work: Callable[[Sequential, int], T], items: Sequence[int], sizes: Sequence[int]) -> list[T]:
        longest_first = sorted(range(len(items)), key=lambda place: -sizes[place])
        others = set(multiprocessing.active_children())
        with _memory(len(items)) as files:

            def one(place: int) -> _Packed:
                return _pack(work(self.worker, items[place]), files[place])

            how = multiprocessing.get_context("fork"), _settle, (os.getpid(), one)
            with ProcessPoolExecutor(min(self.number, len(items)), *how) as pool, warnings.catch_warnings():
                # that a process with threads is forked: the children compute on one thread, and wait for no other's
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
                try:
                    futures = {place: pool.submit(_do, place) for place in longest_first}
                    return [_unpack(futures[place].result(), files[place]) for place in range(len(items))]
                except BaseException as error:  # an interrupt as well: what is being computed is not waited for
                    for child in set(multiprocessing.active_children()) - others:
                        child.kill()
                    if isinstance(error, BrokenProcessPool):
                        raise FedraneError(
                            "a process that computed for clients has died",
                            "most often the machine ran out of memory",
                            "Use fewer of them (OMP_NUM_THREADS=…) or engine=threaded",
                        ) from error
                    raise


# ---- in the forked process

_job: Callable[[int], Any]


def _settle(parent: int, job: Callable[[int], Any]) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and decides
    Thread(target=_follow, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)


def _follow(parent: int) -> None:
    """End with the parent, however that has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _do(place: int) -> Any:
    return _job(place)


# ---- what comes back

ALIGNED = 64
"""Bytes, at a multiple of which a tensor begins."""


class _Packed(NamedTuple):
    content: bytes
    """Pickled, without the tensors' numbers."""
    places: list[tuple[int, int]]
    """Where in the file those begin and end."""


@contextmanager
def _memory(number: int) -> Iterator[list[int]]:
    """So many files that lie in memory, by their descriptors."""
    files = [os.memfd_create("client") for _ in range(number)]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: the library's own way takes a file descriptor for each."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), value.dtype, tuple(value.shape))


def _tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if len(content) else torch.empty(shape, dtype=dtype)


def _pack(value: Any, file: int) -> _Packed:
    skeleton, buffers, end = BytesIO(), list[pickle.PickleBuffer](), 0
    _Pickler(skeleton, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    places = []
    for content in (buffer.raw() for buffer in buffers):
        begin = -(-end // ALIGNED) * ALIGNED
        end = begin + len(content)
        places.append((begin, end))
        while content:
            written = os.pwrite(file, content, end - len(content))
            content = content[written:]
    return _Packed(skeleton.getvalue(), places)


def _unpack(packed: _Packed, file: int) -> Any:
    """The tensors lie where the process has put them; whoever changes one changes a copy."""
    size = os.fstat(file).st_size
    whole = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    buffers = [whole[begin:end] for begin, end in packed.places]
    return pickle.loads(packed.content, buffers=buffers)  # noqa: S301 - from a child of this process
