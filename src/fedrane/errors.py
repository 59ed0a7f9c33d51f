"""What goes wrong through no fault of the code: each error says what was found, why it is a rule, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FedraneError(Exception):
    """An error meant for the user; the command line prints it as one line, without a traceback."""

    def __init__(self, found: str, why: str = "", remedy: str = "") -> None:
        self.found, self.why, self.remedy = found, why, remedy
        said = ": ".join(part.rstrip(".") for part in (found, why) if part)
        super().__init__(". ".join(part.rstrip(".") for part in (said, remedy) if part) + ".")


class ConfigError(FedraneError):
    """A key or a value of the configuration."""


class NoEffect(ConfigError):  # noqa: N818 - it says what happened
    """A setting that was asked for and could have no effect, whatever the method."""


class DataError(FedraneError):
    """A dataset's file, a partition, or a user's own data."""


class CheckpointError(FedraneError):
    """A run folder or a checkpoint that cannot be read or written."""


class FileError(FedraneError):
    """A file that cannot be written."""


class Diverged(FedraneError):  # noqa: N818 - it says what happened
    """Training has left the finite numbers."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy for a mistyped name: the nearest known one, then all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"


def check_choices(settings: object, **options: Sequence[str]) -> None:
    """Each named field of a method must be one of its options."""
    for name, known in options.items():
        value = getattr(settings, name)
        if value not in known:
            raise ConfigError(f"method.{name}={value!r} is not known", remedy=nearest(str(value), known))


def check_ranges(settings: object, **ranges: tuple[float, float]) -> None:
    """Each named field of a method must be a number from the one bound to the other, both allowed."""
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if not low <= value <= high:
            raise ConfigError(
                f"method.{name}={value}", f"it lies between {low:g} and {high:g}", f"Use {low:g} … {high:g}"
            )
