"""Optional dependencies: packages that only some commands need, installed as an extra."""

from __future__ import annotations

from importlib import import_module

from fedrane.errors import ConfigError


def require(extra: str, user: str, *modules: str) -> None:
    """Raise an error if one of these modules cannot be imported, with what needs them and how to install them."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:  # also raised by a module that is too old or broken
            if (error.name or "").partition(".")[0] == "fedrane":  # a bug in this package: installing does not help
                raise
            raise ConfigError(
                f"{user} needs the extra {extra!r}", str(error), f"Install it: pip install 'fedrane[{extra}]'"
            ) from error
