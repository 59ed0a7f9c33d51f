"""What every reader gives back: all rows in memory, as they were stored, with what a device needs to scale them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training rows (to be spread over clients) and the official test rows.

    Images are ``uint8`` of shape (rows, channels, height, width); tables are ``float32`` of shape (rows, columns).
    ``mean`` and ``std`` are per channel, of pixels scaled to [0, 1], or per column of a table.
    """

    name: str
    x: NDArray[np.generic]
    y: NDArray[np.int64]
    x_test: NDArray[np.generic]
    y_test: NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    client: NDArray[np.int64] | None = field(default=None)
    """Where the data come with their clients: the client, 0 … K − 1, of each training row."""

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise DataError(f"{self.name}: {len(x)} {part} inputs but {len(y)} labels", "each row needs its label")
            if len(x) == 0:
                raise DataError(f"{self.name}: no {part} rows", "nothing can be learnt or measured")
            if y.min() < 0 or y.max() >= len(self.classes):
                raise DataError(
                    f"{self.name}: {part} labels from {y.min()} to {y.max()}",
                    f"there are {len(self.classes)} classes, counted from 0",
                )
        images = self.x.dtype == np.uint8 and self.x.ndim == 4
        table = self.x.dtype == np.float32 and self.x.ndim == 2
        if not (images or table) or self.x_test.dtype != self.x.dtype or self.x_test.shape[1:] != self.x.shape[1:]:
            raise DataError(
                f"{self.name}: rows of {self.x.dtype} {self.x.shape[1:]} and test rows of {self.x_test.dtype} "
                f"{self.x_test.shape[1:]}",
                "rows are uint8 images (channels, height, width) or float32 tables (columns), alike in both parts",
            )
        if not len(self.mean) == len(self.std) == self.x.shape[1]:
            raise DataError(f"{self.name}: {len(self.mean)} means for {self.x.shape[1]} channels or columns")
        if self.client is not None and len(self.client) != len(self.y):
            raise DataError(f"{self.name}: {len(self.client)} client entries for {len(self.y)} rows")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.x.shape[1:])


_HELD_OUT_KEY = 0x46656452414E45
"""Of the stream that chooses the test rows: fixed, so that every experiment is measured on the same rows."""


def hold_out(y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows become test rows where the data come without any: a fifth of each class, at least one of two or more.

    The rule depends on the labels and their order alone, neither on an experiment's seed nor on numpy's version.
    """
    draws = np.random.Philox(key=_HELD_OUT_KEY).random_raw(len(y))
    held = np.zeros(len(y), dtype=np.bool_)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        if len(rows) > 1:
            shuffled = rows[np.argsort(draws[rows], kind="stable")]
            held[shuffled[: max(1, round(len(rows) / 5))]] = True
    return held


def moments(x: NDArray[np.generic]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel (pixels scaled to [0, 1]) or per column; 1 where nothing varies."""
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    means, deviations = [], []
    for channel in range(x.shape[1]):  # one at a time, so that the float64 copy stays small
        values = x[:, channel].astype(np.float64) / scale
        means.append(float(values.mean()))
        # Compared exactly: rounding leaves a constant column a tiny deviation, by which nothing should be divided.
        deviations.append(float(values.std()) if values.min() < values.max() else 1.0)
    return tuple(means), tuple(deviations)
