"""A class or a function of the user's, from a Python file or an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedrane.errors import ConfigError, nearest


def is_reference(name: str) -> bool:
    """``path.py:Name`` or ``package.module:Name``, and not a word of ours."""
    return ":" in name


def absolute(name: str) -> str:
    """The same reference from wherever it is read."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else name


def load(name: str, key: str) -> Any:
    """What ``name`` refers to; errors speak of the configuration's ``key``."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"{key}={name}: there is no file {where}", remedy=f"Write {key}=path/to/file.py:Name")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise ConfigError(f"{key}={name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{key}={name}: {where} has no {attribute!r}", remedy=nearest(attribute, known))
    return getattr(module, attribute)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedrane_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
