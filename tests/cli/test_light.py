"""What only informs needs no torch, and so is there at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedrane

COMMANDS = (
    "--help",
    "-h",
    "--version",
    "run --help",
    "compare -h",
    "reproduce --help",
    "tune --help",
    "data get --help",
    "flower new --help",
    "methods",
    "methods fedrane",
    "methods --json",
    "keys",
    "keys clip",
    "datasets",
    "run --rounds 5",
)
REPORT = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"


def loaded(code: str, *argv: str, **env: str) -> tuple[bool, str]:
    """Whether the code imports torch, and what it prints."""
    command = [sys.executable, "-c", f"{REPORT}; {code}", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    last = ended.stderr.splitlines()[-1]
    assert last in ("True", "False"), ended.stderr
    return last == "True", ended.stdout


@pytest.mark.parametrize("words", COMMANDS)
def test_it_does_not_import_torch(words: str) -> None:
    with_torch, shown = loaded("from fedrane.cli import main; main()", *words.split())
    assert not with_torch
    assert shown or "--rounds" in words


@pytest.mark.parametrize("words", ["run rou", "methods fedp", "resume r", "check "])
def test_completion_does_not_import_torch(words: str) -> None:
    env = {"_FEDRANE_COMPLETE": "complete_bash", "COMP_WORDS": f"fedrane {words}", "COMP_CWORD": "2"}
    with_torch, _ = loaded("import sys; sys.argv = ['fedrane']; from fedrane.cli import main; main()", **env)
    assert not with_torch


def test_the_library_is_imported_when_it_is_used() -> None:
    assert not loaded("import fedrane; dir(fedrane); assert not hasattr(fedrane, 'nothing')")[0]
    assert loaded("from fedrane import Experiment")[0], "else the tests above could not fail"


def test_all_names_are_there() -> None:
    """Also after the modules that define them were imported: none may hide a name of the same name."""
    assert set(fedrane.__all__) <= set(dir(fedrane))
    assert {"__version__", *fedrane._HOMES} == set(fedrane.__all__)
    modules = {path.stem for path in Path(fedrane.__file__).parent.iterdir()}
    assert not modules & set(fedrane.__all__), "importing the module would hide the name"
    for name, module in fedrane._HOMES.items():
        assert getattr(fedrane, name) is getattr(sys.modules[module], name)
        if (defined := getattr(getattr(fedrane, name), "__module__", "")).startswith("fedrane."):
            assert defined == module
    assert fedrane.data.load("digits").name == "digits"  # type: ignore[attr-defined]
