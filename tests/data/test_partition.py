"""Partitions: each example has one client, every client has enough, and only intact files are accepted."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedrane.data import partition as module
from fedrane.data.partition import CONSECUTIVE, KINDS, Partition, Partitioning, load, partition, save, split
from fedrane.errors import ConfigError, DataError, FileError

MADE = [kind for kind in KINDS if kind not in ("natural", "pathological")]
"""The kinds that can be drawn for all examples, classes and clients."""
quick = settings(deadline=None, max_examples=60)


def labels(examples: int, classes: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, classes, examples)


def same(one: Partition, other: Partition) -> bool:
    return len(one.clients) == len(other.clients) and all(map(np.array_equal, one.clients, other.clients))


def skew(made: Partition, y: NDArray[np.int64], classes: int) -> float:
    """The mean fraction of a client's largest class."""
    counts = made.counts(y, classes)
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


ALPHAS = st.sampled_from([5e-324, 1e-300, 1e-4, 1.7e308]) | st.floats(0.01, 100)


@st.composite
def requests(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, int, Partitioning, int]:
    clients, minimum, classes = draw(st.integers(1, 500)), draw(st.integers(2, 6)), draw(st.integers(1, 30))
    examples = clients * minimum + draw(st.integers(0, 1500))
    how = Partitioning(
        kind=draw(st.sampled_from(MADE)),
        alpha=draw(ALPHAS),
        size_alpha=draw(ALPHAS),
        shards=draw(st.integers(1, minimum)),
        minimum=minimum,
    )
    # The last class may have no examples, and the data may be sorted by label.
    y = labels(examples, max(classes - draw(st.integers(0, 1)), 1), draw(st.integers(0, 9)))
    return (np.sort(y) if draw(st.booleans()) else y), classes, clients, how, draw(st.integers(0, 2**32))


@quick
@given(requests())
def test_each_example_has_one_client_and_every_client_has_enough(
    request_: tuple[NDArray[np.int64], int, int, Partitioning, int],
) -> None:
    y, classes, clients, how, seed = request_
    made = partition(y, classes, clients, how, seed)
    assert len(made.clients) == clients
    assert np.array_equal(np.sort(np.concatenate(made.clients)), np.arange(len(y)))
    assert all((np.diff(examples) > 0).all() and examples.dtype == np.int64 for examples in made.clients)
    assert made.sizes.min() >= how.minimum
    assert made.counts(y, classes).sum(axis=0).tolist() == np.bincount(y, minlength=classes).tolist()
    assert same(made, partition(y, classes, clients, how, seed))


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != CONSECUTIVE])
def test_another_seed_is_another_partition(kind: str) -> None:
    y = labels(2000, 10)
    made = [partition(y, 10, 20, Partitioning(kind), seed) for seed in (0, 1)]
    assert not same(*made)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("minimum", [2, 120])
def test_many_clients_and_strong_skew_take_no_time(kind: str, minimum: int) -> None:
    y = labels(60_000, 10)
    start = time.process_time()
    made = partition(y, 10, 500, Partitioning(kind, alpha=0.01, minimum=minimum), 0)
    assert time.process_time() - start < 30
    assert made.sizes.min() >= minimum


def test_dirichlet_counts_are_those_of_every_earlier_release() -> None:
    y = np.arange(60) % 3
    assert partition(y, 3, 4, Partitioning(minimum=2), 0).counts(y, 3).tolist() == [
        [0, 1, 1],
        [8, 12, 1],
        [0, 7, 13],
        [12, 0, 5],
    ]


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-capped"])
def test_a_smaller_alpha_gives_more_skew(kind: str) -> None:
    y = labels(20_000, 10)
    skews = [
        skew(partition(y, 10, 50, Partitioning(kind, alpha=alpha), 0), y, 10) for alpha in (0.01, 0.1, 0.5, 5, 1e6)
    ]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.9
    assert skews[-1] < 0.12


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    y, clients, alpha = np.zeros(10_000, dtype=np.int64), 5, 0.4
    shares = np.array(
        [partition(y, 1, clients, Partitioning(alpha=alpha, minimum=2), seed).sizes / len(y) for seed in range(600)]
    )
    mean = 1 / clients
    assert shares.mean(axis=0) == pytest.approx(mean, abs=0.04)
    assert shares.var(axis=0) == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), abs=0.012)


