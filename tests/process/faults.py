"""One failure at a chosen moment of a command: of an operation on its folder's files, or of memory.

An operation is a call of open, mkdir, rename, … with a path in the folder, each write and close of a file opened there
for writing, each fsync, and each call of the library of checkpoints. It fails before anything happens, but for a write,
half of which arrives, and a close. The error is one that Python raises: that of a signal (EINTR) never comes out of
most of these calls, since Python repeats them, and must do no harm all the same.

Memory fails at each line of the modules that write and read a run folder: any of them may ask for some.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fedrane
from fedrane.training import run_folder

ERRORS = ("ENOSPC", "EIO", "EINTR")
MEMORY = "MEMORY"
CALLS = ("open", "mkdir", "rmdir", "replace", "rename", "unlink", "chmod", "listdir", "scandir", "stat", "fsync")
"""Of os."""
ROOMS = ("training/run_folder", "training/sessions", "training/digests", "training/saved", "training/user_code")
FILES = {str(Path(fedrane.__file__).parent / f"{name}.py") for name in (*ROOMS, "training/resume", "system/files")}


class Fault:
    """Counts operations, and lets the one with the number ``at`` fail; ``log`` gets a line for each."""

    def __init__(self, folder: str, at: int, error: str, log: str) -> None:
        self.folder, self.at, self.error, self.log, self.seen = folder, at, error, log, 0

    def due(self, name: str) -> bool:
        self.seen += 1
        if self.log:
            descriptor = os_open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{name}\n".encode())
            os.close(descriptor)
        return self.seen - 1 == self.at

    def raised(self, path: object = None) -> BaseException:
        if self.error == MEMORY:
            return MemoryError("injected")
        number = getattr(errno, self.error)
        return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))

    def concerns(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)


os_open = os.open


class WrittenFile:
    """A file opened for writing, whose writes and close may fail."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self._file, self._fault = file, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> WrittenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, content: Any) -> int:
        if self._fault.due("write"):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            raise self._fault.raised(self._file.name)
        return int(self._file.write(content))

    def close(self) -> None:
        self._file.close()
        if self._fault.due("close"):
            raise self._fault.raised(self._file.name)


def of_files(folder: str, at: int, error: str, log: str) -> None:
    fault = Fault(folder, at, error, log)

    def failing(name: str, original: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = next((value for value in args if fault.concerns(value)), None)
            if (always or path is not None) and fault.due(name):
                raise fault.raised(path)
            return original(*args, **options)

        return call

    def opened(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if fault.concerns(file) and fault.due("open"):
                raise fault.raised(file)
            stream = original(file, mode, *args, **options)
            writes = fault.concerns(file) and set(mode) & set("wax+") and not str(file).endswith(".lock")
            return WrittenFile(stream, fault) if writes else stream

        return call

    for name in CALLS:
        setattr(os, name, failing(name, getattr(os, name), always=name == "fsync"))
    io.open = builtins.open = opened(io.open)  # type: ignore[assignment]
    for name in ("save_file", "safe_open"):
        setattr(run_folder, name, failing(name, getattr(run_folder, name), always=True))


def of_memory(at: int, log: str) -> None:
    fault = Fault("", at, MEMORY, log)
    # Between the body of a with statement and the call of its exit there is a line too: Python closes that file later.
    warnings.filterwarnings("ignore", category=ResourceWarning)

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and fault.due(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}"):
            raise fault.raised()
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in FILES else None)
