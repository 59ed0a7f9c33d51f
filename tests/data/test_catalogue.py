"""The known datasets: where they are searched, their orientation and labels, and the error if they are missing."""

import gzip
import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import io
from scipy.sparse import csc_matrix

from contained import used_or_refused
from fedrane.data import catalogue, download, load, medmnist
from fedrane.data.dataset import hold_out
from fedrane.data.partition import Partitioning, partition
from fedrane.errors import DataError

TOP_RIGHT = np.zeros((28, 28), np.uint8)
TOP_RIGHT[0, 27] = 255  # every reflection or transposition moves it
TOP_RIGHT[0, 26] = 9


@pytest.fixture(autouse=True)
def no_system_packages(monkeypatch):
    monkeypatch.setattr(catalogue, "SYSTEM", {})


EMBEDDED = ("digits", "breast-cancer", "wine", "diabetes")


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
    assert {entry.name: entry.where for entry in catalogue.status(root)}["fmnist"] == str(system)
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
    assert tuple(listed) == catalogue.NAMES == (*EMBEDDED, "zen", *catalogue.KNOWN)
    assert [name for name, entry in listed.items() if entry.ready] == [*EMBEDDED, "zen", "fmnist"]
    assert listed["digits"].where == "embedded"
    assert listed["cifar100"].where == str(tmp_path / "cifar-100-python")
    assert (listed["cifar100"].classes, listed["cifar100"].shape) == (100, (3, 32, 32))
    assert listed["emnist-letters"].how == "`fedrane data get emnist-letters`"
    assert listed["pathmnist"].how == "by hand: `fedrane data get pathmnist` explains it"


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_data_need_no_file_and_hold_out_a_fixed_fifth(name):
    data = load(name, "/nowhere")
    entry = {entry.name: entry for entry in catalogue.status(Path("/nowhere"))}[name]
    assert (len(data.y), len(data.y_test)) == (entry.train, entry.test)
    assert (data.shape, len(data.classes)) == (entry.shape, entry.classes)
    groups = (data.y, data.y_test) if data.classes else (data.y * 0, data.y_test * 0)
    counts, held = (np.bincount(group.astype(int)) for group in groups)
    assert (held == np.rint((counts + held) / 5)).all()


def test_digits_are_bytes():
    data = load("digits")
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


# ---- MNIST and its relatives


@pytest.mark.parametrize("name", ["mnist", "kmnist"])
def test_the_relatives_of_mnist_are_read_upright(name, tmp_path):
    write_fmnist(tmp_path / name.upper() / "raw")
    data = catalogue.load(name, tmp_path)
    assert (data.x[1, 0] == TOP_RIGHT).all()
    assert data.y.tolist() == [9, 0]
    assert (len(data.classes), data.classes[9]) == (10, {"mnist": "9", "kmnist": "wo"}[name])


def test_mean_and_deviation_that_are_not_in_the_catalogue_are_those_of_the_training_examples(tmp_path):
    write_fmnist(tmp_path / "KMNIST" / "raw")
    data = catalogue.load("kmnist", tmp_path)
    pixels = TOP_RIGHT / 255
    assert data.mean == pytest.approx((pixels.mean(),))
    assert data.std == pytest.approx((pixels.std(),))


def test_emnist_balanced_has_small_letters_where_they_differ(tmp_path):
    for part in ("train", "test"):
        stem = tmp_path / "EMNIST" / "raw" / f"emnist-balanced-{part}"
        idx_file(Path(f"{stem}-images-idx3-ubyte.gz"), [TOP_RIGHT.T] * 4)
        idx_file(Path(f"{stem}-labels-idx1-ubyte.gz"), [0, 10, 36, 46])
    data = catalogue.load("emnist-balanced", tmp_path)
    assert (data.x[3, 0] == TOP_RIGHT).all()
    assert [data.classes[label] for label in data.y] == ["0", "A", "a", "t"]
    assert len(data.classes) == 47


# ---- SVHN


def write_svhn(folder, name, x, y, **more):
    folder.mkdir(parents=True, exist_ok=True)
    io.savemat(folder / name, {"X": x, "y": y, **more}, do_compression=True)


RNG = np.random.default_rng(0)
HOUSES = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
NUMBERS = np.array([[1], [10], [9], [10]], np.uint8)


def test_svhn_has_ten_for_zero(tmp_path):
    write_svhn(tmp_path / "SVHN", "train_32x32.mat", HOUSES, NUMBERS)
    write_svhn(tmp_path / "SVHN", "test_32x32.mat", HOUSES[..., :2], NUMBERS[:2])
    data = catalogue.load("svhn", tmp_path)
    assert data.x.shape == (4, 3, 32, 32)
    assert data.x.flags.c_contiguous
    assert data.x[2, 1, 5, 7] == HOUSES[5, 7, 1, 2]
    assert (data.y.tolist(), data.y_test.tolist()) == ([1, 0, 9, 0], [1, 0])
    assert len(data.mean) == 3


