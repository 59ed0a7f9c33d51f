"""Atomic writes with clear errors, and the TOML that is written."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedrane.errors import FileError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SPACE_TEXT = r"os error (27|28|122)\b|No space left|File too large|[Qq]uota exceeded|StorageFull|FileTooLarge"
PARTS = f"*.{'[0-9a-f]' * 8}.part"
"""Temporary files that a killed writer leaves next to its file."""
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
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            settle(part, path)
        finally:
            part.unlink(missing_ok=True)


def settle(part: Path, path: Path) -> None:
    """Move a finished file into place; after a crash, either the old or the new file is there."""
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_toml(values: Mapping[str, Any], header: str = "") -> str:
    """Lines ``key = value`` of TOML, below a header such as ``[table]``.

    >>> as_toml({"lr": 0.1, "partition.kind": "iid"}, "[settings]")
    '[settings]\\nlr = 0.1\\npartition.kind = "iid"\\n'
    """
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    return "".join(line + "\n" for line in ([header] if header else []) + lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):  # TOML's basic strings are JSON's, except for the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)
