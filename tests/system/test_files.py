"""Files are written atomically, with concurrent writers and if a writer is killed."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from fedrane.errors import FedraneError, FileError
from fedrane.system.files import PARTS, as_toml, user_path, write_atomically


def test_an_error_is_one_bounded_line_without_control_characters() -> None:
    error = FedraneError("a\nb\x1b[31m\u202e", "\t" + "x" * 10**6, "remedy\x00")
    assert str(error).startswith("a b\\x1b[31m\\u202e: xxx")
    assert str(error).endswith("xxx. remedy\\x00.")
    assert str(error).isprintable()
    assert len(str(error)) < 5000
    assert str(FedraneError("täglich … ‘x’")) == "täglich … ‘x’."


@pytest.mark.parametrize("wrong", ["a\0b", "x" * 300, "y/" * 3000, "~nobody-here/x"])
def test_a_path_that_cannot_be_is_an_error(wrong: str) -> None:
    with pytest.raises(FileError, match="cannot be used"):
        user_path(wrong)


def test_a_path_that_may_be_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert user_path("~/file/below") == tmp_path / "file" / "below"


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