@pytest.mark.parametrize(
    ("x", "y", "complaint"),
    [
        (HOUSES, NUMBERS[:3], "y (3, 1)"),
        (HOUSES[:, :, :, 0], NUMBERS[:1], "X (32, 32, 3)"),
        (HOUSES[:16], NUMBERS, "X (16, 32, 3, 4)"),
        (HOUSES, np.array([[1], [11], [2], [3]], np.uint8), "labels from 1 to 11"),
        (HOUSES, np.array([[1], [0], [2], [3]], np.uint8), "labels from 0 to 3"),
        (HOUSES / 255, NUMBERS, "images of double"),
        (HOUSES, np.array(list("1234")), "labels of char"),
        (HOUSES, np.zeros((4, 1), [("a", float)]), "labels of struct"),
        (HOUSES, csc_matrix(np.ones((4, 1))), "labels of sparse"),
    ],
)
def test_another_matlab_file_is_one_clear_error(tmp_path, x, y, complaint):
    for name in ("train_32x32.mat", "test_32x32.mat"):
        write_svhn(tmp_path / "SVHN", name, x, y)
    with pytest.raises(DataError, match="fedrane data get svhn") as caught:
        catalogue.load("svhn", tmp_path)
    assert complaint in caught.value.problem


def test_an_array_that_occurs_twice_in_a_matlab_file_is_refused(tmp_path):
    for name in ("train_32x32.mat", "test_32x32.mat"):
        write_svhn(tmp_path / "SVHN", name, HOUSES, NUMBERS)
    path = tmp_path / "SVHN" / "train_32x32.mat"
    path.write_bytes(path.read_bytes() + path.read_bytes()[128:])  # without its header
    with pytest.raises(DataError, match=r"has X .*, y .*, X .*, y"):
        catalogue.load("svhn", tmp_path)


@pytest.mark.parametrize("content", [b"", b"MATLAB 5.0", b"x" * 500, None])
def test_a_damaged_matlab_file_is_one_clear_error(tmp_path, content):
    write_svhn(tmp_path / "SVHN", "train_32x32.mat", HOUSES, NUMBERS)
    path = tmp_path / "SVHN" / "train_32x32.mat"
    (tmp_path / "SVHN" / "test_32x32.mat").touch()
    path.write_bytes(path.read_bytes()[:700] if content is None else content)
    with pytest.raises(DataError, match=r"train_32x32.mat (cannot be read:|has X).*Delete the file"):
        catalogue.load("svhn", tmp_path)


# ---- MedMNIST


def write_medmnist(path, channels, labels, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (len(labels), 28, 28) + ((channels,) if channels > 1 else ())
    held = {}
    for part in ("train", "val", "test"):
        held[f"{part}_images"] = np.random.default_rng(len(part)).integers(0, 256, shape, dtype=np.uint8)
        held[f"{part}_labels"] = np.array(labels, np.uint8)[:, None]
    held |= changes
    np.savez_compressed(path, **{name: array for name, array in held.items() if array is not None})
    return held


@pytest.mark.parametrize("name", medmnist.DATASETS)
def test_medmnist_is_read_from_its_file(name, tmp_path):
    facts = medmnist.DATASETS[name]
    labels = [0, len(facts.classes) - 1, 0]
    held = write_medmnist(tmp_path / "MedMNIST" / f"{name}.npz", facts.channels, labels)
    data = catalogue.load(name, tmp_path)
    assert data.shape == (facts.channels, 28, 28)
    assert data.y.tolist() == data.y_test.tolist() == labels
    assert data.classes == facts.classes
    images = held["train_images"].reshape(3, 28, 28, facts.channels)
    assert (data.x.transpose(0, 2, 3, 1) == images).all()
    assert (data.x_test.transpose(0, 2, 3, 1) == held["test_images"].reshape(images.shape)).all()
    assert data.mean == pytest.approx((images / 255).mean(axis=(0, 1, 2)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"train_labels": None}, "it should have train_images and train_labels"),
        ({"test_labels": np.zeros((2, 1), np.uint8)}, "test_labels of uint8 (2, 1)"),
        ({"train_labels": np.zeros((3, 14), np.uint8)}, "each has one label"),
        ({"train_images": np.zeros((3, 64, 64, 3), np.uint8)}, "train_images of uint8 (3, 64, 64, 3)"),
        ({"train_images": np.zeros((3, 28, 28), np.uint8)}, "train_images of uint8 (3, 28, 28)"),
        ({"train_labels": np.array([[0], [9], [1]], np.uint8)}, "labels from 0 to 9"),
        ({"train_images": np.array([{}, {}, {}])}, "train_images of object (3,)"),
    ],
)
def test_another_file_of_medmnist_is_one_clear_error(tmp_path, changes, complaint):
    path = tmp_path / "MedMNIST" / "pathmnist.npz"
    write_medmnist(path, 3, [0, 1, 8], **changes)
    with pytest.raises(DataError, match="get it again: download https://zenodo") as caught:
        catalogue.load("pathmnist", tmp_path)
    assert complaint in str(caught.value)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"pathmnist\.npz cannot be read"):
        catalogue.load("pathmnist", tmp_path)


