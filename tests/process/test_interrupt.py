"""Ctrl-C: once, the round is finished and saved; twice, the run stops at once."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import sys
import termios
import time
from pathlib import Path

import fedrane as library
from harness import TINY, USER_METHODS, Driver, Ended, Process, checkpoints, executable, lines, metrics, same_run, until

WORDS = (*TINY, f"method={USER_METHODS}:Gliding", "participation=0.6", "rounds=8", "checkpoint_every=3")
FINISHING = "finishing this round"


class Gate:
    """Holds a run up in the middle of a round."""

    def __init__(self, path: Path, round: int) -> None:
        self.path = path / "gate"
        self.path.write_text(str(round))
        self.env = {"FEDRANE_TEST_GATE": str(self.path)}

    def await_run(self) -> None:
        until(self.path.with_suffix(".reached").exists, "the run is in the middle of the round")

    def open(self) -> None:
        self.path.unlink()


def interrupt(process: Process, gate: Gate) -> Ended:
    """Ctrl-C in the middle of a round, which then goes on."""
    gate.await_run()
    process.send(signal.SIGINT)
    until(lambda: FINISHING in process.output, "the process has got the signal")
    gate.open()
    return process.wait()


def test_once_finishes_the_round_and_saves(fedrane: Driver, tmp_path: Path) -> None:
    """The command itself: exit code 130, how to go on, a checkpoint of that very round; resumed, the same bytes."""
    gate, run = Gate(tmp_path, round=5), tmp_path / "run"
    ended = interrupt(executable(tmp_path, "run", "--out", run, *WORDS, env=gate.env), gate)
    assert ended.status == 130
    assert f"fedrane resume {run}" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    assert lines(run) == 5
    assert max(checkpoints(run)) == "round-000005.safetensors"
    assert not (run / "summary.json").exists()
    assert fedrane("run", "--out", tmp_path / "reference", *WORDS).status == 0
    resumed = fedrane("resume", run)
    assert resumed.status == 0
    assert "after round 5" in resumed.stdout
    same_run(run, tmp_path / "reference")


def test_twice_stops_at_once(fedrane: Driver, tmp_path: Path) -> None:
    """The round is given up, although it would go on for ever, and the last checkpoint is complete."""
    gate, run = Gate(tmp_path, round=5), tmp_path / "run"
    process = fedrane.start("run", "--out", run, *WORDS, env=gate.env)
    gate.await_run()
    process.send(signal.SIGINT)
    until(lambda: FINISHING in process.output, "the process has got the signal")
    process.send(signal.SIGINT)
    ended = process.wait()
    assert ended.status == 130
    assert "stopped at once" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert library.load(run).round == 3
    gate.open()
    assert fedrane("run", "--out", tmp_path / "reference", *WORDS).status == 0
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")


def test_in_the_last_round_there_is_nothing_to_go_on_with(fedrane: Driver, tmp_path: Path) -> None:
    """A run that is done when it could stop has simply ended."""
    gate, run = Gate(tmp_path, round=3), tmp_path / "run"
    words = (*TINY, f"method={USER_METHODS}:Plain", "rounds=3")
    ended = interrupt(fedrane.start("run", "--out", run, *words, env=gate.env), gate)
    assert ended.status == 0
    assert "results:" in ended.stdout
    assert (run / "summary.json").exists()


def test_with_json_only_json_is_on_standard_output(fedrane: Driver, tmp_path: Path) -> None:
    """What is meant for people goes to standard error."""
    gate, run = Gate(tmp_path, round=2), tmp_path / "run"
    ended = interrupt(fedrane.start("run", "--json", "--out", run, *WORDS, env=gate.env), gate)
    assert ended.status == 130
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [event["event"] for event in events] == ["round", "round", "end"]
    assert events[-1]["finished"] is False
    assert f"fedrane resume {run}" in ended.stderr


def test_a_comparison_goes_on_with_the_same_command(fedrane: Driver, tmp_path: Path) -> None:
    """Stopped in the middle of its first run, a comparison leaves the rest to the next call."""
    gate, words = Gate(tmp_path, round=2), (*TINY, "rounds=3")
    command = ("compare", "--no-report", "--methods", f"{USER_METHODS}:Plain,local", *words)
    ended = interrupt(fedrane.start(*command, "--out", tmp_path / "stopped", env=gate.env), gate)
    assert ended.status == 130
    assert "same command" in ended.stdout
    for out in ("stopped", "reference"):
        assert fedrane(*command, "--out", tmp_path / out).status == 0
    runs = sorted(
        path.parent.relative_to(tmp_path / "reference") for path in (tmp_path / "reference").rglob("config.toml")
    )
    assert len(runs) == 2
    for run in runs:
        same_run(tmp_path / "stopped" / run, tmp_path / "reference" / run)


def test_asked_at_any_moment_what_is_done_is_saved(tmp_path: Path) -> None:
    """Wherever in a round the wish to stop comes, the round that the run ends with has its checkpoint."""
    experiment = library.Experiment.from_words((*WORDS, "eval_every=8"))
    for asked in range(8):
        stops = itertools.chain([False] * asked, itertools.repeat(True))
        run = tmp_path / str(asked)
        result = library.run(experiment, run, stop=lambda stops=stops: next(stops))
        assert not result.finished
        assert library.load(run).round == result.round


def test_while_nobody_reads_what_it_prints(fedrane: Driver, tmp_path: Path) -> None:
    """Ctrl-C where the process hangs in the middle of a line, as before a pager that waits for its reader."""
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    process = fedrane.start("run", "--out", run, *TINY, "rounds=400", "eval_every=400", stdout=pipe)
    until(lambda: _waiting(reader) > 4000, "the pipe is full")
    time.sleep(0.2)  # now it hangs in the write
    process.send(signal.SIGINT)
    os.set_blocking(reader, True)
    while os.read(reader, 65536):
        pass
    os.close(reader)
    assert process.status() == 130
    assert len(metrics(run)) < 400


def _waiting(pipe: int) -> int:
    """Bytes in a pipe that nobody has read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