def test_no_client_gains_by_its_position() -> None:
    y = np.arange(2000) % 100
    sizes = np.mean([partition(y, 100, 10, Partitioning(minimum=2), seed).sizes for seed in range(100)], axis=0)
    assert sizes == pytest.approx(200, abs=15)


@quick
@given(st.integers(0, 200), st.sampled_from([0.01, 0.1, 0.5, 5.0]), st.integers(2, 40), st.integers(2, 10))
def test_capped_gives_a_client_at_its_share_nothing_of_later_classes(
    seed: int, alpha: float, clients: int, minimum: int
) -> None:
    y = labels(997, 8)
    counts = partition(y, 8, clients, Partitioning("dirichlet-capped", alpha, minimum=minimum), seed).counts(y, 8)
    held_before = np.cumsum(counts, axis=1) - counts
    assert (counts[held_before * clients >= len(y)] == 0).all()


def test_capped_sizes_are_more_even_than_plain() -> None:
    y = labels(10_000, 10)
    plain, capped = (partition(y, 10, 20, Partitioning(kind, 0.3), 3) for kind in ("dirichlet", "dirichlet-capped"))
    assert capped.sizes.std() < plain.sizes.std()


@pytest.mark.parametrize("clients", [1, 3, 7, 10])
def test_iid_sizes_differ_by_one_and_labels_are_mixed(clients: int) -> None:
    y = np.sort(labels(5000, 10))
    made = partition(y, 10, clients, Partitioning("iid"), 0)
    assert made.sizes.max() - made.sizes.min() <= 1
    assert skew(made, y, 10) < 0.16


def test_quantity_skews_sizes_but_not_labels() -> None:
    y = np.sort(labels(20_000, 4))
    made = partition(y, 4, 20, Partitioning("quantity", alpha=0.2, minimum=200), 0)
    assert made.sizes.max() > 10 * made.sizes.min()
    assert skew(made, y, 4) < 0.32  # including clients that were raised to the minimum


@quick
@given(st.integers(1, 4), st.integers(0, 50))
def test_a_shard_adds_at_most_its_classes(shards: int, seed: int) -> None:
    y = np.random.default_rng(0).permutation(np.arange(1200) % 10)
    made = partition(y, 10, 10, Partitioning("shards", shards=shards), seed)
    assert set(made.sizes.tolist()) == {120}
    # Shards of 120 / shards examples, and classes of 120: no shard overlaps more than two classes.
    assert (made.counts(y, 10) > 0).sum(axis=1).max() <= 2 * shards


def test_shards_that_fit_the_classes_give_each_client_two_of_them_at_most() -> None:
    y = np.arange(2000) % 10
    assert ((partition(y, 10, 10, Partitioning("shards"), 0).counts(y, 10) > 0).sum(axis=1) <= 2).all()


def test_more_shards_than_examples_is_an_error() -> None:
    with pytest.raises(DataError, match=r"200 shards .* of 100 examples.*partition\.shards=10 or less"):
        partition(labels(100, 2), 2, 10, Partitioning("shards", shards=20), 0)


@st.composite
def classed(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, int, int]:
    """The labels, the clients, the classes of each, and a seed, with which all can get that many."""
    per_class = draw(st.lists(st.just(0) | st.integers(24, 90), min_size=1, max_size=12).filter(any))
    present = sum(map(bool, per_class))
    classes = draw(st.integers(1, present))
    clients = draw(st.integers(-(-present // classes), min(filter(None, per_class)) // 2))
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(per_class)), per_class))
    return y, clients, classes, draw(st.integers(0, 2**32))


def promised(y: NDArray[np.int64], clients: int, classes: int, seed: int) -> NDArray[np.int64]:
    """The counts of a pathological partition."""
    how, largest = Partitioning("pathological", classes=classes, minimum=2), int(y.max()) + 1
    return partition(y, largest, clients, how, seed).counts(y, largest)


