"""Reads Tiny-ImageNet as it is unpacked: train/CLASS/images/*.JPEG, and val/images with the class of each image.

The classes are WordNet's numbers, one on each line of wnids.txt; words.txt has their names. The images of ``test`` have
no labels, so the official test set is ``val``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.data.readers import read_image
from fedrane.errors import DataError
from fedrane.system import memory

IDS, WORDS, VALIDATION = "wnids.txt", "words.txt", "val/val_annotations.txt"
SHAPE = (3, 64, 64)


def classes(folder: Path, remedy: str) -> list[str]:
    """The numbers of the classes, in order."""
    numbers = sorted({line.strip() for line in _lines(folder / IDS, remedy)} - {""})
    if not numbers:
        raise DataError(f"{folder / IDS} is empty", "it has a class on each line", remedy)
    return numbers


def names(folder: Path, remedy: str) -> tuple[str, ...]:
    """The first name of each class, with its number where two have the same."""
    words = dict(line.partition("\t")[::2] for line in _lines(folder / WORDS, remedy))
    numbers = classes(folder, remedy)
    first = [words.get(number, number).partition(",")[0].strip() or number for number in numbers]
    return tuple(f"{name} ({n})" if first.count(name) > 1 else name for name, n in zip(first, numbers, strict=True))


def train(folder: Path, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    labelled = [
        (path, label)
        for label, number in enumerate(classes(folder, remedy))
        for path in sorted((folder / "train" / number / "images").glob("*.JPEG"))
    ]
    return _read(folder / "train", labelled, remedy)


def validation(folder: Path, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    label_of = {number: label for label, number in enumerate(classes(folder, remedy))}
    labelled = []
    for line in _lines(folder / VALIDATION, remedy):
        name, _, rest = line.partition("\t")
        number = rest.partition("\t")[0]
        if not name or "/" in name or "\\" in name or number not in label_of:
            raise DataError(
                f"{folder / VALIDATION} has a line {line[:80]!r}", "it has the name of an image, and its class", remedy
            )
        labelled.append((folder / "val" / "images" / name, label_of[number]))
    return _read(folder / "val", labelled, remedy)


def _read(
    where: Path, labelled: Sequence[tuple[Path, int]], remedy: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not labelled:
        raise DataError(f"{where} has no images", "", remedy)
    memory.require(len(labelled) * int(np.prod(SHAPE)), f"the images in {where}", "Use a smaller dataset")
    x = np.zeros((len(labelled), *SHAPE), np.uint8)
    for row, (path, _) in enumerate(labelled):
        pixels = read_image(path, SHAPE)
        if pixels.shape != SHAPE:
            raise DataError(f"{path} is of shape {pixels.shape}", f"images of Tiny-ImageNet are {SHAPE}", remedy)
        x[row] = pixels
    return x, np.array([label for _, label in labelled], np.int64)


def _lines(path: Path, remedy: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "", remedy) from error
