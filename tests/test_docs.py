"""The documents are true: their commands and keys exist, and their examples run. See also test_site.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer.main
import yaml
from typer.testing import CliRunner

import fedrane
from fedrane import Experiment, methods
from fedrane.cli.commands import app
from fedrane.config.settings import ALIASES, addressed, by_label, parse
from fedrane.data.partition import Partitioning
from fedrane.testing import conformance

ROOT = Path(__file__).parent.parent
GUIDE, README, CONTRIBUTING = ROOT / "docs" / "guide.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md"
REPRODUCE, DEPLOY = ROOT / "docs" / "reproduce.md", ROOT / "docs" / "deploy.md"
PAPER, SECURITY = ROOT / "docs" / "paper.md", ROOT / "docs" / "security.md"
DEFECTS = ROOT / "docs" / "defects.md"


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def keys(experiment: Experiment) -> dict[str, str]:
    """Every key, dotted, with its default as it is written on the command line."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(experiment):
        value = getattr(experiment, field.name)
        if field.name == "method":
            found["method"] = experiment.method_name
        elif dataclasses.is_dataclass(value):
            found |= {
                f"{field.name}.{inner.name}": _word(getattr(value, inner.name)) for inner in dataclasses.fields(value)
            }
        else:
            found[field.name] = _word(value)
    return found


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_alias_is_in_the_guide() -> None:
    text = " ".join(GUIDE.read_text(encoding="utf-8").partition("## All keys")[2].split())
    for key in dict.fromkeys(ALIASES.values()):
        names = " and ".join(f"`{alias}`" for alias, other in sorted(ALIASES.items()) if other == key)
        assert f"{names} (`{key}`)" in text


def test_every_alias_is_in_the_help_of_a_run() -> None:
    text = " ".join(CliRunner().invoke(app, ["run", "--help"]).stdout.split())
    assert all(f"{alias} ({key})" in text for alias, key in ALIASES.items())


def test_prose_has_at_most_120_columns() -> None:
    """Tables and code cannot be broken."""
    for page in sorted({*ROOT.glob("*.md"), *ROOT.glob("experiments/*.md"), *ROOT.glob("docs/**/*.md")}):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "<"))]
        too_long = [line for line in lines if len(line) > 120 and " " in line.strip()]
        assert not too_long, page.relative_to(ROOT)


def test_the_files_of_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {name for name in re.findall(r"[\w/]+(?:\.py|\.md|/(?![\w…]))", text) if "NAME" not in name}
    assert {"runner.py", "training/loop.py", "kernels/"} <= names
    source = ROOT / "src" / "fedrane"
    assert not [name for name in names if not any((base / name).exists() for base in (source, ROOT))]


def test_every_threat_names_tests_that_exist() -> None:
    """Each that is prevented or detected has one at least."""
    rows = [
        line
        for line in SECURITY.read_text(encoding="utf-8").splitlines()
        if re.search(r"\| (prevented|detected) \|", line)
    ]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("document", [README, GUIDE, CONTRIBUTING, REPRODUCE, DEPLOY], ids=lambda path: path.stem)