@quick
@given(classed())
def test_pathological_gives_each_client_so_many_classes_and_each_class_equally_to_its_clients(
    request_: tuple[NDArray[np.int64], int, int, int],
) -> None:
    y, _, classes, _ = request_
    counts = promised(*request_)
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert counts.sum(axis=0).tolist() == np.bincount(y).tolist()
    for held in counts.T[counts.sum(axis=0) > 0]:
        assert np.ptp(held[held > 0]) <= 1


def test_pathological_shares_classes_by_their_size() -> None:
    y = np.repeat(np.arange(4), [400, 200, 100, 100])
    counts = promised(y, 8, 1, 0)
    assert (counts > 0).sum(axis=0).tolist() == [4, 2, 1, 1]
    assert (counts.sum(axis=1) == 100).all()
    # Each further place goes where most examples per client are left: 400 / 5, 400 / 6 and 200 / 3.
    assert (promised(y, 11, 1, 0) > 0).sum(axis=0).tolist() == [6, 3, 1, 1]


def test_pathological_clients_have_different_pairs_of_classes() -> None:
    counts = promised(np.arange(6000) % 10, 40, 2, 0)
    assert (counts.sum(axis=1) == 150).all()
    assert len(np.unique(counts > 0, axis=0)) > 20
    assert not np.array_equal(counts, promised(np.arange(6000) % 10, 40, 2, 1))


@pytest.mark.parametrize(
    ("clients", "classes", "minimum", "message"),
    [
        (5, 4, 2, r"partition\.classes=4.*are of 3 classes.*Use partition\.classes=3 or less"),
        (1, 2, 2, r"1 clients with 2 of 3 classes.*Use clients=2 or more, or partition\.classes=3 or more"),
        (9, 3, 2, r"class 3 has 4 examples for 9 clients.*fewer clients or a smaller"),
        (8, 1, 12, r"client \d would have 4 examples of its 1 classes.*partition\.minimum=4 or less, or fewer clients"),
    ],
)
def test_an_impossible_pathological_partition_is_one_clear_error(
    clients: int, classes: int, minimum: int, message: str
) -> None:
    y = np.repeat([0, 1, 3], [60, 40, 4])
    with pytest.raises(DataError, match=message):
        partition(y, 5, clients, Partitioning("pathological", classes=classes, minimum=minimum), 0)


SKEWED = "dirichlet-quantity"


@quick
@given(st.integers(0, 50), st.integers(2, 40), ALPHAS, ALPHAS, st.integers(2, 10))
def test_sizes_and_labels_skewed_together_have_the_sizes_of_quantity_alone(
    seed: int, clients: int, alpha: float, size_alpha: float, minimum: int
) -> None:
    y = labels(997, 8)
    both = partition(y, 9, clients, Partitioning(SKEWED, alpha, size_alpha=size_alpha, minimum=minimum), seed)
    sizes = partition(y, 9, clients, Partitioning("quantity", size_alpha, minimum=minimum), seed).sizes
    assert both.sizes.tolist() == sizes.tolist()


def test_each_parameter_skews_what_is_its_own() -> None:
    y = np.arange(20_000) % 10
    made = {
        (alpha, size_alpha): partition(y, 10, 20, Partitioning(SKEWED, alpha, size_alpha=size_alpha), 0)
        for alpha in (0.05, 0.5, 1e9)
        for size_alpha in (0.2, 1e9)
    }
    skews = {key: skew(each, y, 10) for key, each in made.items()}
    spread = {key: int(np.ptp(each.sizes)) for key, each in made.items()}
    assert max(spread[alpha, 1e9] for alpha in (0.05, 0.5, 1e9)) <= 1
    assert min(spread[alpha, 0.2] for alpha in (0.05, 0.5, 1e9)) > 2000
    for size_alpha in (0.2, 1e9):
        assert skews[0.05, size_alpha] > 0.7
        assert skews[0.05, size_alpha] > skews[0.5, size_alpha] + 0.1
        assert skews[1e9, size_alpha] < 0.2  # the smallest have ten examples: at most two of a class
    # Without skew each cell is the product of its margins, rounded.
    even = made[1e9, 1e9].counts(y, 10)
    assert np.abs(even - 100).max() <= 1


