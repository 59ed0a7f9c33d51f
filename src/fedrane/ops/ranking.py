"""How well the scores of a model separate two classes, at all thresholds together and at a fixed specificity."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SPECIFICITY = 95
"""In per cent; it is in the name of the measure."""


class Ranking(NamedTuple):
    """Measures of how high the positive examples are ranked among all. Each is from 0 to 1."""

    auroc: float
    """The area under the ROC curve: the probability that a positive example has a higher score than a negative one; a
    tie is half of it."""
    auprc: float
    """The average precision: the sum of the precisions at all thresholds, each times the increase of the recall. The
    curve is not interpolated, which would be too optimistic (Davis and Goadrich, ICML 2006)."""
    sensitivity_at_specificity_95: float
    """The highest sensitivity of the thresholds whose specificity is at least 95 %, without interpolation."""


def ranking(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> Ranking | None:
    """Return the measures of these scores, of which the positive examples should have the higher; equal scores share
    one threshold. None without examples of both classes.

    >>> ranking(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True])).auroc
    0.875
    """
    _, group = np.unique(-scores, return_inverse=True)  # the highest score first
    hits = np.bincount(group, positive).astype(np.int64)
    true = np.cumsum(hits)  # positives found with each threshold
    false = np.cumsum(np.bincount(group)) - true
    if not len(scores) or not true[-1] or not false[-1]:
        return None
    positives, negatives = int(true[-1]), int(false[-1])
    pairs = np.diff(false, prepend=0) * (2 * true - hits)  # twice the pairs won by the positive example
    allowed = 100 * (negatives - false) >= SPECIFICITY * negatives
    return Ranking(
        float(pairs.sum() / (2 * positives * negatives)),
        float((hits * (true / (true + false))).sum() / positives),
        float(true[allowed].max(initial=0) / positives),
    )
