"""Death at a chosen moment: just before the n-th time a command touches its folder, or in the middle of a write.

Or a failure at that moment (``faults.py``)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults

from fedrane.training import run_folder

TOUCHES = ((os, "fsync"), (Path, "mkdir"), (Path, "replace"), (Path, "unlink"), (run_folder, "save_file"))
"""All by which a run changes its folder, beside plain writes, each of which an fsync follows."""


def sabotage(trigger: str, at: int = 0, log: str = "", error: str = "", folder: str = "") -> None:
    """``log`` is a file for what is touched; the touch number ``at`` (from 0) is the last, or raises the ``error``."""
    if trigger == "fault":
        return faults.of_memory(at, log) if error == faults.MEMORY else faults.of_files(folder, at, error, log)
    return {"touch": _at_touch, "line": _in_line, "checkpoint": _in_checkpoint}[trigger](at, log)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_touch(at: int, log: str) -> None:
    seen: list[str] = []

    def watch(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if log:
                with Path(log).open("a") as file:
                    file.write(name + "\n")
            elif len(seen) == at:
                _die()
            seen.append(name)
            return original(*args, **options)

        return watched

    for owner, name in TOUCHES:
        setattr(owner, name, watch(owner, name))


def _in_line(at: int, log: str) -> None:
    """In the middle of the line of the round ``at``."""
    append = run_folder.Folder.append_metrics

    def cut(self: run_folder.Folder, record: dict[str, Any]) -> None:
        if record["round"] != at:
            return append(self, record)
        text = json.dumps(record)
        with (self.path / run_folder.METRICS).open("a") as file:
            file.write(text[: len(text) // 2])
        return _die()

    run_folder.Folder.append_metrics = cut  # type: ignore[method-assign]


def _in_checkpoint(at: int, log: str) -> None:
    """In the middle of writing the round ``at``: half of it is in our file, and half in one of the library's own."""
    save_file = run_folder.save_file

    def cut(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        if f"{at:06d}" in path.name:
            content = path.read_bytes()
            for half in (path, path.with_name(".tmpAbCdEf")):
                half.write_bytes(content[: len(content) // 2])
            _die()

    run_folder.save_file = cut
