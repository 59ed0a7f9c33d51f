"""Whether the versions that pyproject.toml and constraints.txt allow can be installed together, on an ordinary machine.

    python tests/install/resolve.py

uv resolves from metadata alone: no wheel is downloaded. It reads nothing of pip's configuration, where a machine may
have a source of packages that hides a conflict: a CPU build of torch, for instance, asks for no Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PROJECT, CONSTRAINTS = ROOT / "pyproject.toml", ROOT / "constraints.txt"
UV = Path(sys.executable).with_name("uv")
LINUX = "x86_64-manylinux_2_28"
PLATFORMS = (LINUX, "aarch64-manylinux_2_28", "aarch64-apple-darwin", "windows")
MACOS = "14.0"
"""The oldest one for which there is a torch."""
CUDA = ("nvidia-", "cuda-")
"""What torch takes from a GPU's vendor: torch itself says in which versions."""
ALL = ("dev", "report", "flower", "docs")

Versions = Mapping[str, str]


class Job(NamedTuple):
    """A resolution to try."""

    title: str
    python: str
    extras: tuple[str, ...]
    options: tuple[str, ...] = ()
    platform: str = LINUX
    pinned: bool = False


class Resolved(NamedTuple):
    versions: Versions
    problem: str = ""


def pythons() -> list[str]:
    """Those that the classifiers name."""
    classifiers = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["classifiers"]
    return [found[1] for line in classifiers if (found := re.fullmatch(r".*Python :: (3\.\d+)", line))]


def jobs() -> Iterator[Job]:
    for python in pythons():
        for platform in PLATFORMS:
            yield Job("constraints.txt", python, ALL, ("--constraint", str(CONSTRAINTS)), platform, pinned=True)
        yield Job("newest versions", python, ALL)
        for extras in ((), ("report",), ("flower",), ("dev",), ("docs",)):
            yield lowest(python, extras)


def lowest(python: str, extras: tuple[str, ...]) -> Job:
    return Job("lower bounds", python, extras, ("--resolution", "lowest-direct"))


def environment() -> dict[str, str]:
    """The environment without the variables that make uv look for packages elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    return {**kept, "UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": MACOS}


def resolve(job: Job, uv: Path = UV) -> Resolved:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "resolved.txt")
        command = [uv, "pip", "compile", "--quiet", "--no-config", "--only-binary", ":all:", "--no-annotate"]
        command += ["--python-version", job.python, "--python-platform", job.platform, *job.options]
        command += [word for extra in job.extras for word in ("--extra", extra)]
        done = subprocess.run(
            [*command, "--output-file", out, PROJECT], env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            return Resolved({}, done.stderr.strip())
        return Resolved(read(out))


def read(path: Path) -> Versions:
    """Versions by name, as a file of requirements has them; names are spelt in one way."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def problems(done: Mapping[Job, Resolved], pins: Versions) -> Iterator[str]:
    """What cannot be resolved; what is installed without a pin, and what is pinned for nobody."""
    used: set[str] = set()
    for job, (versions, problem) in done.items():
        if problem:
            yield f"{name(job)}: {problem}"
        if job.pinned:
            used |= versions.keys()
            free = sorted(f"{n}=={v}" for n, v in versions.items() if n not in pins and not n.startswith(CUDA))
            if free:
                yield f"{name(job)}: constraints.txt does not pin {', '.join(free)}"
    if not any(problem for _, problem in done.values()):
        stale = sorted(pins.keys() - used)
        if stale:
            yield f"constraints.txt pins {', '.join(stale)}, which nothing asks for"


def name(job: Job) -> str:
    return f"{job.title}, [{','.join(job.extras)}], Python {job.python}, {job.platform}"


def main() -> int:
    todo = list(jobs())
    with ThreadPoolExecutor(4) as pool:  # they wait for the network
        done = dict(zip(todo, pool.map(resolve, todo), strict=True))
    for job, (versions, problem) in done.items():
        print(f"{name(job)}: {'FAILED' if problem else f'{len(versions)} packages'}")
    found = list(problems(done, read(CONSTRAINTS)))
    for problem in found:
        print(f"\n{problem}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
