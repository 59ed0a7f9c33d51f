"""Errors caused by the user's input or machine: each states the problem, the reason for the rule, and a remedy."""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol

_LONGEST = 1500
"""Characters of each part of a message."""
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"  # but for tabs and line breaks; and what is no text at all
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"  # line breaks and directions of Unicode
)


class FedraneError(Exception):
    """An error for the user. The command line prints it as one line, without a traceback."""

    def __init__(self, problem: str, why: str = "", remedy: str = "") -> None:
        problem, why, remedy = (one_line(part) for part in (problem, why, remedy))
        self.problem, self.why, self.remedy = problem, why, remedy
        reason = ": ".join(part.rstrip(".") for part in (problem, why) if part)
        super().__init__(". ".join(part.rstrip(".") for part in (reason, remedy) if part) + ".")


def one_line(text: str) -> str:
    """Return the text as one line of bounded length without control characters, which could be of somebody else.

    >>> one_line("a name\\twith\\n\\x1b[31mcolour")
    'a name with \\\\x1b[31mcolour'
    """
    text = " ".join(text.split()) if len(text.splitlines()) > 1 or "\t" in text else text
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]} … {text[-290:]}"


def printable(text: str) -> str:
    """Return the text with escapes for what controls a terminal, or changes the direction in which text is written.

    >>> printable("täglich,\\x1b[31m\\u202etxt.exe")
    'täglich,\\\\x1b[31m\\\\u202etxt.exe'
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class ConfigError(FedraneError):
    """A wrong key or value in the configuration."""


class NoEffect(ConfigError):  # noqa: N818 - named after what happened
    """A setting that can have no effect, with any method."""


class DataError(FedraneError):
    """A problem with a dataset's file, a partition, or a user's own data."""


class CheckpointError(FedraneError):
    """A run folder or a checkpoint that cannot be read or written."""


class TooLarge(DataError):  # noqa: N818 - named after what it is
    """Something that needs more memory than is available."""


class FileError(FedraneError):
    """A path that cannot be used, or a file that cannot be written."""


class Diverged(FedraneError):  # noqa: N818 - named after what happened
    """Training produced numbers that are not finite."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy for a mistyped name: the most similar known one, then all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"


class _Choosing(Protocol):
    choices: ClassVar[Mapping[str, tuple[str, ...]]]


def check_choices(settings: _Choosing) -> None:
    """Raise unless each field of a method that is named in its ``choices`` has one of them."""
    for name, known in settings.choices.items():
        value = getattr(settings, name)
        if value not in known:
            raise ConfigError(f"method.{name}={value!r} is not known", remedy=nearest(str(value), known))


def check_ranges(settings: object, **ranges: tuple[float, float]) -> None:
    """Raise unless each named field of a method is within its bounds, both included."""
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if not low <= value <= high:
            raise ConfigError(
                f"method.{name}={value}", f"it must be between {low:g} and {high:g}", f"Use {low:g} … {high:g}"
            )


def portable(error: Exception) -> Exception:
    """The error itself, or one with its text if it cannot be sent to another process; with its notes."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        sent = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            sent.add_note(note)
        return sent
    return error
