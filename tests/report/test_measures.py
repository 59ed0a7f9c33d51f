"""The numbers of a report against what the folders hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import folders
from fedrane.report import measures
from fedrane.report.runs import Line, gather


def lines_of(*paths: Path) -> list[Line]:
    return gather(paths)[0]


def test_a_curve_is_the_mean_over_seeds(tmp_path: Path) -> None:
    """With the sample deviation, as in the table, and the cost so far."""
    for seed in range(3):
        folders.simple(tmp_path / str(seed), seed=seed)
    (curve,) = measures.curves(lines_of(tmp_path), "global")
    values = np.array([[folders.record(r, seed)["global/accuracy"] for r in (1, 2, 3)] for seed in range(3)])
    assert curve.rounds.tolist() == [1, 2, 3]
    assert curve.mean == pytest.approx(values.mean(0))
    assert curve.deviation == pytest.approx(values.std(0, ddof=1))
    assert curve.seconds.tolist() == [2, 4, 6]
    assert curve.sent.tolist() == [4000, 8000, 12000]
    assert not measures.curves(lines_of(tmp_path), "personal"), "FedAvg has no personal model"


def test_a_curve_has_the_rounds_that_all_repetitions_have(tmp_path: Path) -> None:
    """A run that stopped early, and rounds without an evaluation."""
    unmeasured = {key: value for key, value in folders.record(2).items() if key != "global/accuracy"}
    folders.write(tmp_path / "0", [folders.record(1), unmeasured, folders.record(3), folders.record(4)], rounds=4)
    folders.write(tmp_path / "1", [folders.record(r) for r in (1, 2, 3)], seed=1, rounds=4)
    (curve,) = measures.curves(lines_of(tmp_path), "global")
    assert curve.rounds.tolist() == [1, 3]
    assert curve.seconds.tolist() == [2, 6], "the round without an evaluation took its time too"


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    (curve,) = measures.curves(lines_of(folders.simple(tmp_path / "run")), "global")
    assert curve.deviation is None


def test_what_a_target_costs(tmp_path: Path) -> None:
    """The first round that is as good, and all before it; means over the runs that got there."""
    for seed, accuracies in enumerate(([0.1, 0.6, 0.5, 0.9], [0.1, 0.2, 0.6, 0.4], [0.1, 0.1, 0.1, 0.1])):
        records = [folders.record(r, **{"global/accuracy": a}) for r, a in enumerate(accuracies, 1)]
        folders.write(tmp_path / str(seed), records, seed=seed)
    lines = lines_of(tmp_path)
    (cost,) = measures.reached(lines, "global", 0.6)
    assert cost == measures.Reached(0, 2, 2.5, 5.0, 2500.0, 7500.0)
    (never,) = measures.reached(lines, "global", 0.95)
    assert never.runs == 0
    assert math.isnan(never.seconds)


def test_the_first_of_a_comparison_does_not_pay_for_the_start(tmp_path: Path) -> None:
    """Folders that mark the round a process began with, and older ones, in which that is round 1."""
    for name, mark in (("first", {"warmup": True}), ("older", {}), ("warm", {})):
        slow = 2.0 if name == "warm" else 30.0
        records = [
            folders.record(1, seconds=slow, samples_per_second=100.0 * 2 / slow, **mark),
            *(folders.record(r) for r in (2, 3)),
        ]
        folders.write(tmp_path / name, records, name=name)
    lines = lines_of(tmp_path)
    for curve in measures.curves(lines, "global"):
        assert curve.seconds.tolist() == [2, 4, 6]
    assert [cost.seconds for cost in measures.reached(lines, "global", 0.6)] == [2.0] * 3
    assert [measures.mean_seconds(line) for line in lines] == [6.0] * 3
    assert [measures.speed(line) for line in lines] == [100.0] * 3


def test_targets_worth_asking_for(tmp_path: Path) -> None:
    """None beyond what anybody reaches; the first one is in reach of half of the lines."""
    for name, best in (("a", 0.97), ("b", 0.86), ("c", 0.3)):
        folders.write(tmp_path / name, [folders.record(1, **{"global/accuracy": best})], name=name)
    options, first = measures.targets(lines_of(tmp_path), "global")
    assert options == sorted(options, reverse=True)
    assert options[0] == 0.97
    assert first == 0.85


def test_clients_in_rounds_they_missed(tmp_path: Path) -> None:
    """A number belongs to the client that reported it; a client that did not take part has a gap."""
    cohorts = [[0, 3], [], [4], [1, 2, 3]]
    records = [folders.record(r, cohort=c, cosine=[k / 10 for k in c]) for r, c in enumerate(cohorts, 1)]
    del records[1]["cosine"]
    (grid,) = measures.grids(lines_of(folders.write(tmp_path / "run", records)), measures.COSINE)
    assert grid.rounds.tolist() == [1, 3, 4]
    for column, cohort in enumerate(c for c in cohorts if c):
        assert np.flatnonzero(np.isfinite(grid.values[:, column])).tolist() == cohort
        assert grid.values[cohort, column].tolist() == [k / 10 for k in cohort]


@settings(max_examples=20)
@given(weights=st.lists(st.floats(0, 1e6), min_size=folders.CLIENTS, max_size=folders.CLIENTS))
def test_shares_add_up(weights: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """To one in every round; to nothing where the server stays where it is."""
    path = tmp_path_factory.mktemp("run")
    folders.write(path, [folders.record(1, **{"gne/weights": weights})])
    (grid,) = measures.shares(lines_of(path))
    assert grid.values.sum() == pytest.approx(1 if sum(weights) else 0)
    assert np.argsort(grid.values[:, 0], kind="stable").tolist() == np.argsort(weights, kind="stable").tolist()


def test_the_worst_clients(tmp_path: Path) -> None:
    """By their mean over the lines, over all seeds that the lines share."""
    for name, shift in (("a", 0.0), ("b", 0.2)):
        for seed in range(3):
            records = [folders.record(1, **{"global/local_clients": [0.5 + shift, 0.1 * seed + shift, 0.7, 0.8, 0.9]})]
            folders.write(tmp_path / name / str(seed), records, name=name, seed=seed)
    worst = measures.worst(lines_of(tmp_path), "global")
    assert set(worst.who) >= {(0, 1), (1, 1), (2, 1)}
    assert worst.accuracy[:, worst.who.index((0, 1))].tolist() == [0.0, 0.2]
    assert sorted(worst.accuracy.mean(0)) == pytest.approx([0.1, 0.2, 0.3, *[0.6] * 3, *[0.7] * 3, 0.8])
    counts = [int(lines_of(tmp_path)[0].runs[seed].counts[client]) for seed, client in worst.who]
    assert worst.counts == counts == sorted(counts, reverse=True), "in the order of all plots: the most examples first"


def test_post_training_rounds_are_known(tmp_path: Path) -> None:
    """Those after the planned ones; an envelope of several lines leaves them out."""
    folders.write(tmp_path / "a", [folders.record(r) for r in (1, 2, 3)], name="a", rounds=2)
    folders.simple(tmp_path / "b", name="b", rounds=2)
    tuned, plain = measures.curves(lines_of(tmp_path), "global")
    assert tuned.post.tolist() == [False, False, True]
    assert not plain.post.any()
    everyone = measures.envelope([tuned, plain._replace(mean=plain.mean - 0.2)])
    assert everyone.rounds.tolist() == [1, 2]
    assert everyone.high == pytest.approx(tuned.mean[:2])
    assert everyone.low == pytest.approx(plain.mean - 0.2)


def test_the_span_covers_every_band(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.2, 0.9)):
        folders.write(tmp_path / str(seed), [folders.record(1, **{"global/accuracy": accuracy})], seed=seed)
    (curve,) = measures.curves(lines_of(tmp_path), "global")
    low, high = measures.span([curve])
    assert low == pytest.approx(0.55 - np.std([0.2, 0.9], ddof=1))
    assert high == 1.0, "an accuracy is at most 1"


@settings(max_examples=50)
@given(
    y=st.lists(st.booleans(), min_size=4, max_size=30),
    rounds=st.lists(st.integers(0, 2**30 - 1), min_size=2, max_size=4),
)
def test_macro_f1_of_two_classes(y: list[bool], rounds: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Computed from recalls and accuracies alone, it is that of the predictions."""
    truth = np.array(y)
    records, f1 = [], 0.0
    for number, bits in enumerate(rounds, 1):
        predicted = np.array([bits >> k & 1 for k in range(len(y))], dtype=bool)
        of_class = [(truth == label, predicted == label) for label in (False, True)]
        recall = [
            float((actual & chosen).sum() / actual.sum()) if actual.any() else None for actual, chosen in of_class
        ]
        f1 = float(
            np.mean([2 * (actual & chosen).sum() / max(actual.sum() + chosen.sum(), 1) for actual, chosen in of_class])
        )
        accuracy = float((truth == predicted).mean())
        records.append(folders.record(number, **{"global/accuracy": accuracy, "global/recall": recall}))
    path = folders.write(tmp_path_factory.mktemp("run"), records, classes=("no", "yes"))
    cell = measures.macro_f1(lines_of(path)[0], "global")
    if any(None in r["global/recall"] or r["global/recall"][0] == r["global/recall"][1] for r in records):
        assert cell.mean is None or cell.mean == pytest.approx(f1)
    else:
        assert cell.mean == pytest.approx(f1)


