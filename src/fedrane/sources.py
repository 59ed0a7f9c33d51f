"""What a user's own files hold: two runs of the same words are the same only if these have not changed between."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fedrane.data import catalogue
from fedrane.experiment import Experiment

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
    found = {key: (path, path.stat()) for key, path in own_files(experiment).items()}
    return {key: _digest(path.resolve(), about.st_mtime_ns, about.st_size) for key, (path, about) in found.items()}


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
