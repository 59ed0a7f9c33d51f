"""Reads the JSON of LEAF (Caldas et al., 2018), in which the examples of each user are a client's.

A folder holds files with the keys ``users`` and ``user_data``: for each user a list ``x`` of examples and a list ``y``
of labels. LEAF's ``preprocess.sh`` writes such folders, ``data/train`` and ``data/test``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import text
from fedrane.errors import DataError
from fedrane.system import memory
from fedrane.system.files import plain_size

_SIDE = 28
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""Those of LEAF's Shakespeare, in its order. A character that is not among them is unknown."""
LENGTH = 80
"""Of its texts, whose next character is predicted."""
_PER_BYTE = 12
"""Bytes in memory for one of a file: ``0.0, `` becomes a number of 24 bytes and a place in a list."""


class Examples(NamedTuple):
    """Images of several users, or texts."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    users: NDArray[np.int64]
    """The user of each, 0 … K − 1 in the order of their names."""


def users(folder: Path, remedy: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user of a folder's files, with the examples and their labels as they are in the file."""
    for path in sorted(folder.glob("*.json")):
        try:
            memory.require(_PER_BYTE * plain_size(path), str(path), "Let LEAF write smaller files, or use more memory")
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read as JSON: {error}", "", remedy) from error
        held = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(held, dict):
            raise DataError(f"{path} has no user_data", "a file of LEAF has the examples of each user there", remedy)
        for user, data in held.items():
            x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                why = "a user has a list x of examples and a list y of as many labels"
                raise DataError(f"{path}: the data of user {user!r} cannot be used", why, remedy)
            yield user, x, y


def femnist(folder: Path, classes: int, remedy: str) -> Examples:
    """Read the images of FEMNIST in a folder: 784 numbers each, from 0 to 1, or bytes in LEAF's first version."""
    images, labels, owners = [], [], []  # not an array of names: each would take as much as the longest
    for user, x, y in users(folder, remedy):
        if not y:
            continue
        try:
            pixels, numbers = np.array(x, dtype=np.float64), np.array(y)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{folder}: the data of user {user!r} cannot be used: {error}", "", remedy) from error
        scaled = pixels * 255 if pixels.size and pixels.max() <= 1 else pixels
        if pixels.ndim != 2 or pixels.shape[1] != _SIDE**2 or not ((scaled >= 0) & (scaled <= 255)).all():
            raise DataError(
                f"{folder}: user {user!r} has examples of shape {pixels.shape[1:]}",
                f"images are {_SIDE**2} numbers from 0 to 1, or from 0 to 255",
                remedy,
            )
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or numbers.min() < 0 or numbers.max() >= classes:
            why = f"the classes are numbered from 0 to {classes - 1}"
            raise DataError(f"{folder}: user {user!r} has labels that are no classes", why, remedy)
        images.append(np.rint(scaled).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE))
        labels.append(numbers.astype(np.int64))
        owners.append(user)
    return _together(folder, images, labels, owners, remedy)


def shakespeare(folder: Path, remedy: str) -> Examples:
    """Read the texts of Shakespeare's roles in a folder: each user is a role of a play."""
    texts, labels, owners = [], [], []
    for user, x, y in users(folder, remedy):
        if not y:
            continue
        lengths = {*((LENGTH, len(each) if isinstance(each, str) else 0) for each in x)}
        lengths |= {*((1, len(each) if isinstance(each, str) else 0) for each in y)}
        if any(wanted != given for wanted, given in lengths):
            why = f"an example is {LENGTH} characters, and its label the one after them"
            raise DataError(f"{folder}: user {user!r} has other examples", why, remedy)
        texts.append(text.encode("".join(x), LETTERS).astype(np.uint8).reshape(-1, LENGTH))
        labels.append(text.encode("".join(y), LETTERS))
        owners.append(user)
    return _together(folder, texts, labels, owners, remedy)


def _together(
    folder: Path,
    inputs: list[NDArray[np.uint8]],
    labels: list[NDArray[np.int64]],
    owners: list[str],
    remedy: str,
) -> Examples:
    if not inputs:
        raise DataError(f"{folder} has no examples", "", remedy)
    number = {user: index for index, user in enumerate(sorted({*owners}))}
    users_of = np.repeat([number[user] for user in owners], [len(part) for part in labels])
    return Examples(np.concatenate(inputs), np.concatenate(labels), users_of)
