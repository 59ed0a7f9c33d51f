"""Digests of an experiment's inputs: two runs with the same settings are the same only if these did not change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedrane.data import catalogue
from fedrane.data.columns import Table
from fedrane.data.dataset import Dataset
from fedrane.experiment import Experiment
from fedrane.system.files import user_path
from fedrane.task import Task

LENGTH = 12
"""Hex digits of a digest."""


def user_files(experiment: Experiment) -> dict[str, Path]:
    """Return the user's files and folders that an experiment names, by dotted key."""
    code = {"method.name": experiment.method_name, "model": experiment.model}
    named = {key: file for key, name in code.items() if (file := name.rpartition(":")[0]).endswith(".py")}
    if experiment.dataset not in catalogue.NAMES:
        named["dataset"] = experiment.dataset
    if experiment.partition.file:
        named["partition.file"] = experiment.partition.file
    paths = {key: user_path(name) for key, name in named.items()}
    return {key: path for key, path in paths.items() if path.exists()}


def contents(experiment: Experiment) -> dict[str, str]:
    """Return a digest of each file and folder that an experiment names, by dotted key."""
    return {key: digest(path) for key, path in user_files(experiment).items()}


def digest(path: Path) -> str:
    """Return the digest of the current content of a file or folder."""
    stat = path.stat()
    return _digest(path.resolve(), stat.st_mtime_ns, stat.st_size)


@cache
def _digest(path: Path, changed: int, size: int) -> str:
    """Return the digest of a file, or of all names and files in a folder; ``changed`` and ``size`` key the cache."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:LENGTH]
    combined = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as stream:
            combined.update(f"{file.relative_to(path)}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    return combined.hexdigest()[:LENGTH]


# ---- digests of loaded objects, and of those passed from Python


def of_dataset(dataset: Dataset) -> str:
    """Return the digest of the examples, labels and classes; it does not depend on how they are stored."""
    arrays = {
        "x": dataset.x,
        "y": dataset.y,
        "x_test": dataset.x_test,
        "y_test": dataset.y_test,
        "client": dataset.client,
    }
    return _of_arrays([*dataset.classes], {name: array for name, array in arrays.items() if array is not None})


def of_table(table: Table) -> str:
    """Return the digest of the names, categories and fills of a table's columns."""
    return _of_arrays([repr(table)], {})


def of_normalisation(dataset: Dataset) -> str:
    """Return the digest of the normalisation constants, which may be anything for a dataset passed from Python.

    They are rounded to nine digits: if they are computed from the data, the last bits may differ between machines.
    """
    return _of_arrays([f"{value:.9g}" for value in (*dataset.mean, *dataset.std)], {})


def of_network(task: Task) -> str:
    """Return the digest of a network's layers and constants (no checkpoint has these); not of its ``forward`` code."""
    layers = [f"{part} {module!r}" for part, module in task.parts.items()]
    shapes = [f"{part}.{n} {tuple(t.shape)}" for part, m in task.parts.items() for n, t in m.state_dict().items()]
    held = {f"{part}.{n}": t for part, m in task.parts.items() for n, t in m.named_buffers() if not task.is_stat(n)}
    # As float32, so that a model trained in another precision has the same digest when it is loaded to predict.
    plain = {name: t.float() if t.is_floating_point() else t for name, t in held.items()}
    return _of_tensors([*layers, *shapes], plain)


def of_weights(network: nn.Module) -> str:
    """Return the digest of a network's initial weights."""
    return _of_tensors([], network.state_dict())


def _of_tensors(words: Iterable[str], tensors: Mapping[str, Tensor]) -> str:
    plain = {name: t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() for name, t in tensors.items()}
    return _of_arrays(words, plain)


def _of_arrays(words: Iterable[str], arrays: Mapping[str, np.ndarray]) -> str:
    combined = hashlib.sha256("\0".join(words).encode())
    for name, array in arrays.items():
        combined.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        combined.update(np.ascontiguousarray(array).data if array.size else b"")
    return combined.hexdigest()[:LENGTH]


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the keys whose digests differ; a key that was not recorded before is not compared."""
    return [key for key, digest in now.items() if then.get(key, digest) != digest]
