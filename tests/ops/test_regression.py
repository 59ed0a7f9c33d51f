"""The metrics of numbers: those of scikit-learn, from sums that add up over clients."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from fedrane.data.dataset import Target
from fedrane.errors import DataError
from fedrane.ops.regression import Residuals, overall, scores, together

DRAW = np.random.default_rng(5)
TARGET = Target(150.0, 70.0)
TRUE = [DRAW.normal(mean, 1, count) for mean, count in ((0.3, 40), (-1.0, 7), (2.0, 1))]
PREDICTED = [y + DRAW.normal(0.1, 0.5, len(y)) for y in TRUE]
CLIENTS = [Residuals.of(p, y) for p, y in zip(PREDICTED, TRUE, strict=True)]


def test_they_are_scikit_learn_s_over_all_clients_together() -> None:
    y, p = (TARGET.mean + TARGET.std * np.concatenate(parts) for parts in (TRUE, PREDICTED))
    measured = overall("", CLIENTS, TARGET)
    assert measured["r2"] == pytest.approx(r2_score(y, p), rel=1e-12)
    assert measured["rmse"] == pytest.approx(root_mean_squared_error(y, p), rel=1e-12)
    assert measured["mae"] == pytest.approx(mean_absolute_error(y, p), rel=1e-12)
    assert measured["loss"] == pytest.approx(np.mean((np.concatenate(PREDICTED) - np.concatenate(TRUE)) ** 2))


def test_sums_of_clients_are_those_of_all_examples() -> None:
    whole = Residuals.of(np.concatenate(PREDICTED), np.concatenate(TRUE))
    assert tuple(together(CLIENTS)) == pytest.approx(tuple(whole), rel=1e-12)


def test_r2_is_the_mean_of_the_clients_scores_by_examples() -> None:
    """Also with a client of one example, which has no R² of its own."""
    weights = [client.examples for client in CLIENTS]
    assert np.average(scores(CLIENTS), weights=weights) == pytest.approx(overall("", CLIENTS, TARGET)["r2"], rel=1e-12)


def test_without_its_targets_a_client_counts_as_an_average_one() -> None:
    silent = CLIENTS[0].without_targets()
    assert overall("", [silent], TARGET)["r2"] == pytest.approx(1 - CLIENTS[0].loss / CLIENTS[0].examples)
    assert silent == (40, 0.0, 40.0, CLIENTS[0].absolute, CLIENTS[0].loss)


def test_numbers_that_are_all_the_same_have_no_r2() -> None:
    same = Residuals.of(np.zeros(4), np.full(4, 0.7))
    with pytest.raises(DataError, match="all 4 numbers that should be predicted are the same"):
        overall("", [same], TARGET)
