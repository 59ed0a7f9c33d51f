"""A matrix by factors does what the matrix does."""

from __future__ import annotations

import numpy as np
import pytest

from fedrane.ops import matrices
from fedrane.ops.matrices import Dense, Factored

CLIENTS, COLUMNS = 60, 7


def problem() -> tuple[Factored, np.ndarray, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    factor, gradient = draws.normal(size=(CLIENTS, COLUMNS)), draws.normal(size=CLIENTS)
    return Factored(factor), draws.uniform(0.1, 3, CLIENTS), draws.uniform(0.1, 3, CLIENTS), gradient


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("block", [COLUMNS, 16 * COLUMNS, 1 << 20], ids=lambda size: f"{size // COLUMNS} rows")
def test_factors_are_the_matrix(monkeypatch: pytest.MonkeyPatch, ridge: float, block: int) -> None:
    """Products, sums of rows, all elements, and Newton's step; also in small blocks."""
    monkeypatch.setattr(matrices, "BLOCK_SIZE", block)
    factored, x, w, gradient = problem()
    array = factored.factor @ factored.factor.T + ridge * np.eye(CLIENTS)
    factored = factored.ridged(ridge / 3).ridged(2 * ridge / 3)
    np.testing.assert_allclose(factored.dense(), array, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(factored.times(x), array @ x, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(factored.row_sums(), array.sum(1), rtol=1e-12, atol=1e-11)
    move = np.linalg.solve(x[:, None] * array * x + np.diag(w), -gradient)
    for matrix in (factored, Dense(array)):
        found = matrix.newton(x, w, gradient)
        assert found is not None
        np.testing.assert_allclose(found, move, rtol=1e-9, atol=1e-11)


def test_a_step_that_rounding_spoils_is_none() -> None:
    """The weights of the diagonal vanish beside the matrix: not positive definite, or not a descent."""
    factored, x, w, gradient = problem()
    assert Dense(factored.dense()).newton(1e12 * x, w, gradient) is None
    assert Factored(np.ones((4, 1))).newton(np.full(4, 2.0**40), np.ones(4), np.ones(4)) is None