def test_labels_of_another_number_are_not_unpacked(tmp_path, monkeypatch):
    labels = np.zeros((10_000_000, 1), np.int64)
    write_medmnist(tmp_path / "MedMNIST" / "pathmnist.npz", 3, [0, 1, 8], train_labels=labels)
    monkeypatch.setattr(medmnist.arrays, "read", None)
    with pytest.raises(DataError, match=r"train_labels of int64 \(10000000, 1\)"):
        catalogue.load("pathmnist", tmp_path)


@pytest.mark.parametrize("name", ["pathmnist", "femnist"])
def test_what_is_got_by_hand_is_never_downloaded(name, tmp_path):
    folder = tmp_path / catalogue.KNOWN[name].folder
    for act in (catalogue.load, download.get):
        with pytest.raises(DataError, match="By hand") as caught:
            act(name, tmp_path)
        assert str(folder) in caught.value.remedy
    assert not folder.exists()


# ---- FEMNIST, in the format of LEAF


def write_leaf(folder, **users):
    """One file of several users: their images, and the labels of these."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    sizes = [len(y) for _, y in users.values()]
    content = {"users": list(users), "num_samples": sizes, "user_data": held}
    (folder / f"all_data_{'_'.join(users)}.json").write_text(json.dumps(content))


def written(*values):
    """Images as LEAF writes them: 784 fractions, and one of them as the first."""
    return [[value, *[1.0] * 783] for value in values]


def test_femnist_has_a_client_for_each_user(tmp_path):
    folder = tmp_path / "LEAF" / "femnist"
    write_leaf(folder / "train", f0002_11=(written(0.0, 0.2), [0, 61]), f0001_41=(written(0.4, 0.6, 0.8), [10, 36, 1]))
    write_leaf(folder / "train", f0000_14=(written(1.0, 0.2), [5, 5]), empty=([], []))
    write_leaf(folder / "test", f0002_11=(written(0.0), [3]))
    data = catalogue.load("femnist", tmp_path)
    assert data.shape == (1, 28, 28)
    assert data.client.tolist() == [0, 0, 2, 2, 1, 1, 1]  # in the order of the users' names
    assert data.x[:, 0, 0, 0].tolist() == [255, 51, 0, 51, 102, 153, 204]
    assert (data.x[:, 0, 0, 1:] == 255).all()
    assert [data.classes[label] for label in data.y] == [*"55", "0", "z", "A", "a", "1"]
    assert (len(data.classes), data.y_test.tolist()) == (62, [3])
    assert partition(data.y, 62, 0, Partitioning(), 0, data.client).sizes.tolist() == [2, 3, 2]


def test_a_user_s_name_may_be_long(tmp_path):
    folder, name = tmp_path / "LEAF" / "femnist", "u" * 3_000_000
    content = json.dumps({"user_data": {name: {"x": written(*[1.0] * 300), "y": [0] * 300}}})
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / part / "data.json").write_text(content)
    data = used_or_refused(tmp_path, lambda: catalogue.load("femnist", tmp_path))
    assert data is not None
    assert data.client.tolist() == [0] * 300


def test_a_pipe_is_no_file_of_leaf(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "LEAF" / "femnist" / part).mkdir(parents=True)
        os.mkfifo(tmp_path / "LEAF" / "femnist" / part / "data.json")
    with pytest.raises(DataError, match="not a plain file"):
        catalogue.load("femnist", tmp_path)


def test_shakespeare_has_texts_and_a_client_for_each_role(tmp_path):
    folder = tmp_path / "LEAF" / "shakespeare"
    line = "To be, or not to be: that is the question: Whether 'tis nobler in the mind to s~"
    write_leaf(folder / "train", HAMLET=([line, line[1:] + "u"], ["u", "f"]), OPHELIA=([" " * 80], ["~"]))
    write_leaf(folder / "test", HAMLET=([line], ["\n"]))
    data = catalogue.load("shakespeare", tmp_path)
    assert (data.shape, data.vocabulary, len(data.classes)) == ((80,), 81, 81)
    shown = ["".join((*data.alphabet, "~")[code] for code in row) for row in data.x]
    assert shown == [line, line[1:] + "u", " " * 80]
    assert [data.classes[y] for y in (*data.y, *data.y_test)] == ["u", "f", "unknown", "newline"]
    assert data.client.tolist() == [0, 0, 1]
    assert (data.classes[1], data.mean) == ("space", ())


@pytest.mark.parametrize(("x", "y"), [(["a" * 79], ["b"]), (["a" * 80], ["bc"]), ([5], ["b"]), (["a" * 80], [3])])
def test_shakespeare_with_other_texts_is_refused(tmp_path, x, y):
    for part in ("train", "test"):
        write_leaf(tmp_path / "LEAF" / "shakespeare" / part, a=(x, y))
    with pytest.raises(DataError, match="an example is 80 characters, and its label the one after them"):
        catalogue.load("shakespeare", tmp_path)


# ---- Tiny-ImageNet


def write_tiny(root, annotations="val_0.JPEG\tn02\t0\t0\t62\t62\nval_1.JPEG\tn01\t0\t0\t62\t62\n", side=64):
    folder = root / "tiny-imagenet-200"
    grey, coloured = Image.new("L", (side, side), 10), Image.new("RGB", (side, side), (200, 200, 200))
    images = {"train/n01/images/a": grey, "train/n02/images/b": coloured}
    images |= {"val/images/val_0": coloured, "val/images/val_1": grey}
    for name, image in images.items():
        path = folder / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tmantis\nn03\tother\n")
    (folder / "val" / "val_annotations.txt").write_text(annotations)


def test_tiny_imagenet_is_read_from_its_folders(tmp_path):
    write_tiny(tmp_path)
    data = catalogue.load("tiny-imagenet", tmp_path)
    assert (data.shape, data.classes) == ((3, 64, 64), ("goldfish", "mantis"))
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [1, 0])
    assert [int(x.mean()) for x in (*data.x, *data.x_test)] == pytest.approx([10, 200, 200, 10], abs=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": "val_0.JPEG\tn07\n"}, "the name of an image, and its class"),
        ({"annotations": "../val_0.JPEG\tn01\n"}, "the name of an image, and its class"),
        ({"annotations": ""}, "has no images"),
        ({"side": 32}, r"of shape \(3, 32, 32\)"),
    ],
)
def test_tiny_imagenet_of_another_form_is_refused(tmp_path, change, message):
    write_tiny(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        catalogue.load("tiny-imagenet", tmp_path)


def test_femnist_in_bytes_is_the_same(tmp_path):
    folder = tmp_path / "LEAF" / "femnist"
    for part in ("train", "test"):
        write_leaf(folder / part, a=([[51, *[255] * 783]] * 2, [0, 1]))
    assert catalogue.load("femnist", tmp_path).x[:, 0, 0, :2].tolist() == [[51, 255]] * 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "has no user_data"),
        ('{"user_data": {"a": {"x": [[1]], "y": []}}}', "the data of user 'a' cannot be used"),
        ('{"user_data": {"a": {"x": [[1], [1, 2]], "y": [0, 0]}}}', "the data of user 'a' cannot be used"),
        ('{"user_data": {"a": {"x": [[0.5, 1]], "y": [0]}}}', "user 'a' has examples of shape (2,)"),
        ('{"user_data": {"a": {"x": ["to be"], "y": ["o"]}}}', "the data of user 'a' cannot be used"),
        (json.dumps({"user_data": {"a": {"x": [[-1.0] * 784], "y": [0]}}}), "user 'a' has examples"),
        (json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": [62]}}}), "user 'a' has labels"),
        (json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": ["a"]}}}), "user 'a' has labels"),
        (json.dumps({"user_data": {"a": {"x": [[float("nan")] * 784], "y": [1]}}}), "user 'a' has examples"),
        (json.dumps({"user_data": {"a": {"x": [[10**400] * 784], "y": [0]}}}), "the data of user 'a' cannot be used"),
        ('{"user_data": {}}', "has no examples"),
    ],
)
def test_another_json_file_is_one_clear_error(tmp_path, content, complaint):
    folder = tmp_path / "LEAF" / "femnist"
    write_leaf(folder / "test", a=(written(1.0), [0]))
    (folder / "train").mkdir()
    (folder / "train" / "data.json").write_text(content)
    with pytest.raises(DataError, match=r"preprocess\.sh") as caught:
        catalogue.load("femnist", tmp_path)
    assert complaint in caught.value.problem
