"""Datasets handed over from Python as objects: those of torch and torchvision, and of Hugging Face ``datasets``.

They are known by what they can do: examples have an index, and are (input, label), or dictionaries by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fedrane.data.arrays import Array
from fedrane.data.columns import no_column
from fedrane.data.dataset import Dataset
from fedrane.data.readers import alike, assembled, pixels_of
from fedrane.data.tabular import TableOptions
from fedrane.errors import ConfigError, DataError

TRAIN, TEST = "train", "test"
LABELS = ("label", "labels")
"""Names of the column of labels that are recognised, the first one there."""
INPUTS = ("image", "img")
"""Names of the column of inputs that are recognised where there are several other columns."""


class MapStyle(Protocol):
    """A dataset whose examples have an index; each is (input, label), or a dictionary by column."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Splits = Mapping[str, MapStyle]
"""Datasets by the names of their splits, as ``datasets.load_dataset`` returns them."""


def from_torch(dataset: MapStyle, test: MapStyle | None = None, name: str = "torch", vocabulary: int = 0) -> Dataset:
    """Read any torch dataset with a length whose items are (input, label).

    An input is a tensor, a NumPy array or a PIL image: an image as in :func:`from_npz`, not yet normalised, or a row of
    a table; with a ``vocabulary``, a sequence of numbers below it. A label is an integer or a name.
    """
    return _read(dataset, test, name, TableOptions(), 0, vocabulary)


def from_huggingface(
    dataset: MapStyle | Splits,
    test: MapStyle | None = None,
    name: str = "huggingface",
    image_size: int = 0,
    **columns: str,
) -> Dataset:
    """Read a dataset of Hugging Face, or any whose items are dictionaries: one, or a dictionary of splits.

    Of several splits, ``train`` is trained on and ``test`` is the test set.
    ``columns`` are ``label``, ``client`` and ``drop`` of :class:`TableOptions`. A label called ``label`` need not be
    named, nor an input that is called ``image`` or is the only other column. ``image_size`` above 0 resizes pictures.
    """
    return _handed_over(dataset, test, name, TableOptions(**columns), image_size)


def handed_over(given: MapStyle | Splits, options: TableOptions, image_size: int = 0) -> Dataset:
    """Read a dataset that was passed to a run; ``options`` are for items that are dictionaries."""
    return _handed_over(given, None, "dataset", options, image_size)


def _handed_over(
    given: MapStyle | Splits, test: MapStyle | None, name: str, options: TableOptions, image_size: int
) -> Dataset:
    if not isinstance(given, Mapping):
        return _read(given, test, name, options, image_size)
    if TRAIN not in given or test is not None:
        raise DataError(
            f"{name} has the splits {', '.join(map(str, given))}",
            f"{TRAIN!r} is trained on, and {TEST!r}, if it is there, is the test set",
            "Pass one split, dataset[NAME], or from_huggingface(dataset[NAME], test=dataset[OTHER])",
        )
    read = _read(given[TRAIN], given.get(TEST), name, options, image_size)
    unused = [str(split) for split in given if split not in (TRAIN, TEST)]
    note = f"{name}: not used are the splits {', '.join(unused)}"
    return replace(read, notes=(*read.notes, note)) if unused else read


class _Columns(NamedTuple):
    """The use of the columns of a dataset whose items are dictionaries."""

    input: str
    label: str
    client: str
    unused: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], options: TableOptions, what: str) -> _Columns:
        uses: dict[str, str] = {}
        label = options.label or next((name for name in LABELS if name in names), "")
        if not label:
            raise ConfigError(
                f"{what} has the columns {', '.join(names)}",
                f"none of them is called {LABELS[0]}",
                "Name the column to predict: label=NAME",
            )
        for key, wanted in (("label", [label]), ("client", [options.client]), ("drop", options.dropped)):
            for name in filter(None, wanted):
                if name not in names:
                    raise no_column(name, names, what, key)
                if uses.setdefault(name, key) != key:
                    raise ConfigError(f"{uses[name]}={name} and {key}={name}", "a column has one use")
        left = [name for name in names if name not in uses]
        chosen = next((name for name in INPUTS if name in left), left[0] if len(left) == 1 else "")
        if not chosen:
            there = f"the columns {', '.join(left)}" if left else "no column"
            raise ConfigError(
                f"{what} has {there} beside {', '.join(uses)}",
                "one column is the input" + (f", and none is called {INPUTS[0]}" if left else ""),
                "Leave the others out: drop=ONE,OTHER; a table is passed as a frame: dataset.to_pandas()",
            )
        return cls(chosen, label, options.client, tuple(name for name in left if name != chosen))


