"""The datasets known by name: their properties, where their files are, and how to read them.

Files use torchvision's layout, so both libraries can share a folder. Files that are already there are not changed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import cifar, idx, leaf, medmnist, svhn, text, tinyimagenet
from fedrane.data.columns import Column, Table
from fedrane.data.dataset import Dataset, hold_out, moments
from fedrane.errors import DataError, nearest
from fedrane.system.files import user_path

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]

DIGITS, ZEN = "digits", "zen"
SYSTEM: Mapping[str, Path] = {"fmnist": Path("/usr/share/datasets/fashion-mnist")}
"""Where a package of the operating system installs a dataset."""

_PACKAGES = {"fmnist": "dataset-fashion-mnist"}


class Parts(NamedTuple):
    """The examples of a dataset."""

    train: Examples
    test: Examples
    client: NDArray[np.int64] | None = None
    """Of each training example; None if the data name no clients."""


@dataclass(frozen=True, kw_only=True)
class Known(ABC):
    """A dataset stored in files."""

    folder: str
    """Relative to the data root."""
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: int | None
    """None if it depends on how the files were made."""
    test: int | None
    mean: tuple[float, ...] = ()
    """Empty: computed from the training examples."""
    std: tuple[float, ...] = ()
    by_hand: str = ""
    """How to get a dataset that :mod:`fedrane.data.download` does not."""
    alphabet: str = ""
    """Of texts: their characters, in the order of their numbers."""

    def locate(self, folder: Path, name: str) -> Path | None:
        """Return the path of one of the files, or None if it is missing."""
        return path if (path := folder / name).is_file() else None

    @abstractmethod
    def parts(self, folder: Path, remedy: str) -> Parts:
        """Read the images and labels."""

    def names(self, folder: Path, remedy: str) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.classes

    def missing(self, folder: Path) -> list[str]:
        """Return the files that are missing."""
        return [name for name in (*self.train_files, *self.test_files) if not self.locate(folder, name)]


@dataclass(frozen=True, kw_only=True)
class KnownFiles(Known):
    """A dataset of which some files are for training, and others for testing."""

    @abstractmethod
    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        """Read the images and labels of some of the files."""

    def parts(self, folder: Path, remedy: str) -> Parts:
        return Parts(self.examples(folder, self.train_files, remedy), self.examples(folder, self.test_files, remedy))


@dataclass(frozen=True, kw_only=True)
class KnownIdx(KnownFiles):
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
class KnownCifar(KnownFiles):
    """A dataset stored as pickled batches of images with their labels."""

    labels: str
    """The key of the labels in a batch."""
    names_file: str
    names_key: str

    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        batches = [cifar.read(folder / name, self.labels, len(self.classes), remedy) for name in files]
        return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])

    def names(self, folder: Path, remedy: str) -> tuple[str, ...]:
        path = self.locate(folder, self.names_file)
        return cifar.names(path, self.names_key, len(self.classes), remedy) if path else self.classes


@dataclass(frozen=True, kw_only=True)
class KnownSvhn(KnownFiles):
    """SVHN: a MATLAB file of images with their labels."""

    def examples(self, folder: Path, files: tuple[str, ...], remedy: str) -> Examples:
        [name] = files
        return svhn.read(folder / name, remedy)


@dataclass(frozen=True, kw_only=True)
class KnownMedmnist(Known):
    """A dataset of MedMNIST: one file, whose validation examples are not used."""

    facts: medmnist.Facts

    def parts(self, folder: Path, remedy: str) -> Parts:
        train, test = (medmnist.read(folder / self.train_files[0], p, self.facts, remedy) for p in ("train", "test"))
        return Parts(train, test)

    @classmethod
    def of(cls, name: str, facts: medmnist.Facts) -> KnownMedmnist:
        file, side = f"{name}.npz", medmnist.SIDE
        return cls(
            folder="MedMNIST",
            train_files=(file,),
            test_files=(),
            classes=facts.classes,
            shape=(facts.channels, side, side),
            train=facts.train,
            test=facts.test,
            by_hand=f"download {medmnist.SOURCE}/{file} (MD5 {facts.md5})",
            facts=facts,
        )


@dataclass(frozen=True, kw_only=True)
class KnownLeaf(Known):
    """What LEAF writes: folders of JSON, in which each user is a client. Images of FEMNIST, or texts."""

    def locate(self, folder: Path, name: str) -> Path | None:
        return path if any((path := folder / name).glob("*.json")) else None

    def parts(self, folder: Path, remedy: str) -> Parts:
        [train], [test] = self.train_files, self.test_files
        trained, tested = (self._examples(folder / name, remedy) for name in (train, test))
        return Parts((trained.x, trained.y), (tested.x, tested.y), trained.users)

    def _examples(self, folder: Path, remedy: str) -> leaf.Examples:
        return leaf.shakespeare(folder, remedy) if self.alphabet else leaf.femnist(folder, len(self.classes), remedy)


class KnownTinyImageNet(Known):
    """Tiny-ImageNet: files of images, and lists of their classes."""

    def parts(self, folder: Path, remedy: str) -> Parts:
        return Parts(tinyimagenet.train(folder, remedy), tinyimagenet.validation(folder, remedy))

    def names(self, folder: Path, remedy: str) -> tuple[str, ...]:
        return tinyimagenet.names(folder, remedy)


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

MNIST_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
MNIST_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""Of MNIST and of what was made in its form."""

