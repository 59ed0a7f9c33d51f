"""Files of data: a dataset, a partition or an array, or one clear error; nothing unpacked that would not fit."""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from scipy import io as matlab

from contained import examples, used_or_refused
from damage import as_json, damaged, replaced
from fedrane.data import cifar, idx, leaf, medmnist, partition, readers, svhn
from fedrane.data.dataset import Dataset
from fedrane.data.tabular import from_csv

pytestmark = pytest.mark.slow

# ---- .npz files

kinds = (
    arrays.scalar_dtypes()
    | st.sampled_from(["uint8", "float32", "int64", "U3", "S3", "M8[s]", "object", "complex64", ">i4", "V5", "bool"])
    | st.just([("é", "f4"), ("b", "U2", (2,))])
)
shapes = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6)
likely = st.tuples(st.integers(2, 9), st.integers(1, 5)) | st.tuples(*[st.integers(1, 5)] * 3) | shapes


@st.composite
def members(draw: st.DrawFn) -> bytes:
    """One array as a file, of any type; its header may say anything, and its bytes may be others."""
    how = draw(st.sampled_from(["array", "array", "array", "header", "bytes"]))
    stream = io.BytesIO()
    if how == "bytes":
        return draw(st.binary(max_size=200))
    if how == "array":
        dtype = np.dtype(draw(kinds))
        drawn = dtype.kind in "biufcSUMm"
        array = draw(arrays.arrays(dtype, likely)) if drawn else np.zeros(draw(likely), dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # this type can be read by a recent NumPy only
            np.lib.format.write_array(stream, array, allow_pickle=True)
        return draw(damaged(stream.getvalue()))
    size = st.sampled_from(["3", "-1", "0", "10**9", "1000000000000", "True", "2.5", "9" * 400, "(1,)", "'a'", "1j"])
    shape = "(" + "".join(f"{draw(size)}, " for _ in range(draw(st.integers(0, 40)))) + ")"
    descr = draw(
        st.sampled_from(["'|u1'", "'<f4'", "'|O'", "'<U9999999999'", "[('a', '<f4')]", "'V0'", "'|S0'", "7", "("])
    )
    text = draw(
        st.just(
            f"{{'descr': {descr}, 'fortran_order': {draw(st.sampled_from(['True', 'False', '1']))}, 'shape': {shape}}}"
        )
        | st.sampled_from(
            ["(" * 3000, "{" * 3000, "__import__('os').system('touch it')", "-" * 5000 + "1", "", "\0", "[]"]
        )
    )
    header = text.encode("latin1") + b"\n"
    version = draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (9, 9)]))
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + draw(st.binary(max_size=64))


@st.composite
def archives(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """Arrays under these names, or others; the archive may be damaged, or lie about their sizes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", draw(st.sampled_from([0, 8, 12, 14]))) as archive:
        chosen = draw(st.lists(st.sampled_from(names), min_size=2, max_size=len(names)) | st.just([*names[:2]]))
        for name in [*chosen, *draw(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=3), max_size=1))]:
            if f"{name}.npy" not in archive.namelist():
                archive.writestr(f"{name}.npy", draw(members()))
        if draw(st.integers(0, 9)) == 0:
            archive.filelist[0].file_size = draw(st.sampled_from([0, 1 << 31, 1 << 40, 10**8]))
    return draw(damaged(stream.getvalue()))


def small(dataset: Dataset) -> Dataset:
    """What a dataset that was read must be."""
    assert dataset.x.dtype in (np.uint8, np.float32)
    assert len(dataset.x) == len(dataset.y)
    assert len(dataset.x_test) == len(dataset.y_test)
    assert dataset.y.min(initial=0) >= 0
    assert dataset.y.max(initial=0) < len(dataset.classes)
    return dataset


@examples(200)
@given(content=archives(("x", "y", "x_test", "y_test", "client", "classes")))
def test_npz(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "it.npz"
    path.write_bytes(content)
    used_or_refused(tmp_path, lambda: small(readers.from_npz(path)))
    used_or_refused(tmp_path, lambda: readers.read_labelled(path, ("0", "1", "a")))
    used_or_refused(tmp_path, lambda: readers.read_inputs(path, lambda shape: None))


def _partition(path: Path) -> bytes:
    partition.save(partition.Partition((np.arange(0, 8, 2), np.arange(1, 8, 2))), path, dataset="digits", seed=1)
    return path.read_bytes()


@examples(150)
@given(data=st.data())
def test_partitions(data: st.DataObject, tmp_path: Path) -> None:
    whole = _partition(tmp_path / "whole.npz")
    path = tmp_path / "it.npz"
    path.write_bytes(data.draw(damaged(whole) | archives(("examples", "offsets", "meta"))))
    read = used_or_refused(tmp_path, lambda: partition.load(path, examples=8))
    if read is not None:
        assert sorted(np.concatenate(read.clients)) == list(range(8))


# ---- IDX files and pickles


@examples(200)
@given(
    shape=st.lists(st.integers(0, 6) | st.sampled_from([2**31, 2**32 - 1, 10**6]), min_size=0, max_size=5),
    body=st.binary(max_size=300),
    squeezed=st.booleans(),
    dimensions=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_idx(
    shape: list[int], body: bytes, squeezed: bool, dimensions: int, data: st.DataObject, tmp_path: Path
) -> None:
    content = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4) for n in shape) + body
    if np.prod(shape, dtype=float) < 300:
        content = content[: 4 + 4 * len(shape)] + body.ljust(300)[: int(np.prod(shape))]
    path = tmp_path / "it"
    path.write_bytes(data.draw(damaged(gzip.compress(content) if squeezed else content)))
    read = used_or_refused(tmp_path, lambda: idx.read(path, dimensions, "Get another"))
    assert read is None or read.ndim == dimensions


class Hostile:
    """What a pickle must not bring about."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.system('true')",)


