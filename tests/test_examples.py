"""The tutorials run and say what is true, and the notebooks are made from them as they are."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedrane.testing import conformance
from harness import environment
from problems import SLOW

EXAMPLES = Path(__file__).parent.parent / "examples"


def _notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", EXAMPLES / "notebooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = _notebooks()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run(number: int, **changes: str) -> dict[str, Any]:
    """The names of a tutorial after its last cell; with other values of some settings, to be quick."""
    [path] = EXAMPLES.glob(f"{number:02}_*.py")
    text = path.read_text(encoding="utf-8")
    for key, value in changes.items():
        text = re.sub(rf"\b{key}=\d+", f"{key}={value}", text)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, path.name, "exec"), names)  # noqa: S102 - our own text
    return names


def last(result: Any, model: str) -> float:
    return float(result.summary[f"{model}/last"][f"{model}/accuracy"])


def test_a_csv_file_becomes_a_federation_of_three_hospitals(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(1, rounds="2")
    assert names["result"].population == 3
    assert names["predicted"] == ["malignant"] * 3  # the first patients of the data
    shown = capsys.readouterr().out
    assert "Did you mean 'diagnosis'?" in shown
    assert "missing values: 1 in 'mean radius'" in shown


@SLOW
def test_the_federation_of_hospitals_learns() -> None:
    names = run(1)
    assert all(
        last(names["rows"][name], model) > 0.9 for name, model in (("fedavg", "global"), ("fedrane", "personal"))
    )


@SLOW
def test_a_method_of_ones_own_keeps_the_laws_and_a_wrong_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(2)
    shown = capsys.readouterr().out
    laws = len(names["verdicts"])
    assert len(names["held"]) == laws
    assert f"{laws} of {laws} laws hold" in shown
    assert "works with and without normalisation" in shown
    assert "strength 0 is FedAvg: True" in shown
    assert all(min(values) > 0.5 for values in names["table"].values())


@SLOW
def test_a_simulated_federation_is_the_laptop_s_run() -> None:
    """As a process of its own: the simulation's, which are Ray's, end with it."""
    [path] = EXAMPLES.glob("03_*.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment(COLUMNS="100"))
    assert done.returncode == 0, done.stderr
    assert "the server's state is the same as on the laptop: True" in done.stdout
    assert "certs: ca.crt, server.pem, server.key and 3 node keys" in done.stdout
    form = json.loads(Path("hospitals/app_hospitals/inputs.json").read_text(encoding="utf-8"))
    assert len(form["table"]["columns"]) == len(form["mean"]) == 30
    assert {"ca.crt", "server.pem", "server.key", "node-2.pub"} <= {path.name for path in Path("certs").iterdir()}


@SLOW
def test_the_report_page_is_written() -> None:
    names = run(4)
    text = names["page"].read_text(encoding="utf-8")
    assert all(name in text for name in ("fedavg", "local", "fedrane"))
    assert last(names["results"]["fedrane"], "global") > last(names["results"]["fedavg"], "global")


@SLOW
def test_one_cell_of_a_table_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(5)
    assert names["status"] == 0
    shown = capsys.readouterr().out
    assert "in all: 11 cells to run" in shown
    assert "table-gfl: 2 done" in shown
    assert names["cell"]["method"] == "fedrane"


@pytest.mark.parametrize("path", NOTEBOOKS.TUTORIALS, ids=lambda path: path.stem)
def test_a_notebook_is_its_tutorial(path: Path) -> None:
    """Make them again with: python examples/notebooks.py"""
    made = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = NOTEBOOKS.cells(path)
    expected = NOTEBOOKS.notebook(cells, [""] * len(cells))
    shown = [output for cell in made["cells"] for output in cell.pop("outputs", [])]
    for cell in expected["cells"]:
        cell.pop("outputs", None)
    assert made == expected
    assert shown, "it was run"
    assert path.read_text(encoding="utf-8").count("\n# %%") == len(cells) - 1


def test_the_notebook_on_methods_shows_as_many_laws_as_there_are() -> None:
    [path] = EXAMPLES.glob("02_*.ipynb")
    number = len(conformance.LAWS)
    assert f"{number} of {number} laws hold" in path.read_text(encoding="utf-8")


def test_five_tutorials_begin_with_a_title() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS.TUTORIALS] == ["01", "02", "03", "04", "05"]
    for path in NOTEBOOKS.TUTORIALS:
        assert NOTEBOOKS.cells(path)[0].source.startswith("# ")


def test_the_commands_in_the_tutorials_are_ours() -> None:
    """Those in the text: the others run."""
    import typer.main

    from fedrane.cli.commands import app

    group: Any = typer.main.get_command(app)
    for path in NOTEBOOKS.TUTORIALS:
        text = " ".join(cell.source for cell in NOTEBOOKS.cells(path) if cell.kind == "markdown")
        for command in re.findall(r"`fedrane ([^`]+)`", text):
            name, *words = command.split()
            assert name in group.commands, command
            options = {option for parameter in group.commands[name].params for option in parameter.opts}
            if not hasattr(group.commands[name], "commands"):
                assert {word for word in words if word.startswith("--")} <= options, command