KNOWN: Mapping[str, Known] = {
    "mnist": KnownIdx(
        folder="MNIST/raw",
        train_files=MNIST_TRAIN,
        test_files=MNIST_TEST,
        classes=tuple("0123456789"),
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fmnist": KnownIdx(
        folder="FashionMNIST/raw",
        train_files=MNIST_TRAIN,
        test_files=MNIST_TEST,
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
    "kmnist": KnownIdx(
        folder="KMNIST/raw",
        train_files=MNIST_TRAIN,
        test_files=MNIST_TEST,
        classes=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
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
    "emnist-balanced": KnownIdx(
        folder="EMNIST/raw",
        train_files=("emnist-balanced-train-images-idx3-ubyte", "emnist-balanced-train-labels-idx1-ubyte"),
        test_files=("emnist-balanced-test-images-idx3-ubyte", "emnist-balanced-test-labels-idx1-ubyte"),
        classes=tuple("0123456789" + _LETTERS + "abdefghnqrt"),  # other small letters look like their capitals
        shape=(1, 28, 28),
        train=112_800,
        test=18_800,
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
    "svhn": KnownSvhn(
        folder="SVHN",
        train_files=("train_32x32.mat",),
        test_files=("test_32x32.mat",),
        classes=tuple("0123456789"),
        shape=(3, 32, 32),
        train=73_257,
        test=26_032,
    ),
    "femnist": KnownLeaf(
        folder="LEAF/femnist",
        train_files=("train",),
        test_files=("test",),
        classes=tuple("0123456789" + _LETTERS + _LETTERS.lower()),
        shape=(1, 28, 28),
        train=None,
        test=None,
        by_hand="run data/femnist/preprocess.sh of https://github.com/TalwalkarLab/leaf (-t sample), "
        "and copy its data/train and data/test",
    ),
    "shakespeare": KnownLeaf(
        folder="LEAF/shakespeare",
        train_files=("train",),
        test_files=("test",),
        classes=text.names_of(leaf.LETTERS),
        shape=(leaf.LENGTH,),
        train=None,
        test=None,
        alphabet=leaf.LETTERS,
        by_hand="run data/shakespeare/preprocess.sh of https://github.com/TalwalkarLab/leaf (-t sample), "
        "and copy its data/train and data/test",
    ),
    "tiny-imagenet": KnownTinyImageNet(
        folder="tiny-imagenet-200",
        train_files=(tinyimagenet.IDS, tinyimagenet.WORDS),
        test_files=(tinyimagenet.VALIDATION,),
        classes=tuple(map(str, range(200))),
        shape=tinyimagenet.SHAPE,
        train=100_000,
        test=10_000,
        by_hand="unpack tiny-imagenet-200.zip of https://cs231n.stanford.edu",
    ),
    **{name: KnownMedmnist.of(name, facts) for name, facts in medmnist.DATASETS.items()},
}


@dataclass(frozen=True)
class Embedded:
    """A dataset that comes with scikit-learn or with Python, so it works without a download."""

    read: Callable[[], Dataset]
    classes: int
    """0 if a number is predicted."""
    shape: tuple[int, ...]
    train: int
    test: int
    comes_with: str = "scikit-learn"


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # the import takes a second; only these datasets need it

    flat, labels = load_digits(return_X_y=True)
    x = np.rint(flat * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    return _with_test_set(DIGITS, x, labels, tuple("0123456789"))


def _breast_cancer() -> Dataset:
    from sklearn.datasets import load_breast_cancer

    return _named_table("breast-cancer", load_breast_cancer(), "diagnosis")


def _wine() -> Dataset:
    from sklearn.datasets import load_wine

    return _named_table("wine", load_wine(), "cultivar")


def _diabetes() -> Dataset:
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes()
    table = Table("progression", tuple(Column(str(column)) for column in bunch.feature_names))
    held = hold_out(np.zeros(len(bunch.target), np.int64))
    x, y = bunch.data.astype(np.float32), bunch.target.astype(np.float64)
    return Dataset("diabetes", x[~held], y[~held], x[held], y[held], (), *moments(x[~held]), table=table)


def _named_table(name: str, bunch: Any, label: str) -> Dataset:
    table = Table(label, tuple(Column(str(column)) for column in bunch.feature_names))
    return _with_test_set(name, bunch.data.astype(np.float32), bunch.target, tuple(map(str, bunch.target_names)), table)


def _with_test_set(
    name: str, x: NDArray[Any], labels: NDArray[Any], classes: tuple[str, ...], table: Table | None = None
) -> Dataset:
    y = labels.astype(np.int64)
    held = hold_out(y)
    return Dataset(name, x[~held], y[~held], x[held], y[held], classes, *moments(x[~held]), table=table)


EMBEDDED: Mapping[str, Embedded] = {
    DIGITS: Embedded(_digits, 10, (1, 8, 8), 1438, 359),
    "breast-cancer": Embedded(_breast_cancer, 2, (30,), 456, 113),
    "wine": Embedded(_wine, 3, (13,), 142, 36),
    "diabetes": Embedded(_diabetes, 0, (10,), 354, 88),
    ZEN: Embedded(text.zen, 45, (text.WINDOW,), 653, 171, "Python"),
}
TEXTS = (ZEN,)
"""Those that are texts."""

NAMES = (*EMBEDDED, *KNOWN)


@dataclass(frozen=True)
class Status:
    """What is known about a dataset without reading it."""

    name: str
    ready: bool
    where: str
    """Its folder, "embedded", or the folder that is searched first."""
    classes: int
    shape: tuple[int, ...]
    train: int | None
    """None if it depends on how the files were made."""
    test: int | None
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


def unknown(name: str) -> DataError:
    """The error for a name that is no dataset, file or folder."""
    return DataError(f"no dataset, file or folder is called {name!r}", "", nearest(name, NAMES))


def find(name: str, root: Path) -> Path | None:
    """Return the folder that has every file of a dataset, or None."""
    return next((folder for folder in _folders(name, root) if not known(name).missing(folder)), None)


def load(name: str, root: str | Path | None = None, window: int = text.WINDOW) -> Dataset:
    """Read a known dataset from the data root; ``window`` is for a text."""
    if name == ZEN:
        return text.zen(window)
    if name in EMBEDDED:
        return EMBEDDED[name].read()
    entry, root = known(name), data_root(root)
    folder = find(name, root)
    if folder is None:
        looked = " and ".join(
            f"{path} (no {', '.join(entry.missing(path))})" if path.is_dir() else f"{path} (no such folder)"
            for path in _folders(name, root)
        )
        how = f"By hand: {entry.by_hand} into {root / entry.folder}" if entry.by_hand else f"Get it with {_how(name)}"
        raise DataError(f"{name} is missing: looked in {looked}", "", how)
    again = f"get it again: {entry.by_hand}" if entry.by_hand else f"run `fedrane data get {name}`"
    remedy = f"Delete the file and {again}"
    (x, y), (x_test, y_test), client = entry.parts(folder, remedy)
    names = entry.names(folder, remedy)
    if entry.alphabet:
        of_text: dict[str, Any] = {"vocabulary": len(names), "alphabet": entry.alphabet}
        return Dataset(name, x, y, x_test, y_test, names, (), (), client, **of_text)
    mean, std = (entry.mean, entry.std) if entry.mean else moments(x)
    return Dataset(name, x, y, x_test, y_test, names, mean, std, client)


def status(root: Path | None = None) -> list[Status]:
    """Return every known dataset and whether its files are there."""
    root = data_root(root)
    listed = [
        Status(
            *(name, True, "embedded", e.classes, e.shape, e.train, e.test),
            how=f"nothing to do: it comes with {e.comes_with}",
        )
        for name, e in EMBEDDED.items()
    ]
    for name, entry in KNOWN.items():
        folder = find(name, root)
        where = str(folder or root / entry.folder)
        sizes = len(entry.classes), entry.shape, entry.train, entry.test
        listed.append(Status(name, folder is not None, where, *sizes, _how(name)))
    return listed


def _folders(name: str, root: Path) -> list[Path]:
    return [root / known(name).folder, *([SYSTEM[name]] if name in SYSTEM else [])]


def by_hand(name: str) -> bool:
    """Whether a dataset cannot be downloaded by ``fedrane data get``, which then explains what to do."""
    return name in KNOWN and bool(KNOWN[name].by_hand)


def _how(name: str) -> str:
    if by_hand(name):
        return f"by hand: `fedrane data get {name}` explains it"
    package = f", or install the Debian package {_PACKAGES[name]}" if name in _PACKAGES else ""
    return f"`fedrane data get {name}`{package}"