def test_the_mixtures_have_the_moments_of_the_distribution() -> None:
    """With as many examples of each class and client, the mean is 1 / classes, and the spread that of Dir(α)."""
    y, clients, classes, alpha = np.arange(20_000) % 4, 200, 4, 2.0
    how = Partitioning(SKEWED, alpha, size_alpha=1e9)
    shares = partition(y, classes, clients, how, 0).counts(y, classes) / (len(y) / clients)
    assert shares.mean(axis=0) == pytest.approx(1 / classes)
    assert shares.var() == pytest.approx((1 / classes) * (1 - 1 / classes) / (classes * alpha + 1), rel=0.1)


@quick
@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.data())
def test_examples_are_taken_from_the_largest_one_by_one(heights: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(heights)))
    left = list(heights)
    for _ in range(total):
        left[left.index(max(left))] -= 1
    taken = module._skim(np.array(heights), total)
    assert taken.sum() == total
    assert (taken >= 0).all()
    assert sorted(np.array(heights) - taken) == sorted(left)


def test_repair_takes_from_the_largest_its_most_numerous_class_and_keeps_the_skew() -> None:
    counts = np.array([[50, 20, 0], [0, 3, 9], [0, 0, 0], [0, 1, 0]])
    repaired = module._repair(counts, 5)
    assert repaired.tolist() == [[41, 20, 0], [0, 3, 9], [5, 0, 0], [4, 1, 0]]


@pytest.mark.parametrize("kind", MADE)
def test_too_many_clients_is_one_clear_error(kind: str) -> None:
    with pytest.raises(DataError, match=r"clients=9 or fewer or partition\.minimum=4 or less"):
        partition(labels(99, 3), 3, 20, Partitioning(kind), 0)
    with pytest.raises(DataError, match=r"fewer clients and a smaller partition\.minimum"):
        partition(labels(9, 3), 3, 20, Partitioning(kind), 0)
    with pytest.raises(DataError, match=r"Use clients=9 or fewer\.$"):
        partition(labels(99, 3), 3, 60, Partitioning(kind), 0)


@pytest.mark.parametrize("clients", [0, -1])
def test_the_number_of_clients_is_needed(clients: int) -> None:
    with pytest.raises(DataError, match="for instance clients=20"):
        partition(labels(99, 3), 3, clients, Partitioning(), 0)


NATURAL = Partitioning("natural")


@pytest.mark.parametrize("clients", [0, 3])
def test_natural_clients_keep_their_examples_even_below_the_minimum(clients: int) -> None:
    owner = np.array([2, 0, 2, 5, 0, 5, 5])
    made = partition(labels(7, 2), 2, clients, NATURAL, 0, owner)
    assert [examples.tolist() for examples in made.clients] == [[1, 4], [0, 2], [3, 5, 6]]


def test_natural_errors() -> None:
    owner = np.array([0, 0, 1, 1, 7])
    with pytest.raises(DataError, match=r"has 3 clients, but clients=4.*Use clients=3"):
        partition(labels(5, 2), 2, 4, NATURAL, 0, owner)
    with pytest.raises(DataError, match=r"^client 7 has only 1 example"):
        partition(labels(5, 2), 2, 0, NATURAL, 0, owner)
    with pytest.raises(DataError, match=r"^client 3 \(and 1 more\) has only 1 example"):
        partition(labels(4, 2), 2, 0, NATURAL, 0, np.array([0, 0, 3, 4]))
    with pytest.raises(DataError, match=r"names no clients.*partition\.kind=dirichlet"):
        partition(labels(5, 2), 2, 0, NATURAL, 0)


