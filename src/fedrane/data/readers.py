"""The user's own data: a file of arrays or a folder of images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedrane.data import arrays as npz
from fedrane.data.arrays import Array, Header
from fedrane.data.columns import Table
from fedrane.data.dataset import CLASSES_ONLY, Dataset, as_numbers, hold_out_of_clients, moments
from fedrane.data.tabular import Kind, is_table, labels, numbers_to_predict, read_known
from fedrane.errors import DataError, nearest
from fedrane.system import memory
from fedrane.system.files import user_path

_ARRAYS = ("x", "y", "client", "x_test", "y_test", "classes", "vocabulary")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What these suffixes stand for. The content decides how a file is read, and Pillow knows formats that run programs."""
_GREY = {"1", "L", "LA", "La"}
_CHANNELS = {1, 3, 4}
_PER_LABEL = 64
"""Bytes that are needed to sort and number one label, beside the label itself."""
_PER_ROW = 1024
"""Bytes of a row's name and prediction, as they are listed."""
_AT_ONCE = 1 << 20
"""Pixels that are converted at a time."""


def from_npz(path: str | Path) -> Dataset:
    """Read a file of arrays: ``x`` and ``y``, and optionally ``x_test`` and ``y_test``, ``client``, ``classes``.

    ``x`` contains images, as bytes or as floats in [0, 1], with channels first, last or left out; or a table of
    numbers. ``y`` and ``client`` contain integers or names. ``classes`` names the classes in order. With
    ``vocabulary``, one whole number, ``x`` contains sequences of numbers below it (examples, length), for an embedding.
    """
    path = user_path(path)
    headers = _headers(path)
    for name in headers:
        if name not in _ARRAYS:
            raise DataError(f"{path} has an unknown array {name!r}", "", nearest(name, _ARRAYS))
    for name, other in (("x", "y"), ("y", "x"), ("x_test", "y_test"), ("y_test", "x_test")):
        if name not in headers and (other in headers or name == "x"):
            raise DataError(f"{path} has no array {name!r}", "inputs and labels belong together", f"Add {name!r}")
    arrays = _arrays(path, headers)
    test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
    classes = arrays.get("classes")
    names = None if classes is None else [str(name) for name in _column(classes, f"{path}: classes").tolist()]
    train = arrays["x"], arrays["y"]
    return assembled(path.stem, str(path), train, test, arrays.get("client"), names, _vocabulary(arrays, path))


def _vocabulary(arrays: Mapping[str, Array], path: Path) -> int:
    """The number of words or characters that the file's inputs are numbers of; 0 if it does not say."""
    if "vocabulary" not in arrays:
        return 0
    size = arrays["vocabulary"]
    if size.dtype.kind not in "iu" or size.size != 1 or size.item() < 1:
        raise DataError(f"{path}: vocabulary is {size.dtype} {size.shape}", "it is one whole number above 0")
    return int(size.item())


def _headers(path: Path) -> dict[str, Header]:
    if not path.is_file():
        raise DataError(f"{path} does not exist", "", "Check the path")
    with _clear_errors(path):
        return npz.headers(path)


def _arrays(path: Path, headers: Mapping[str, Header]) -> dict[str, Array]:
    """Read these arrays of a dataset, if there is memory for them and for what is made of them."""
    needed = 0
    for name, header in headers.items():
        if name in ("x", "x_test"):
            needed += header.size + _kept(header.shape) + _kept(header.shape, moments=name == "x")
        else:
            needed += 8 * header.size + _PER_LABEL * header.elements  # names are decoded, copied and sorted
    memory.require(needed, f"the dataset in {path}", "Use fewer or smaller examples")
    with _clear_errors(path):
        return npz.read(path, headers)


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            "it should be a .npz file of plain arrays",
            "Write it with numpy.savez(path, x=…, y=…), without arrays of objects",
        ) from error


