"""What an experiment's inputs hold: two runs of the same words are the same only if these have not changed between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedrane.data import catalogue
from fedrane.data.dataset import Dataset
from fedrane.experiment import Experiment
from fedrane.task import Task

LENGTH = 12
"""Digits of a digest."""


def own_files(experiment: Experiment) -> dict[str, Path]:
    """The files and folders of the user's that an experiment names, by its dotted keys."""
    code = {"method.name": experiment.method_name, "model": experiment.model}
    named = {key: file for key, name in code.items() if (file := name.rpartition(":")[0]).endswith(".py")}
    if experiment.dataset not in catalogue.NAMES:
        named["dataset"] = experiment.dataset
    if experiment.partition.file:
        named["partition.file"] = experiment.partition.file
    paths = {key: Path(name).expanduser() for key, name in named.items()}
    return {key: path for key, path in paths.items() if path.exists()}


def contents(experiment: Experiment) -> dict[str, str]:
    """A digest of each of them."""
    return {key: digest(path) for key, path in own_files(experiment).items()}


def digest(path: Path) -> str:
    """Of a file or a folder as it is now."""
    about = path.stat()
    return _digest(path.resolve(), about.st_mtime_ns, about.st_size)


@cache
def _digest(path: Path, changed: int, size: int) -> str:
    """Of a file's bytes, or of all names and bytes in a folder; ``changed`` and ``size`` say which bytes were read."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:LENGTH]
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as stream:
            whole.update(f"{file.relative_to(path)}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:LENGTH]


# ---- of what was read from them, or handed over from Python


def of_dataset(rows: Dataset) -> str:
    """Of the examples, labels and classes, wherever they come from; files that hold the same have the same."""
    arrays = {"x": rows.x, "y": rows.y, "x_test": rows.x_test, "y_test": rows.y_test, "client": rows.client}
    found = {name: array for name, array in arrays.items() if array is not None}
    return _of_arrays([*rows.classes], found)


def of_normalisation(rows: Dataset) -> str:
    """Of the means and deviations by which inputs are scaled, which a dataset that is handed over may have of any kind.

    To nine digits: the last bits of those that are computed from the rows may differ from machine to machine.
    """
    return _of_arrays([f"{value:.9g}" for value in (*rows.mean, *rows.std)], {})


def of_network(task: Task) -> str:
    """Of a network's layers, and of its constants, which no checkpoint holds; not of the code in ``forward``."""
    layers = [f"{part} {module!r}" for part, module in task.parts.items()]
    shapes = [f"{part}.{n} {tuple(t.shape)}" for part, m in task.parts.items() for n, t in m.state_dict().items()]
    held = {f"{part}.{n}": t for part, m in task.parts.items() for n, t in m.named_buffers() if not task.is_stat(n)}
    # As float32, so that a model that is loaded to predict is the one that was trained in another precision.
    plain = {name: t.float() if t.is_floating_point() else t for name, t in held.items()}
    return _of_tensors([*layers, *shapes], plain)


def of_weights(network: nn.Module) -> str:
    """Of the weights that a network starts from."""
    return _of_tensors([], network.state_dict())


def _of_tensors(words: Iterable[str], tensors: Mapping[str, Tensor]) -> str:
    plain = {name: t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() for name, t in tensors.items()}
    return _of_arrays(words, plain)


def _of_arrays(words: Iterable[str], arrays: Mapping[str, np.ndarray]) -> str:
    whole = hashlib.sha256("\0".join(words).encode())
    for name, array in arrays.items():
        whole.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        whole.update(np.ascontiguousarray(array).data if array.size else b"")
    return whole.hexdigest()[:LENGTH]


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The keys whose digests differ; what was not recorded then cannot be compared."""
    return [key for key, found in now.items() if then.get(key, found) != found]