BATCH = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"batch_label": b"one", b"filenames": [b"a", b"b"]}
PICKLES = [
    pickle.dumps(value, protocol) for protocol in range(5) for value in (BATCH, {"data": Hostile()}, [Hostile()])
]
ORIGINAL = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, 2)
operations = st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes])
operands = st.binary(max_size=6) | st.sampled_from([b"os\nsystem\n", b"\xff\xff\xff\x7f", b"9" * 9000 + b"\n", b"1\n"])
programs = st.lists(operations | operands, max_size=30).map(b"".join)


@examples(200)
@given(content=st.sampled_from([*PICKLES, ORIGINAL]).flatmap(damaged) | damaged(ORIGINAL) | programs)
def test_cifar(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(content)
    used_or_refused(tmp_path, lambda: cifar.read(path, "labels", 10, "Get another"))
    used_or_refused(tmp_path, lambda: cifar.names(path, "label_names", 10, "Get another"))


# ---- files of known datasets, and Parquet


def _matlab(packed: bool = True, **arrays: Any) -> bytes:
    stream = io.BytesIO()
    matlab.savemat(stream, arrays, do_compression=packed)
    return stream.getvalue()


HOUSES = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1), np.uint8)}
MATLAB = [_matlab(**HOUSES), _matlab(packed=False, **HOUSES), _matlab(**HOUSES | {"y": np.array([["1"], ["2"]])})]


@examples(150)
@given(content=st.sampled_from(MATLAB).flatmap(damaged))
def test_svhn(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "it.mat"
    path.write_bytes(content)
    used_or_refused(tmp_path, lambda: svhn.read(path, "Get another"))


@examples(100)
@given(content=archives(("train_images", "train_labels")))
def test_medmnist(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "it.npz"
    path.write_bytes(content)
    used_or_refused(tmp_path, lambda: medmnist.read(path, "train", medmnist.DATASETS["breastmnist"], "Get another"))


LEAF = {"users": ["a"], "user_data": {"a": {"x": [[0.5] * 784], "y": [3]}, "b": {"x": [[1] * 784] * 2, "y": [0, 1]}}}


@examples(150)
@given(content=replaced(LEAF).map(as_json) | damaged(as_json(LEAF).encode()).map(lambda raw: raw.decode("latin1")))
def test_leaf(content: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(content, encoding="latin1")
    used_or_refused(tmp_path, lambda: leaf.femnist(tmp_path, 62, "Get another"))


@examples(150)
@given(data=st.data())
def test_parquet(data: st.DataObject, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, label = tmp_path / "it.parquet", ["a", "b"] * 10
    column = data.draw(st.sampled_from([[1.5] * 20, ["x", None] * 10, [True] * 20, [[1]] * 20, [b"x"] * 20]))
    parquet.write_table(pyarrow.table({"y": label, "v": column}), path)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    used_or_refused(tmp_path, lambda: small(from_csv(path, "y")))


# ---- images


@st.composite
def pictures(draw: st.DrawFn) -> tuple[str, bytes]:
    """A suffix, and an image of any format and mode, perhaps damaged."""
    formats = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "gif": "GIF", "webp": "WEBP", "tif": "TIFF", "ppm": "PPM"}
    suffix = draw(st.sampled_from(sorted(formats)))
    kind = formats[draw(st.sampled_from(sorted(formats)))]
    mode = draw(st.sampled_from(["L", "RGB", "1", "P", "RGBA", "LA", "CMYK", "I;16", "F"]))
    image = Image.new(mode, draw(st.tuples(st.integers(1, 9), st.integers(1, 9)) | st.just((4, 4))))
    stream = io.BytesIO()
    try:
        image.save(stream, kind)
    except (OSError, ValueError):  # this format has no such mode
        stream = io.BytesIO()
        image.convert("RGB").save(stream, kind)
    return suffix, draw(damaged(stream.getvalue()))


@examples(200)
@given(
    folder=st.lists(pictures(), min_size=1, max_size=4),
    depth=st.sampled_from([2, 2, 3, 1, 4]),
    size=st.sampled_from([0, 4, 1, -1, 30_000, 10**30]),
)
def test_images(
    folder: list[tuple[str, bytes]], depth: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.mktemp("images")
    for number, (suffix, content) in enumerate(folder):
        path = here.joinpath(*[f"{number % 2}"] * (depth - 1), f"{number}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        used_or_refused(here, lambda path=path: readers.read_image(path, (3, 4, 4), size))
    used_or_refused(here, lambda: small(readers.from_folder(here, size)))
