"""Measures of heterogeneity: closed forms, limits and what must not change them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon

from fedrane.data.heterogeneity import Heterogeneity
from fedrane.data.partition import Partitioning, partition
from fedrane.errors import DataError

quick = settings(deadline=None, max_examples=60)
COUNTS = arrays.arrays(np.int64, st.tuples(st.integers(1, 8), st.integers(1, 6)), elements=st.integers(0, 50)).filter(
    lambda counts: counts.sum(axis=1).all()
)


def test_clients_of_one_class_each() -> None:
    """Of K equal clients with a class each, (K − 1) / K of the examples of each have a label that is too frequent."""
    measured = Heterogeneity.of(np.diag([20] * 4))
    assert measured.total_variation == pytest.approx(3 / 4)
    # Half of log2(1 / (5/8)), plus half of 1/4 · log2((1/4) / (5/8)) + 3/4 · log2(2).
    assert measured.jensen_shannon == pytest.approx((np.log2(8 / 5) + np.log2(2 / 5) / 4 + 3 / 4) / 2)
    assert measured.gini == 0
    assert measured.classes == (1, 1, 1)
    assert measured.sizes == (20, 20, 20)


def test_the_measures_of_a_small_table() -> None:
    measured = Heterogeneity.of(np.array([[6, 2, 0], [1, 1, 2], [3, 0, 0], [2, 2, 1]]))
    assert measured.sizes == (3, 4.5, 8)
    assert measured.classes == (1, 2.5, 3)
    pairs = np.abs(np.subtract.outer([8, 4, 3, 5], [8, 4, 3, 5]))
    assert measured.gini == pytest.approx(pairs.sum() / (2 * 4 * 20))  # half the mean difference, over the mean


@quick
@given(COUNTS)
def test_divergences_are_those_of_scipy_and_within_their_limits(counts: NDArray[np.int64]) -> None:
    measured = Heterogeneity.of(counts)
    own, everyone = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    expected = np.mean([np.nan_to_num(jensenshannon(row, everyone, base=2)) ** 2 for row in own])
    assert measured.jensen_shannon == pytest.approx(expected, abs=1e-7)
    assert -1e-12 <= measured.jensen_shannon <= measured.total_variation + 1e-12 <= 1
    assert 0 <= measured.gini < 1


@quick
@given(COUNTS)
def test_order_and_scale_do_not_matter(counts: NDArray[np.int64]) -> None:
    measured = Heterogeneity.of(counts)
    turned = Heterogeneity.of(3 * counts[::-1, ::-1])
    assert turned.jensen_shannon == pytest.approx(measured.jensen_shannon)
    assert turned.total_variation == pytest.approx(measured.total_variation)
    assert turned.gini == pytest.approx(measured.gini)
    assert turned.sizes == tuple(3 * size for size in measured.sizes)
    assert turned.classes == measured.classes


def test_a_smaller_alpha_measures_more() -> None:
    y = np.arange(20_000) % 10
    made = [
        Heterogeneity.of(partition(y, 10, 20, Partitioning("dirichlet", alpha), 0).counts(y, 10))
        for alpha in (0.05, 0.5, 5, 1e6)
    ]
    for name in ("jensen_shannon", "total_variation", "gini"):
        values = [getattr(each, name) for each in made]
        assert values == sorted(values, reverse=True)
        assert values[-1] < 0.01


def test_the_gini_of_one_client_with_nearly_all() -> None:
    assert Heterogeneity.of(np.array([[1]] * 99 + [[1_000_000]])).gini == pytest.approx(0.99, abs=0.001)


@pytest.mark.parametrize("counts", [np.zeros((2, 3), np.int64), np.zeros((0, 3), np.int64)])
def test_a_client_without_examples_is_an_error(counts: NDArray[np.int64]) -> None:
    with pytest.raises(DataError):
        Heterogeneity.of(counts)
