"""The metrics where a number is predicted: R², the root of the mean squared error, and the mean absolute error.

A client counts sums over its examples, which add up: clients and server find the same R² as one who had all examples.

R² is 1 − Σ (y − ŷ)² / Σ (y − ȳ)² over all examples together. A client may have too few examples for one of its own, so
its score in ``…/clients``, ``r2_mean``, ``r2_std`` and ``r2_worst10`` is 1 − its mean squared error / the variance of
all clients' examples; weighted by examples, the mean of these scores is R².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data.dataset import Target
from fedrane.errors import DataError

R2 = "r2"


class Residuals(NamedTuple):
    """Sums over one client's examples, of standardised numbers: all that the metrics need."""

    examples: int
    targets: float
    squares: float
    """Of the targets."""
    absolute: float
    """Of the residuals."""
    loss: float
    """Of the squares of the residuals."""

    @classmethod
    def of(cls, predicted: NDArray[np.floating[Any]], y: NDArray[np.floating[Any]]) -> Residuals:
        targets = y.astype(np.float64)
        residuals = targets - predicted
        sums = targets, targets**2, np.abs(residuals), residuals**2
        return cls(len(y), *(float(values.sum()) for values in sums))

    def without_targets(self) -> Residuals:
        """The same for one who may not know of the targets: as if they had the mean and variance of training ones."""
        return self._replace(targets=0.0, squares=float(self.examples))


def together(parts: Sequence[Residuals]) -> Residuals:
    """The sums over all examples of several clients."""
    return Residuals(*(sum(values) for values in zip(*parts, strict=True)))


def variance(of: Residuals) -> float:
    """The variance of the targets; an error if they are all the same."""
    spread = of.squares / of.examples - (of.targets / of.examples) ** 2
    if spread <= 1e-12:  # standardised by training examples, whose variance is 1
        raise DataError(
            f"all {of.examples} numbers that should be predicted are the same",
            "R² compares errors with their variance",
            "Use more examples: a larger partition.test or validation",
        )
    return spread


def overall(prefix: str, parts: Sequence[Residuals], target: Target) -> dict[str, float]:
    """Return the metrics over all examples together, the errors in the target's unit, and the loss."""
    total = together(parts)
    mean_square = total.loss / total.examples
    return {
        f"{prefix}{R2}": 1 - mean_square / variance(total),
        f"{prefix}rmse": target.std * math.sqrt(mean_square),
        f"{prefix}mae": target.std * total.absolute / total.examples,
        f"{prefix}loss": mean_square,
    }


def scores(parts: Sequence[Residuals]) -> NDArray[np.float64]:
    """The score of each client, of which R² is the mean by examples."""
    return 1 - np.array([part.loss / part.examples for part in parts]) / variance(together(parts))
