"""Reads the MATLAB files of SVHN: ``X`` (height, width, channels, examples) and ``y``, in which 10 stands for 0."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError, TooLarge
from fedrane.system import memory
from fedrane.system.files import plain_size

_IMAGE = (32, 32, 3)
_NUMBERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "single", "double")
"""The classes of MATLAB that labels may have."""


def read(path: Path, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (examples, 3, 32, 32) and labels 0 … 9; ``remedy`` is added to error messages."""
    from scipy import io  # slow to import

    try:
        plain_size(path)
        listed = io.whosmat(path)
        shapes = {name: shape for name, shape, _ in listed}
        kinds = {name: kind for name, _, kind in listed}
        count = shapes["X"][3] if len(shapes.get("X", ())) == 4 else 0
        twice = len(listed) > len(shapes)  # the reader would take the first, and the shapes are of the last
        if twice or shapes.get("X", ())[:3] != _IMAGE or shapes.get("y") != (count, 1):
            raise DataError(
                f"{path} has {', '.join(f'{name} {shape}' for name, shape, _ in listed) or 'no arrays'}",
                "it should have images X (32, 32, 3, examples) and labels y (examples, 1)",
                remedy,
            )
        if kinds["X"] != "uint8" or kinds["y"] not in _NUMBERS:
            why = "images are bytes, and labels numbers"
            raise DataError(f"{path} has images of {kinds['X']} and labels of {kinds['y']}", why, remedy)
        memory.require(3 * math.prod(shapes["X"]), str(path), "Use a machine with more memory")
        held = io.loadmat(path, variable_names=["X", "y"])
        images, labels = held["X"], held["y"]
    except (DataError, TooLarge):
        raise
    except Exception as error:  # on broken bytes, the reader of MATLAB files raises almost anything
        raise DataError(f"{path} cannot be read: {str(error) or type(error).__name__}", "", remedy) from error
    if images.dtype != np.uint8 or labels.dtype.kind not in "iuf" or not np.isin(labels, np.arange(1, 11)).all():
        raise DataError(
            f"{path} has images of {images.dtype} and labels from {labels.min()} to {labels.max()}",
            "images are bytes, and labels 1 to 10, of which 10 stands for 0",
            remedy,
        )
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels[:, 0].astype(np.int64) % 10