@pytest.mark.parametrize("clients", [(), (np.array([0, 1]), np.array([1, 2])), (np.array([0]), np.array([2]))])
def test_an_invalid_partition_is_rejected(clients: tuple[NDArray[np.int64], ...]) -> None:
    with pytest.raises(DataError):
        Partition(clients)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "dirichlett"}, r"partition\.kind=dirichlett.*Did you mean 'dirichlet'\? Known: auto, natural, iid"),
        ({"alpha": 0.0}, r"partition\.alpha=0\.0"),
        ({"alpha": -1.0}, r"partition\.alpha=-1\.0"),
        ({"alpha": float("inf")}, r"partition\.alpha=inf"),
        ({"alpha": float("nan")}, r"partition\.alpha=nan"),
        ({"size_alpha": 0.0}, r"partition\.size_alpha=0\.0"),
        ({"shards": 0}, r"partition\.shards=0"),
        ({"classes": 0}, r"partition\.classes=0"),
        ({"minimum": 1}, r"partition\.minimum=1\b"),
        ({"test": 0.0}, r"partition\.test=0\.0"),
        ({"test": 1.0}, r"partition\.test=1\.0"),
        ({"test": float("nan")}, r"partition\.test=nan"),
    ],
)
def test_every_wrong_setting_has_a_remedy(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Partitioning(**wrong)  # type: ignore[arg-type]
    assert caught.value.why
    assert caught.value.remedy


def one_client(examples: int) -> Partition:
    return Partition((np.arange(examples),))


@quick
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=12),
    st.floats(0.01, 0.99),
    st.floats(0, 0.99),
    st.integers(0, 1000),
)
def test_a_split_uses_each_example_once_and_empties_no_client(
    sizes: list[int], test: float, validation: float, seed: int
) -> None:
    owner = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    whole = partition(np.zeros_like(owner), 1, 0, NATURAL, 0, owner)
    parts = split(whole, seed, test, validation)
    for examples, *pieces in zip(whole.clients, parts.train, parts.validation, parts.test, strict=True):
        assert np.array_equal(np.sort(np.concatenate(pieces)), examples)
        assert all((np.diff(piece) > 0).all() for piece in pieces)
        trained, held, tested = map(len, pieces)
        assert trained >= 1
        assert tested >= 1
        assert held >= (validation > 0 and len(examples) >= 3)
        assert held == 0 or validation > 0
        assert abs(tested - test * len(examples)) <= 0.5 or tested in (1, len(examples) - 2)
    for one, other in zip(parts.test, split(whole, seed, test).test, strict=True):
        assert np.array_equal(one, other)


def test_split_fractions_are_as_configured_and_depend_on_the_seed() -> None:
    parts = split(one_client(1000), 0, validation=0.2)
    assert (len(parts.train[0]), len(parts.validation[0]), len(parts.test[0])) == (600, 150, 250)
    assert not np.array_equal(parts.test[0], split(one_client(1000), 1).test[0])
    assert np.array_equal(parts.test[0], split(one_client(1000), 0).test[0])


def test_clients_of_one_size_split_differently() -> None:
    parts = split(Partition((np.arange(100), np.arange(100, 200))), 0)
    assert not np.array_equal(parts.test[0], parts.test[1] - 100)


def test_split_errors() -> None:
    with pytest.raises(DataError, match=r"client 0 has 1 example.*partition\.minimum=2"):
        split(one_client(1), 0)
    with pytest.raises(ConfigError, match=r"partition\.test=1\.5"):
        split(one_client(9), 0, test=1.5)
    for validation in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="validation="):
            split(one_client(9), 0, validation=validation)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Partition, Path]:
    made = partition(labels(300, 5), 5, 8, Partitioning(), 0)
    path = tmp_path / "made" / "partition.npz"
    save(made, path, dataset="digits", seed=0)
    return made, path


def test_a_saved_partition_comes_back(saved: tuple[Partition, Path]) -> None:
    made, path = saved
    assert same(load(path, examples=300), made)
    assert [file.name for file in path.parent.iterdir()] == ["partition.npz"]
    with np.load(path, allow_pickle=False) as file:
        assert json.loads(str(file["meta"])) == {"dataset": "digits", "seed": 0}


def test_saving_replaces_the_file(saved: tuple[Partition, Path]) -> None:
    _, path = saved
    save(one_client(20), path)
    assert same(load(path, examples=20), one_client(20))


