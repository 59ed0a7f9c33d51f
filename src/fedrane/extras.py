"""Packages that only some commands need come with an extra of this package."""

from __future__ import annotations

from importlib import import_module

from fedrane.errors import ConfigError


def require(extra: str, user: str, *modules: str) -> None:
    """These modules must be importable; where they are not, one line says who needs them and how to install them."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:  # also one that is installed, but too old or broken
            if (error.name or "").partition(".")[0] == "fedrane":  # a defect of ours, which no installation mends
                raise
            raise ConfigError(
                f"{user} needs the extra {extra!r}", str(error), f"Install it: pip install 'fedrane[{extra}]'"
            ) from error
