"""No room for a file: one clear line, nothing lost, and once there is room the run goes on to the same bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedrane as library
from harness import TINY, Driver, Ended, checkpoints, leftovers, lines, same_run

GROWING = (*TINY, "method=local", "participation=0.5", "rounds=8")
"""Its checkpoints grow with the clients that have joined."""
EVEN = (*TINY, "rounds=6")


def complains(ended: Ended, path: Path | str) -> None:
    """One line with what could not be written and why."""
    assert ended.status == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error:")
    assert str(path) in ended.stderr
    assert "no space left" in ended.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def leave(disk: Path, room: int) -> Path:
    """Fill a disk up to so many bytes."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_bsize - room))
    return ballast


def test_a_checkpoint_too_large(fedrane: Driver, tmp_path: Path) -> None:
    """Where a checkpoint outgrows what a file may hold, the one before it stands."""
    run, reference = tmp_path / "run", tmp_path / "reference"
    assert fedrane("run", "--out", tmp_path / "first", *GROWING[:-1], "rounds=1").status == 0
    assert fedrane("run", "--out", reference, *GROWING).status == 0
    limit = len(checkpoints(tmp_path / "first")["round-000001.safetensors"]) + 1000
    assert len(checkpoints(reference)["round-000008.safetensors"]) > limit
    ended = fedrane("run", "--out", run, *GROWING, limit=limit)
    complains(ended, run / "checkpoints")
    done = lines(run) - 1
    assert 1 <= done < 8
    assert library.load(run).round == done
    assert not leftovers(run)
    complains(fedrane("resume", run, limit=limit), run / "checkpoints")
    assert fedrane("resume", run).status == 0
    same_run(run, reference)


def test_no_room_for_the_first_checkpoint(fedrane: Driver, tmp_path: Path) -> None:
    """There is no model yet, and the run starts again when it is resumed."""
    run = tmp_path / "run"
    complains(fedrane("run", "--out", run, *EVEN, limit=20_000), run / "checkpoints")
    with pytest.raises(library.FedraneError, match="no checkpoint"):
        library.load(run)
    assert fedrane("resume", run).status == 0
    assert fedrane("run", "--out", tmp_path / "reference", *EVEN).status == 0
    same_run(run, tmp_path / "reference")


def test_no_room_for_a_metrics_line(fedrane: Driver, tmp_path: Path) -> None:
    """The half of a line that still had room is cut off when the run goes on."""
    run, words = tmp_path / "run", (*EVEN, "checkpoint_every=6")
    complains(fedrane("run", "--out", run, *words, limit=5000), run / "metrics.jsonl")
    assert (run / "metrics.jsonl").stat().st_size == 5000
    assert fedrane("resume", run).status == 0
    assert fedrane("run", "--out", tmp_path / "reference", *words).status == 0
    same_run(run, tmp_path / "reference")


def test_no_room_to_begin(fedrane: Driver, tmp_path: Path) -> None:
    """A run that could not write its configuration has not begun: it is started again."""
    run = tmp_path / "run"
    complains(fedrane("run", "--out", run, *EVEN, limit=600), run)
    assert not (run / "config.toml").exists()
    assert fedrane("run", "--out", run, *EVEN).status == 0


@pytest.mark.parametrize("more", [(), ("--tensorboard",), ("--json",)])
def test_the_disk_is_full_after_some_rounds(fedrane: Driver, disk: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Two checkpoints fit but not a third; once the disk has room, the run goes on."""
    run = disk / "run"
    assert fedrane("run", "--out", tmp_path / "reference", *EVEN).status == 0
    size = len(checkpoints(tmp_path / "reference")["round-000006.safetensors"])
    ballast = leave(disk, int(2.5 * size) + 40_000)
    complains(fedrane("run", *more, "--out", run, *EVEN), run)
    assert library.load(run).round == 2
    assert not leftovers(run)
    ballast.unlink()
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")


def test_the_disk_fills_to_the_last_byte(fedrane: Driver, disk: Path, tmp_path: Path) -> None:
    """Whichever file is the one without room, and however often: nothing is lost on the way."""
    run = disk / "run"
    assert fedrane("run", "--out", tmp_path / "reference", *EVEN).status == 0
    page = os.statvfs(disk).f_bsize
    for pages in range(3, 80, 7):
        ballast = leave(disk, pages * page)
        begun = (run / "config.toml").exists()
        ended = fedrane("resume", run) if begun else fedrane("run", "--out", run, *EVEN)
        ballast.unlink()
        if ended.status == 0:
            break
        complains(ended, run)
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")
