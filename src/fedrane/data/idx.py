"""Reads IDX files, the format of MNIST: a magic number, the dimensions, then the bytes of one array."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError
from fedrane.system import memory

_UNSIGNED_BYTE = 0x08
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20


def locate(folder: Path, stem: str) -> Path | None:
    """Return the file of this name, plain or compressed, or None."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def read(path: Path, dimensions: int, remedy: str, item: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in a plain or gzip-compressed file; ``remedy`` is added to error messages.

    ``item`` is the shape that each example must have.
    """
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw as stream:
            head = stream.read(4 + 4 * dimensions)
            magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
            if head[:4] != magic:
                raise DataError(
                    f"{path} begins with {head[:4].hex(' ') or 'nothing'}",
                    f"an IDX file of unsigned bytes in {dimensions} dimensions begins with {magic.hex(' ')}",
                    remedy,
                )
            if len(head) < 4 + 4 * dimensions:
                raise DataError(f"{path} ends inside its header", "", remedy)
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if item is not None and shape[1:] != item:
                raise DataError(f"{path} has images of {shape[1:]}", f"they should be {item}", remedy)
            memory.require(2 * size, f"{path}, which says that it holds {' × '.join(map(str, shape))} bytes,", remedy)
            # Read in chunks, at most one beyond the size in the header: a forged header cannot claim memory.
            body = bytearray()
            while len(body) <= size and (chunk := stream.read(_CHUNK)):
                body += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", "", remedy) from error
    if len(body) != size:
        held = f"{len(body)}" if len(body) < size else f"more than {size}"
        raise DataError(f"{path} has {held} bytes", f"its header says {' × '.join(map(str, shape))}", remedy)
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)
