"""Files are written atomically, with concurrent writers and if a writer is killed."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedrane.system.files import PARTS, PRIVATE, as_toml, private_folder, write_atomically


def test_two_who_write_a_file_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the whole file while the first has written its part but not yet moved it."""
    path, flush = tmp_path / "table.md", os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", flush)
        write_atomically(path, "the second's, which is longer")
        assert path.read_text() == "the second's, which is longer"

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomically(path, "the first's")
    assert path.read_text() == "the first's", "whoever comes last"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_private_before_anything_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the umask hides nothing and others may read the folder."""
    modes: list[int] = []
    make = os.open

    def opened(*args: Any, **more: Any) -> int:
        descriptor = make(*args, **more)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    before = os.umask(0)
    try:
        write_atomically(tmp_path / "key", b"secret", PRIVATE)
        write_atomically(tmp_path / "plain", b"for all")
        private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert modes[0] == PRIVATE
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")} == {
        "key": 0o600,
        "plain": 0o666,
        "a": 0o700,
        "b": 0o700,
    }


def test_what_a_killed_writer_leaves_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.part").touch()
    (tmp_path / "table.md").write_text("old")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process does not clean up

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "table.md", "new")
    assert (tmp_path / "table.md").read_text() == "old"
    (left,) = set(tmp_path.iterdir()) - {tmp_path / "table.md", tmp_path / "mine.part"}
    assert list(tmp_path.glob(PARTS)) == [left], "and no file of the user's is taken for one"


def test_what_is_written_as_toml_is_read_back() -> None:
    values = {"a": 'quotes " and \\ and \x7f and α', "b": True, "c": -3, "d": 1e-05, "e": float("inf"), "f.g": "dotted"}
    text = as_toml(values, "[table]")
    assert tomllib.loads(text) == {"table": {**{k: v for k, v in values.items() if k != "f.g"}, "f": {"g": "dotted"}}}
