"""The datasets known by name: their properties, where their files are, and how to read them.

Files use torchvision's layout, so both libraries can share a folder. Files that are already there are not changed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.data import cifar, idx
from fedrane.data.dataset import Dataset, hold_out, moments
from fedrane.errors import DataError, nearest
from fedrane.system.files import user_path

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]

DIGITS = "digits"
"""Comes with scikit-learn, so it works without a download."""

SYSTEM: Mapping[str, Path] = {"fmnist": Path("/usr/share/datasets/fashion-mnist")}
"""Where a package of the operating system installs a dataset."""

_PACKAGES = {"fmnist": "dataset-fashion-mnist"}


@dataclass(frozen=True, kw_only=True)
class Known(ABC):
    """A dataset stored in files."""

    folder: str
    """Relative to the data root."""
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @abstractmethod
    def locate(self, folder: Path, name: str) -> Path | None:
        """Return the path of one of the files, or None if it is missing."""

    @abstractmethod
    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        """Read the images and labels of some of the files."""

    def names(self, folder: Path, remedy: str) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.classes

    def missing(self, folder: Path) -> list[str]:
        """Return the files that are missing."""
        return [name for name in (*self.train_files, *self.test_files) if not self.locate(folder, name)]


@dataclass(frozen=True, kw_only=True)
class KnownIdx(Known):
    """A dataset stored as a file of images and one of labels, plain or compressed."""

    first_label: int = 0
    """The number of the first class in the files."""
    transposed: bool = False
    """Images are stored column by column."""

    def locate(self, folder: Path, name: str) -> Path | None:
        return idx.locate(folder, name)

    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        images, labels = (self.locate(folder, name) or folder / name for name in files)
        x = idx.read(images, 3, remedy, self.shape[1:])
        y = idx.read(labels, 1, remedy).astype(np.int64)
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x)} images but {labels} has {len(y)} labels", "", remedy)
        last_label = self.first_label + len(self.classes) - 1
        if len(y) and (y.min() < self.first_label or y.max() > last_label):
            raise DataError(
                f"{labels} has labels from {y.min()} to {y.max()}",
                f"the classes are numbered from {self.first_label} to {last_label}",
                remedy,
            )
        upright = np.ascontiguousarray(x.swapaxes(1, 2)) if self.transposed else x
        return upright[:, np.newaxis], y - self.first_label


@dataclass(frozen=True, kw_only=True)
class KnownCifar(Known):
    """A dataset stored as pickled batches of images with their labels."""

    labels: str
    """The key of the labels in a batch."""
    names_file: str
    names_key: str

    def locate(self, folder: Path, name: str) -> Path | None:
        return path if (path := folder / name).is_file() else None

    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        batches = [cifar.read(folder / name, self.labels, len(self.classes), remedy) for name in files]
        return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])

    def names(self, folder: Path, remedy: str) -> tuple[str, ...]:
        path = self.locate(folder, self.names_file)
        return cifar.names(path, self.names_key, len(self.classes), remedy) if path else self.classes


_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

KNOWN: Mapping[str, Known] = {
    "fmnist": KnownIdx(
        folder="FashionMNIST/raw",
        train_files=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        test_files=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "emnist-letters": KnownIdx(
        folder="EMNIST/raw",
        train_files=("emnist-letters-train-images-idx3-ubyte", "emnist-letters-train-labels-idx1-ubyte"),
        test_files=("emnist-letters-test-images-idx3-ubyte", "emnist-letters-test-labels-idx1-ubyte"),
        classes=tuple("abcdefghijklmnopqrstuvwxyz"),
        shape=(1, 28, 28),
        train=124_800,
        test=20_800,
        mean=(0.1722,),
        std=(0.3309,),
        first_label=1,
        transposed=True,
    ),
    "cifar10": KnownCifar(
        folder="cifar-10-batches-py",
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_files=("test_batch",),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        labels="labels",
        names_file="batches.meta",
        names_key="label_names",
    ),
    "cifar100": KnownCifar(
        folder="cifar-100-python",
        train_files=("train",),
        test_files=("test",),
        classes=tuple(_CIFAR100.split()),
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        labels="fine_labels",
        names_file="meta",
        names_key="fine_label_names",
    ),
}

NAMES = (DIGITS, *KNOWN)


@dataclass(frozen=True)
class Status:
    """What is known about a dataset without reading it."""

    name: str
    ready: bool
    where: str
    """Its folder, "embedded", or the folder that is searched first."""
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    how: str
    """How to get it."""


def data_root(given: str | Path | None = None) -> Path:
    """Return the folder of all datasets: the given one, else $FEDRANE_DATA, else one in the user's cache."""
    if root := given or os.environ.get("FEDRANE_DATA"):
        return user_path(root)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedrane"


def known(name: str) -> Known:
    """Return the catalogue entry of a dataset stored in files."""
    if name not in KNOWN:
        raise DataError(f"no dataset is called {name!r}", "", nearest(name, NAMES))
    return KNOWN[name]


def find(name: str, root: Path) -> Path | None:
    """Return the folder that has every file of a dataset, or None."""
    return next((folder for folder in _folders(name, root) if not known(name).missing(folder)), None)


def load(name: str, root: str | Path | None = None) -> Dataset:
    """Read a known dataset from the data root."""
    if name == DIGITS:
        return _digits()
    entry, root = known(name), data_root(root)
    folder = find(name, root)
    if folder is None:
        looked = " and ".join(
            f"{path} (no {', '.join(entry.missing(path))})" if path.is_dir() else f"{path} (no such folder)"
            for path in _folders(name, root)
        )
        raise DataError(f"{name} is missing: looked in {looked}", "", f"Get it with {_how(name)}")
    remedy = f"Delete the file and run `fedrane data get {name}`"
    x, y = entry.examples(folder, entry.train_files, remedy)
    x_test, y_test = entry.examples(folder, entry.test_files, remedy)
    return Dataset(name, x, y, x_test, y_test, entry.names(folder, remedy), entry.mean, entry.std)


def status(root: Path | None = None) -> list[Status]:
    """Return every known dataset and whether its files are there."""
    root = data_root(root)
    listed = [Status(DIGITS, True, "embedded", 10, (1, 8, 8), 1438, 359, "nothing to do: it comes with scikit-learn")]
    for name, entry in KNOWN.items():
        folder = find(name, root)
        where = str(folder or root / entry.folder)
        sizes = len(entry.classes), entry.shape, entry.train, entry.test
        listed.append(Status(name, folder is not None, where, *sizes, _how(name)))
    return listed


def _folders(name: str, root: Path) -> list[Path]:
    return [root / known(name).folder, *([SYSTEM[name]] if name in SYSTEM else [])]


def _how(name: str) -> str:
    package = f", or install the Debian package {_PACKAGES[name]}" if name in _PACKAGES else ""
    return f"`fedrane data get {name}`{package}"


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # the import takes a second; only this dataset needs it

    flat, labels = load_digits(return_X_y=True)
    x = np.rint(flat * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    held = hold_out(y)
    return Dataset(DIGITS, x[~held], y[~held], x[held], y[held], tuple("0123456789"), *moments(x[~held]))
