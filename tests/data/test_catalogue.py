"""The known datasets: where they are searched, their orientation and labels, and the error if they are missing."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fedrane.data import catalogue, load
from fedrane.data.dataset import hold_out
from fedrane.errors import DataError

TOP_RIGHT = np.zeros((28, 28), np.uint8)
TOP_RIGHT[0, 27] = 255  # every reflection or transposition moves it
TOP_RIGHT[0, 26] = 9


@pytest.fixture(autouse=True)
def no_system_packages(monkeypatch):
    monkeypatch.setattr(catalogue, "SYSTEM", {})


def idx_file(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.asarray(array, np.uint8)
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fmnist(folder, suffix=".gz", labels=(9, 0), images=(TOP_RIGHT, TOP_RIGHT)):
    for part in ("train", "t10k"):
        idx_file(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        idx_file(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_is_read_upright(tmp_path, suffix):
    write_fmnist(tmp_path / "FashionMNIST" / "raw", suffix)
    data = catalogue.load("fmnist", tmp_path)
    assert data.x.shape == (2, 1, 28, 28)
    assert (data.x[0, 0] == TOP_RIGHT).all()
    assert [data.classes[label] for label in data.y] == ["Ankle boot", "T-shirt/top"]
    assert (data.mean, data.std) == ((0.2860,), (0.3530,))


def test_emnist_letters_are_transposed_and_numbered_from_zero(tmp_path):
    for part in ("train", "test"):
        stem = tmp_path / "EMNIST" / "raw" / f"emnist-letters-{part}"
        idx_file(Path(f"{stem}-images-idx3-ubyte.gz"), [TOP_RIGHT.T, TOP_RIGHT.T])  # stored column by column
        idx_file(Path(f"{stem}-labels-idx1-ubyte.gz"), [1, 26])
    data = catalogue.load("emnist-letters", tmp_path)
    assert (data.x_test[1, 0] == TOP_RIGHT).all()
    assert data.x.flags.c_contiguous
    assert data.y.tolist() == [0, 25]
    assert (len(data.classes), data.classes[0], data.classes[25]) == (26, "a", "z")
    idx_file(tmp_path / "EMNIST" / "raw" / "emnist-letters-test-labels-idx1-ubyte.gz", [0, 26])
    with pytest.raises(DataError, match=r"emnist-letters-test-labels-idx1-ubyte.gz has labels from 0 to 26"):
        catalogue.load("emnist-letters", tmp_path)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"labels": (1, 10)}, "train-labels-idx1-ubyte.gz has labels from 1 to 10"),
        ({"labels": (1, 2, 3)}, "has 2 images but"),
        ({"images": np.zeros((2, 28, 27))}, "train-images-idx3-ubyte.gz has images of"),
    ],
    ids=["label", "count", "size"],
)
def test_inconsistent_files_are_rejected(tmp_path, wrong, complaint):
    write_fmnist(tmp_path / "FashionMNIST" / "raw", **wrong)
    with pytest.raises(DataError, match="fedrane data get fmnist") as caught:
        catalogue.load("fmnist", tmp_path)
    assert complaint in caught.value.problem


def test_a_system_package_serves_where_the_data_root_has_none(tmp_path, monkeypatch):
    system, root = tmp_path / "system", tmp_path / "root"
    monkeypatch.setattr(catalogue, "SYSTEM", {"fmnist": system})
    write_fmnist(system, labels=(1, 1))
    assert catalogue.load("fmnist", root).y.tolist() == [1, 1]
    assert catalogue.status(root)[1].where == str(system)
    write_fmnist(root / "FashionMNIST" / "raw", labels=(2, 2))
    assert catalogue.load("fmnist", root).y.tolist() == [2, 2]
    (root / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()  # half a dataset does not hide a whole one
    assert catalogue.load("fmnist", root).y.tolist() == [1, 1]


def test_absent_files_are_named_with_the_way_to_get_them(tmp_path):
    folder = tmp_path / "FashionMNIST" / "raw"
    with pytest.raises(DataError, match="no such folder") as caught:
        catalogue.load("fmnist", tmp_path)
    assert str(folder) in caught.value.problem
    assert "`fedrane data get fmnist`" in caught.value.remedy
    assert "dataset-fashion-mnist" in caught.value.remedy
    write_fmnist(folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"\(no t10k-labels-idx1-ubyte\)"):
        catalogue.load("fmnist", tmp_path)


def test_status_lists_what_is_ready(tmp_path):
    write_fmnist(tmp_path / "FashionMNIST" / "raw")
    listed = {entry.name: entry for entry in catalogue.status(tmp_path)}
    assert tuple(listed) == catalogue.NAMES == ("digits", "fmnist", "emnist-letters", "cifar10", "cifar100")
    assert [name for name, entry in listed.items() if entry.ready] == ["digits", "fmnist"]
    assert listed["digits"].where == "embedded"
    assert listed["cifar100"].where == str(tmp_path / "cifar-100-python")
    assert (listed["cifar100"].classes, listed["cifar100"].shape) == (100, (3, 32, 32))
    assert listed["emnist-letters"].how == "`fedrane data get emnist-letters`"


def test_digits_need_no_file_and_hold_out_a_fixed_fifth():
    data = load("digits", "/nowhere")
    entry = catalogue.status(Path("/nowhere"))[0]
    assert (len(data.y), len(data.y_test)) == (entry.train, entry.test)
    assert data.shape == entry.shape
    counts, held = np.bincount(data.y), np.bincount(data.y_test)
    assert (held == np.rint((counts + held) / 5)).all()
    assert (data.x.min(), data.x.max()) == (0, 255)
    assert set(np.unique(data.x)) <= {round(level * 255 / 16) for level in range(17)}
    pixels = data.x / 255
    assert data.mean == pytest.approx([pixels.mean()])
    assert data.std == pytest.approx([pixels.std()])
    again = load("digits")
    assert (again.x_test == data.x_test).all()


def test_the_held_out_examples_never_change():
    """The test set is the same in every version, and with every version of NumPy."""
    held = hold_out(np.arange(1000) % 7)
    assert hashlib.sha256(np.packbits(held).tobytes()).hexdigest()[:16] == "cc7f641310e42eca"


def test_every_class_of_two_examples_gives_one_to_the_test_set():
    y = np.array([0, 1, 1, 2, 2, 2, *[3] * 8])
    assert np.bincount(y[hold_out(y)], minlength=4).tolist() == [0, 1, 1, 2]


def test_the_data_root_is_the_one_given_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDRANE_DATA", raising=False)
    assert catalogue.data_root() == tmp_path / ".cache" / "fedrane"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert catalogue.data_root() == Path("/elsewhere/fedrane")
    monkeypatch.setenv("FEDRANE_DATA", "~/data")
    assert catalogue.data_root() == tmp_path / "data"
    assert catalogue.data_root("given") == Path("given")


def test_a_mistyped_name_gets_the_nearest_as_a_suggestion(tmp_path):
    for attempt in (catalogue.load, load):
        with pytest.raises(DataError, match="Did you mean 'fmnist'"):
            attempt("fmist", tmp_path)
    with pytest.raises(DataError, match="image_size"):
        load("digits", image_size=32)
