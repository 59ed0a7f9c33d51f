"""The user's own code in a run folder: its copies, and whether it may run (docs/decisions/0014).

A folder may come from anyone, and its configuration may name any code. So code that a folder names is run only if this
user has named it before, on this account, or trusts it explicitly now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrane.config import sources
from fedrane.config.settings import FIELD, flat
from fedrane.errors import CheckpointError
from fedrane.experiment import KEYS as KNOWN
from fedrane.experiment import Experiment, read_toml
from fedrane.system import loading, named_code
from fedrane.system.files import write_atomically
from fedrane.training.run_folder import CODE, CONFIG, DIGESTS, Folder


def remember(experiment: Experiment) -> None:
    """Record that the user has named this experiment's code: it may then run if a folder names it."""
    named_code.remember(_references(experiment.to_dict()).values())


def _references(values: Mapping[str, Any]) -> dict[str, str]:
    """The code that a configuration names, by key; ``method = "…"`` is the same as ``[method] name``."""
    return named_code.references(flat(values))


def keep(experiment: Experiment, folder: Folder) -> None:
    """Copy the code that an experiment names into its folder, under its digest, so that no copy replaces another.

    Only the named files are copied, not the local modules that they import.
    """
    for key, file in sources.user_files(experiment).items():
        if key in named_code.KEYS:
            folder.held()
            write_atomically(_copy(folder, file, sources.digest(file)), file.read_bytes())


def _copy(folder: Folder, file: Path, digest: str) -> Path:
    return folder.path / CODE / f"{file.stem}-{digest}.py"


def recorded(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded digests of a run's inputs: from its start, or from the last accepted change."""
    return {key: digest for name in DIGESTS for key, digest in metadata.get(name, {}).items()}


def now(folder: Folder) -> dict[str, str]:
    """Return the current digests of the files that a folder names, if they still exist."""
    named = {key: loading.file_of(name) for key, name in _of(folder).items()}
    return {key: sources.digest(file) for key, file in named.items() if file and file.is_file()}


def gone(folder: Folder) -> list[Path]:
    """Return the files that a folder names and that no longer exist."""
    return [file for name in _of(folder).values() if (file := loading.file_of(name)) and not file.is_file()]


def _of(folder: Folder) -> dict[str, str]:
    return _references(read_toml(folder.path / CONFIG))


@contextmanager
def opened(folder: Folder, trust: bool = False, changed: bool = False) -> Iterator[Experiment]:
    """Yield a folder's experiment; inside this context the code that it names is loaded from the right file.

    That is the original file if it is unchanged or ``changed`` accepts the change, else the copy in the folder.
    ``trust`` allows code that the user has not named before.
    """
    values = read_toml(folder.path / CONFIG)
    then = recorded(folder.read_metadata())
    files: dict[str, Path] = {}
    for key, reference in _references(values).items():
        if original := loading.file_of(reference):
            files[reference] = _locate(folder, original, then.get(key), changed)
    named_code.require(str(folder.path), _references(values), trust, files)
    require_recorded(folder, values)
    with loading.elsewhere(files):
        yield Experiment.from_dict(values)


def require_recorded(folder: Folder, values: Mapping[str, Any]) -> None:
    """Raise an error unless a configuration has the settings that the run began with."""
    now, then = flat(values), folder.read_metadata().get("settings", {})
    for key in now.keys() - then.keys() - KNOWN if then else ():
        if not key.startswith(FIELD):
            raise CheckpointError(f"{folder.path / CONFIG} has the unknown key {key}", remedy="Put it back as it was")
    for key, value in then.items():
        if now.get(key) != value and str(now.get(key)) != str(value):
            what = f"{key}={now[key]}" if key in now else f"no {key}"
            raise CheckpointError(
                f"{folder.path / CONFIG} has {what}, and the run began with {key}={value}",
                "with another setting it is another experiment",
                f"Put {key}={value} back; for another experiment start a new run",
            )


def _locate(folder: Folder, original: Path, then: str | None, changed: bool) -> Path:
    exists = original.is_file()
    if exists and (changed or then is None or sources.digest(original) == then):
        return original
    copy = _copy(folder, original, then or "")
    what = f"{original} {'has changed' if exists else 'is gone'} since the run in {folder.path}"
    if not copy.is_file():
        raise CheckpointError(what, "the folder has no copy of it", "Restore it")
    if sources.digest(copy) != then:
        raise CheckpointError(what, f"and so has its copy, {copy}", "Restore one of them")
    return copy


def require_named(folder: Path, values: Mapping[str, Any], trust: bool) -> None:
    """Raise an error unless the code that a folder's settings name is known or trusted."""
    named_code.require(str(folder), _references(values), trust)