def _kept(shape: tuple[int, ...], moments: bool = False) -> int:
    """Bytes of these inputs as a dataset keeps them; with ``moments``, also of their mean and deviation per channel."""
    one = input_shape(shape)
    elements = math.prod(shape)
    working = 16 * elements // max(one[0], 1) if moments and one else 0  # two copies of one channel, as float64
    return elements * (4 if len(one) == 1 else 1) + working


def input_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one input of an array of this shape, as :func:`as_inputs` returns it."""
    if len(shape) == 3:
        return (1, *shape[1:])
    return (shape[3], *shape[1:3]) if _channels_last(shape) else shape[1:]


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def read_inputs(path: Path, check_shape: Callable[[tuple[int, ...]], None], vocabulary: int = 0) -> Array:
    """Read only the inputs of a file of arrays: its ``x``; ``check_shape`` sees the shape of one before any is read."""
    headers = _headers(path)
    if "x" not in headers:
        raise DataError(f"{path} has no array 'x'", "x are the inputs", "Write it with numpy.savez(path, x=…)")
    shape = headers["x"].shape
    _check_inputs(headers["x"], f"{path}: x")
    check_shape(input_shape(shape))
    needed = headers["x"].size + _kept(shape) + _PER_ROW * shape[0]
    memory.require(needed, f"x of {path}", "Use a file with fewer examples")
    with _clear_errors(path):
        return as_inputs(npz.read(path, ["x"])["x"], f"{path}: x", vocabulary)


def read_labelled(
    path: str | Path, classes: Sequence[str], image_size: int = 0, table: Table | None = None, vocabulary: int = 0
) -> tuple[Array, NDArray[Any]]:
    """Read all examples of one client, from a CSV file, a file of arrays or a folder of images; the classes are given.

    So is the form of a ``table``. A label is the name of a class or its index; without classes, it is a number. A
    client need not have examples of every class.
    """
    path = user_path(path)
    if path.suffix == ".npz":
        headers = _headers(path)
        if not {"x", "y"} <= headers.keys():
            raise DataError(f"{path} has {', '.join(headers)}", "a client's inputs are x, and their labels y")
        arrays = _arrays(path, {name: headers[name] for name in ("x", "y")})
        x = as_inputs(arrays["x"], f"{path}: x", vocabulary)
        y = _column(arrays["y"], f"{path}: y") if classes else arrays["y"]
        names = [str(v) for v in y.tolist()]
    elif is_table(path):
        if table is None:
            raise DataError(f"{path} is a table with named columns", "the federation's inputs are others")
        rows = read_known(path, table, {table.label: Kind.TEXT if classes else Kind.NUMBER})
        x = table.encode(rows)
        y = np.array(labels(rows, table)) if classes else numbers_to_predict(rows, table.label)
        names = y.tolist()
    else:
        images = from_folder(path, image_size)
        x = np.concatenate([images.x, images.x_test])
        y = np.array(images.classes)[np.concatenate([images.y, images.y_test])]
        names = y.tolist()
    if len(x) != len(names):
        raise DataError(f"{path}: {len(x)} inputs but {len(names)} labels", "each input needs a label")
    if not classes:
        if y.dtype.kind not in "biuf" or y.ndim != 1 or not np.isfinite(y).all():
            raise DataError(f"{path}: labels of {y.dtype}", "they are the numbers to predict, all finite")
        return x, y.astype(np.float64)
    known = {name: index for index, name in enumerate(classes)}
    if not set(names) <= known.keys():
        known = {str(index): index for index in range(len(classes))}
    strays = sorted(set(names) - known.keys())
    if strays:
        raise DataError(f"{path}: label {strays[0]!r}", f"the classes are {', '.join(classes)}")
    return x, np.array([known[name] for name in names], dtype=np.int64)


def read_image(path: Path, shape: tuple[int, ...], image_size: int = 0) -> Array:
    """Read one image, with the channels of ``shape`` (channels, height, width), resized if ``image_size`` is not 0."""
    pixels = _decode(path, image_size)
    if len(pixels) == 1 and shape[0] == 3:
        return np.repeat(pixels, 3, axis=0)
    if len(pixels) == 3 and shape[0] == 1:
        return np.asarray(Image.fromarray(pixels.transpose(1, 2, 0)).convert("L"))[np.newaxis]
    return pixels


class _Picture(NamedTuple):
    path: Path
    client: str | None
    label: str


def from_folder(path: str | Path, image_size: int = 0) -> Dataset:
    """Read a folder of images, ``class/…`` or ``client/class/…``, or two such folders called ``train`` and ``test``.

    Images are grey if all of them are, else RGB. ``image_size`` above 0 resizes them to that height and width.
    """
    folder = user_path(path)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", "", "Check the path")
    if image_size < 0:
        raise DataError(f"image_size is {image_size}", "a size is positive, and 0 means no resizing")
    parts = {part.name for part in folder.iterdir() if part.is_dir() and not part.name.startswith(".")}
    split = "train" in parts and parts <= {"train", "test"}  # next to other folders they are classes or clients
    train = _pictures(folder / "train" if split else folder)
    test = _pictures(folder / "test") if split and "test" in parts else []
    pixels = alike([pixels for _, pixels in _decoded([picture.path for picture in train + test], image_size)])
    labels = np.array([picture.label for picture in train + test])
    examples = len(train)
    return assembled(
        folder.resolve().name,
        str(folder),
        (pixels[:examples], labels[:examples]),
        (pixels[examples:], labels[examples:]) if test else None,
        None if train[0].client is None else np.array([picture.client for picture in train]),
    )


def _pictures(folder: Path) -> list[_Picture]:
    """Return every image in ``folder``, sorted by name; all must be at the same depth."""
    files_at = {depth: sorted(_visible_files(folder, depth)) for depth in (1, 2, 3, 4)}
    images = {
        depth: kept
        for depth, files in files_at.items()
        if (kept := [file for file in files if file.suffix.lower() in _SUFFIXES])
    }
    layout = "images must be in class/… or in client/class/…"
    if not images:
        other = next((file for files in files_at.values() for file in files), None)
        raise DataError(f"{folder} has no images" + (f" but {other}" if other else ""), layout)
    if len(images) > 1 or not images.keys() <= {2, 3}:
        strays = [images[depth][0] for depth in images]
        raise DataError(f"{folder} has {' and '.join(map(str, strays))}", layout, "Put all images at the same depth")
    return [
        _Picture(file, file.parent.parent.name if depth == 3 else None, file.parent.name)
        for depth, files in images.items()
        for file in files
    ]


def _visible_files(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.glob("/".join("*" * depth)):  # at a fixed depth, so a link to a parent folder cannot loop
        if path.is_file() and not any(name.startswith(".") for name in path.relative_to(folder).parts):
            yield path


def _decoded(paths: Sequence[Path], image_size: int) -> list[tuple[Path, Array]]:
    """Return all images; before the first of each size and kind is decoded, the memory for all is compared."""
    decoded: list[tuple[Path, Array]] = []
    checked: set[tuple[int, ...]] = set()
    for path in paths:
        with _opened(path) as image:
            shape = _shape(image, image_size)
            if decoded and not image_size:
                _check_alike(*decoded[0], path, shape)
            if shape not in checked:
                # The list, the array of all, and the parts for training and testing.
                needed = 2 * len(paths) * math.prod(shape) + _kept((len(paths), *shape), moments=True)
                memory.require(needed, f"{len(paths)} images like {path}", "Set a smaller image_size, or use fewer")
                checked.add(shape)
            decoded.append((path, pixels_of(image, str(path), image_size)))
    return decoded


def _decode(path: Path, image_size: int) -> Array:
    with _opened(path) as image:
        memory.require(4 * math.prod(_shape(image, image_size)), str(path), "Use a smaller image")
        return pixels_of(image, str(path), image_size)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image of which only the header has been read. What goes wrong inside the context is an error about it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path, formats=_FORMATS)
        with image:
            yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = f"{Image.MAX_IMAGE_PIXELS:,} are the most that are decoded"
        raise DataError(f"{path} has too many pixels", limit, "Make it smaller, or remove it") from error
    except UnidentifiedImageError as error:
        known = f"images are {', '.join(_FORMATS)}"
        raise DataError(f"{path} cannot be read as an image", known, "Convert or remove it") from error
    except Exception as error:  # on broken bytes, decoders raise almost anything
        reason = str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read as an image: {reason}", "", "Repair or remove it") from error


def _mode(image: Image.Image) -> str:
    return "L" if image.mode in _GREY else "RGB"


def _shape(image: Image.Image, image_size: int) -> tuple[int, ...]:
    """The shape of the array that an image becomes."""
    width, height = (image_size, image_size) if image_size else image.size
    return len(_mode(image)), height, width


def pixels_of(image: Image.Image, what: str, image_size: int = 0) -> Array:
    """Return an image as bytes (channels, height, width), with one channel if it is grey."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{what} has more than 8 bits per pixel", "images are bytes", "Convert it to 8 bits")
    flat = image.convert(_mode(image))
    if image_size:
        flat = flat.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(flat)
    return pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _check_alike(first: Path, pixels: Array, path: Path, shape: tuple[int, ...]) -> None:
    (height, width), (other_height, other_width) = pixels.shape[1:], shape[1:]
    if (height, width) != (other_height, other_width):
        raise DataError(
            f"{first} is {height} × {width} but {path} is {other_height} × {other_width}",
            "all images must have the same size",
            "Set image_size to resize them, for instance image_size=32",
        )


