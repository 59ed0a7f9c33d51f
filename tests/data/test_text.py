"""Text as next-character prediction: windows, vocabulary, the test text, clients as consecutive parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrane
from fedrane import Experiment
from fedrane.data import catalogue, from_text, load, text
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Partitioning, partition, split
from fedrane.errors import ConfigError, DataError, NoEffect, TooLarge
from fedrane.system import memory
from fedrane.training.predictor import read_named_inputs
from fedrane.training.setup import make_partition

PANGRAM = "the quick brown fox jumps over the lazy dog. " * 4


def written(folder: Path, content: str, **more: Any) -> Path:
    path = folder / "a.txt"
    path.write_text(content, **more)
    return path


def decoded(dataset: Dataset, numbers: Any) -> str:
    return "".join((dataset.alphabet + "�")[number] for number in numbers)


def test_each_window_is_followed_by_its_label(tmp_path: Path) -> None:
    """Every character of the text is predicted once, from those before it, but the first window."""
    data = load(str(written(tmp_path, PANGRAM)), window=7)
    x, y = np.concatenate([data.x, data.x_test]), np.concatenate([data.y, data.y_test])
    assert [decoded(data, [*window, after]) for window, after in zip(x, y, strict=True)] == [
        PANGRAM[i : i + 8] for i in range(len(PANGRAM) - 7)
    ]


def test_the_test_text_is_the_last_fifth_and_no_training_window_has_of_it(tmp_path: Path) -> None:
    """Digits mark the test text: they would show in the vocabulary, or in a training window."""
    data = from_text(written(tmp_path, "ab" * 40 + "12" * 10), window=3)
    assert len(data.y_test) == 20
    assert data.alphabet == "ab"
    assert data.y_test.tolist() == [2] * 20, "unknown characters are a class of their own"
    assert data.classes == ("a", "b", "unknown")
    assert data.vocabulary == 3
    assert data.x.max() < 2
    assert "20 of the 20 test characters do not occur" in data.notes[0]


def test_classes_have_names_that_can_be_printed(tmp_path: Path) -> None:
    data = from_text(written(tmp_path, "a \t\n\x07é" * 20, encoding="utf-8"), window=2)
    assert data.classes == ("U+0007", "tab", "newline", "space", "a", "é", "unknown")


def test_a_byte_order_mark_is_no_character(tmp_path: Path) -> None:
    plain, marked = (from_text(written(tmp_path, "abc" * 20, encoding=e), 2) for e in ("utf-8", "utf-8-sig"))
    assert plain.alphabet == marked.alphabet == "abc"


def test_the_zen_of_python() -> None:
    data = load("zen")
    known = next(status for status in catalogue.status() if status.name == "zen")
    assert (known.classes, known.shape) == (len(data.classes), data.shape)
    assert (known.train, known.test) == (len(data.y), len(data.y_test))
    assert decoded(data, data.x[0]) == "The Zen of Python, by Tim Peters"


@pytest.mark.parametrize(
    ("content", "window", "error", "why"),
    [
        (b"\xff\xfe\x00", 3, DataError, "is not UTF-8 .at byte 0"),
        (b"", 3, DataError, "has 0 characters"),
        (b"abcde", 4, DataError, "first four fifths must have more than 4"),
        (b"abcdefgh", 0, ConfigError, "window=0"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path: Path, content: bytes, window: int, error: Any, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(error, match=why):
        from_text(tmp_path / "a.txt", window)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset, file or folder"):
        load(str(tmp_path / "b.txt"))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        from_text(tmp_path / "b.txt")


def test_windows_that_do_not_fit_are_refused_unmade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.LIMIT, "0.001")
    with pytest.raises(TooLarge, match="Use a smaller window"):
        from_text(written(tmp_path, "ab" * 10_000), window=1000)


# ---- clients


def test_clients_are_consecutive_parts_by_default() -> None:
    data = load("zen", window=5)
    made = make_partition(Experiment(dataset="zen", clients=4), data)
    np.testing.assert_array_equal(np.concatenate(made.clients), np.arange(len(data.y)))
    assert made.sizes.max() - made.sizes.min() <= 1
    other = make_partition(Experiment(dataset="zen", clients=4, partition=Partitioning("iid")), data)
    assert not np.array_equal(np.concatenate(other.clients), np.arange(len(data.y)))


def test_consecutive_parts_of_any_data() -> None:
    y = np.array([1, 0] * 15)
    made = partition(y, 2, 3, Partitioning("consecutive"), seed=5)
    assert [part.tolist() for part in made.clients] == [list(range(k, k + 10)) for k in (0, 10, 20)]
    with pytest.raises(DataError, match="Use clients=3 or fewer"):
        partition(y, 2, 4, Partitioning("consecutive"), seed=5)


def test_a_client_is_tested_on_the_end_of_its_part() -> None:
    """In the middle, nearly every test window would overlap with training windows on both sides."""
    made = partition(np.zeros(40, np.int64), 1, 2, Partitioning("consecutive"), seed=0)
    parts = split(made, seed=3, test=0.25, validation=0.2, ordered=True)
    for k in (0, 1):
        whole = [*parts.train[k], *parts.validation[k], *parts.test[k]]
        assert whole == list(range(20 * k, 20 * k + 20))
        assert [len(part[k]) for part in (parts.train, parts.validation, parts.test)] == [12, 3, 5]


# ---- settings


def test_the_window_is_of_texts_alone() -> None:
    with pytest.raises(NoEffect, match=r"window=5 would have no effect: that needs a text, dataset=FILE.txt"):
        fedrane.run(["dataset=digits", "window=5"], progress=False)
    with pytest.raises(ConfigError, match="window=0"):
        Experiment(dataset="zen", window=0)


# ---- whole runs


LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedavg", "lstm"),
        *(pytest.param(name, "lstm", marks=pytest.mark.slow) for name in ("fedprox", "fedrane")),
        pytest.param("fedavg", "transformer", marks=pytest.mark.slow),
    ],
)
def test_it_learns_to_predict_the_next_character(method: str, model: str, tmp_path: Path) -> None:
    """Of an English text that stands beside this library: after four rounds far better than always the space."""
    path = written(tmp_path, " ".join(LICENSE.read_text().split())[:5000])
    settings = {"clients": 4, "window": 5, "rounds": 4, "epochs": 2, "batch": 32, "lr": 0.2, "momentum": 0.9}
    words = {"method": method, "model": model, "dataset": str(path), "engine": "stacked", "threads": 1, "clip": 5.0}
    result = fedrane.run(Experiment(**words, **settings), progress=False)
    assert result.experiment.partition.kind == "consecutive"
    majority = np.bincount(from_text(path, 5).y_test).max() / len(from_text(path, 5).y_test)
    for whose in ("global", "personal"):
        accuracy = result.history[3].get(f"{whose}/accuracy", 1.0)
        assert accuracy > majority + 0.08, (whose, accuracy, majority)


def test_a_model_of_text_takes_text(tmp_path: Path) -> None:
    path = written(tmp_path, "ab" * 200)
    settings = {"clients": 2, "window": 4, "rounds": 2, "batch": 16, "lr": 0.5, "engine": "sequential"}
    fedrane.run(Experiment(dataset=str(path), **settings), tmp_path / "run", progress=False)
    model = fedrane.load(tmp_path / "run").model
    assert model.predict("abab") == ["a"]
    assert model.predict("ababa") == ["b"], "of a longer text the end counts"
    with pytest.raises(DataError, match=r"a text of 3 characters.*predicts the one after 4"):
        model.predict("aba")
    (tmp_path / "b.txt").write_text("baba\n")
    ((name, x),) = read_named_inputs(tmp_path / "b.txt", model.inputs, 0)
    assert name.endswith("b.txt")
    assert x.tolist() == text.encode("baba", "ab").tolist()
