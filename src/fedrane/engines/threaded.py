"""Clients on the cores of a CPU: one thread of arithmetic each, longest client first, channels last in memory.

The networks of federated learning are small: two threads in one convolution wait for each other more than they
compute, where two clients on one thread each do not. The hooks and their order are the sequential engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Work
from fedrane.engines import recording
from fedrane.engines.recording import Recording, overwrite, tensors
from fedrane.engines.sequential import Sequential
from fedrane.federation import Federation
from fedrane.task import Batch, Context

T = TypeVar("T")


class Threaded(Sequential):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        super().__init__(algorithm, federation)
        self.threads = torch.get_num_threads()
        self.idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(self.threads):
            self.idle.put(Worker(algorithm, federation))

    def each(self, work: Callable[[Sequential, int], T], items: Sequence[int], sizes: Sequence[int]) -> list[T]:
        def one(place: int) -> T:
            worker = self.idle.get()
            try:
                return work(worker, items[place])
            finally:
                self.idle.put(worker)

        before = torch.get_num_threads()
        with ThreadPoolExecutor(self.threads, "client", _one_thread) as pool:
            longest_first = sorted(range(len(items)), key=lambda place: -sizes[place])
            futures = {place: pool.submit(one, place) for place in longest_first}
            try:
                return [futures[place].result() for place in range(len(items))]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                torch.set_num_threads(before)  # for threads that others start later


class Worker(Sequential):
    """With a network of its own: while it computes, its modules hold the parameters of one client."""

    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        parts = {name: copy.deepcopy(part) for name, part in federation.task.parts.items()}
        super().__init__(algorithm, replace(federation, task=replace(federation.task, parts=parts)))
        self.desk: _Desk | None = None
        self.records = federation.task.device.type == "cpu"  # what recordings know

    def begin(self, ctx: Context) -> Work:
        work: Work = pytree.tree_map_only(Tensor, channels_last, super().begin(ctx))
        return work

    def step(self, ctx: Context, work: Work, rows: Tensor, key: Tensor) -> Work:
        desk = self._desk_for(ctx, work) if len(rows) == self.federation.batch else None
        if desk is None:
            return super().step(ctx, self._taken_up(work), rows, key)
        done = desk.step(rows, key)
        self.records = done and not desk.recording.given_up
        if done:
            return desk.work
        work, self.desk = self._taken_up(work), None
        return super().step(ctx, work, rows, key)

    def finish(self, ctx: Context, work: Work) -> Done:
        done: Done = pytree.tree_map_only(Tensor, tree.as_saved, super().finish(ctx, self._taken_up(work)))
        return done

    def _desk_for(self, ctx: Context, work: Work) -> _Desk | None:
        """With this client laid on it; none if steps cannot be recorded."""
        if self.desk and work is self.desk.work and self.records:
            return self.desk
        if not (self.records and _Desk.possible(ctx, work)):
            return None
        if self.desk is None or self.desk.kind != _kind((ctx, work)):
            self.desk = _Desk(self, ctx, work)
        self.desk.lay(ctx, work)
        return self.desk

    def _taken_up(self, work: Work) -> Work:
        """What lies on the desk as tensors of its own, since others will lie there."""
        if self.desk and work is self.desk.work:
            work = pytree.tree_map_only(Tensor, torch.clone, work)
            self.desk = self.desk if self.records else None
        return work

    def batch(self, rows: Tensor, key: Tensor) -> Batch:
        batch = super().batch(rows, key)
        return batch._replace(x=channels_last(batch.x))


class _Desk:
    """Where one client after another lies while it trains, so that a step on a full batch is recorded once."""

    def __init__(self, worker: Worker, ctx: Context, work: Work) -> None:
        self.kind, work_kind = _kind((ctx, work)), _kind(work)
        self.ctx: Context
        self.work: Work
        self.ctx, self.work = pytree.tree_map_only(Tensor, torch.empty_like, (ctx, work))
        self.rows = torch.zeros(worker.federation.batch, dtype=torch.int64)
        self.key = torch.zeros((), dtype=torch.int64)

        def step() -> None:
            after = Sequential.step(worker, self.ctx, self.work, self.rows, self.key)
            self.alike = _kind(after) == work_kind
            if self.alike:
                overwrite(tensors(self.work), tensors(after))

        self.recording = Recording(step, tensors(self.work))

    @staticmethod
    def possible(ctx: Context, work: Work) -> bool:
        """Without objects that cannot be compared, without a gradient's past, and not too much to hold twice."""
        leaves, numbers = pytree.tree_leaves((ctx, work)), tensors((ctx, work))
        plain = all(isinstance(leaf, Tensor | int | float | str) for leaf in leaves)
        return plain and not any(n.requires_grad for n in numbers) and sum(n.nbytes for n in numbers) <= recording.MOST

    def lay(self, ctx: Context, work: Work) -> None:
        torch._foreach_copy_(tensors((self.ctx, self.work)), tensors((ctx, work)))

    def step(self, rows: Tensor, key: Tensor) -> bool:
        """Done, if what comes out is of a kind with what was there."""
        self.rows.copy_(rows)
        self.key.copy_(key)
        self.recording.replay()
        return self.alike


def _kind(tree: Any) -> list[Any]:
    """Two trees of one kind differ in the numbers of their tensors alone."""
    leaves, shape = pytree.tree_flatten(tree)

    def kind(leaf: Any) -> tuple[Any, ...]:
        return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)

    return [shape, *(kind(leaf) for leaf in leaves)]


def _one_thread() -> None:
    torch.zeros(1).add_(1)  # a thread takes the process's number of threads when it first computes, so not after this
    torch.set_num_threads(1)


def channels_last(value: Tensor) -> Tensor:
    """As the library's fast paths want an image or a convolution's weight to lie; one of a single channel, which lies
    both ways at once, must say so by its strides."""
    if value.dim() != 4:
        return value
    _, channels, height, width = value.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return value.contiguous(memory_format=torch.channels_last).as_strided(value.shape, strides)
