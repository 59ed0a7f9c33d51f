"""Files of arrays: their headers are read first, and what breaks is one kind of error."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedrane.data import arrays


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode()


def described(dtype: str, shape: str) -> bytes:
    return header(f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}\n")


def archive(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members:
            packed.writestr(name, content)
    return path


def test_headers_describe_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.ones((3, 4), np.float32), y=np.array(["a", "bc"]))
    found = arrays.headers(path)
    assert found["x"] == arrays.Header((3, 4), np.dtype(np.float32))
    assert (found["x"].elements, found["x"].size, found["y"].size) == (12, 48, 16)
    assert arrays.read(path, ["y"])["y"].tolist() == ["a", "bc"]


BROKEN = {
    "claims more than it holds": described("|u1", "(1000000000000, 28, 28)") + b"few",
    "overflows": described("<f8", "(9223372036854775807, 9223372036854775807)"),
    "negative": described("|u1", "(-1, 5)"),
    "deep": header("(" * 9000),
    "deep but closed": header("(" * 4000 + ")" * 4000),
    "no dictionary": header("[1, 2]\n"),
    "unfinished": header("{'descr': '<f8', "),
    "huge type": described("<f999999999999", "(2,)"),
    "no array": b"not an array",
    "empty": b"",
    "unknown version": header("{}", b"\x09\x00"),
    "objects": described("|O", "(2,)") + b"cos\nsystem\n",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_array_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    path = archive(tmp_path / "a.npz", ("x.npy", content))
    with pytest.raises(ValueError, match=r"."):
        arrays.read(path, ["x"])
    if b"'|O'" not in content:  # objects have a good header
        with pytest.raises(ValueError, match=r"."):
            arrays.headers(path)


def test_a_device_is_not_read() -> None:
    """A partition in a run folder may be a link to one, which never ends."""
    with pytest.raises(OSError, match="not a plain file"):
        arrays.headers(Path("/dev/zero"))


def test_an_encrypted_file_is_an_error(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    path = archive(tmp_path / "a.npz", ("x.npy", buffer.getvalue()))
    packed = bytearray(path.read_bytes())
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(signature) + at] |= 1
    path.write_bytes(packed)
    with pytest.raises(ValueError, match="encrypted"):
        arrays.headers(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name_are_an_error(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", ("x.npy", described("|u1", "(0,)")), ("x.npy", described("|u1", "(0,)")))
    with pytest.raises(ValueError, match="same name"):
        arrays.headers(path)