def test_a_write_that_fails_leaves_the_old_file(saved: tuple[Partition, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left")

    made, path = saved
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FileError, match=r"cannot be written.*no space left"):
        save(one_client(20), path)
    assert same(load(path, examples=300), made)
    assert [file.name for file in path.parent.iterdir()] == ["partition.npz"]


def test_a_file_replaces_the_settings(saved: tuple[Partition, Path]) -> None:
    made, path = saved
    how = Partitioning("iid", file=str(path))
    assert same(partition(labels(300, 5), 5, 8, how, 99), made)
    assert same(partition(labels(300, 5), 5, 0, how, 99), made)
    with pytest.raises(DataError, match=r"has 8 clients, but clients=9"):
        partition(labels(300, 5), 5, 9, how, 99)


def test_a_partition_of_other_data_is_rejected(saved: tuple[Partition, Path]) -> None:
    with pytest.raises(
        DataError, match=r"300 examples \(dataset=digits, seed=0\).*has 301: the file belongs to another"
    ):
        load(saved[1], examples=301)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(DataError, match=r"no partition can be read.*Check partition\.file"):
            load(path, examples=3)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for path in (tmp_path / "taken", tmp_path / "taken" / "file" / "below.npz"):
        with pytest.raises(FileError, match="cannot be written"):
            save(one_client(3), path)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_broken_file_is_rejected_or_still_intact(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("broken") / "partition.npz"
    made = partition(labels(60, 3), 3, 4, Partitioning(), 0)
    save(made, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        position = data.draw(st.integers(0, len(content) - 1))
        byte = data.draw(st.integers(0, 255))
        assume(content[position] != byte)
        content[position] = byte
    path.write_bytes(content)
    try:
        loaded = load(path, examples=60)
    except DataError:
        return
    assert same(loaded, made)  # some bytes of an archive, such as its dates, do not matter


GOOD = {"examples": np.arange(6), "offsets": np.array([0, 2, 6]), "meta": np.array("{}")}


@pytest.mark.parametrize(
    "change",
    [
        {"examples": np.array([0, 1, 2, 3, 4, 4])},
        {"examples": np.array([0, 1, 2, 3, 4, 6])},
        {"examples": np.arange(6) - 1},
        {"examples": np.arange(6.0)},
        {"examples": np.arange(6).reshape(2, 3)},
        {"offsets": np.array([0, 2, 5])},
        {"offsets": np.array([1, 2, 6])},
        {"offsets": np.array([0, 4, 2, 6])},
        {"offsets": np.array([], dtype=np.int64)},
        {"meta": np.array("{")},
        {"meta": np.array("[]")},
        {"examples": np.array([None] * 6)},
    ],
)
def test_an_archive_of_other_arrays_is_rejected(tmp_path: Path, change: dict[str, NDArray[np.generic]]) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, **GOOD)
    assert load(path, examples=6).sizes.tolist() == [2, 4]
    np.savez(path, **(GOOD | change))
    with pytest.raises(DataError, match=r"not a partition, or is corrupt"):
        load(path, examples=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.zeros(10_000_000, np.int64)}, "its offsets do not match"),
        ({"meta": np.array("{}" + " " * 2_000_000)}, "its description is too long"),
        ({"examples": np.zeros(10_000_000, np.int64)}, "is for 10000000 examples"),
    ],
)
def test_arrays_that_cannot_be_of_this_dataset_are_not_read(
    tmp_path: Path, change: dict[str, NDArray[np.generic]], message: str
) -> None:
    path = tmp_path / "large.npz"
    np.savez_compressed(path, **(GOOD | change))
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        load(path, examples=6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_an_archive_without_an_array_is_rejected(tmp_path: Path, missing: str) -> None:
    np.savez(tmp_path / "less.npz", **{name: array for name, array in GOOD.items() if name != missing})
    with pytest.raises(DataError, match="not a partition"):
        load(tmp_path / "less.npz", examples=6)


@pytest.mark.parametrize("content", [b"", b"client,row\n0,1\n"])
def test_another_type_of_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.npz").write_bytes(content)
    np.save(tmp_path / "array.npy", np.arange(3))
    for name in ("text.npz", "array.npy"):
        with pytest.raises(DataError, match="not a partition"):
            load(tmp_path / name, examples=3)
