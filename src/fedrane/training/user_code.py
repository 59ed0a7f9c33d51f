"""The user's own code in a run folder: its copies, and whether it may run (docs/decisions/0014).

A folder may come from anyone, and its configuration may name any code. So code that a folder names is run only if this
user has named it before, on this account, or trusts it explicitly now.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedrane.config import sources
from fedrane.config.settings import flat
from fedrane.errors import CheckpointError, ConfigError
from fedrane.experiment import Experiment, read_toml
from fedrane.system import loading
from fedrane.system.files import write_atomically
from fedrane.training.run_folder import CODE, CONFIG, DIGESTS, Folder

KEYS = ("method.name", "model")
"""The settings that may name code."""
WORDS = {"method.name": "method", "model": "model"}
"""Their names on the command line."""

LOG = logging.getLogger("fedrane")

_named: set[str] = set()
"""The code named in this process; this works even if nothing can be written to disk."""


# ---- what the user has named


def _record() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedrane" / "named-code"


def remember(experiment: Experiment) -> None:
    """Record that the user has named this experiment's code: it may then run if a folder names it."""
    for reference in _references(experiment.to_dict()).values():
        _add(_marks(reference, loading.file_of(reference)))


def _marks(reference: str, file: Path | None) -> set[str]:
    """Return the marks that identify a reference: the name with the digest of its file, since a run has a copy of it.

    Also the path of the file, which its user may edit; but not the path of a copy in a run folder.
    """
    if file is None or not file.is_file():
        return {f"module {reference}"}
    name = reference.rpartition(":")[2]
    content = f"sha256 {loading.digest(file)}:{name}"
    return {content, f"file {file.resolve()}:{name}"} if file == loading.file_of(reference) else {content}


def _add(marks: set[str]) -> None:
    new = sorted(marks - _known())
    _named.update(new)
    # If nothing can be written, the user is asked again next time.
    with suppress(OSError):
        if new:
            _record().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _record().open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write("".join(f"{mark}\n" for mark in new))


def _known() -> set[str]:
    try:
        return _named | set(_record().read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    except OSError:
        return _named


def _references(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the code that a configuration names, by key; ``method = "…"`` is the same as ``[method] name``."""
    settings = flat(values)
    named = {key: str(settings.get(key, "")) for key in KEYS}
    return {key: name for key, name in named.items() if loading.is_reference(name)}


# ---- code in a run folder


def keep(experiment: Experiment, folder: Folder) -> None:
    """Copy the code that an experiment names into its folder, under its digest, so that no copy replaces another.

    Only the named files are copied, not the local modules that they import.
    """
    for key, file in sources.user_files(experiment).items():
        if key in KEYS:
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
    require_named(folder.path, values, trust, files)
    with loading.elsewhere(files):
        yield Experiment.from_dict(values)


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


def require_named(
    folder: Path, values: Mapping[str, Any], trust: bool = False, files: Mapping[str, Path] = MappingProxyType({})
) -> None:
    """Raise an error unless the code that a folder names is known or trusted; ``files`` are where it is loaded from."""
    for key, reference in _references(values).items():
        file = files.get(reference) or loading.file_of(reference)
        marks = _marks(reference, file)
        if marks & _known() and not trust:
            continue
        what = f"{folder} names code: {WORDS[key]}={reference}"
        where = _identity(reference, file)
        if not trust:
            raise ConfigError(
                what,
                "you have not run it here before, and a folder from someone else may name any code",
                f"Read {where}; if you trust it, use --trust-code (in Python: trust_code=True)",
            )
        LOG.warning("%s; trusted, and loaded from %s", what, where)
        _add(marks)


def _identity(reference: str, file: Path | None) -> str:
    """Where code would be loaded from, and its digest if it is a file."""
    if file is None:
        return f"the installed module {reference.rpartition(':')[0]}"
    return f"{file} (SHA-256 {loading.digest(file)})" if file.is_file() else f"{file}, which is missing"