def test_commands_in_the_documents_exist_and_their_keys_too(document: Path) -> None:
    group: Any = typer.main.get_command(app)
    lines = [line for block in blocks(document, "sh") for line in block.splitlines() if line.startswith("fedrane ")]
    assert lines
    for line in lines:
        name, *words = shlex.split(line, comments=True)[1:]
        command = group.commands[name]
        if hasattr(command, "commands"):
            command, *words = command.commands[words[0]], *words[1:]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
        chosen = words[words.index("--methods") + 1] if "--methods" in words else ""
        labels = by_label(chosen, ()) if name == "compare" else {}
        given = parse(word for word in words if "=" in word and word != chosen and "," not in word)
        shared, own = addressed(given, labels, keys(Experiment()))
        for label, method in ((label, method) for label, method in labels.items() if method in methods.METHODS):
            Experiment.from_words(f"{k}={v}" for k, v in {**shared, "method": method, **own[label]}.items())
        pairs = ["method" if key == "method.name" else key for key in shared]
        assert {key for key in pairs if not key.startswith("method.")} <= keys(Experiment()).keys(), line


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_targets_and_programs_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + blocks(page, "sh"))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= TARGETS
    programs = re.findall(r"\bpython ((?:docs|benchmarks|experiments|examples|tests)/[\w/.]+)", " ".join(text.split()))
    assert [name for name in programs if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", [README, CONTRIBUTING, GUIDE, REPRODUCE], ids=lambda path: path.stem)
def test_a_command_that_no_test_runs_is_one_of_make_pip_or_pytest(document: Path) -> None:
    """Targets are run by CI, installations by ``make package``; what begins with fedrane runs in test_site.py."""
    lines = [line for block in blocks(document, "sh") for line in block.replace("\\\n", " ").splitlines()]
    programs = {re.sub(r"^(\w+=\S+ )+", "", line).split(" ")[0] for line in lines if not line.startswith(("#", " "))}
    assert programs - {""} <= {"fedrane", "make", "pip", ".venv/bin/pytest"}


@pytest.mark.parametrize("document", [README, GUIDE], ids=lambda path: path.stem)
def test_python_in_the_documents_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order and in one namespace, as a reader would; with few rounds."""
    monkeypatch.chdir(tmp_path)
    examples = blocks(document, "python")
    assert examples
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, example in enumerate(examples, 1):
        quick = re.sub(r"\brounds=\d+", "rounds=2", example)
        exec(compile(quick, f"{document.name}, example {number}", "exec"), names)  # noqa: S102 - our own text
    assert isinstance(names["scores"], torch.Tensor)


def test_the_method_of_the_contributors_page_keeps_every_law(tmp_path: Path) -> None:
    """Also the one that the page gives it."""
    method, law = blocks(CONTRIBUTING, "python")
    (tmp_path / "prox.py").write_text(method, encoding="utf-8")
    kind = methods.find(f"{tmp_path / 'prox.py'}:Prox").cls
    assert [problem for each in conformance.LAWS if (problem := conformance.check(kind(), each))] == []
    names: dict[str, Any] = {"Prox": kind}
    exec(compile(law, "CONTRIBUTING.md, the law", "exec"), names)  # noqa: S102 - our own text
    names["test_without_strength_it_is_fedavg"]()


def test_a_release_has_one_version_and_its_notes() -> None:
    """The notes are those that the workflow of a tag takes from the changelog."""
    version = fedrane.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    [of_tag] = [step for step in steps if step.startswith("test ")]
    [notes] = [step.partition(" > ")[0] for step in steps if "awk" in step]
    env = {**os.environ, "GITHUB_REF_NAME": f"v{version}"}
    assert subprocess.run(["bash", "-c", of_tag], cwd=ROOT, env=env, check=False).returncode == 0
    assert subprocess.run(["bash", "-c", of_tag], cwd=ROOT, env=env | {"GITHUB_REF_NAME": "v0"}, check=False).returncode
    shown = subprocess.run(["bash", "-c", notes], cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    assert shown.startswith(f"## [{version}]")
    assert "### Added" in shown


def measured(file: str, what: str, method: str = "fedavg") -> float:
    """Samples per second, from a committed result of ``benchmarks/engines.py``."""
    content = json.loads((ROOT / "benchmarks" / "results" / f"engines-{file}.json").read_text(encoding="utf-8"))
    [speed] = [r["samples_per_second"] for r in content["results"] if (r["what"], r["method"]) == (what, method)]
    return float(speed)


LOOP, ON_DEVICE, FLOAT32, BF16 = (
    "(a) plain loop, DataLoader",
    "(b) plain loop, data on the device",
    "(d) auto, float32",
    "(d) auto, bf16",
)


def test_the_speeds_are_those_that_were_recorded() -> None:
    claims = " ".join(README.read_text(encoding="utf-8").split())
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    convnet, resnet = measured("fmnist-gpu", BF16), measured("cifar10-gpu", BF16)
    loops = {file: measured(file, LOOP) for file in ("fmnist-gpu", "cifar10-gpu", "fmnist-cpu", "cifar10-cpu")}
    on_device = [measured(file, ON_DEVICE) for file in ("fmnist-gpu", "cifar10-gpu")]
    times = [convnet / loops["fmnist-gpu"], resnet / loops["cifar10-gpu"]]
    assert f"{1000 * round(convnet / 1000):,} samples/s with a ConvNet, {times[0]:.0f} times a plain loop" in claims
    assert f"ResNet-18 {1000 * round(resnet / 1000):,}, {times[1]:.0f} times" in claims
    assert f"{times[1]:.0f} to {times[0]:.0f} times as fast on a GPU" in claims
    slow = [measured(f"{name}-cpu", FLOAT32) / loops[f"{name}-cpu"] for name in ("fmnist", "cifar10")]
    small = measured("digits-cpu", FLOAT32) / measured("digits-cpu", LOOP)
    for text in (claims, page):
        assert f"{slow[0]:.1f} and {slow[1]:.1f} times" in text
    assert f"a small network on 100 clients {small:.0f} times" in claims
    assert f"{small:.0f} times for a small network on 100 clients" in page
    assert f"{on_device[0]:,.0f} and {on_device[1]:,.0f} samples/s" in page
    assert f"{convnet / on_device[0]:.0f} and {resnet / on_device[1]:.0f} times as fast" in page
    for file in loops:
        for what in (LOOP, FLOAT32, BF16):
            assert f"{measured(file, what):,.0f}" in page, (file, what)


def test_the_counts_of_the_readme_are_right() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    names = {name for name, entry in methods.METHODS.items() if not entry.preset}
    assert f"{len(names)} methods in short files" in text
    paper = tomllib.loads((ROOT / "src" / "fedrane" / "experiments" / "paper.toml").read_text(encoding="utf-8"))
    compared = {name for metric in ("global", "personal") for rows in paper[metric].values() for name in rows}
    assert f"all, and {len(names - compared)} methods more" in text
    rows = [line.split(" | ")[:2] for line in DEFECTS.read_text(encoding="utf-8").splitlines() if "::" in line]
    assert f"{len({tuple(row) for row in rows})} defects of other libraries" in text


def test_the_accuracies_of_the_readme_are_those_of_the_page_about_the_paper() -> None:
    """Which are held to the records below."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    command = "fedrane reproduce experiments/capped.toml --methods fedrane --alpha 0.5 --show"
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in under(command)]
    ours = {row[-1]: [float(part) for part in row[1].split(" ± ")] for row in cells}
    paper = {row[-1]: float(row[2]) for row in cells}
    globally, personally = "G-FL, last round", "P-FL, last round"
    assert f"FedRANE {ours[globally][0]:.1f} ± {ours[globally][1]:.1f} % with the global model" in text
    assert f"{ours[personally][0]:.1f} ± {ours[personally][1]:.1f} % with the clients' own" in text
    assert f"The paper has {paper[globally]:.1f} and {paper[personally]:.1f}" in text
    best: dict[str, list[str]] = {}
    for row in under("python experiments/search.py --plan experiments/contest.toml --show"):
        trial, _, *shown = [cell.strip() for cell in row.strip("| ").split("|")]
        best.setdefault(trial.partition(",")[0], shown)
    for name, method in (("FedRANE", "fedrane"), ("SphereFed", "spherefed"), ("FedAvg", "fedavg")):
        assert f"{name} {best[method][0]} / {best[method][1]}" in text


