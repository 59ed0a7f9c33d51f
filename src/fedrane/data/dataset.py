"""The dataset type that every reader returns: all examples in memory, as stored, with their normalisation constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.data.columns import Table
from fedrane.errors import DataError

REGRESSION = "regression"
CLASSES_ONLY = f"Numbers are predicted from a table, with task={REGRESSION}; or group them into classes"
"""What to do about labels that are measurements."""


@dataclass(frozen=True)
class Target:
    """A number that is predicted: by its mean and deviation over training examples, the network's has 0 and 1."""

    mean: float
    std: float

    @classmethod
    def of(cls, y: NDArray[np.float64]) -> Target:
        return cls(float(y.mean()), float(y.std()))

    def standardised(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        return (y - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training examples, to be split over the clients, and the official test set.

    Images are ``uint8`` of shape (examples, channels, height, width). Tables are ``float32`` of shape (examples,
    columns). ``mean`` and ``std`` are per channel, of pixels scaled to [0, 1], or per column of a table. With a
    ``vocabulary``, inputs are whole numbers of shape (examples, length), which are not normalised: ``mean`` and ``std``
    are empty.

    Labels are the numbers of classes, int64. Without classes they are real numbers to predict, float64: regression.
    """

    name: str
    x: NDArray[np.generic]
    y: NDArray[Any]
    x_test: NDArray[np.generic]
    y_test: NDArray[Any]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    client: NDArray[np.int64] | None = field(default=None)
    """The client, 0 … K − 1, of each training example; None if the data name no clients."""
    table: Table | None = field(default=None)
    """The names and categories of a table's columns; None for images, and for tables whose columns have no names."""
    options: Mapping[str, str] = field(default_factory=dict)
    """How the table was read: the experiment's keys for tables. Empty if it was not read by them."""
    notes: tuple[str, ...] = ()
    """What the user should know about how they were read."""
    vocabulary: int = 0
    """Inputs are numbers from 0 to ``vocabulary`` − 1, for an embedding; 0 if they are quantities."""
    alphabet: str = ""
    """Of a text: its characters, in the order of their numbers; empty for other data."""

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise DataError(f"{self.name}: {len(x)} {part} inputs but {len(y)} labels", "each input needs a label")
            if len(x) == 0:
                raise DataError(f"{self.name}: no {part} examples", "nothing can be trained or evaluated")
            if not self.classes:
                self._check_numbers_to_predict(part, y)
            elif y.min() < 0 or y.max() >= len(self.classes):
                raise DataError(
                    f"{self.name}: {part} labels from {y.min()} to {y.max()}",
                    f"there are {len(self.classes)} classes, numbered from 0",
                )
        if self.client is not None and len(self.client) != len(self.y):
            raise DataError(f"{self.name}: {len(self.client)} client entries for {len(self.y)} examples")
        if self.vocabulary:
            self._check_numbers()
            return
        images = self.x.dtype == np.uint8 and self.x.ndim == 4
        table = self.x.dtype == np.float32 and self.x.ndim == 2
        if not (images or table) or self.x_test.dtype != self.x.dtype or self.x_test.shape[1:] != self.x.shape[1:]:
            raise DataError(
                f"{self.name}: training examples of {self.x.dtype} {self.x.shape[1:]} and test examples of "
                f"{self.x_test.dtype} {self.x_test.shape[1:]}",
                "both must be uint8 images (channels, height, width) or float32 tables (columns), of the same shape",
            )
        if not len(self.mean) == len(self.std) == self.x.shape[1]:
            raise DataError(f"{self.name}: {len(self.mean)} means for {self.x.shape[1]} channels or columns")
        if self.table is not None and self.shape != (self.table.width,):
            raise DataError(
                f"{self.name}: inputs of shape {self.shape}", f"its columns make {self.table.width} numbers"
            )

    def _check_numbers_to_predict(self, part: str, y: NDArray[Any]) -> None:
        if y.dtype != np.float64 or not np.isfinite(y).all():
            raise DataError(
                f"{self.name}: {part} labels of {y.dtype}" + (", not all finite" if y.dtype == np.float64 else ""),
                "without classes, labels are the numbers to predict: finite, of float64",
                "Convert them, y.astype(float), or name the classes",
            )
        if y.min() == y.max():
            raise DataError(
                f"{self.name}: all {part} labels are {y[0]}", "what is always the same need not be predicted", ""
            )

    @cached_property
    def target(self) -> Target | None:
        """The number that is predicted; None if classes are. Of the training examples alone."""
        return None if self.classes else Target.of(self.y)

    def _check_numbers(self) -> None:
        """Raise an error unless the inputs are sequences of numbers of the vocabulary; store them in few bytes."""
        for what in ("x", "x_test"):
            object.__setattr__(self, what, as_numbers(getattr(self, what), self.vocabulary, f"{self.name}: {what}"))
        if self.x.shape[1] != self.x_test.shape[1]:
            raise DataError(
                f"{self.name}: training inputs of length {self.x.shape[1]} and test inputs of {self.x_test.shape[1]}",
                "all have the same length",
                "Cut or pad them",
            )
        if self.mean or self.std or self.table is not None:
            raise DataError(
                f"{self.name}: mean, std or a table with a vocabulary",
                "its inputs are numbers of words or characters, which have no mean",
                "Give empty tuples and no table",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])


def as_numbers(x: NDArray[np.generic], vocabulary: int, what: str) -> NDArray[np.generic]:
    """Return sequences of numbers of a vocabulary, (examples, length), as they are stored: in as few bytes as can be.

    They are converted to int64 only when they are used.
    """
    if x.dtype.kind not in "iu" or x.ndim != 2 or 0 in x.shape:
        raise DataError(
            f"{what} is {x.dtype} {x.shape}",
            "with a vocabulary, inputs are whole numbers (examples, length)",
            "Convert them, x.astype(int), or leave the vocabulary out",
        )
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"{what} has numbers from {low} to {high}",
            f"the vocabulary has {vocabulary}, numbered from 0",
            f"Set vocabulary={high + 1} or more" if low >= 0 else "Number the words or characters from 0",
        )
    return x.astype(next(kind for kind in (np.uint8, np.int16, np.int32, np.int64) if high <= np.iinfo(kind).max))


