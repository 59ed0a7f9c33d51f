"""Files are written atomically, with concurrent writers and if a writer is killed; and only into folders of ours."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedrane.errors import ConfigError, FedraneError, FileError, TooLarge
from fedrane.system.files import (
    MARK,
    PARTS,
    PRIVATE,
    as_toml,
    is_ours,
    private_folder,
    read_text,
    require_new,
    take,
    user_path,
    write_atomically,
)


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


def test_only_plain_text_of_a_size_that_fits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may never end, as a pipe that nobody writes to; an empty file may have any size."""
    plain, pipe, giant = (tmp_path / name for name in ("plain", "pipe", "giant"))
    plain.write_text("é", encoding="utf-8")
    assert read_text(plain) == "é"
    os.mkfifo(pipe)
    for endless in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a plain file"):
            read_text(endless)
    monkeypatch.setenv("FEDRANE_MEMORY", "1")
    with giant.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge, match=r"giant needs about 8 TiB"):
        read_text(giant)


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


def test_a_name_that_is_not_utf8_is_written_as_json_has_it(tmp_path: Path) -> None:
    name = os.fsdecode(b"run-\xff-\xc3\xa4")
    write_atomically(tmp_path / "it.json", json.dumps(name, ensure_ascii=False))
    assert json.loads((tmp_path / "it.json").read_text(encoding="utf-8")) == name
    with pytest.raises(ConfigError, match=r"run-\\udcff-ä cannot be saved.*UTF-8"):
        as_toml({"dataset": name})


def test_a_folder_is_ours_if_we_made_it_or_it_was_empty(tmp_path: Path) -> None:
    take(tmp_path / "new", "run")
    (tmp_path / "new" / "metrics.jsonl").touch()
    take(tmp_path / "new", "run")
    assert not is_ours(tmp_path / "new", "comparison"), "it was made for a run"
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / f"{MARK}.0123abcd.part").touch()
    take(tmp_path / "killed", "run")
    (tmp_path / "theirs" / "a" / "seed-0").mkdir(parents=True)
    with pytest.raises(FileError, match="theirs is not empty"):
        take(tmp_path / "theirs", "comparison", holding="*/seed-*/config.toml")
    assert not (tmp_path / "theirs" / MARK).exists()
    (tmp_path / "theirs" / "a" / "seed-0" / "config.toml").touch()
    take(tmp_path / "theirs", "comparison", holding="*/seed-*/config.toml")


def test_what_exists_is_overwritten_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for allowed in (None, tmp_path / "nothing", tmp_path / "empty"):
        require_new(allowed, force=False)
    for path in (tmp_path, tmp_path / "link"):
        require_new(path, force=True)
        with pytest.raises(FileError, match="--force"):
            require_new(path, force=False)


def test_what_is_written_as_toml_is_read_back() -> None:
    values = {"a": 'quotes " and \\ and \x7f and α', "b": True, "c": -3, "d": 1e-05, "e": float("inf"), "f.g": "dotted"}
    text = as_toml(values, "[table]")
    assert tomllib.loads(text) == {"table": {**{k: v for k, v in values.items() if k != "f.g"}, "f": {"g": "dotted"}}}