SEARCH = ROOT / "experiments" / "search.py"


@pytest.fixture
def search() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search", SEARCH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_search_runs_on_the_examples_that_tune_leaves(search: ModuleType, tmp_path: Path) -> None:
    """Each example has its client already: a saved partition of all examples must not be applied."""
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "seed = 0\nalphas = [0.5]\nrungs = [10]\n"
        '[base]\ndataset = "digits"\n"partition.file" = "all-examples.npz"\n[trials.plain]\n'
    )
    [piece] = search.load(plan).pieces()
    assert piece.wanted.partition.file == "all-examples.npz"
    assert piece.experiment.partition == Partitioning(kind="natural", test=search.VALIDATION)


def figures(text: str) -> list[str]:
    """The rows of the tables."""
    return [line for line in text.splitlines() if line.startswith("| ") and re.search(r"\| \d+\.\d+ ", line)]


def under(comment: str) -> list[str]:
    """The rows of the next table after a comment on the page about the paper."""
    after = PAPER.read_text(encoding="utf-8").partition(f"<!-- {comment} -->")[2]
    return figures(after[after.index("\n| ") :].partition("\n\n")[0])


def test_the_search_is_printed_as_it_was_recorded(search: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    search.load(SEARCH.with_suffix(".toml")).show()
    page, recorded = PAPER.read_text(encoding="utf-8"), figures(capsys.readouterr().out)
    assert recorded
    assert [line for line in recorded if line not in page] == []


def test_the_contest_is_printed_as_it_was_recorded(search: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    search.load(SEARCH.with_name("contest.toml")).show()
    rounds = capsys.readouterr().out.split("\n60 rounds")[1:]
    recorded = [row for text in rounds for row in figures(text.partition(" rounds")[0])]
    assert sorted(under("python experiments/search.py --plan experiments/contest.toml --show")) == sorted(recorded)


def test_the_table_of_the_contest_is_printed_as_it_was_recorded(
    search: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings that the contest has chosen, as the page says."""
    monkeypatch.chdir(ROOT)
    command = "fedrane reproduce experiments/capped.toml --methods fedrane --alpha 0.5 --show"
    chosen = search.load(SEARCH.with_name("contest.toml")).choices()["fedrane"]
    words = [f"fedrane.{key.removeprefix('method.')}={value}" for key, value in chosen.items()]
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], *words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    recorded = figures((tmp_path / "capped.md").read_text(encoding="utf-8"))
    assert sorted(row.rpartition("|")[0].rpartition("|")[0] for row in under(command)) == sorted(
        row.rpartition("|")[0] for row in recorded
    )
