"""Reads ``.npz`` files: first the shapes and types of all arrays, so that a reader can refuse them unread."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import TooLarge
from fedrane.system.files import plain_size

Array = NDArray[Any]
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Header(NamedTuple):
    """The header of one of a file's arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.elements * self.dtype.itemsize


def headers(path: Path) -> dict[str, Header]:
    """Read the shapes and types of a file's arrays. A broken file raises ValueError or OSError."""
    with _opened(path) as (archive, members):
        return {name: _header(archive, entry) for name, entry in members.items()}


def read(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """Read these arrays of a file. A broken file raises ValueError or OSError."""
    with _opened(path) as (archive, members):
        return {name: _array(archive, members[name]) for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    try:
        plain_size(path)
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its arrays have the same name")
            yield archive, members
    except OSError:
        raise
    except MemoryError as error:
        raise TooLarge(f"the arrays of {path} do not fit in memory") from error
    except Exception as error:  # on broken bytes, the readers of zip and arrays raise almost anything
        raise ValueError(str(error) or type(error).__name__) from error


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Header:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"{entry.filename} has the unknown version {version}")
        shape, _, dtype = _HEADERS[version](stream)
        header = Header(shape, dtype)
        held = entry.file_size - stream.tell()
    if min(header.shape, default=0) < 0 or (header.size > held and not header.dtype.hasobject):
        raise ValueError(f"{entry.filename} has {held} bytes, and its header says {header.dtype} {header.shape}")
    return header


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    _header(archive, entry)
    with archive.open(entry) as stream:
        # Never pickled objects: reading them would run code from the file.
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array
