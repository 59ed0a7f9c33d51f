"""Results are lines of text that neither haste nor company can spoil."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedrane.errors import FileError
from fedrane.experiment import Experiment
from fedrane.reproduce.results import ResultStore, lock
from fedrane.reproduce.targets import settings_of


def record(seed: int, status: str = "done", **more: Any) -> dict[str, Any]:
    settings = settings_of(Experiment(dataset="digits", seed=seed))
    tells = {"kept": {}} if status == "done" else {"word": "failed", "reason": "it broke"}
    return {"status": status, "settings": settings, **tells, **more}


def add_many(folder: str, first: str, last: str) -> None:
    """Wait until the others are there as well, so that all write at once."""
    Path(folder, f"{first}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < 2:
        time.sleep(0.001)
    for seed in range(int(first), int(last)):
        ResultStore(folder).add(record(seed))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "digits.jsonl").read_text().splitlines()]


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    """Two processes at once with overlapping seeds: each cell is recorded once."""
    spans = (("0", "16"), ("8", "24"))
    writers = [subprocess.Popen([sys.executable, __file__, str(tmp_path), *span]) for span in spans]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(line["settings"]["seed"] for line in lines(tmp_path)) == list(range(24))


def test_a_finished_cell_takes_the_place_of_a_failed_one_and_never_the_other_way(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for status in ("failed", "done", "failed"):
        store.add(record(0, status))
    (line,) = lines(tmp_path)
    assert line["status"] == "done"


def test_what_was_kept_adds_up(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.add(record(0) | {"kept": {"cosines": 1}})
    store.add(record(0) | {"kept": {"tsne": 2}})
    ((_, stored),) = store.read().items()
    assert stored["kept"] == {"cosines": 1, "tsne": 2}


def test_other_lines_stay_as_they_are(tmp_path: Path) -> None:
    """Byte for byte, so that a change is one line in the history of the file."""
    store = ResultStore(tmp_path)
    store.add(record(0))
    path = tmp_path / "digits.jsonl"
    path.write_text(path.read_text().replace('"status": "done"', '"status":   "done"'))
    before = path.read_text()
    store.add(record(1))
    assert path.read_text().startswith(before)


@pytest.mark.parametrize(
    "text",
    [
        b"<<<<<<< HEAD",
        b'{"status": "done"}',
        b"[]",
        b'{"cut": ',
        b'{"status": "done", "settings": null}',
        b'{"status": ["done"], "settings": {"method.name": "fedavg", "dataset": "digits"}, "kept": {}}',
        b'{"status": "done", "settings": {"method.name": "fedavg", "dataset": "digits"}}',
        b'{"status": "failed", "settings": {"method.name": "fedavg", "dataset": "digits"}}',
        b"\xff",
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, text: bytes) -> None:
    store = ResultStore(tmp_path)
    store.add(record(0))
    with (tmp_path / "digits.jsonl").open("ab") as file:
        file.write(text + b"\n")
    for act in (store.read, lambda: store.add(record(1))):
        with pytest.raises(FileError, match="line 2"):
            act()
    assert len((tmp_path / "digits.jsonl").read_bytes().splitlines()) == 2, "nothing is lost"


def test_empty_lines_are_nothing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.add(record(0))
    with (tmp_path / "digits.jsonl").open("a") as file:
        file.write("\n")
    store.add(record(1))
    assert len(store.read()) == len(lines(tmp_path)) == 2


def test_a_claim_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    with lock(tmp_path / "cell", wait=False) as first, lock(tmp_path / "cell", wait=False) as second:
        assert first
        assert not second
    with lock(tmp_path / "cell", wait=False) as again:
        assert again


if __name__ == "__main__":
    add_many(*sys.argv[1:])
