"""Clients on the cores of a CPU: one thread of arithmetic each, longest client first, channels last in memory.

The networks of federated learning are small: two threads in one convolution wait for each other more than they
compute, where two clients on one thread each do not. The hooks and their order are the sequential engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedrane.algorithm import Algorithm, Work
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

        with ThreadPoolExecutor(self.threads, "client", _one_thread) as pool:
            longest_first = sorted(range(len(items)), key=lambda place: -sizes[place])
            futures = {place: pool.submit(one, place) for place in longest_first}
            try:
                return [futures[place].result() for place in range(len(items))]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                torch.set_num_threads(self.threads)  # for threads that others start later


class Worker(Sequential):
    """With a network of its own: while it computes, its modules hold the parameters of one client."""

    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        parts = {name: copy.deepcopy(part) for name, part in federation.task.parts.items()}
        super().__init__(algorithm, replace(federation, task=replace(federation.task, parts=parts)))

    def begin(self, ctx: Context) -> Work:
        work: Work = pytree.tree_map_only(Tensor, channels_last, super().begin(ctx))
        return work

    def batches(self, k: int, round: int, epochs: int) -> Iterator[Batch]:
        for batch in super().batches(k, round, epochs):
            yield batch._replace(x=channels_last(batch.x))


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
