"""A class or a function of the user's, from a Python file or an installed module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from fedrane.errors import ConfigError, nearest

_elsewhere: ContextVar[Mapping[str, Path]] = ContextVar("elsewhere", default=MappingProxyType({}))


def is_reference(name: str) -> bool:
    """``path.py:Name`` or ``package.module:Name``, and not a word of ours."""
    return ":" in name


def absolute(name: str) -> str:
    """The same reference from wherever it is read."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else name


def file_of(name: str) -> Path | None:
    """The Python file that a reference names."""
    where = name.rpartition(":")[0]
    return Path(where) if where.endswith(".py") else None


@contextmanager
def elsewhere(files: Mapping[str, Path]) -> Iterator[None]:
    """Within it these references are loaded from these files, and keep their names."""
    token = _elsewhere.set(files)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def version(name: str) -> str:
    """A digest of the code that a reference names now; empty for a module or no file."""
    file = _elsewhere.get().get(name) or file_of(name)
    return digest(file) if file and file.is_file() else ""


def digest(file: Path) -> str:
    """Of a file's whole content: what is trusted, and cached, is known by it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load(name: str, key: str) -> Any:
    """What ``name`` refers to; errors speak of the configuration's ``key``."""
    where, _, attribute = name.rpartition(":")
    file = _elsewhere.get().get(name) or file_of(name)
    if file and not file.is_file():
        raise ConfigError(f"{key}={name}: there is no file {where}", remedy=f"Write {key}=path/to/file.py:Name")
    try:
        module = _from_file(file, Path(where).stem) if file else importlib.import_module(where)
    except Exception as error:
        raise ConfigError(f"{key}={name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{key}={name}: {where} has no {attribute!r}", remedy=nearest(attribute, known))
    return getattr(module, attribute)


def _from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedrane_user_{name}", path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    # Not through the loader, which would rather run a compiled file beside it: that may be of other code.
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return module
