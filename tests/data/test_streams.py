"""Random streams: the same name gives the same numbers, in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrane.data.streams import bits, generator, key, permutation, permutations, uniform

quick = settings(deadline=None)
PARTS = st.lists(st.integers() | st.text(), max_size=4)


def test_the_streams_are_those_of_every_earlier_release() -> None:
    assert key(0, "x") == 2961053100694741575
    assert key(7, "batches", 3, 1) == 807283956792997635
    assert permutation(8, 0, "x").tolist() == [7, 6, 5, 1, 0, 4, 2, 3]
    assert permutation(6, 7, "batches", 3, 1).tolist() == [0, 4, 1, 3, 2, 5]
    assert uniform(2, 0, "x").tolist() == [0.4092257536379884, 0.4058109355832009]


@quick
@given(st.integers(0, 300), st.integers(), PARTS)
def test_a_permutation_has_each_number_once(n: int, seed: int, where: list[int | str]) -> None:
    drawn = permutation(n, seed, *where)
    assert drawn.dtype == np.int64
    assert np.array_equal(np.sort(drawn), np.arange(n))
    assert np.array_equal(drawn, permutation(n, seed, *where))
    names: list[tuple[int | str, ...]] = [tuple(where), (*where, "other")]
    orders = [[permutation(n, seed, *name, k) for k in range(3)] for name in names]
    assert np.array_equal(permutations(n, 3, seed, names), np.reshape(orders, (2, 3, n)))


@quick
@given(st.integers(), PARTS)
def test_a_key_is_a_non_negative_int_of_63_bits(seed: int, where: list[int | str]) -> None:
    assert 0 <= key(seed, *where) < 2**63


@quick
@given(st.tuples(st.integers(), PARTS), st.tuples(st.integers(), PARTS))
def test_other_names_are_other_streams(one: tuple[int, list[int | str]], other: tuple[int, list[int | str]]) -> None:
    assert (key(one[0], *one[1]) == key(other[0], *other[1])) == (one == other)


def test_names_that_look_alike_are_kept_apart() -> None:
    assert len({key(0, "1"), key(0, 1), key(0, "a", "b"), key(0, "ab"), key(0, "a,b"), key(0), key(0, "")}) == 7


def test_numpy_integers_name_the_same_stream_and_floats_none() -> None:
    assert key(np.int64(3), "round", np.int32(4)) == key(3, "round", 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        key(0, 0.5)  # type: ignore[arg-type]


def test_uniform_fills_the_unit_interval() -> None:
    drawn = uniform(10_000, 0, "flat")
    assert drawn.dtype == np.float64
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert np.histogram(drawn, bins=10, range=(0, 1))[0] == pytest.approx(1000, abs=130)


def test_generator_and_bits_restart_the_same_stream() -> None:
    assert generator(1, "a").integers(2**60) == generator(1, "a").integers(2**60)
    assert generator(1, "a").bit_generator.random_raw() == bits(1, "a").random_raw()
