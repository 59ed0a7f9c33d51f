"""AUROC, AUPRC and the sensitivity at a fixed specificity: scikit-learn's values, and numbers counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedrane.ops.ranking import Ranking, ranking

EXACT = 1e-12


def drawn(seed: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores with many ties, with few, or with none, and examples of both classes."""
    draws = np.random.default_rng(seed)
    positive = draws.random(draws.integers(2, 400)) < draws.choice([0.05, 0.4, 0.9])
    positive[:2] = True, False
    scores = draws.normal(size=len(positive)) + positive
    return scores.round([0, 1, 9][seed % 3]), positive


@pytest.mark.parametrize("seed", range(60))
def test_they_are_those_of_scikit_learn(seed: int) -> None:
    scores, positive = drawn(seed)
    false, true, _ = roc_curve(positive, scores, drop_intermediate=False)
    expected = (
        roc_auc_score(positive, scores),
        average_precision_score(positive, scores),
        true[false <= 0.05 + EXACT].max(),
    )
    assert ranking(scores, positive) == pytest.approx(expected, abs=EXACT, rel=0)


def test_an_auroc_is_the_share_of_pairs_in_the_right_order() -> None:
    scores, positive = drawn(1)
    pairs = np.sign(scores[positive][:, None] - scores[~positive])
    assert len(np.unique(scores)) < len(scores)
    measured = ranking(scores, positive)
    assert measured is not None
    assert measured.auroc == pytest.approx((1 + pairs.mean()) / 2, abs=EXACT)


def test_the_best_the_worst_and_equal_scores() -> None:
    positive = np.arange(10) >= 6
    assert ranking(positive.astype(np.float64), positive) == (1, 1, 1)
    assert ranking(np.zeros(10), positive) == (0.5, 0.4, 0)
    worst = ranking(-positive.astype(np.float64), positive)
    assert worst is not None
    assert worst[::2] == (0, 0)


@pytest.mark.parametrize("positive", [[], [True], [False, False], [True, True, True]])
def test_they_need_examples_of_both_classes(positive: list[bool]) -> None:
    assert ranking(np.arange(len(positive), dtype=np.float64), np.array(positive, dtype=np.bool_)) is None


def test_only_the_order_of_the_scores_counts() -> None:
    """Infinite ones too: a method may exclude a class."""
    scores, positive = drawn(4)
    moved = np.where(scores == scores.max(), np.inf, np.where(scores == scores.min(), -np.inf, np.tanh(scores / 9)))
    assert ranking(moved, positive) == ranking(scores, positive)


@pytest.mark.parametrize(("negatives", "allowed"), [(19, 0), (20, 1), (39, 1), (40, 2), (100, 5), (140, 7), (60, 3)])
def test_a_specificity_of_95_per_cent_is_exact(negatives: int, allowed: int) -> None:
    """Positives alternate with negatives, from the top: each allowed false positive lets one more be found."""
    positive = np.array([True, False] * 10 + [False] * (negatives - 10))
    measured = ranking(-np.arange(len(positive), dtype=np.float64), positive)
    assert measured is not None
    assert measured.sensitivity_at_specificity_95 == (allowed + 1) / 10


def test_the_name_contains_the_specificity() -> None:
    from fedrane.ops import ranking as module

    assert Ranking._fields[-1].endswith(f"_{module.SPECIFICITY}")
