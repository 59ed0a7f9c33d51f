"""Loads a user's class or function from a Python file or an installed module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from fedrane.errors import ConfigError, nearest
from fedrane.system.files import plain_size, usable

_PREFIX = "fedrane_user_"
"""How the modules of users' files are called."""

_elsewhere: ContextVar[Mapping[str, Path]] = ContextVar("elsewhere", default=MappingProxyType({}))


def installed() -> dict[str, str]:
    """The methods of installed packages: their entry points, by name."""
    from importlib.metadata import entry_points  # slow to import

    return {entry.name: entry.value for entry in entry_points(group="fedrane.methods")}


def is_reference(name: str) -> bool:
    """Whether this is ``path.py:Name`` or ``package.module:Name``, and not a known name."""
    return ":" in name


def absolute(name: str) -> str:
    """Return the reference with an absolute path."""
    where, _, attribute = name.rpartition(":")
    return f"{usable(where).resolve()}:{attribute}" if where.endswith(".py") else name


def file_of(name: str) -> Path | None:
    """Return the Python file that a reference names, or None for a module."""
    where = name.rpartition(":")[0]
    return usable(where) if where.endswith(".py") else None


@contextmanager
def elsewhere(files: Mapping[str, Path]) -> Iterator[None]:
    """Load these references from these files inside the context; their names do not change."""
    token = _elsewhere.set(files)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def version(name: str) -> str:
    """Return the digest of the file that a reference names; empty for a module or a missing file."""
    file = _elsewhere.get().get(name) or file_of(name)
    return digest(file) if file and file.is_file() else ""


def digest(file: Path) -> str:
    """Return the full digest of a plain file: it identifies trusted and cached code."""
    plain_size(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load(name: str, key: str) -> Any:
    """Return what ``name`` refers to; ``key`` is the setting that errors mention."""
    where, _, attribute = name.rpartition(":")
    file = _elsewhere.get().get(name) or file_of(name)
    if file and not file.is_file():
        raise ConfigError(f"{key}={name}: there is no file {where}", remedy=f"Write {key}=path/to/file.py:Name")
    try:
        module = _from_file(file, Path(where).stem) if file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise failed(f"{key}={name} cannot be loaded", error) from error
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{key}={name}: {where} has no {attribute!r}", remedy=nearest(attribute, known))
    return getattr(module, attribute)


def failed(what: str, error: BaseException) -> ConfigError:
    """Return the error for the user's own code that raised this one: with its file and line."""
    place = raised_at(error)
    return ConfigError(f"{what}: {type(error).__name__}: {error}" + (f" ({place})" if place else ""))


def raised_at(error: BaseException) -> str:
    """Return the last file, line and function of the user's own code that an error came through; empty if none."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(_PREFIX)
    ]
    if not frames:
        return ""
    frame, line = frames[-1]
    return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"


def _from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_PREFIX + name, path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    # Not through the loader: it would prefer a compiled file next to it, which may be of other code.
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return module
