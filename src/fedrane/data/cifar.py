"""Reads the pickles of CIFAR-10 and CIFAR-100 without running them.

A pickle is a program for a small stack machine, and one of its instructions calls any function of any module. So
``pickle`` is not used. This interpreter knows only the few instructions in such files. Functions are just names, and
the four that occur stand for fixed, harmless steps. It reads the original files, written by Python 2 (text and pixels
are byte strings), and files rewritten by Python 3 (pixels are text that is encoded back).
"""

from __future__ import annotations

import pickletools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


def read(path: Path, key: str, classes: int, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (examples, 3, 32, 32) and labels of one batch; ``key`` is the key of the labels."""
    batch = _dictionary(path, remedy)
    data, labels = batch.get("data"), batch.get(key)
    if not isinstance(data, _Array) or data.value is None or data.value.shape[1] != _PIXELS:
        raise DataError(f"{path} has no images", f"'data' must be an array with {_PIXELS} bytes per image", remedy)
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise DataError(f"{path} has no valid labels", f"{key!r} must be a list of integers below {classes}", remedy)
    if len(labels) != len(data.value):
        raise DataError(f"{path} has {len(data.value)} images but {len(labels)} labels", "", remedy)
    return data.value.reshape(-1, 3, _SIDE, _SIDE), np.array(labels, dtype=np.int64)


def names(path: Path, key: str, classes: int, remedy: str) -> tuple[str, ...]:
    """Return the class names from a dataset's file of names."""
    listed = _dictionary(path, remedy).get(key)
    if not isinstance(listed, list) or not all(type(name) is str for name in listed) or len(listed) != classes:
        raise DataError(f"{path} has no class names", f"{key!r} must be a list of {classes} names", remedy)
    return tuple(listed)


def _dictionary(path: Path, remedy: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the parser warns about names that no intact file contains
            content = _interpret(path.read_bytes())
    except _Refused as refused:
        raise DataError(
            f"{path} refused: the file asks for {refused}",
            "a CIFAR file contains an array of bytes, lists, numbers and text, and nothing in it is ever executed",
            remedy,
        ) from refused
    except (OSError, ValueError, LookupError, Warning) as error:
        reason = "an instruction lacks its operand" if isinstance(error, LookupError) else error
        raise DataError(f"{path} cannot be read: {reason}", "", remedy) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} contains a {type(content).__name__}", "a CIFAR file contains a dictionary", remedy)
    return content


class _Refused(Exception):  # noqa: N818 — never seen outside this module
    """The file asks for something that no CIFAR file needs."""


@dataclass(frozen=True)
class _Name:
    """A function or type named in the file; it is never looked up."""

    name: str


@dataclass
class _Array:
    """An array of bytes; None between the two instructions that create and fill it."""

    value: NDArray[np.uint8] | None = None


_EMPTY_ARRAY = {_Name("numpy.core.multiarray _reconstruct"), _Name("numpy._core.multiarray _reconstruct")}
_NDARRAY, _DTYPE, _ENCODE = _Name("numpy ndarray"), _Name("numpy dtype"), _Name("_codecs encode")
_BYTE = _Name("dtype u1")


def _interpret(pickled: bytes) -> Any:
    """Return the object in a pickle.

    Raises ValueError or LookupError if it is broken, and _Refused if it asks for something no CIFAR file needs.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    copied = 0

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any  # its type depends on the instruction
    for opcode, argument, _ in pickletools.genops(pickled):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(argument)  # the parser returns byte strings as text, one character per byte
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                _target(stack, list).append(item)
            case "APPENDS":
                items = since_mark()
                _target(stack, list).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(_target(stack, dict), [key, value])
            case "SETITEMS":
                items = since_mark()
                _set_items(_target(stack, dict), items)
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                marks.append(len(stack) - int(opcode.name[-1]))
                stack.append(tuple(since_mark()))
            case "GLOBAL":
                stack.append(_admitted(_Name(argument)))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
                copied += len(stack[-1]) if isinstance(stack[-1], bytes) else 0
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], _Array):
                    stack[-1].value = _filled(state)
                    copied += stack[-1].value.size
                elif stack[-1] != _BYTE:  # the state of a byte dtype carries no information
                    raise ValueError("a state is set on something that has none")
            case other:
                raise _Refused(_dotted(argument) if other == "INST" else f"the pickle instruction {other}")
        if copied > 2 * len(pickled):  # a text is encoded once, and one array made of it
            raise ValueError("it makes more arrays than it has bytes for")
    raise ValueError("it has no end")


def _target(stack: list[Any], cls: type) -> Any:
    if not stack or type(stack[-1]) is not cls:
        raise ValueError(f"items are added to something that is not a {cls.__name__}")
    return stack[-1]


def _set_items(target: dict[str, Any], items: list[Any]) -> None:
    # Only text may be a key: hashing deeply nested tuples can take forever.
    if not all(type(key) is str for key in items[::2]):
        raise ValueError("a key is not text")
    target.update(zip(items[::2], items[1::2], strict=True))


def _dotted(name: str) -> str:
    return name.replace(" ", ".")


def _admitted(name: _Name) -> _Name:
    if name not in _EMPTY_ARRAY | {_NDARRAY, _DTYPE, _ENCODE}:
        raise _Refused(_dotted(name.name))
    return name


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name):
        raise ValueError("something that is not a function is called")
    match arguments:
        case (cls, *_) if function in _EMPTY_ARRAY and cls == _NDARRAY:
            return _Array()
        case (str(dtype), *_) if function == _DTYPE:
            if dtype != "u1":
                raise _Refused(f"an array of type {dtype[:20]!r}")
            return _BYTE
        case (str(text), "latin1") if function == _ENCODE:
            return text.encode("latin1")
    raise ValueError("a call without its arguments")


def _filled(state: Any) -> NDArray[np.uint8]:
    match state:
        case (int(), (int(examples), int(columns)), dtype, int(by_columns), str() | bytes() as pixels) if (
            dtype == _BYTE
        ):
            if min(examples, columns) < 0 or examples * columns != len(pixels):
                raise ValueError(f"an array of {examples} × {columns} bytes has {len(pixels)}")
            raw = pixels.encode("latin1") if isinstance(pixels, str) else pixels
            return np.frombuffer(raw, dtype=np.uint8).reshape(examples, columns, order="F" if by_columns else "C")
    raise ValueError("an array is not a table of bytes")
