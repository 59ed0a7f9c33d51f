"""The matrix of a bargain as Newton's method needs it: with all its elements, or as a product of few columns.

>>> x = np.array([1.0, 2.0])
>>> factor = np.array([[3.0], [4.0]])
>>> Factored(factor).times(x), Dense(factor @ factor.T).times(x)
(array([33., 44.]), array([33., 44.]))
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
BLOCK_SIZE = 1 << 20
"""Elements of a factor that are scaled at a time, so that it is never copied as a whole."""

SWEEPS = 8
"""Of all clients, before Newton's method by factors."""


class Matrix(Protocol):
    """A symmetric, positive semi-definite matrix M with ones on its diagonal."""

    def times(self, x: Array) -> Array:
        """M x."""

    def start(self, w: Array) -> Array:
        """Where Newton's method may begin: near the x with x (M x) = w."""

    def ridged(self, ridge: float) -> Matrix:
        """M + ridge · 1."""

    def newton(self, x: Array, w: Array, gradient: Array) -> Array | None:
        """The solution of (diag(x) M diag(x) + diag(w)) move = −gradient, or None if rounding errors allow none."""

    def dense(self) -> Array:
        """All elements."""


class Dense(NamedTuple):
    """A matrix with all its elements. Newton's step takes K³ / 3 operations, and K² numbers."""

    array: Array

    def times(self, x: Array) -> Array:
        product: Array = self.array @ x
        return product

    def start(self, w: Array) -> Array:
        """Exact if all deviations are equal."""
        first: Array = np.sqrt(w / np.maximum(self.array.clip(min=0).sum(1), 1.0))
        return first

    def ridged(self, ridge: float) -> Dense:
        return Dense(self.array + ridge * np.eye(len(self.array)))

    def newton(self, x: Array, w: Array, gradient: Array) -> Array | None:
        hessian = x[:, None] * self.array * x
        hessian[np.diag_indices(len(w))] += w
        return _solve(hessian, -gradient)

    def dense(self) -> Array:
        return self.array


class Factored(NamedTuple):
    """FFᵀ + ridge · 1, for a factor of K rows and m < K columns. Newton's step takes K m² operations, and m² numbers:
    by Woodbury's identity, with D = w + ridge x² and U = diag(x) F,

        (D + UUᵀ)⁻¹ = D⁻¹ − D⁻¹U (1 + UᵀD⁻¹U)⁻¹ UᵀD⁻¹
    """

    factor: Array
    ridge: float = 0.0

    def times(self, x: Array) -> Array:
        product: Array = self.factor @ (self.factor.T @ x) + self.ridge * x
        return product

    def start(self, w: Array) -> Array:
        """Half way, again and again, to what each client would answer to the others: x² + x (M x − x)_k = w. A sweep
        takes a tenth of the time of Newton's step, and all together save half of the steps."""
        x: Array = np.sqrt(w / np.maximum(self.times(np.ones(len(w))), 1.0))
        for _ in range(SWEEPS):
            others = self.times(x) - x
            root = np.sqrt(others**2 + 4 * w) + np.abs(others)
            x = np.sqrt(x * np.where(others > 0, 2 * w / root, root / 2))
        return x

    def ridged(self, ridge: float) -> Factored:
        return Factored(self.factor, self.ridge + ridge)

    def newton(self, x: Array, w: Array, gradient: Array) -> Array | None:
        diagonal, (rows, columns) = w + self.ridge * x**2, self.factor.shape
        factor, scale = (torch.from_numpy(a) for a in (self.factor, (x / np.sqrt(diagonal))[:, None]))
        inner = torch.eye(columns, dtype=factor.dtype)
        height = max(1, BLOCK_SIZE // columns)
        for begin in range(0, rows, height):
            block = factor[begin : begin + height] * scale[begin : begin + height]
            inner += block.T @ block  # torch's product takes half the time of NumPy's
        share = _solve(inner.numpy(), self.factor.T @ (x * gradient / diagonal))
        if share is None:
            return None
        move: Array = (x * (self.factor @ share) - gradient) / diagonal
        return move if gradient @ move < 0 else None

    def dense(self) -> Array:
        return Dense(self.factor @ self.factor.T).ridged(self.ridge).array


def _solve(matrix: Array, right: Array) -> Array | None:
    """By Cholesky's factorisation, of the upper triangle. None if the matrix is not positive definite."""
    from scipy.linalg.lapack import dposv  # slow to import

    _, solution, failed = dposv(matrix, right, overwrite_a=True)
    return None if failed else solution