def alike(images: Sequence[Array]) -> Array:
    """Stack images of one size in one array; if some are RGB, grey ones become RGB."""
    _, height, width = images[0].shape
    channels = max(map(len, images))
    return np.stack([np.broadcast_to(pixels, (channels, height, width)) for pixels in images])


def assembled(
    name: str,
    where: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array] | None,
    client: Array | None,
    names: Sequence[str] | None = None,
    vocabulary: int = 0,
) -> Dataset:
    """Build the dataset from arrays of any source."""
    x = as_inputs(train[0], f"{where}: x", vocabulary)
    labels, classes = _labels([train[1]] if test is None else [train[1], test[1]], names, where)
    y, clients = labels[0], None if client is None else _numbered(client, f"{where}: client")
    for what, column in (("labels", y), ("client entries", clients)):
        if column is not None and len(column) != len(x):
            raise DataError(f"{where}: {len(x)} inputs but {len(column)} {what}", "each input needs one")
    if test is None:
        held = hold_out_of_clients(y, clients, where)
        x_test, y_test = x[held], y[held]
        x, y, clients = x[~held], y[~held], None if clients is None else clients[~held]
    else:
        x_test, y_test = as_inputs(test[0], f"{where}: x_test", vocabulary), labels[1]
    constants = ((), ()) if vocabulary else moments(x)
    return Dataset(name, x, y, x_test, y_test, classes, *constants, clients, vocabulary=vocabulary)


