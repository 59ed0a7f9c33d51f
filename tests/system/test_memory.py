"""What needs more memory than there is gets an error that says how much, before it takes any."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest

from fedrane.errors import ConfigError, TooLarge
from fedrane.system import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available and no limits."""
    monkeypatch.delenv(memory.LIMIT, raising=False)
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "proc")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB\n")
    return tmp_path


def test_the_error_names_how_much_is_needed_and_how_to_lift_it(machine: Path) -> None:
    memory.require(8 * GIB, "a file")
    with pytest.raises(
        TooLarge, match=r"^a file needs about 13\.7 GiB of memory: 8 GiB are available\. Use less, or "
    ) as e:
        memory.require(13.7 * GIB, "a file")
    assert "FEDRANE_MEMORY=unlimited" in str(e.value)


def test_the_limit_can_be_set_or_lifted(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.LIMIT, "0.5")
    with pytest.raises(TooLarge, match="512 MiB are available"):
        memory.require(GIB, "a file")
    monkeypatch.setenv(memory.LIMIT, "unlimited")
    memory.require(10**30, "a file")
    for wrong in ("none", "-1", "0", "nan", ""):
        monkeypatch.setenv(memory.LIMIT, wrong)
        with pytest.raises(ConfigError, match="it is a number of GiB"):
            memory.available()


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("0::/job\n", "job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/job/step\n", "job", ("memory.max", "memory.current", "inactive_file")),
        (
            "3:cpu:/\n4:memory:/job\n",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["its own", "of the group above", "version 1"],
)
def test_a_container_has_what_its_group_may_still_take(
    machine: Path, group: str, folder: str, names: tuple[str, ...]
) -> None:
    (machine / "proc" / "self" / "cgroup").write_text(group)
    inside = machine / "groups" / folder
    inside.mkdir(parents=True)
    (machine / "groups" / "memory.max").write_text("max\n")
    (inside / names[0]).write_text(f"{4 * GIB}\n")
    (inside / names[1]).write_text(f"{3 * GIB}\n")
    (inside / "memory.stat").write_text(f"anon 1\n{names[2]} {GIB}\n")
    assert memory.available() == 2 * GIB


def test_a_limit_on_the_process_counts_what_it_has(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * GIB, 2 * GIB))
    (machine / "proc" / "self" / "statm").write_text(f"{GIB // resource.getpagesize()} 1 1 1 0 1 0\n")
    assert memory.available() == GIB


def test_a_system_of_unknown_memory_refuses_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "proc" / "meminfo").unlink()
    monkeypatch.setattr(memory.os, "sysconf_names", {})
    assert memory.available() == math.inf


def test_this_machine_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(memory.LIMIT, raising=False)
    assert 0 < memory.available() < 1e15
