"""Datasets: the ones known by name, and the user's own."""

from __future__ import annotations

from pathlib import Path

from fedrane.data import catalogue
from fedrane.data.dataset import Dataset
from fedrane.data.objects import from_huggingface, from_torch
from fedrane.data.readers import from_folder, from_npz
from fedrane.data.tabular import SUFFIXES, TableOptions, from_csv, from_frame, is_table, read_table
from fedrane.data.text import SUFFIX, WINDOW, from_text, is_text
from fedrane.errors import DataError
from fedrane.system.files import user_path

__all__ = [
    "Dataset",
    "TableOptions",
    "from_csv",
    "from_folder",
    "from_frame",
    "from_huggingface",
    "from_npz",
    "from_text",
    "from_torch",
    "load",
]


def load(
    source: str,
    root: str | Path | None = None,
    image_size: int = 0,
    table: TableOptions = TableOptions(),  # noqa: B008
    window: int = WINDOW,
) -> Dataset:
    """Load a known dataset by its name, or the user's own from a CSV, Parquet, ``.npz`` or text file or a folder.

    ``image_size`` is for a folder, ``table`` for a CSV or Parquet file, and ``window`` for a text.
    """
    path = user_path(source)
    is_known = source in catalogue.NAMES
    is_folder = not is_known and path.suffix != ".npz" and path.is_dir()
    if image_size and not is_folder:
        raise DataError(
            f"image_size is {image_size} for {source}", "only images in a folder are resized", "Leave image_size at 0"
        )
    if is_known:
        return catalogue.load(source, root, window)
    if path.suffix == ".npz":
        return from_npz(path)
    if is_folder:
        return from_folder(path, image_size)
    if is_table(source):
        return read_table(path, table)
    if is_text(source) and path.is_file():
        return from_text(path, window)
    if path.exists():
        read = f"read are {', '.join(SUFFIXES)}, .npz, {SUFFIX}, and folders of images"
        raise DataError(f"{source} is no dataset", read, "From Python, a frame is one too: dataset=pandas.read_…(path)")
    raise catalogue.unknown(source)
