"""Commands as real processes, and what their run folders hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedrane.training.digests import DIGEST
from fedrane.training.run_folder import CALIBRATION, CONFIG, METADATA, METRICS, PARTITION, SUMMARY, TIMINGS

DRIVER = Path(__file__).parent.parent / "process" / "driver.py"
USER_METHODS = Path(__file__).parent.parent / "process" / "user_methods.py"
"""A user's own method and network."""
FEDRANE = Path(sys.executable).with_name("fedrane")
PATIENCE = 300.0
"""Seconds to wait for another process, which may have a small part of a busy machine."""
TINY = ("dataset=digits", "model=mlp", "clients=4", "epochs=1", "batch=256", "device=cpu")
"""A run whose rounds take milliseconds."""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **more}


class Ended(NamedTuple):
    status: int
    """As a shell sees it; negative for a signal."""
    stdout: str
    stderr: str

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


def refused(ended: Ended, *words: str) -> None:
    """One clear line on standard error, and exit code 2."""
    assert ended.status == 2, ended
    assert not ended.stdout
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


class Process:
    """A command on its way."""

    def __init__(self, pid: int, status: Callable[[], int], stdout: Path, stderr: Path) -> None:
        self.pid, self.status, self._stdout, self._stderr = pid, status, stdout, stderr

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """All so far, on both streams."""
        return self._stdout.read_text() + self._stderr.read_text()

    def wait(self) -> Ended:
        return Ended(self.status(), self._stdout.read_text(), self._stderr.read_text())


class Driver:
    """Starts commands from a warm interpreter; see ``process/driver.py``."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.started = scratch, 0
        self.server = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._read()

    def close(self) -> None:
        for pipe in (self.server.stdin, self.server.stdout):
            if pipe:
                pipe.close()
        self.server.wait(PATIENCE)

    def start(
        self,
        *argv: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        limit: int = 0,
        sabotage: Mapping[str, Any] | None = None,
        absent: Sequence[str] = (),
        stdout: Path | None = None,
    ) -> Process:
        """``limit`` is the largest file the command may write; ``sabotage`` is where it kills itself; modules that
        are ``absent`` cannot be imported, as if they were not installed."""
        self.started += 1
        stdout, stderr = stdout or self.scratch / f"{self.started}.out", self.scratch / f"{self.started}.err"
        request = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd or self.scratch),
            "env": dict(env or {}),
            "limit": limit,
            "sabotage": sabotage,
            "absent": list(absent),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        for path in (stdout, stderr):
            path.touch()
        pid = self._ask(request)["pid"]
        return Process(pid, lambda: int(self._ask({"wait": pid})["status"]), stdout, stderr)

    def __call__(self, *argv: str | Path, **settings: Any) -> Ended:
        return self.start(*argv, **settings).wait()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())


def executable(cwd: Path, *argv: str | Path, env: Mapping[str, str] | None = None) -> Process:
    """The command as it is installed."""
    stdout, stderr = cwd / "stdout", cwd / "stderr"
    with stdout.open("w") as out, stderr.open("w") as err:
        command = [str(FEDRANE), *map(str, argv)]
        process = subprocess.Popen(command, cwd=cwd, env=environment(**(env or {})), stdout=out, stderr=err)
    return Process(process.pid, lambda: process.wait(PATIENCE), stdout, stderr)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that another process brings about."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.002)


# ---- what a run folder holds


def checkpoints(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "checkpoints").glob("round-*.safetensors"))}


def leftovers(run: Path) -> list[str]:
    """Files that a finished run has no use for."""
    return [str(path) for path in run.rglob("*") if path.name.endswith(".part") or path.name.startswith(".tmp")]


def lines(run: Path) -> int:
    path = run / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(run: Path) -> list[dict[str, Any]]:
    """Without their digests."""
    records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != DIGEST} for record in records]


def untimed(record: Mapping[str, Any]) -> str:
    """As text, so that the order of the keys counts too."""
    return json.dumps({key: value for key, value in record.items() if key not in TIMINGS})


def same_run(run: Path, other: Path) -> None:
    """Two finished runs that differ in nothing but the time they took."""
    for name in (CONFIG, METADATA, PARTITION, CALIBRATION):
        assert (run / name).read_bytes() == (other / name).read_bytes(), f"{name} differs"
    for number, (a, b) in enumerate(zip(metrics(run), metrics(other), strict=True), 1):
        assert untimed(a) == untimed(b), f"line {number} of {METRICS} differs"
    assert untimed(json.loads((run / SUMMARY).read_text())) == untimed(json.loads((other / SUMMARY).read_text()))
    mine, theirs = checkpoints(run), checkpoints(other)
    assert max(mine) == max(theirs)
    for name in mine.keys() & theirs.keys():
        assert mine[name] == theirs[name], f"the bytes of {name} differ"
    assert not leftovers(run) + leftovers(other)