_HELD_OUT_KEY = 0x46656452414E45
"""The key of the random stream that chooses the test set. It is fixed, so every experiment has the same test set."""


def hold_out(y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Choose a test set for data that come without one: a fifth of each class, at least one example of two or more.

    The choice depends only on the labels and their order, not on an experiment's seed or the version of NumPy.
    """
    draws = np.random.Philox(key=_HELD_OUT_KEY).random_raw(len(y))
    held = np.zeros(len(y), dtype=np.bool_)
    for label in np.unique(y):
        examples = np.flatnonzero(y == label)
        if len(examples) > 1:
            shuffled = examples[np.argsort(draws[examples], kind="stable")]
            held[shuffled[: max(1, round(len(examples) / 5))]] = True
    return held


def hold_out_of_clients(y: NDArray[np.int64], clients: NDArray[np.int64] | None, where: str) -> NDArray[np.bool_]:
    """Choose the test examples; every client keeps at least one to train on."""
    held = hold_out(y)
    if clients is not None:
        different, first = np.unique(clients, return_index=True)
        without_training = np.bincount(clients[~held], minlength=len(different)) == 0
        held[first[without_training]] = False
    if not held.any():
        raise DataError(
            f"{where}: no example can be held out for testing",
            "a fifth of each class with two or more examples is held out",
            "Give a test set, or more examples",
        )
    return held


def moments(x: NDArray[np.generic]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel (of pixels in [0, 1]) or column; 1 for a constant one."""
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    means, deviations = [], []
    for channel in range(x.shape[1]):  # one at a time, to keep the float64 copy small
        values = x[:, channel].astype(np.float64)
        values /= scale
        means.append(float(values.mean()))
        # Compared exactly: rounding gives a constant column a tiny deviation, and nothing should be divided by that.
        deviations.append(float(values.std()) if values.min() < values.max() else 1.0)
    return tuple(means), tuple(deviations)