def as_inputs(x: Array, what: str, vocabulary: int = 0) -> Array:
    """Return images as bytes (examples, channels, height, width), or a table as float32 (examples, columns).

    With a ``vocabulary``, return sequences of numbers (examples, length).
    """
    if vocabulary:
        return as_numbers(x, vocabulary, what)
    _check_inputs(Header(x.shape, x.dtype), what)
    if x.ndim == 2:
        with np.errstate(over="ignore"):  # values beyond float32 become infinite and are rejected below
            table = x.astype(np.float32)
        if not np.isfinite(table).all():
            row, column = np.argwhere(~np.isfinite(table))[0]
            raise DataError(
                f"{what} has {x[row, column]} in row {row}, column {column}",
                "a table must contain finite numbers that fit in float32",
                "Fill in or remove such examples",
            )
        return table
    images = x if x.dtype == np.uint8 else _bytes(x, what)
    if x.ndim == 3:
        images = images[:, np.newaxis]
    elif _channels_last(x.shape):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


def _check_inputs(header: Header, what: str) -> None:
    if len(header.shape) not in (2, 3, 4) or header.dtype.kind not in "biuf" or 0 in header.shape:
        raise DataError(
            f"{what} is {header.dtype} {header.shape}",
            "inputs are images (examples, height, width), with channels first or last, or a table (examples, columns)",
        )


