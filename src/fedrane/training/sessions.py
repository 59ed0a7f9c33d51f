"""The sessions of a run: when and where it was started, and each time it was resumed.

They have their own file, since they differ between two runs of one experiment; all other files are the same.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedrane._version import __version__
from fedrane.errors import CheckpointError, FileError
from fedrane.experiment import Experiment
from fedrane.training.run_folder import CONFIG, SESSIONS, Folder

Entry = dict[str, Any]
COMPARED = ("versions", "machine")
"""The parts of an entry that should be the same in all sessions."""
ROUNDS = "rounds"
"""The part with the number of rounds: planned, and done before and after."""


def describe(experiment: Experiment, done: int) -> Entry:
    """The entry of this session, of a run with ``done`` rounds."""
    return {
        "command": shlex.join(sys.argv),
        "start": _now(),
        "end": None,
        "outcome": None,
        ROUNDS: {"planned": experiment.rounds, "before": done, "after": None},
        "versions": versions(),
        "machine": {
            "device": experiment.device,
            "device_name": device_name(experiment.device),
        },
        "engine": experiment.engine,
        "threads": experiment.threads,
        "changed_inputs": {},
        "notes": [],
    }


def versions() -> dict[str, str]:
    """The versions of all that may change the last bits of a result."""
    return {
        "fedrane": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def device_name(device: str) -> str:
    """The product name of the CPU or GPU."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read(folder: Folder) -> list[Entry]:
    """All sessions so far; none in a folder of an earlier version."""
    entries = folder.read_json(SESSIONS) if (folder.path / SESSIONS).is_file() else []
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise CheckpointError(f"{folder.path / SESSIONS} is not a list of sessions", remedy="Put it back, or remove it")
    return entries


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(part, {}), dict) for part in (*COMPARED, ROUNDS))


def require_planned(folder: Folder, rounds: int) -> None:
    """Raise an error if the configuration has another number of rounds than the last session planned."""
    last: Entry = (read(folder) or [{}])[-1].get(ROUNDS, {})
    planned = [last[name] for name in ("planned_before", "planned") if name in last]  # killed, it may be either
    if planned and rounds not in planned:
        raise CheckpointError(
            f"{folder.path / CONFIG} has rounds={rounds}, and the run was planned with rounds={planned[-1]}",
            "the file was edited",
            f"Put rounds={planned[-1]} back, then: fedrane resume {folder.path} rounds={rounds}",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two sessions' versions and machines, in words."""
    return [
        f"{name.replace('_', ' ')} {value} (was {before[part][name]})"
        for part in COMPARED
        for name, value in now[part].items()
        if name in before.get(part, {}) and before[part][name] != value
    ]


def edited(first: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """How a configuration computes otherwise than when the run began, in words."""
    now = {"engine": experiment.engine, "threads": experiment.threads}
    return [f"{key}={value} (was {first[key]})" for key, value in now.items() if first.get(key, value) != value]


@contextmanager
def recorded(folder: Folder, earlier: list[Entry], entry: Entry, done: Callable[[], int]) -> Iterator[None]:
    """Write the entry now, and complete it at the end. If the process is killed, it stays without an end."""

    def write() -> None:
        folder.write_json(SESSIONS, [*earlier, entry])

    def ended(outcome: str) -> None:
        entry.update(end=_now(), outcome=outcome, rounds=entry[ROUNDS] | {"after": done()})
        write()

    write()
    try:
        yield
    except BaseException as error:
        with suppress(FileError):  # the disk may be full; the first error is reported
            ended(f"{type(error).__name__}: {error}".removesuffix(": "))
        raise
    ended("finished" if folder.finished else "stopped")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
