"""Which code the user of this account has named: it may run if a folder names it (docs/decisions/0014)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedrane.errors import ConfigError, one_line
from fedrane.system import loading

KEYS = {"method.name": "method", "model": "model"}
"""The settings that may name code, and their names on the command line."""
LOG = logging.getLogger("fedrane")
TRUST = "use --trust-code (in Python: trust_code=True)"

_named: set[str] = set()
"""The code named in this process; this works even if nothing can be written to disk."""


def references(settings: Mapping[str, Any]) -> dict[str, str]:
    """The code that settings by their dotted keys name."""
    named = {key: str(settings.get(key, "")) for key in KEYS}
    return {key: name for key, name in named.items() if loading.is_reference(name)}


def remember(named: Iterable[str]) -> None:
    """Record that the user has named these references."""
    for reference in named:
        _add(_marks(reference, loading.file_of(reference)))


def require(
    where: str,
    named: Mapping[str, str],
    trust: bool = False,
    files: Mapping[str, Path] = MappingProxyType({}),
    remedy: str = TRUST,
) -> None:
    """Raise an error unless the code that is named there is known or trusted; it is loaded from ``files``."""
    for key, reference in named.items():
        file = files.get(reference) or loading.file_of(reference)
        marks = _marks(reference, file)
        if marks & _known():
            continue
        what, place = f"{where} names code: {KEYS[key]}={reference}", _identity(reference, file)
        if not trust:
            why = "you have not run it here before, and a folder from someone else may name any code"
            raise ConfigError(what, why, f"Read {place}; if you trust it, {remedy}")
        LOG.warning("%s", one_line(f"{what}; trusted, and loaded from {place}"))
        _add(marks)


def _record() -> Path:
    """Where it is kept; OSError where this account has no home, as some in containers."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedrane" / "named-code"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


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


def _identity(reference: str, file: Path | None) -> str:
    """Where code would be loaded from, and its digest if it is a file."""
    if file is None:
        return f"the installed module {reference.rpartition(':')[0]}"
    return f"{file} (SHA-256 {loading.digest(file)})" if file.is_file() else f"{file}, which is missing"
