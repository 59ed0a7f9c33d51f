"""What is built and how it is installed, as far as it can be seen without a network.

``make resolve`` asks the package index, and ``make package`` installs what was built.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from install import resolve
from install.resolve import ALL, CONSTRAINTS, PROJECT, ROOT, Job, Resolved

NOT_OURS = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "*.pyc", "build", "dist", "runs"
)  # as .gitignore has them; and settings of git and CI
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
MADE = ("PKG-INFO", "setup.cfg", "src/fedrane.egg-info")
"""What a build adds."""


# ---- what is built


def build(what: str, source: Path, out: Path) -> Path:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, what, str(out)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of this repository, which stands beside it as ``copy``."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "copy", ignore=NOT_OURS)
    before = names(folder / "copy")
    with tarfile.open(build("build_sdist", folder / "copy", folder / "out")) as archive:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, which Debian 12 has
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder / "tree")  # noqa: S202 - our own archive
    for name in names(folder / "copy") - before:
        (folder / "copy" / name).unlink()
    (tree,) = (folder / "tree").iterdir()
    return tree


def test_the_sdist_holds_the_repository(unpacked: Path) -> None:
    found = {name for name in names(unpacked) if not name.startswith(MADE)}
    assert found == names(unpacked.parent.parent / "copy")
    assert {"LICENSE", "constraints.txt", "docs/guide.md", "tests/install/test_install.py"} <= found


def test_the_wheel_holds_the_package(unpacked: Path, tmp_path: Path) -> None:
    """Built from the sdist: every file below src/, data too, and nothing else."""
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "out")) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = [name for name in wheel.namelist() if PurePosixPath(name).name == "LICENSE"]
    assert found == {name for name in names(unpacked / "src") if name.startswith("fedrane/")}
    assert {"fedrane/py.typed", "fedrane/report/page.html", "fedrane/presets/paper.toml"} <= found
    assert len(licences) == 1


def test_every_file_names_the_same_version() -> None:
    version = tomllib.loads("[it]\n" + (ROOT / "src/fedrane/_version.py").read_text())["it"]["__version__"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert changelog.startswith(f"[{version}]")  # from which a release takes its notes
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# ---- what is installed


def test_every_direct_requirement_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    pins = resolve.read(CONSTRAINTS)
    for line in (
        *project["dependencies"],
        *(line for some in project["optional-dependencies"].values() for line in some),
    ):
        requirement = Requirement(line)
        assert requirement.specifier, f"{line} has no lower bound"
        assert requirement.specifier.contains(pins[requirement.name]), line


def test_the_pythons_are_those_of_the_classifiers_and_of_ci() -> None:
    assert resolve.pythons()[0] == "3.11"
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if workflow.exists():  # not in an sdist
        assert f"python: {json.dumps(resolve.pythons())}" in workflow.read_text(encoding="utf-8")


def test_jobs_are_for_every_python() -> None:
    jobs = list(resolve.jobs())
    for python in resolve.pythons():
        mine = [job for job in jobs if job.python == python]
        assert {job.platform for job in mine if job.pinned} == set(resolve.PLATFORMS)
        assert {job.extras for job in mine if "lowest-direct" in job.options} == {(), *((extra,) for extra in ALL)}
        assert any(not job.options for job in mine)


def uv(folder: Path, *lines: str) -> Path:
    """A program in uv's place."""
    program = folder / "uv"
    program.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    program.chmod(0o700)
    return program


JOB = Job("constraints.txt", "3.12", ("report",), ("--constraint", "constraints.txt"), pinned=True)


def test_a_resolution_is_independent_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that give pip or uv further packages are removed."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS", "UV_OVERRIDE"):
        monkeypatch.setenv(name, "/elsewhere")
    program = uv(
        tmp_path,
        f'env > {tmp_path}/environment; echo "$@" > {tmp_path}/words',
        'while [ "$1" != --output-file ]; do shift; done',
        'printf "Jinja2==3.1.6\\nzope.interface==8.0 ; python_version < \'3.13\'  # why\\n" > "$2"',
    )
    assert resolve.resolve(JOB, program) == Resolved({"jinja2": "3.1.6", "zope-interface": "8.0"})
    assert "/elsewhere" not in (tmp_path / "environment").read_text()
    words = (tmp_path / "words").read_text()
    for word in ("--no-config", "--only-binary :all:", "--python-version 3.12", "--extra report", "--constraint"):
        assert word in words


def test_what_uv_cannot_resolve_is_reported(tmp_path: Path) -> None:
    done = {JOB: resolve.resolve(JOB, uv(tmp_path, "echo no solution: torch wants triton==3.7.1 >&2; exit 1"))}
    assert list(resolve.problems(done, {})) == [
        "constraints.txt, [report], Python 3.12, x86_64-manylinux_2_28: no solution: torch wants triton==3.7.1"
    ]


def test_what_is_not_pinned_and_what_is_pinned_in_vain_is_reported() -> None:
    done = {
        JOB: Resolved({"a": "1", "b": "2", "nvidia-cublas": "13"}),
        JOB._replace(pinned=False): Resolved({"d": "4"}),
    }
    unpinned, stale = resolve.problems(done, {"a": "1", "c": "3"})
    assert unpinned.endswith("does not pin b==2")
    assert stale == "constraints.txt pins c, which nothing asks for"
    assert not list(resolve.problems(done, {"a": "1", "b": "2"}))


# ---- make


@pytest.mark.parametrize(("asked", "rebuilt"), [("(3, 11)", False), ("(3, 13)", True)])
def test_make_with_another_python(tmp_path: Path, asked: str, rebuilt: bool) -> None:
    """An environment of another Python is rebuilt, and not used silently."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for path, version in ((".venv/bin/python", "(3, 11)"), ("other", asked)):
        (tmp_path / path).write_text(f'#!/bin/sh\necho "{version}"\n')
        (tmp_path / path).chmod(0o700)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
        (tmp_path / name).touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "check", f"PYTHON={tmp_path / 'other'}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ("-m venv --clear .venv" in done.stdout) == rebuilt
    assert "ruff format" in done.stdout
