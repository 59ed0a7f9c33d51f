"""How much the clients of a partition differ: in their labels, and in their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError


@dataclass(frozen=True)
class Heterogeneity:
    """Measures of a partition.

    The divergences compare the label distribution of each client with that of all examples together.

    >>> measured = Heterogeneity.of(np.array([[30, 0], [0, 10]]))
    >>> measured.total_variation, measured.sizes, round(measured.gini, 3)
    (0.5, (10.0, 20.0, 30.0), 0.25)
    """

    sizes: tuple[float, float, float]
    """The examples of a client: fewest, median, most."""
    classes: tuple[float, float, float]
    """The classes that a client has examples of: fewest, median, most."""
    jensen_shannon: float
    """The mean over clients of the Jensen-Shannon divergence, in bits: 0 for equal distributions, at most 1."""
    total_variation: float
    """The mean over clients of the total variation distance: the fraction of a client's examples that would need
    another label to have the distribution of all."""
    gini: float
    """The Gini coefficient of the sizes: 0 if all are equal, near 1 if one client has nearly all examples."""

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Heterogeneity:
        """Measure the numbers of examples of each client and class, (clients, classes); every client needs one."""
        sizes = counts.sum(axis=1)
        if not len(sizes) or not sizes.all():
            raise DataError("a client without examples" if len(sizes) else "no clients", "it has no distribution")
        own, everyone = counts / sizes[:, None], counts.sum(axis=0) / sizes.sum()
        middle = (own + everyone) / 2
        divergences = (
            _relative_entropy(own, middle) + _relative_entropy(np.broadcast_to(everyone, own.shape), middle)
        ) / 2
        place = 2 * np.arange(1, len(sizes) + 1) - len(sizes) - 1
        return cls(
            _spread(sizes),
            _spread((counts > 0).sum(axis=1)),
            float(divergences.mean()),
            float(np.abs(own - everyone).sum(axis=1).mean() / 2),
            float((place * np.sort(sizes)).sum() / (len(sizes) * sizes.sum())),
        )

    def lines(self) -> list[str]:
        """The divergences and the inequality of sizes in words."""
        divergences = f"Jensen-Shannon {self.jensen_shannon:.3f} bits, total variation {self.total_variation:.3f}"
        return [
            f"label skew (mean over clients, from 0 to 1): {divergences}",
            f"size skew: Gini {self.gini:.3f} (from 0 to 1), largest / smallest {self.sizes[2] / self.sizes[0]:.3g}",
        ]


def _relative_entropy(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Kullback-Leibler divergence of each row, in bits; ``q`` is positive where ``p`` is."""
    ratio = np.divide(p, q, out=np.ones_like(q), where=p > 0)
    return np.asarray((p * np.log2(ratio)).sum(axis=1))


def _spread(values: NDArray[np.int64]) -> tuple[float, float, float]:
    return float(values.min()), float(np.median(values)), float(values.max())
