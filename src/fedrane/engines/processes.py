"""One client per core: processes of one thread of arithmetic each, forked in every round.

Many threads of one process wait for Python's lock. A forked process has the models, the examples and the method in its
memory: nothing is sent to it, and a method of a notebook need not be importable. Results come back in shared memory.
 The hooks and their order are the sequential engine's.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.engines.threaded import AHEAD, Worker, submitted
from fedrane.errors import ConfigError, FedraneError, portable

T = TypeVar("T")


def impossible() -> str:
    """Why processes cannot be used here; nothing where they can."""
    if sys.platform != "linux":
        return "forking a process that computes is safe on Linux alone"
    if torch.cuda.is_available():
        return "what autograd keeps for a GPU does not outlive a fork"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may have no children"
    return ""


def require_possible() -> None:
    if why := impossible():
        raise ConfigError("engine=processes cannot be used here", why, "Use engine=threaded or engine=auto")


class Processes(Sequential):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        require_possible()
        super().__init__(algorithm, federation)
        self.number = torch.get_num_threads()
        self.worker = Worker(algorithm, federation)
        if sys.version_info >= (3, 12):  # the children compute on one thread, and wait for no other's lock
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded, use of fork")

    def each(self, work: Callable[[Sequential, int], T], items: Sequence[int], sizes: Sequence[int]) -> list[T]:
        longest_first = sorted(range(len(items)), key=lambda position: -sizes[position])
        return list(self._submitted(work, items, longest_first, len(items)))

    def in_order(self, work: Callable[[Sequential, int], T], items: Sequence[int]) -> Generator[T, None, None]:
        return self._submitted(work, items, range(len(items)), AHEAD * self.number)

    def _submitted(
        self, work: Callable[[Sequential, int], T], items: Sequence[int], order: Sequence[int], ahead: int
    ) -> Generator[T, None, None]:
        with _memory() as file:

            def one(position: int) -> _Packed:  # what was there before has been read
                return _pack(work(self.worker, items[position]), file, position % ahead * MAX_RESULT_BYTES)

            def submit(position: int) -> Future[_Packed]:
                with _uninterrupted():
                    return pool.submit(_do, position)

            with ProcessPoolExecutor(
                max_workers=max(1, min(self.number, len(items))),
                mp_context=multiprocessing.get_context("fork"),
                initializer=_settle,
                initargs=(os.getpid(), one),
            ) as pool:
                try:
                    for packed in submitted(submit, order, ahead):
                        yield _unpack(packed, file)
                except BaseException as error:  # an interrupt as well: what is being computed is not waited for
                    with _uninterrupted():
                        for child in list((pool._processes or {}).values()):
                            child.kill()
                    if isinstance(error, BrokenProcessPool):
                        raise FedraneError(
                            "a process that computed for clients has died",
                            "most often the machine ran out of memory",
                            "Use fewer of them (threads=…) or engine=threaded",
                        ) from error
                    raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt takes effect afterwards: half-made processes would be left over."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    interrupted = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


# ---- in the forked process

_job: Callable[[int], Any]


def _settle(parent: int, job: Callable[[int], Any]) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, and decides
    sys.stdout, sys.stderr = _reopened(sys.stdout), _reopened(sys.stderr)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)


def _reopened(stream: Any) -> Any:
    """Another way to the same file: a thread that is not here may hold the locks of the one that was forked."""
    try:
        file = getattr(stream, "rich_proxied_file", stream).fileno()
    except (AttributeError, OSError, ValueError):
        return stream
    return open(file, "w", buffering=1, encoding=stream.encoding, errors="backslashreplace", closefd=False)


def _follow(parent: int) -> None:
    """End with the parent, however that has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _do(position: int) -> Any:
    try:
        return _job(position)
    except Exception as error:
        if (sent := portable(error)) is error:
            raise
        raise sent from None


# ---- what comes back

MAX_RESULT_BYTES = 1 << 40
"""Of the shared file for each item; it takes memory only where something is written."""


class _Packed(NamedTuple):
    content: bytes
    """Pickled, without the tensors' numbers."""
    positions: list[tuple[int, int]]
    """Where in the file those begin and end."""


@contextmanager
def _memory() -> Iterator[int]:
    """The descriptor of a file in memory."""
    file = os.memfd_create("clients")
    try:
        yield file
    finally:
        os.close(file)


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: the library's own way takes a file descriptor for each."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), value.dtype, tuple(value.shape))


def _tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if len(content) else torch.empty(shape, dtype=dtype)


def _pack(value: Any, file: int, begin: int) -> _Packed:
    skeleton, buffers = BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(skeleton, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    positions = []
    for content in (buffer.raw() for buffer in buffers):
        end = begin + len(content)
        positions.append((begin, end))
        while content:
            content = content[os.pwrite(file, content, end - len(content)) :]
        begin = end
    return _Packed(skeleton.getvalue(), positions)


def _unpack(packed: _Packed, file: int) -> Any:
    """Each tensor in memory of its own, which goes when the tensor does."""
    buffers = [_read(file, *position) for position in packed.positions]
    return pickle.loads(packed.content, buffers=buffers)  # noqa: S301 - from a child of this process


def _read(file: int, begin: int, end: int) -> memoryview:
    content = rest = np.empty(end - begin, dtype=np.uint8).data
    while rest:
        rest = rest[os.preadv(file, [rest], end - len(rest)) :]
    return content
