"""Atomic writes with clear errors, folders that may be written to, and the TOML that is written."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedrane.errors import ConfigError, FileError
from fedrane.system import memory

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SPACE_TEXT = r"os error (27|28|122)\b|No space left|File too large|[Qq]uota exceeded|StorageFull|FileTooLarge"
PARTS = f"*.{'[0-9a-f]' * 8}.part"
"""Temporary files that a killed writer leaves next to its file."""
MARK = ".fedrane"
"""The file by which a folder is known as one of ours; it says what for."""
_PARSED = 8
"""Bytes in memory for each byte of a text, as it is parsed."""
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of what only its owner may read."""


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn a failed write into an error with the reason; saved data are safe."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in NO_SPACE or re.search(NO_SPACE_TEXT, str(error)):  # safetensors gives only the text
            why, remedy = "there is no space left", "Everything saved before is intact: free some space, then resume"
        else:
            why, remedy = f"system error: {error}", "Choose a folder you may write to"
        raise FileError(f"{path} cannot be written", why, remedy) from error


def user_path(text: str | Path) -> Path:
    """Return a path that the user gave, with ``~`` replaced."""
    try:
        return usable(Path(text).expanduser())
    except RuntimeError as error:
        raise FileError(f"{text} cannot be used", "this home directory is not known", "Write the whole path") from error


def usable(path: str | Path) -> Path:
    """Return the path; an error if the system cannot have a file of that name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # whoever uses it says more about that
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"{path} cannot be used", f"{reason}", "Choose another path") from error
    return Path(path)


def plain_size(path: Path) -> int:
    """The bytes of a plain file; OSError for anything else: a device or a pipe may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a plain file")
    return status.st_size


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a plain file; TooLarge if it does not fit in memory."""
    memory.require(_PARSED * plain_size(path), str(path), "Put back what was there")
    return path.read_text(encoding="utf-8", errors=errors)


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; what exists stays as it is."""
    with clear_errors(path):
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file atomically; of several concurrent writers the last one wins, and none fails.

    The file has this mode, less the umask, from its first byte on.
    """
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                # A path may hold bytes that are no text, as lone surrogates: they are written as JSON escapes them.
                file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            move_into_place(part, path)
        finally:
            part.unlink(missing_ok=True)


def is_text(path: str | Path) -> bool:
    """Whether a path can be written as UTF-8; a system's file names may hold other bytes, here lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in str(path))


def require_text(path: Path, who: str) -> None:
    """Raise an error for a path that ``who`` cannot write to, since it takes UTF-8 only."""
    if not is_text(path):
        raise ConfigError(f"{who} cannot write to {path}", "its name is not UTF-8", "Name another folder")


@contextmanager
def as_text(path: Path) -> Iterator[Path]:
    """The path of an existing file for a library that takes UTF-8 only."""
    if is_text(path):
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")  # of Linux; other systems have no such names
    finally:
        os.close(descriptor)


def move_into_place(part: Path, path: Path) -> None:
    """Move a finished file into place; after a crash, either the old or the new file is there."""
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_ours(folder: Path, purpose: str, holding: str = "") -> bool:
    """Whether we may write into a folder: it is new or empty, or we took it for the same purpose before.

    Or it holds files of the pattern ``holding``, which only we write.
    """
    with clear_errors(folder):
        try:
            names = [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return True
        if MARK in names:
            return read_text(folder / MARK, errors="replace") == _mark(purpose)
        known = bool(holding) and any(folder.glob(holding))
        return known or all(name.startswith(f"{MARK}.") for name in names)  # a mark that was never finished


def require_ours(folder: Path, purpose: str, holding: str = "") -> None:
    """Raise an error for a folder with files that are not ours: some could be overwritten."""
    if not is_ours(folder, purpose, holding):
        raise FileError(
            f"{folder} is not empty",
            f"it was not made for a {purpose}, and files in it could be overwritten",
            "Name a folder that is new or empty",
        )


def take(folder: Path, purpose: str, holding: str = "") -> None:
    """Make a folder ours, or raise an error if it holds files that are not."""
    require_ours(folder, purpose, holding)
    if not (folder / MARK).is_file():
        write_atomically(folder / MARK, _mark(purpose))


@contextmanager
def taking(folder: Path, purpose: str, holding: str = "") -> Iterator[None]:
    """Take a folder for what follows. If that fails before it has written anything, no folder is left behind."""
    new = not folder.exists()
    take(folder, purpose, holding)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # of a folder that is not empty, among others
            if new and {path.name for path in folder.iterdir()} == {MARK}:
                (folder / MARK).unlink()
                folder.rmdir()
        raise


def _mark(purpose: str) -> str:
    return f"A {purpose} of fedrane.\n"


def require_new(path: Path | None, force: bool) -> None:
    """Raise an error if a file, or a folder with files in it, would be overwritten and ``force`` does not allow it."""
    if path is None or force or not os.path.lexists(path):
        return
    with clear_errors(path):
        if not path.is_dir() or any(path.iterdir()):
            raise FileError(
                f"{path} exists already", "it would be overwritten", "Name another, or overwrite it with --force"
            )


def as_toml(values: Mapping[str, Any], header: str = "") -> str:
    """Lines ``key = value`` of TOML, below a header such as ``[table]``.

    >>> as_toml({"lr": 0.1, "partition.kind": "iid"}, "[settings]")
    '[settings]\\nlr = 0.1\\npartition.kind = "iid"\\n'
    """
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return "".join(line + "\n" for line in ([header] if header else []) + lines)


def toml_value(value: Any) -> str:
    """One value as TOML has it."""
    if isinstance(value, str):  # TOML's basic strings are JSON's, except for the delete character
        if not is_text(value):
            name = value.encode(errors="backslashreplace").decode()
            raise ConfigError(f"{name} cannot be saved", "a TOML file is UTF-8, and this name is not", "Rename it")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)
