"""The clients and their data on the device: what an engine trains a method on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane.data import class_counts, sampling
from fedrane.data.augment import Augmentation, Augmenter
from fedrane.data.dataset import Dataset, Target
from fedrane.data.partition import Split
from fedrane.data.sampling import Span
from fedrane.task import Batch, Client, Roster, Task


@dataclass(frozen=True, eq=False)
class Normaliser:
    """Turns stored examples into network inputs: pixels to [0, 1], then mean 0 and deviation 1 by fixed constants.

    Numbers of a vocabulary are passed on as they are, as int64.
    """

    scale: Tensor
    shift: Tensor
    vocabulary: int = 0

    @classmethod
    def of(cls, dataset: Dataset, dtype: torch.dtype, device: torch.device) -> Normaliser:
        image = len(dataset.shape) == 3
        return cls.from_constants(dataset.mean, dataset.std, image, dtype, device, dataset.vocabulary)

    @classmethod
    def from_constants(
        cls,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        image: bool,
        dtype: torch.dtype,
        device: torch.device,
        vocabulary: int = 0,
    ) -> Normaliser:
        m, s = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        scale, shift = (1 / (255 * s), m / s) if image else (1 / s, m / s)
        shape = (1, -1, 1, 1) if image else (1, -1)
        scale, shift = (t.reshape(shape).to(device=device, dtype=dtype) for t in (scale, shift))
        return cls(scale, shift, vocabulary)

    def __call__(self, examples: Tensor) -> Tensor:
        if self.vocabulary:
            return examples.long()
        return examples.to(self.scale.dtype) * self.scale - self.shift


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of the training or test set, stored on the device and normalised there when they are used."""

    x: Tensor
    y: Tensor
    normalise: Normaliser

    @classmethod
    def of(cls, x: NDArray[Any], y: NDArray[Any], normalise: Normaliser, target: Target | None = None) -> Pool:
        """Labels are class numbers; numbers to predict are standardised."""
        device = normalise.scale.device
        labels = torch.from_numpy(y if target is None else target.standardised(y))
        kept = labels.to(device=device, dtype=None if target is None else normalise.scale.dtype)
        return cls(torch.from_numpy(x).to(device), kept, normalise)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, examples: Tensor | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of these examples, in the shape of their indices."""
        index = torch.as_tensor(examples).to(self.y.device)
        inputs = self.normalise(self.x[index.flatten()])
        return inputs.reshape(*index.shape, *inputs.shape[1:]), self.y[index]


@dataclass(frozen=True, eq=False)
class Federation:
    """A task, its data and their split over the clients."""

    task: Task
    train: Pool
    test: Pool
    split: Split
    batch: int
    seed: int
    augment: Augmentation = Augmentation()  # noqa: RUF009 - it is frozen
    augmenter: Augmenter = field(init=False)
    """Created here and not at its first use, which engines record."""

    def __post_init__(self) -> None:
        self.augment.check(tuple(self.train.x.shape[1:]), self.task.vocabulary)
        object.__setattr__(self, "augmenter", Augmenter.of(self.augment, self.task.device, self.task.dtype))

    @classmethod
    def of(
        cls,
        task: Task,
        dataset: Dataset,
        split: Split,
        batch: int,
        seed: int,
        augment: Augmentation = Augmentation(),  # noqa: B008 - it is frozen
    ) -> Federation:
        normalise = Normaliser.of(dataset, task.dtype, task.device)
        both = (dataset.x, dataset.y), (dataset.x_test, dataset.y_test)
        train, test = (Pool.of(x, y, normalise, task.target) for x, y in both)
        # No batch is larger than the largest client: a batch of 10,000 means "all examples", not 9,000 of padding.
        longest = max(len(examples) for examples in split.train)
        return cls(task, train, test, split, min(batch, longest), seed, augment)

    @property
    def population(self) -> int:
        return len(self.split.train)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The number of training examples of each client and class: (clients, classes); one column without classes."""
        return class_counts.of_examples(self.split.train, self.train.y.cpu().numpy(), self.task.classes)

    @cached_property
    def roster(self) -> Roster:
        sizes = [len(examples) for examples in self.split.train]
        return Roster(torch.tensor(sizes, dtype=torch.int64, device=self.task.device))

    def training_batch(self, examples: Tensor, mask: Tensor, key: Tensor, augmented: bool, full: bool = False) -> Batch:
        """Return the batch of a step, or of one step of several clients stacked.

        ``augmented`` is true for steps that train; they are augmented as the experiment is configured.
        """
        pool, mixed = self.train, None
        if augmented and self.augmenter.moves:
            x, y = pool.normalise(self.augmenter.move(pool.x, examples, key)), pool.y[examples]
        else:
            x, y = pool.take(examples)
        if augmented and self.augmenter.mixes:
            x, mixed = self.augmenter.mix(x, y, mask, key)
        return Batch(x, y, mask, key, full, mixed)

    def batches(self, round: int, clients: Sequence[int], epochs: Span) -> dict[int, sampling.Batches]:
        sizes = {client: len(self.split.train[client]) for client in clients}
        return sampling.batches(self.seed, round, sizes, self.batch, epochs)

    def examples_trained(self, clients: Sequence[int], epochs: Span) -> int:
        """On how many examples these clients train in a round, padding not counted."""
        return sum(sampling.examples_trained(len(self.split.train[k]), self.batch, epochs) for k in clients)

    def client(self, index: int, round: int, lr: float, epochs: Span) -> Client:
        return each_of(self.cohort([index], round, lr, epochs))[0]

    def cohort(self, clients: list[int], round: int, lr: float, epochs: Span) -> Client:
        """Return these clients, stacked, with what each knows about itself in a round."""
        steps = [sampling.local_steps(len(self.split.train[k]), self.batch, epochs) for k in clients]
        return describe(self.task, clients, self.labels, round, lr, steps)


def describe(
    task: Task,
    clients: list[int],
    labels: NDArray[np.int64],
    round: int,
    lr: float = 0.0,
    steps: list[int] | None = None,
) -> Client:
    """Return these clients, stacked, with what each knows about itself; ``labels`` are the class counts of all."""
    numbers = np.stack([clients, labels[clients].sum(1), steps or [0] * len(clients), [round] * len(clients)])
    index, size, step_count, round_of = torch.from_numpy(numbers).to(task.device)
    return Client(
        index=index,
        size=size,
        labels=torch.from_numpy(labels[clients]).to(device=task.device, dtype=task.dtype),
        steps=step_count,
        round=round_of,
        lr=torch.full((len(clients),), lr, dtype=task.dtype, device=task.device),
        population=len(labels),
    )


def each_of(cohort: Client) -> list[Client]:
    """Return the single clients of a stack."""
    columns = (value.unbind() if isinstance(value, Tensor) else repeat(value) for value in cohort)
    return [Client(*values) for values in zip(*columns, strict=False)]
