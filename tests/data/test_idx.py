"""IDX files, written here from the format's description: magic 00 00 08 D, D big-endian sizes, the bytes row by row."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from fedrane.data import idx
from fedrane.errors import DataError, TooLarge

REMEDY = "Delete the file and run `fedrane data get fmnist`"
PIXELS = bytes(range(24))  # two images of 3 × 4 with different pixels: a wrong order shows
IMAGES = b"\x00\x00\x08\x03" + struct.pack(">III", 2, 3, 4) + PIXELS
LABELS = b"\x00\x00\x08\x01" + struct.pack(">I", 5) + bytes([9, 0, 3, 3, 1])


def refused(path, content, dimensions=3):
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        idx.read(path, dimensions, REMEDY)
    assert str(path) in str(caught.value)
    assert caught.value.remedy == REMEDY
    return str(caught.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["images", "images.gz"])  # the content decides, not the name
def test_images_are_read_in_row_major_order(tmp_path, pack, name):
    path = tmp_path / name
    path.write_bytes(pack(IMAGES))
    images = idx.read(path, 3, REMEDY)
    assert (images.dtype, images.shape) == (np.uint8, (2, 3, 4))
    assert images[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert images[1, 2, 0] == 20
    assert images.flags.writeable


def test_labels_are_read(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(LABELS)
    assert idx.read(path, 1, REMEDY).tolist() == [9, 0, 3, 3, 1]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_truncated_anywhere_is_rejected(tmp_path, pack):
    whole = pack(IMAGES)
    for length in range(len(whole)):
        refused(tmp_path / "images", whole[:length])


def test_a_file_that_is_too_long_is_rejected(tmp_path):
    assert "more than 24 bytes" in refused(tmp_path / "images", IMAGES + b"!")


def test_a_damaged_gzip_is_rejected(tmp_path):
    packed = bytearray(gzip.compress(IMAGES))
    packed[-6] ^= 0xFF  # in the checksum
    assert "cannot be read" in refused(tmp_path / "images", bytes(packed))
    packed[12] ^= 0xFF  # in the compressed bytes
    assert "cannot be read" in refused(tmp_path / "images", bytes(packed))


@pytest.mark.parametrize(
    "magic",
    [b"\x00\x00\x08\x01", b"\x00\x00\x0d\x03", b"PK\x03\x04", b"<htm"],
    ids=["dimensions", "floats", "zip", "page"],
)
def test_a_wrong_magic_number_is_rejected(tmp_path, magic):
    message = refused(tmp_path / "images", magic + IMAGES[4:])
    assert magic.hex(" ") in message
    assert "00 00 08 03" in message


def test_a_header_cannot_claim_memory(tmp_path):
    claim = b"\x00\x00\x08\x03" + struct.pack(">III", *[0xFFFFFFFF] * 3)
    (tmp_path / "images").write_bytes(claim + b"few")
    tracemalloc.start()
    with pytest.raises(TooLarge, match="needs about over a million TiB") as caught:
        idx.read(tmp_path / "images", 3, REMEDY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert REMEDY in str(caught.value)
    assert peak < 5_000_000


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRANE_MEMORY", "0.01")
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x03" + struct.pack(">III", 20_000, 28, 28) + bytes(20_000 * 784)))
    assert path.stat().st_size < 20_000
    with pytest.raises(
        TooLarge, match=r"20000 × 28 × 28 bytes, needs about 29\.9 MiB of memory: 10\.2 MiB are available"
    ):
        idx.read(path, 3, REMEDY)
    monkeypatch.setenv("FEDRANE_MEMORY", "unlimited")
    assert idx.read(path, 3, REMEDY).shape == (20_000, 28, 28)


def test_examples_of_another_shape_are_refused_unread(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(b"\x00\x00\x08\x03" + struct.pack(">III", 0xFFFFFFFF, 0, 28))
    with pytest.raises(DataError, match=r"has images of \(0, 28\): they should be \(28, 28\)"):
        idx.read(path, 3, REMEDY, (28, 28))


def test_an_unreadable_path_is_rejected(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        idx.read(tmp_path, 3, REMEDY)


def test_the_plain_file_is_found_before_the_compressed_one(tmp_path):
    assert idx.locate(tmp_path, "images") is None
    (tmp_path / "images.gz").touch()
    assert idx.locate(tmp_path, "images") == tmp_path / "images.gz"
    (tmp_path / "images").touch()
    assert idx.locate(tmp_path, "images") == tmp_path / "images"
