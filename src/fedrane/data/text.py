"""Text as next-character prediction: an input is a window of characters, its label the character that follows."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.data.dataset import Dataset, as_numbers
from fedrane.errors import ConfigError, DataError
from fedrane.system import memory
from fedrane.system.files import user_path

SUFFIX = ".txt"
WINDOW = 32
"""Characters before the one to predict."""
UNKNOWN = "unknown"
"""The class of characters that the training text does not have."""
TEST = 5
"""The test text is the last part of this many."""
_NAMES = {" ": "space", "\n": "newline", "\t": "tab"}


def is_text(name: str | Path) -> bool:
    """Whether this is the name of a file that is read as text."""
    return str(name).lower().endswith(SUFFIX)


def from_text(path: str | Path, window: int = WINDOW, alphabet: str = "") -> Dataset:
    """Read a text file (UTF-8). Its last fifth is the test text, and its alphabet that of the rest, or a given one."""
    path = user_path(path)
    return of_text(path.stem, str(path), read_text(path, window), window, alphabet)


def read_text(path: Path, window: int) -> str:
    """Return the content of a text file, if there is memory for the windows made of it."""
    try:
        memory.require(path.stat().st_size * (4 * window + 64), f"the windows of {path}", "Use a smaller window")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (at byte {error.start})", "the encodings of texts cannot be recognised", "Convert it"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "", "Check the path") from error


def of_text(name: str, where: str, text: str, window: int = WINDOW, alphabet: str = "") -> Dataset:
    """Return the dataset of a text.

    A test character may have training characters in its window, and no training window has a test character.
    """
    if window < 1:
        raise ConfigError(f"window={window}", "it counts the characters before the one to predict", "Use window=32")
    begin = len(text) - len(text) // TEST
    if begin <= window or begin == len(text):
        raise DataError(
            f"{where} has {len(text)} characters",
            f"with window={window} its first four fifths must have more than {window}",
            "Use a longer text or a smaller window",
        )
    alphabet = alphabet or "".join(sorted(set(text[:begin])))
    x, y = windows(text, alphabet, window)
    test = slice(begin - window, None)
    classes = names_of(alphabet)
    unknown = int((y[test] == len(alphabet)).sum())
    note = f"{unknown} of the {len(y[test])} test characters do not occur in the training text: they count as errors"
    return Dataset(
        name,
        x[: begin - window],
        y[: begin - window],
        x[test],
        y[test],
        classes,
        mean=(),
        std=(),
        notes=(note,) if unknown else (),
        vocabulary=len(classes),
        alphabet=alphabet,
    )


def names_of(alphabet: str) -> tuple[str, ...]:
    """The classes of a text: its characters, and those that it does not know."""
    return (*map(_name, alphabet), UNKNOWN)


def _name(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    return character if character.isprintable() else f"U+{ord(character):04X}"


def encode(text: str, alphabet: str) -> NDArray[np.int64]:
    """Return the numbers of a text's characters; those that are not in the alphabet have the number after the last."""
    number = {character: index for index, character in enumerate(alphabet)}
    return np.fromiter((number.get(character, len(alphabet)) for character in text), np.int64, len(text))


def windows(text: str, alphabet: str, window: int) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Return every window of a text that has a character after it, and that character."""
    if len(text) <= window:
        raise DataError(
            f"a text of {len(text)} characters", f"an example is {window} characters and the one after them", "Add more"
        )
    codes = encode(text, alphabet)
    small = as_numbers(codes[None], len(alphabet) + 1, "the text")[0]
    return np.lib.stride_tricks.sliding_window_view(small[:-1], window).copy(), codes[window:]


def last_window(text: str, alphabet: str, window: int) -> NDArray[np.int64]:
    """Return the end of a text as one input of a model, (1, window): what comes next is to be predicted."""
    if len(text) < window:
        raise DataError(
            f"the input is a text of {len(text)} characters",
            f"the model predicts the one after {window}",
            f"Give {window} characters or more; of a longer text the last ones count",
        )
    return encode(text[-window:], alphabet)[None]


def zen(window: int = WINDOW) -> Dataset:
    """The Zen of Python, the poem that ``import this`` prints: a text that is on every machine with Python."""
    with contextlib.redirect_stdout(io.StringIO()):
        poem = importlib.import_module("this").s
    return of_text("zen", "The Zen of Python", codecs.decode(poem, "rot13"), window)
