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
    """Products, all elements, and Newton's step; also in small blocks."""
    monkeypatch.setattr(matrices, "BLOCK_SIZE", block)
    factored, x, w, gradient = problem()
    array = factored.factor @ factored.factor.T + ridge * np.eye(CLIENTS)
    factored = factored.ridged(ridge / 3).ridged(2 * ridge / 3)
    np.testing.assert_allclose(factored.dense(), array, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(factored.times(x), array @ x, rtol=1e-12, atol=1e-11)
    move = np.linalg.solve(x[:, None] * array * x + np.diag(w), -gradient)
    for matrix in (factored, Dense(array)):
        found = matrix.newton(x, w, gradient)
        assert found is not None
        np.testing.assert_allclose(found, move, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alike", [True, False])
def test_a_start_is_near_the_end(alike: bool) -> None:
    """The powers are met to a tenth; of equal or of perpendicular clients it is the solution."""
    draws = np.random.default_rng(1)
    w = draws.uniform(0.1, 3, 50)
    factor = np.ones((50, 2)) / np.sqrt(2) if alike else draws.normal(size=(50, 9)) + 2
    factored = Factored(factor / np.linalg.norm(factor, axis=1, keepdims=True))
    x = factored.start(w)
    np.testing.assert_allclose(x * factored.times(x), w, rtol=0.1)
    np.testing.assert_allclose(Factored(np.eye(50)).start(w), np.sqrt(w), rtol=1e-12)
    for matrix in (Dense(np.ones((50, 50))), Factored(np.ones((50, 1)))):
        np.testing.assert_allclose(matrix.start(np.ones(50)), np.full(50, 50**-0.5), rtol=1e-12)


def test_a_step_that_rounding_spoils_is_none() -> None:
    """The weights of the diagonal vanish beside the matrix: not positive definite, or not a descent."""
    factored, x, w, gradient = problem()
    assert Dense(factored.dense()).newton(1e12 * x, w, gradient) is None
    assert Factored(np.ones((4, 1))).newton(np.full(4, 2.0**40), np.ones(4), np.ones(4)) is None
