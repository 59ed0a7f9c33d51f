"""One client per core of a CPU: one thread of arithmetic each, longest client first, channels last in memory.

The networks of federated learning are small: two threads in one convolution wait for each other more than they
compute; two clients on one thread each do not. The hooks and their order are the sequential engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Work
from fedrane.data.federation import Federation
from fedrane.engines import replay
from fedrane.engines.replay import overwrite, tensors
from fedrane.engines.sequential import Sequential, not_replayed
from fedrane.engines.static_step import StaticStep
from fedrane.task import Batch, Context

T = TypeVar("T")
AHEAD = 4
"""Results of each worker that may wait for one that comes before them in a sum."""


class Threaded(Sequential):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        super().__init__(algorithm, federation)
        self.threads = torch.get_num_threads()
        self.idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(self.threads):
            self.idle.put(Worker(algorithm, federation))

    def each(self, work: Callable[[Sequential, int], T], items: Sequence[int], sizes: Sequence[int]) -> list[T]:
        longest_first = sorted(range(len(items)), key=lambda position: -sizes[position])
        return list(self._submitted(work, items, longest_first, len(items)))

    def in_order(self, work: Callable[[Sequential, int], T], items: Sequence[int]) -> Generator[T, None, None]:
        return self._submitted(work, items, range(len(items)), AHEAD * self.threads)

    def _submitted(
        self, work: Callable[[Sequential, int], T], items: Sequence[int], order: Sequence[int], ahead: int
    ) -> Generator[T, None, None]:
        def one(position: int) -> T:
            worker = self.idle.get()
            try:
                return work(worker, items[position])
            finally:
                self.idle.put(worker)

        before = torch.get_num_threads()
        with ThreadPoolExecutor(self.threads, "client", _one_thread) as pool:
            try:
                yield from submitted(lambda position: pool.submit(one, position), order, ahead)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                torch.set_num_threads(before)  # for threads that others start later


def submitted(submit: Callable[[int], Future[T]], order: Sequence[int], ahead: int) -> Iterator[T]:
    """The results of all positions, from the first; they are submitted in this order, ``ahead`` of the one that is next
    at most. So many are there at a time."""
    futures: dict[int, Future[T]] = {}
    for position in range(len(order)):
        while len(futures) + position < min(position + ahead, len(order)):
            following = order[len(futures) + position]
            futures[following] = submit(following)
        yield futures.pop(position).result()


class Worker(Sequential):
    """With a network of its own: while it computes, its modules hold the parameters of one client."""

    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        parts = {name: copy.deepcopy(part) for name, part in federation.task.parts.items()}
        super().__init__(algorithm, replace(federation, task=replace(federation.task, parts=parts)))
        self.client = _StaticClient(self)
        self.records = federation.task.device.type == "cpu"  # whether steps on full batches are recorded

    def begin(self, ctx: Context) -> Work:
        work: Work = pytree.tree_map_only(Tensor, channels_last, super().begin(ctx))
        return work

    def step(self, ctx: Context, work: Work, examples: Tensor, key: Tensor) -> Work:
        if len(examples) != self.federation.batch or not self._load(ctx, work):
            return super().step(ctx, self._cloned(work), examples, key)
        done = self.client.step(examples, key)
        self.records = done and not self.client.static.plain
        self.message = self.message or not_replayed(self.algorithm, self.client.static.refused)
        if not done:
            return super().step(ctx, self._cloned(work), examples, key)
        after: Work = self.client.work
        return after

    def finish(self, ctx: Context, work: Work) -> Done:
        done: Done = pytree.tree_map_only(Tensor, tree.as_saved, super().finish(ctx, self._cloned(work)))
        return done

    def _load(self, ctx: Context, work: Work) -> bool:
        """Whether this client is in the static buffers now; it is not where steps cannot be recorded."""
        if not self.records:
            return False
        if work is not self.client.work:
            if not _StaticClient.possible(ctx, work):
                return False
            self.client.load(ctx, work)
        return True

    def _cloned(self, work: Work) -> Work:
        """The work as a copy, if it is in the static buffers, which the next client overwrites."""
        if work is self.client.work:
            work = pytree.tree_map_only(Tensor, torch.clone, work)
        if not self.records and self.client.work is not None:  # the buffers are not used again
            self.client = _StaticClient(self)
        return work

    def batch(self, examples: Tensor, key: Tensor) -> Batch:
        batch = super().batch(examples, key)
        return batch._replace(x=channels_last(batch.x))


class _StaticClient:
    """Static buffers for one client after another while it trains, so that a step on a full batch is recorded once."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.static = worker, StaticStep(worker.federation.task.device)
        self.ctx: Context
        self.work: Any = None  # of the client that is loaded
        self.examples = torch.zeros(worker.federation.batch, dtype=torch.int64)
        self.key = torch.zeros((), dtype=torch.int64)

    @staticmethod
    def possible(ctx: Context, work: Work) -> bool:
        """Without objects that cannot be compared, without a gradient's history, and not too much to hold twice."""
        leaves, numbers = pytree.tree_leaves((ctx, work)), tensors((ctx, work))
        plain = all(isinstance(leaf, Tensor | int | float | str) for leaf in leaves)
        small = sum(n.nbytes for n in numbers) <= replay.MAX_RECORDED_BYTES
        return plain and not any(n.requires_grad for n in numbers) and small

    def load(self, ctx: Context, work: Work) -> None:
        def allocate() -> list[Tensor]:
            self.ctx, self.work = pytree.tree_map_only(Tensor, torch.empty_like, (ctx, work))
            return tensors((self.ctx, self.work))

        self.static.load(tensors((ctx, work)), _layout((ctx, work)), allocate)

    def step(self, examples: Tensor, key: Tensor) -> bool:
        """Done, if what comes out has the layout of what was there."""
        self.examples.copy_(examples)
        self.key.copy_(key)
        self.static.run(self._step, writes=tensors(self.work))
        return self.alike

    def _step(self) -> None:
        after = Sequential.step(self.worker, self.ctx, self.work, self.examples, self.key)
        self.alike = _layout(after) == _layout(self.work)
        if self.alike:
            overwrite(tensors(self.work), tensors(after))


def _layout(tree: Any) -> list[Any]:
    """Two trees of one layout differ in the values of their tensors alone."""
    leaves, shape = pytree.tree_flatten(tree)

    def of(leaf: Any) -> tuple[Any, ...]:
        return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)

    return [shape, *(of(leaf) for leaf in leaves)]


def _one_thread() -> None:
    torch.zeros(1).add_(1)  # a thread takes the process's number of threads when it first computes, so not after this
    torch.set_num_threads(1)


def channels_last(value: Tensor) -> Tensor:
    """An image or a convolution's weight in the memory layout of the library's fast paths. With a single channel both
    layouts are the same memory, and only the strides show which is meant."""
    if value.dim() != 4:
        return value
    _, channels, height, width = value.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return value.contiguous(memory_format=torch.channels_last).as_strided(value.shape, strides)
