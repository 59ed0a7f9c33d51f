"""The memory that is available, and the refusal of what needs more.

A file of a few megabytes can unpack to many gigabytes, and a number in a setting can ask for as much. The size is known
before anything is read or drawn, so it is compared first: an error is better than a machine that swaps or kills.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from fedrane.errors import ConfigError, TooLarge

try:
    import resource
except ImportError:  # not a Unix: it has no such limits
    resource = None  # type: ignore[assignment]

LIMIT = "FEDRANE_MEMORY"
"""An environment variable: a number of GiB to use instead of what the machine has available, or ``unlimited``."""
UNLIMITED = "unlimited"
_GIB = 1 << 30
_SMALL = 1 << 24
"""So few bytes are always there, and asking the system takes longer."""
_PROCESS, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def require(needed: float, what: str, remedy: str = "Use less") -> None:
    """Raise unless ``needed`` bytes are available; ``what`` needs them."""
    if needed <= _SMALL and LIMIT not in os.environ:
        return
    free = available()
    if needed > free:
        raise TooLarge(
            f"{what} needs about {as_text(needed)} of memory",
            f"{as_text(free)} are available",
            f"{remedy}, or lift the limit: {LIMIT}={UNLIMITED}, or a number of GiB",
        )


def available() -> float:
    """Return the bytes that may still be taken; infinite where the system does not say."""
    if LIMIT in os.environ:
        return _given(os.environ[LIMIT])
    return max(0.0, min([*_of_machine(), *_of_groups(), *_of_process()], default=math.inf))


def as_text(size: float) -> str:
    """A number of bytes for people.

    >>> as_text(13.7e9)
    '12.8 GiB'
    """
    for unit, scale in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1e6 * scale else f"over a million {unit}"
    return f"{max(size, 0) / 1024:.3g} KiB"


def _given(text: str) -> float:
    if text == UNLIMITED:
        return math.inf
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not gigabytes > 0:
        raise ConfigError(f"{LIMIT}={text}", "it is a number of GiB", f"Use for instance {LIMIT}=8, or {UNLIMITED}")
    return gigabytes * _GIB


def _of_machine() -> Iterator[float]:
    """Of the whole machine: free memory, and what the system can free at once."""
    for line in _text(_PROCESS / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield float(line.split()[1]) * 1024
            return
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names:  # macOS says how much there is, and not how much is free
        yield float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


def _of_groups() -> Iterator[float]:
    """Of a container or job: the limits of its control groups, version 2 and 1, less what they use."""
    for line in _text(_PROCESS / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "inactive_file")
        root = _GROUPS
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _GROUPS / "memory"
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root) and (limit := _text(folder / names[0]).strip()).isdecimal():
                used = _text(folder / names[1]).strip()
                rows = (row.split() for row in _text(folder / "memory.stat").splitlines())
                cached = next((int(row[1]) for row in rows if row[0] == names[2]), 0)  # freed when it is needed
                yield float(limit) - (float(used or 0) - cached)


def _of_process() -> Iterator[float]:
    """Of the limit on this process's addresses (``ulimit -v``), less what it has."""
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = (_text(_PROCESS / "self" / "statm").split() or ["0"])[0]
            yield float(limit) - float(pages) * resource.getpagesize()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
