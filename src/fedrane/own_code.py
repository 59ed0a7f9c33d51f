"""A user's own method or network in a run folder: its copy, and on whose word it is run (docs/decisions/0014).

A folder may come from anybody, and its configuration may name any code. So code that a folder names is run only if this
user has named it before, on this account, or says now that it is to be trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedrane import loading, sources
from fedrane.errors import CheckpointError, ConfigError
from fedrane.experiment import Experiment, read_toml
from fedrane.files import write_atomically
from fedrane.settings import flat
from fedrane.training.run_folder import CODE, CONFIG, DIGESTS, Folder

KEYS = ("method.name", "model")
"""The settings that may name code."""
WORDS = {"method.name": "method", "model": "model"}
"""What these are called on the command line."""

_named: set[str] = set()
"""By this process, also where nothing can be written down."""


# ---- what the user has named


def _record() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedrane" / "named-code"


def remember(experiment: Experiment) -> None:
    """The user has named this experiment's code: it may be run when a folder names it."""
    for reference in _references(experiment.to_dict()).values():
        _add(_marks(reference, loading.file_of(reference)))


def _marks(reference: str, file: Path | None) -> set[str]:
    """What a reference is known by: with the name in it, the content of the file, of which a run has a copy.

    And the file's place, where its user may edit it; not that of a copy in somebody's folder.
    """
    if file is None or not file.is_file():
        return {f"module {reference}"}
    name = reference.rpartition(":")[2]
    content = f"sha256 {loading.digest(file)}:{name}"
    return {content, f"file {file.resolve()}:{name}"} if file == loading.file_of(reference) else {content}


def _add(marks: set[str]) -> None:
    new = sorted(marks - _known())
    _named.update(new)
    # Where nothing can be written, the user is asked again another time.
    with suppress(OSError):
        if new:
            _record().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _record().open("a", encoding="utf-8") as file:
                file.write("".join(f"{mark}\n" for mark in new))


def _known() -> set[str]:
    try:
        return _named | set(_record().read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return _named


def _references(values: Mapping[str, Any]) -> dict[str, str]:
    """The code that a configuration names, by its keys; ``method = "…"`` names it as ``[method] name`` does."""
    settings = flat(values)
    named = {key: str(settings.get(key, "")) for key in KEYS}
    return {key: name for key, name in named.items() if loading.is_reference(name)}


# ---- in a folder


def keep(experiment: Experiment, folder: Folder) -> None:
    """Copy the files that an experiment names into its folder, each under its digest: no copy replaces another.

    Only the named files: what they import from their neighbours stays where it is.
    """
    for key, file in sources.own_files(experiment).items():
        if key in KEYS:
            write_atomically(_copy(folder, file, sources.digest(file)), file.read_bytes())


def _copy(folder: Folder, file: Path, digest: str) -> Path:
    return folder.path / CODE / f"{file.stem}-{digest}.py"


def recorded(facts: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a run's inputs, as they were when it began or as a change was accepted last."""
    return {key: digest for name in DIGESTS for key, digest in facts.get(name, {}).items()}


def now(folder: Folder) -> dict[str, str]:
    """The digests of the files that a folder names, as far as they are at their places."""
    named = {key: loading.file_of(name) for key, name in _of(folder).items()}
    return {key: sources.digest(file) for key, file in named.items() if file and file.is_file()}


def gone(folder: Folder) -> list[Path]:
    """The files that a folder names and that are not at their places."""
    return [file for name in _of(folder).values() if (file := loading.file_of(name)) and not file.is_file()]


def _of(folder: Folder) -> dict[str, str]:
    return _references(read_toml(folder.path / CONFIG))


@contextmanager
def opened(folder: Folder, trust: bool = False, changed: bool = False) -> Iterator[Experiment]:
    """A folder's experiment; what it names is loaded, within this context, from where it was found.

    That is the file itself where it is as it was, or ``changed`` says to take it as it is; else the folder's copy.
    ``trust`` lets code run that the user has not named before.
    """
    values = read_toml(folder.path / CONFIG)
    then = recorded(folder.read_metadata())
    files: dict[str, Path] = {}
    for key, reference in _references(values).items():
        if original := loading.file_of(reference):
            files[reference] = _found(folder, original, then.get(key), changed)
    require_named(folder.path, values, trust, files)
    with loading.elsewhere(files):
        yield Experiment.from_dict(values)


def _found(folder: Folder, original: Path, then: str | None, changed: bool) -> Path:
    here = original.is_file()
    if here and (changed or then is None or sources.digest(original) == then):
        return original
    copy = _copy(folder, original, then or "")
    what = f"{original} {'has changed' if here else 'is gone'} since the run in {folder.path}"
    if not copy.is_file():
        raise CheckpointError(what, "the folder has no copy of it", "Put it back as it was")
    if sources.digest(copy) != then:
        raise CheckpointError(what, f"and so has its copy, {copy}", "Put either back as it was")
    return copy


def require_named(
    folder: Path, values: Mapping[str, Any], trust: bool = False, files: Mapping[str, Path] = MappingProxyType({})
) -> None:
    """What a folder's configuration names must be known, or be trusted now; ``files`` say where it is loaded from."""
    for key, reference in _references(values).items():
        file = files.get(reference) or loading.file_of(reference)
        marks = _marks(reference, file)
        if trust:
            _add(marks)
        elif not marks & _known():
            raise ConfigError(
                f"{folder} names code: {WORDS[key]}={reference}",
                "you have not run it here before, and a folder from elsewhere may name any code",
                f"Read {file or reference}; if you trust it: --trust-code (from Python, trust_code=True)",
            )