def test_no_f1_with_more_classes_or_other_examples_each_round(tmp_path: Path) -> None:
    three = folders.write(tmp_path / "a", [folders.record(1, **{"global/recall": [0.1, 0.5, 0.9]})])
    each = {"global/local_clients": [0.5] * 4, "personal/clients": [0.5] * 4}
    more: dict[str, Any] = {"global/recall": [0.1, 0.9], "unevaluated": [1], **each}
    partly = folders.write(tmp_path / "b", [folders.record(1, **more)], classes=("no", "yes"))
    assert all(measures.macro_f1(lines_of(path)[0], "global").mean is None for path in (three, partly))


def test_recalls_are_of_the_last_round(tmp_path: Path) -> None:
    """Means over seeds; a class without examples is NaN; lines with other classes are not put together."""
    for seed in (0, 1):
        records = [folders.record(r, **{"global/recall": [0.1 * r, 0.5 + 0.2 * seed, None]}) for r in (1, 2)]
        folders.write(tmp_path / "a" / str(seed), records, name="a", seed=seed)
    recalls = measures.recalls(lines_of(tmp_path), "global")
    assert recalls is not None
    np.testing.assert_allclose(recalls.values, [[0.2, 0.6, np.nan]])
    folders.simple(tmp_path / "b", name="b", classes=("another", "one", "two"))
    assert measures.recalls(lines_of(tmp_path), "global") is None


def test_partitions_that_differ_are_distinguished(tmp_path: Path) -> None:
    folders.simple(tmp_path / "a", name="a")
    folders.simple(tmp_path / "b", name="b")
    lines = lines_of(tmp_path)
    assert measures.share_partitions(lines)
    assert [who for who, _ in measures.partitions(lines)] == [[0, 1]]
    folders.simple(tmp_path / "c", name="c", classes=("another", "one", "two"))
    lines = lines_of(tmp_path)
    assert not measures.share_partitions(lines)
    assert [who for who, _ in measures.partitions(lines)] == [[0, 1], [2]]
