"""Results as small text files, one JSON line for each finished cell. Results of several machines can be combined.

There is a file for each dataset. A writer holds the folder's lock and replaces the whole file in one rename: processes
cannot lose each other's lines, and a kill never leaves half a line. Lines with the same settings are the same cell;
the better one is kept: a finished one rather than a failed one, then the later one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrane.errors import FileError
from fedrane.reproduce.targets import key_of
from fedrane.system.files import clear_errors, write_atomically

try:
    import fcntl
except ImportError:  # not a Unix: nothing is locked there
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]
DONE, FAILED = "done", "failed"
NEEDED = {DONE: frozenset({"kept"}), FAILED: frozenset({"word", "reason"})}
"""The entries that a record must have in addition to its settings."""


class ResultStore:
    """All results in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def read(self) -> dict[str, Record]:
        """The record of each cell, by its key."""
        records: dict[str, Record] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for _, record in _lines(path):
                key = key_of(record["settings"])
                records[key] = _better(records.get(key), record)
        return records

    def add(self, record: Record) -> None:
        """Write a cell's record, unless a better one is there already."""
        path = self.folder / f"{file_name(record)}.jsonl"
        key = key_of(record["settings"])
        with self._locked():
            best, others = record, []
            for text, old in _lines(path):
                if key_of(old["settings"]) == key:
                    best = _better(old, best)
                else:
                    others.append(text)
            text = json.dumps(best, ensure_ascii=False, allow_nan=False)
            write_atomically(path, "".join(line + "\n" for line in [*others, text]))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder / ".lock"):
            yield


@contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a file's lock, and yield whether we have it. The system releases it when the process dies."""
    if fcntl is None:
        yield True
        return
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def file_name(record: Record) -> str:
    """The name of the file of a record: its dataset's, or the name of the user's file."""
    return re.sub(r"[^\w.+-]+", "-", Path(record["settings"]["dataset"]).stem).strip("-.") or "data"


def _better(old: Record | None, new: Record) -> Record:
    if old is None or old["status"] != DONE:
        return new
    if new["status"] != DONE:
        return old
    combined = {**new, "kept": {**old["kept"], **new["kept"]}}
    if problems := {**old.get("problems", {}), **new.get("problems", {})}:
        combined["problems"] = problems
    return combined


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Each line, as text and parsed."""
    if not path.is_file() or not path.stat().st_size:
        return
    for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = line.decode()
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object")
            settings, needed = record.get("settings"), NEEDED.get(str(record.get("status")), frozenset())
            if not needed or not isinstance(settings, dict) or not {"method.name", "dataset"} <= settings.keys():
                raise ValueError("it lacks the settings or the status of a cell")
            if missing := sorted(needed - record.keys()):
                raise ValueError(f"it lacks {', '.join(missing)}")
        except ValueError as error:
            raise FileError(
                f"{path}, line {number}, is no result", str(error), "Fix or remove the line, then start again"
            ) from error
        yield text, record