class _Items(NamedTuple):
    """The examples of a dataset."""

    x: Array
    y: Array
    clients: Array | None
    columns: _Columns | None
    """None if the items are no dictionaries."""
    are_pictures: bool
    """Whether all inputs are PIL images."""


def _read(
    dataset: MapStyle,
    test: MapStyle | None,
    name: str,
    options: TableOptions,
    image_size: int,
    vocabulary: int = 0,
) -> Dataset:
    train = _items(dataset, name, options, None, image_size)
    held = None if test is None else _items(test, f"{name} (test)", options, train.columns, image_size)
    if held and train.are_pictures and held.are_pictures and len(held.x[0]) != len(train.x[0]):
        train, held = (part._replace(x=_coloured(part.x)) for part in (train, held))
    names = _class_names(dataset, train.columns)
    tested = (held.x, held.y) if held else None
    read = assembled(name, name, (train.x, train.y), tested, train.clients, names, vocabulary)
    if train.columns is None:
        return read
    used = TableOptions(train.columns.label, train.columns.client, options.drop)
    unused = train.columns.unused
    notes = (f"{name}: not used are the columns {', '.join(unused)}",) if unused else ()
    return replace(read, options=asdict(used), notes=notes)


def _items(dataset: MapStyle, what: str, options: TableOptions, columns: _Columns | None, image_size: int) -> _Items:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{what}: a {type(dataset).__name__} has no length", "examples are read by their index")
    inputs: list[Array] = []
    labels: list[Any] = []
    clients: list[Any] = []
    pictures = 0
    for number in range(len(dataset)):
        try:
            item = dataset[number]
            if isinstance(item, Mapping):
                columns = columns or _Columns.of(list(map(str, item)), options, what)
                x, y = item[columns.input], item[columns.label]
                clients += [_plain(item[columns.client])] if columns.client else []
            else:
                x, y = item
            is_picture = isinstance(x, Image.Image)
            inputs.append(pixels_of(x, f"{what}, item {number}", image_size) if is_picture else np.asarray(x))
            labels.append(_plain(y))
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise DataError(
                f"{what}: item {number} cannot be used: {error}",
                "an item is (input, label), or a dictionary with both: a tensor, array or image on the CPU, and one "
                "number or name",
            ) from error
        pictures += is_picture
        sides = slice(1 if pictures == len(inputs) else 0, None)  # grey pictures among coloured ones become RGB
        if inputs[-1].shape[sides] != inputs[0].shape[sides]:
            remedy = "Resize or convert them in the dataset's transform"
            shapes = f"{what}: item {number} is {inputs[-1].shape} and item 0 is {inputs[0].shape}"
            raise DataError(
                shapes, "all inputs must have the same shape", remedy + (", or set image_size" if is_picture else "")
            )
    if image_size and not pictures:
        raise DataError(f"image_size is {image_size} for {what}", "only PIL images are resized", "Leave it at 0")
    owners = np.array(clients) if columns and columns.client else None
    are_pictures = 0 < pictures == len(inputs)
    x_all = alike(inputs) if are_pictures else np.stack(inputs or [np.zeros(0)])[: len(inputs)]
    return _Items(x_all, np.array(labels), owners, columns, are_pictures)


def _plain(value: Any) -> Any:
    """A label or a client as a name or a number."""
    return value if isinstance(value, str) else np.asarray(value).item()


def _coloured(images: Array) -> Array:
    return np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images


def _class_names(dataset: object, columns: _Columns | None) -> list[str] | None:
    """The names of the classes in order, if the dataset has them as ``ClassLabel`` does."""
    features = getattr(dataset, "features", None)
    if columns is None or not isinstance(features, Mapping):
        return None
    names = getattr(features.get(columns.label), "names", None)
    return None if names is None else [str(name) for name in names]
