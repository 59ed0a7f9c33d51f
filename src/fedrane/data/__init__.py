"""Datasets: the ones known by name, and the user's own."""

from __future__ import annotations

from pathlib import Path

from fedrane.data import catalogue
from fedrane.data.dataset import Dataset
from fedrane.data.readers import from_folder, from_npz, from_torch
from fedrane.errors import DataError, nearest
from fedrane.system.files import user_path

__all__ = ["Dataset", "from_folder", "from_npz", "from_torch", "load"]


def load(source: str, root: str | Path | None = None, image_size: int = 0) -> Dataset:
    """Load a known dataset by its name, or the user's own from a ``.npz`` file or a folder of images."""
    path = user_path(source)
    is_folder = source not in catalogue.NAMES and path.suffix != ".npz" and path.is_dir()
    if image_size and not is_folder:
        raise DataError(
            f"image_size is {image_size} for {source}", "only images in a folder are resized", "Leave image_size at 0"
        )
    if source in catalogue.NAMES:
        return catalogue.load(source, root)
    if path.suffix == ".npz":
        return from_npz(path)
    if is_folder:
        return from_folder(path, image_size)
    raise DataError(f"no dataset, .npz file or folder is called {source!r}", "", nearest(source, catalogue.NAMES))
