"""Files that are there whole or not at all, and what the system says of a write as one clear line."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fedrane.errors import FileError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ROOM_WORDS = r"os error (27|28|122)\b|No space left|File too large|[Qq]uota exceeded|StorageFull|FileTooLarge"
PARTS = f"*.{'[0-9a-f]' * 8}.part"
"""What a writer that was killed leaves beside its file."""


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """A failed write as an error that tells what is safe."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in NO_ROOM or re.search(NO_ROOM_WORDS, str(error)):  # safetensors passes on words alone
            why, remedy = "there is no room for it", "What was saved before is untouched: make room, then go on"
        else:
            why, remedy = f"the system says: {error}", "Choose a place you may write to"
        raise FileError(f"{path} cannot be written", why, remedy) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file whole or not at all; of several who write it at once one comes last, and none fails."""
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            with part.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            settle(part, path)
        finally:
            part.unlink(missing_ok=True)


def settle(part: Path, path: Path) -> None:
    """Put a finished file in place, so that either the old or the new one survives whatever happens."""
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
