"""Cohorts, dropouts and batches: functions of (seed, round, client)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrane.data import sampling, streams
from fedrane.errors import TooLarge


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 4), st.integers(0, 9))
def test_each_epoch_uses_each_example_once(size: int, batch: int, epochs: int, client: int) -> None:
    made = sampling.batches(3, 5, {client: size, client + 1: size, client + 2: 3}, batch, epochs)[client]
    steps = -(-size // batch)
    assert made.examples.shape == made.mask.shape == (epochs * steps, batch)
    for epoch in range(epochs):
        part = slice(epoch * steps, (epoch + 1) * steps)
        assert sorted(made.examples[part][made.mask[part]]) == list(range(size))
    assert len(set(made.keys.tolist())) == epochs * steps
    assert (made.examples[~made.mask] == 0).all()


def test_more_than_fits_in_memory_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs and batch may come from a server."""
    for batch, epochs in ((10, 10**9), (10**11, 1)):
        with pytest.raises(TooLarge, match=r"examples drawn for round 1 \(epochs=\d+\) needs about"):
            sampling.batches(0, 1, {0: 100}, batch, epochs)


def test_batches_differ_by_round_client_and_epoch() -> None:
    def of(seed: int, round: int, client: int, *others: int) -> sampling.Batches:
        return sampling.batches(seed, round, dict.fromkeys((client, *others), 50), 50, 2)[client]

    first = of(0, 1, 0)
    assert not np.array_equal(first.examples[0], first.examples[1])
    for other in (of(0, 2, 0), of(0, 1, 1), of(1, 1, 0)):
        assert not np.array_equal(first.examples, other.examples)
        assert not set(first.keys.tolist()) & set(other.keys.tolist())
    for again in (of(0, 1, 0), of(0, 1, 0, 4, 2)):  # independent of the other clients
        assert np.array_equal(first.examples, again.examples)
        assert np.array_equal(first.keys, again.keys)


@given(st.integers(1, 300), st.floats(0.001, 1), st.integers(1, 100))
def test_a_cohort_is_a_sorted_fraction(population: int, participation: float, round: int) -> None:
    cohort = sampling.cohort(7, round, population, participation)
    assert len(cohort) == max(1, int(participation * population + 0.5))
    assert cohort == sorted(set(cohort))
    assert all(0 <= k < population for k in cohort)


def test_everybody_is_sampled_sooner_or_later_and_evenly() -> None:
    counts = np.bincount([k for r in range(400) for k in sampling.cohort(0, r, 20, 0.25)], minlength=20)
    assert counts.sum() == 400 * 5
    assert counts.min() > 70
    assert counts.max() < 130


def test_dropouts_have_their_own_stream_and_probability() -> None:
    everybody = list(range(50))
    lost = [sampling.lost(0, r, everybody, 0.2) for r in range(100)]
    assert 850 < sum(map(len, lost)) < 1150
    assert sampling.lost(0, 3, everybody, 0.0) == []
    assert set(sampling.lost(0, 3, everybody[:25], 0.2)) == {k for k in lost[3] if k < 25}, "whoever else takes part"


@given(st.integers(0, 60), st.integers(1, 16), st.integers(1, 4))
def test_so_many_steps_are_so_many_epochs(size: int, batch: int, epochs: int) -> None:
    """N = E · ⌈n/b⌉ steps: the same examples, in the same order, with the same noise."""
    whole = sampling.batches(3, 5, {1: size}, batch, epochs)[1]
    steps = sampling.Steps(max(1, epochs * -(-size // batch)))
    for one, other in zip(whole, sampling.batches(3, 5, {1: size}, batch, steps)[1], strict=True):
        assert one.tobytes() == other.tobytes()
        assert one.shape == other.shape


@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 30))
def test_steps_go_on_through_shuffled_passes_and_end_within_one(size: int, batch: int, count: int) -> None:
    made = sampling.batches(3, 5, {1: size}, batch, sampling.Steps(count))[1]
    longer = sampling.batches(3, 5, {1: size}, batch, 30)[1]
    assert len(made.examples) == count
    for one, other in zip(made, longer, strict=True):
        assert np.array_equal(one, other[:count])
    passes = [streams.permutation(size, 3, "batches", 5, 1, number) for number in range(count)]
    drawn = made.examples[made.mask]
    assert np.array_equal(drawn, np.concatenate(passes)[: len(drawn)])
    assert sampling.examples_trained(size, batch, sampling.Steps(count)) == len(drawn)


@given(st.integers(0, 60), st.integers(1, 16), st.floats(0.01, 3))
def test_a_part_of_an_epoch_is_that_part_of_its_batches(size: int, batch: int, epochs: float) -> None:
    steps = -(-size // batch)
    made = sampling.batches(3, 5, {1: size}, batch, epochs)[1]
    assert len(made.examples) == sampling.local_steps(size, batch, epochs)
    assert epochs * steps - 1e-6 <= len(made.examples) < epochs * steps + 1
    assert sampling.examples_trained(size, batch, epochs) == made.mask.sum()


def test_rounding_adds_no_step() -> None:
    """0.14 · 50 and 2.2 · 25 are a little more than 7 and 55."""
    assert sampling.local_steps(50, 1, 0.14) == 7
    assert sampling.local_steps(50, 2, 2.2) == 55
    assert sampling.local_steps(100, 10, 0.01) == 1
    assert sampling.local_steps(0, 10, sampling.Steps(5)) == 0


def test_more_steps_than_fit_in_memory_are_not_drawn() -> None:
    with pytest.raises(TooLarge, match=r"round 1 \(steps=\d+\) needs about .* Use fewer steps"):
        sampling.batches(0, 1, {0: 100}, 10, sampling.Steps(10**9))
