"""Who may import whom, so that a method stays one readable file and engines know none."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedrane

SOURCE = Path(fedrane.__file__).parent
CORE = ("tree", "task", "algorithm", "ops/sgd", "errors")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("fedrane.")}


def allowed(name: str, among: tuple[str, ...]) -> bool:
    return any(name == f"fedrane.{part}" or name.startswith(f"fedrane.{part}.") for part in among)


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_method_imports_only_the_protocol_and_mathematics(path: Path) -> None:
    wrong = {name for name in imports(path) if not allowed(name, ("algorithm", "task", "tree", "ops", "errors"))}
    assert not wrong


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_method_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    "path",
    [*sorted((SOURCE / "engines").glob("*.py")), *sorted((SOURCE / "flower").glob("*.py"))],
    ids=lambda p: p.stem,
)
def test_an_engine_names_no_method(path: Path) -> None:
    assert not {name for name in imports(path) if allowed(name, ("methods",))}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_engine_and_no_method(name: str) -> None:
    found = imports(SOURCE / f"{name}.py")
    assert not {n for n in found if allowed(n, ("engines", "flower", "methods", "run", "training", "cli", "report"))}


@pytest.mark.parametrize(
    ("package", "above"),
    [("training", ("report", "reproduce", "cli")), ("report", ("reproduce", "cli")), ("reproduce", ("cli",))],
)
def test_packages_import_in_one_direction(package: str, above: tuple[str, ...]) -> None:
    """Training knows no report, a report no reproduction, and none of them the command line."""
    for path in (SOURCE / package).rglob("*.py"):
        assert not {name for name in imports(path) if allowed(name, above)}, path.name


@pytest.mark.parametrize("path", sorted((SOURCE / "kernels").rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_know_nothing_but_tensors(path: Path) -> None:
    assert not {name for name in imports(path) if not allowed(name, ("kernels",))}


def test_the_optimiser_imports_no_model() -> None:
    assert not {name for name in imports(SOURCE / "ops" / "sgd.py") if allowed(name, ("models", "task", "algorithm"))}


def test_the_core_needs_no_extra() -> None:
    """Flower, Plotly, TensorBoard and the plotting of figures are imported where they are used."""
    extras = ["flwr", "ray", "plotly", "tensorboard", "matplotlib", "sklearn", "cvxpy"]
    code = f"import fedrane, fedrane.cli.app, sys; print([m for m in sys.modules if m in {extras}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
