"""Who may import whom, so that a method stays one readable file and engines know none."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedrane

SOURCE = Path(fedrane.__file__).parent
CORE = ("tree", "task", "algorithm", "ops/sgd", "errors")


def imports(path: Path, late: bool = True) -> set[str]:
    """What a file imports of the library; without ``late``, only when it is imported itself."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree) if late else tree.body:
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
    text = path.read_text(encoding="utf-8")
    of_fields = r'^    \w+: .* = .*\n    """|^    (?:choices|needs|needs_classes): '
    descriptions = re.findall(of_fields, text, re.MULTILINE)
    assert len(text.splitlines()) - len(descriptions) <= 120


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
    assert not {n for n in found if allowed(n, ("engines", "flower", "methods", "runner", "training", "cli", "report"))}


LAYERS = (
    ("cli",),
    ("flower",),
    ("reproduce",),
    ("report", "testing"),
    ("runner", "training"),
    ("engines",),
    ("experiment", "config"),
    ("methods",),
    ("algorithm", "task", "tree", "ops", "data", "models", "kernels"),
    ("system", "errors", "_version"),
)
"""From the top; a module imports from its own layer and from those below it (docs/architecture.md)."""
LATE = {("engines", "flower"), ("config", "engines")}
"""``engine=flower`` is imported when it is asked for: it needs packages that may not be there. The reference of all
keys is made from the names of the engines, too."""


def test_rooms_import_downwards_only() -> None:
    depth = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        used = {name.split(".")[1] for name in imports(path)} & depth.keys()
        upwards = {other for other in used if depth[other] < depth[room] and (room, other) not in LATE}
        assert not upwards, f"{path.relative_to(SOURCE)} imports {sorted(upwards)}, which are above it"


def test_no_module_imports_itself_through_others() -> None:
    names = {
        path: ".".join(("fedrane", *path.relative_to(SOURCE).with_suffix("").parts)) for path in SOURCE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    graph = {name: imports(path, late=False) & modules.keys() - {name} for name, path in modules.items()}
    for name in graph:  # a package runs before its modules, but does not need them to be complete
        graph[name] -= {name.rpartition(".")[0]}
    while leaves := [name for name, used in graph.items() if not used & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in a cycle, or above one: {sorted(graph)}"


SAME_MEANING = {
    "convolution": "kernels/gpu has the kernels of the operations in kernels",
    "batch_norm": "as convolution",
    "pooling": "as convolution",
    "sgd_step": "as convolution",
    "progress": "what a run shows while it trains; in cli, what a command adds to that",
    "tables": "tables of results, as text; in reproduce, those of the paper",
}
"""The names that several modules have, and the one thing that each stands for."""


def test_no_name_of_a_module_has_two_meanings() -> None:
    names = [path.stem for path in SOURCE.rglob("*.py") if not path.stem.startswith("_")]
    assert {name for name in names if names.count(name) > 1} == SAME_MEANING.keys()
    assert not {*names, *(path.name for path in SOURCE.rglob("*") if path.is_dir())} & sys.stdlib_module_names


def test_no_private_name_is_imported() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        private = {name for name in imports(path) if name.rpartition(".")[2].startswith("_")}
        assert private <= {"fedrane._version", "fedrane._version.__version__"}, path.relative_to(SOURCE)


@pytest.mark.parametrize("path", sorted((SOURCE / "kernels").rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_know_nothing_but_tensors(path: Path) -> None:
    assert not {name for name in imports(path) if not allowed(name, ("kernels",))}


def test_the_optimiser_imports_no_model() -> None:
    assert not {name for name in imports(SOURCE / "ops" / "sgd.py") if allowed(name, ("models", "task", "algorithm"))}


def test_the_core_needs_no_extra() -> None:
    """Flower, Plotly, pandas, the loggers and the plotting of figures are imported where they are used."""
    extras = [
        "flwr",
        "ray",
        "plotly",
        "tensorboard",
        "matplotlib",
        "sklearn",
        "cvxpy",
        "pandas",
        "pyarrow",
        "wandb",
        "mlflow",
    ]
    code = f"import fedrane, fedrane.cli.commands, sys; print([m for m in sys.modules if m in {extras}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
