"""What holds for any input, whatever is in it: it is used, or refused by one clear error.

While a call is contained, Python reports what it does to the system (PEP 578): it starts no process, connects to
nothing, unpickles nothing, runs no code of the folder that holds the input, and writes nothing outside that folder.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

from fedrane.errors import FedraneError

T = TypeVar("T")
LONGEST = 5000
"""Characters of an error: three parts of a bounded length."""
LIMIT_GIB, LIMIT_KIB = "0.125", 3 << 18
"""What the library may take for one thing, and how far the process may grow: by all its copies."""
TIMES = int(os.environ.get("FEDRANE_FUZZ", "1"))
"""How many times as many examples are tried; with more than one, they are random (``make fuzz``)."""

STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.startfile"}
REACHES = {"socket.connect", "socket.bind", "socket.sendto", "urllib.Request"}
PATHS = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 1,
         "os.truncate": 1, "shutil.rmtree": 1, "shutil.move": 2, "shutil.copyfile": 2}  # fmt: skip
"""How many of an event's first arguments are paths that it changes."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Watch:
    """There is one for the process: Python forgets no hook."""

    def __init__(self) -> None:
        self.folder = ""
        self.unpickles = False
        self.seen: list[str] = []

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event in STARTS | REACHES or (event == "pickle.find_class" and not self.unpickles):
            self.seen.append(f"{event} {given!r}"[:300])
        elif event == "exec":
            code = given[0]
            if isinstance(code, CodeType) and code.co_filename.endswith(".py") and self._inside(code.co_filename):
                self.seen.append(f"exec of {code.co_filename}")
        elif event == "open":
            path, _, flags = given
            if isinstance(flags, int) and flags & WRITES:
                self._written(event, path)
        elif event in PATHS:
            for path in given[: PATHS[event]]:
                self._written(event, path)

    def _inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(self.folder + os.sep)

    def _written(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is open already
        text = os.fsdecode(path)
        caches = ("__pycache__", ".hypothesis", "torchinductor_")
        ours = self._inside(text) or text in (os.devnull, self.folder) or any(cache in text for cache in caches)
        if not ours and not text.startswith(os.environ["XDG_STATE_HOME"]):
            self.seen.append(f"{event} {text!r}")


_watch = _Watch()
sys.addaudithook(_watch)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


@contextmanager
def _contained(folder: Path, unpickles: bool) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest memory is counted from here
    before = _status("VmRSS:")
    _watch.seen, _watch.unpickles, _watch.folder = [], unpickles, os.path.realpath(folder)
    try:
        yield
    finally:
        _watch.folder = ""
    assert not _watch.seen, _watch.seen
    assert _status("VmHWM:") - before < LIMIT_KIB


def used_or_refused(folder: Path, call: Callable[[], T], unpickles: bool = False) -> T | None:
    """What the call returns, or None where it raises an error for the user; anything else that it raises is a defect.

    ``folder`` holds the input, and is all that may be written to; ``unpickles`` where a simulation hands its own
    objects to its nodes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDRANE_MEMORY", LIMIT_GIB)
        with _contained(folder, unpickles), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # those are ours, and meant for the user
            try:
                return call()
            except FedraneError as error:
                text = str(error)
    assert text.isprintable(), text
    assert len(text) <= LONGEST
    return None


def examples(number: int) -> settings:
    """So many examples, the same in every run; by ``make fuzz`` many times as many, and others in each."""
    return settings(
        max_examples=number * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),  # to make a failing case smaller takes minutes where a run is trained
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large),
    )