def _bytes(images: Array, what: str) -> Array:
    """Return floats in [0, 1] as bytes."""
    low, high = images.min().item(), images.max().item()
    if images.dtype.kind in "iu" or not (low >= 0 and high <= 1):
        raise not_pixels(what, images.dtype, (low, high))
    pixels = np.empty(images.shape, np.uint8)
    step = max(1, _AT_ONCE * len(images) // images.size)  # a float64 copy of all would be eight times their size
    for begin in range(0, len(images), step):
        pixels[begin : begin + step] = np.rint(images[begin : begin + step].astype(np.float64) * 255)
    return pixels


def not_pixels(what: str, dtype: object, values: tuple[float, ...]) -> DataError:
    """Return the error for pixels that are neither bytes nor in [0, 1]; ``values`` are their minimum and maximum."""
    remedy = "Give 0 … 255 as uint8, or divide by the largest possible value (255, 65535); do not normalise"
    if any(value != value for value in values):
        remedy = "Fill in or remove what is not a number"
    return DataError(
        f"{what} has images of {dtype}" + (f" from {values[0]} to {values[1]}" if values else ""),
        "images are uint8, or floats from 0 to 1; they are normalised later, by their own mean and deviation",
        remedy,
    )


def _column(values: Array, what: str) -> Array:
    """Check and return one integer or name per example."""
    if values.ndim != 1 or values.dtype.kind not in "biuSU":
        remedy = CLASSES_ONLY if values.dtype.kind == "f" and what.endswith(": y") else ""
        raise DataError(f"{what} is {values.dtype} {values.shape}", "it must be a list of integers or of names", remedy)
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "backslashreplace")
    return values if values.dtype.kind == "U" else values.astype(np.int64)


def _labels(
    parts: list[Array], names: Sequence[str] | None, where: str
) -> tuple[list[NDArray[np.int64]], tuple[str, ...]]:
    """Return the labels of each part as class indices, and the classes: the given ones, else those that occur."""
    columns = [_column(part, f"{where}: y") for part in parts]
    named = {column.dtype.kind == "U" for column in columns}
    if len(named) > 1:
        raise DataError(f"{where}: y and y_test mix numbers and names", "both must have labels of the same type")
    different, codes = np.unique(np.concatenate(columns), return_inverse=True)
    if names is None:
        names, indices = [str(value) for value in different.tolist()], np.arange(len(different))
    else:
        index = {name: number for number, name in enumerate(names)} if named == {True} else range(len(names))
        strays = [value for value in different.tolist() if value not in index]
        if strays or len(set(names)) != len(names):
            problem = f"label {strays[0]!r} is not one of the given classes" if strays else "a class is listed twice"
            raise DataError(f"{where}: {problem}", f"'classes' must list each class once; it lists {len(names)}")
        indices = np.array([index[value] for value in different.tolist()])
    return np.split(indices[codes], [len(columns[0])])[: len(parts)], tuple(names)


def _numbered(client: Array, what: str) -> NDArray[np.int64]:
    """Return the clients as 0 … K − 1, in the order of their numbers or names."""
    return np.unique(_column(client, what), return_inverse=True)[1].astype(np.int64)
