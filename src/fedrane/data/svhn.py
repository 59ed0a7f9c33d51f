"""Reads the files of SVHN (Netzer et al., 2011): images and labels in the format of MATLAB 5.

Not with SciPy, whose reader ends the process on some damaged files. A file is a header and elements; an element is a
tag, of its type and size, and bytes. An array is an element of elements: flags, dimensions, name, numbers.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError, TooLarge
from fedrane.system import memory
from fedrane.system.files import plain_size

_IMAGE = (32, 32, 3)
_HEADER, _CHUNK, _LONGEST = 128, 1 << 20, 256
_LITTLE = b"IM"
"""How the header of a file of little-endian numbers ends."""
_MATRIX, _COMPRESSED, _COMPLEX = 14, 15, 0x0800
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""How numbers are stored, by the type of their element: MATLAB takes the smallest that holds them."""
_KINDS = ("?", "cell", "struct", "object", "char", "sparse", "double", "single", "int8", "uint8", "int16", "uint16",
          "int32", "uint32", "int64", "uint64")  # fmt: skip
_NUMBERS = _KINDS[6:]


class _Stream:
    """The bytes of an element, unpacked as they are asked for."""

    def __init__(self, file: IO[bytes], size: int, packed: bool) -> None:
        self.file, self.left = file, size
        self.unpacking = zlib.decompressobj() if packed else None

    def _stored(self, most: int) -> bytes:
        piece = self.file.read(min(most, self.left))
        self.left -= len(piece)
        return piece

    def read(self, count: int) -> bytes:
        made = bytearray()
        while len(made) < count:
            wanted = min(count - len(made), _CHUNK)
            given = self.unpacking.unconsumed_tail if self.unpacking else b""
            given = given or self._stored(_CHUNK if self.unpacking else wanted)
            piece = self.unpacking.decompress(given, wanted) if self.unpacking else given
            if not given and not piece:
                raise ValueError("it ends inside an array")
            made += piece
        return bytes(made)

    def tag(self) -> tuple[int, int, bytes]:
        """The type and the size of the next element, and its bytes if they are so few that they are in the tag."""
        raw = self.read(8)
        kind, size = struct.unpack("<II", raw)
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            if size > 4:
                raise ValueError("one of its elements has no size")
            return kind, size, raw[4 : 4 + size]
        return kind, size, b""

    def short(self) -> bytes:
        """The bytes of the next element, one of those before the numbers."""
        _, size, inside = self.tag()
        if size > _LONGEST:
            raise ValueError("the header of an array is too long")
        return inside or self.read(size + -size % 8)[:size]


class _Array(NamedTuple):
    """What a file says about an array, and where its element is."""

    name: str
    kind: str
    shape: tuple[int, ...]
    place: int
    size: int
    packed: bool

    def read(self, file: IO[bytes]) -> NDArray[np.generic]:
        """Its numbers."""
        file.seek(self.place)
        stream = _Stream(file, self.size, self.packed)
        _described(stream, self.packed)
        stored, size, inside = stream.tag()
        if stored not in _STORED:
            raise ValueError(f"{self.name} has numbers of the unknown type {stored}")
        dtype = np.dtype(f"<{_STORED[stored]}")
        if size != math.prod(self.shape) * dtype.itemsize:
            raise ValueError(f"{self.name} has {size} bytes, and should have {self.shape} of {dtype.name}")
        return np.frombuffer(inside or stream.read(size), dtype).reshape(self.shape, order="F")


def _described(stream: _Stream, packed: bool) -> tuple[str, str, tuple[int, ...]]:
    """The name of an array, what it holds, and its shape; the numbers are next."""
    if packed and stream.tag()[0] != _MATRIX:
        raise ValueError("it holds something that is no array")
    [flags, _] = struct.unpack("<II", stream.short())
    dimensions, name = stream.short(), stream.short()
    shape = struct.unpack(f"<{len(dimensions) // 4}i", dimensions)
    if min(shape, default=-1) < 0 or flags & 0xFF >= len(_KINDS):
        raise ValueError("it holds an array of an unknown kind or shape")
    return name.decode("latin1"), "complex" if flags & _COMPLEX else _KINDS[flags & 0xFF], shape


def _arrays(file: IO[bytes], end: int) -> Iterator[_Array]:
    while file.tell() < end:
        kind, size = struct.unpack("<II", file.read(8))
        place, packed = file.tell(), kind == _COMPRESSED
        if kind not in (_MATRIX, _COMPRESSED) or place + size > end:
            raise ValueError("it holds something that is no array, or ends inside one")
        yield _Array(*_described(_Stream(file, size, packed), packed), place, size, packed)
        file.seek(place + size)


def read(path: Path, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (examples, 3, 32, 32) and labels 0 … 9; ``remedy`` is added to error messages."""
    try:
        end = plain_size(path)
        with path.open("rb") as file:
            if file.read(_HEADER)[-2:] != _LITTLE:
                raise ValueError("it does not begin as a file of MATLAB 5")
            listed = list(_arrays(file, end))
            x, y = _checked(listed, path, remedy)
            memory.require(3 * math.prod(x.shape), str(path), "Use a machine with more memory")
            images, labels = x.read(file), y.read(file)
    except (DataError, TooLarge):
        raise
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", "", remedy) from error
    if images.dtype != np.uint8 or not np.isin(labels, np.arange(1, 11)).all():
        raise DataError(
            f"{path} has images of {images.dtype} and labels from {labels.min()} to {labels.max()}",
            "images are bytes, and labels 1 to 10, of which 10 stands for 0",
            remedy,
        )
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels[:, 0].astype(np.int64) % 10


def _checked(listed: list[_Array], path: Path, remedy: str) -> tuple[_Array, _Array]:
    """The images and labels among the arrays of a file; an error if they cannot be those of SVHN."""
    found = {array.name: array for array in listed}
    x, y = found.get("X"), found.get("y")
    if (
        len(found) < len(listed)
        or not x
        or not y
        or (len(x.shape), x.shape[:3]) != (4, _IMAGE)
        or y.shape != (*x.shape[3:], 1)
    ):
        raise DataError(
            f"{path} has {', '.join(f'{array.name} {array.shape}' for array in listed) or 'no arrays'}",
            "it should have images X (32, 32, 3, examples) and labels y (examples, 1)",
            remedy,
        )
    if x.kind != "uint8" or y.kind not in _NUMBERS:
        why = "images are bytes, and labels numbers"
        raise DataError(f"{path} has images of {x.kind} and labels of {y.kind}", why, remedy)
    return x, y
