"""The site: its pages are complete and true, its commands and snippets run, and its check finds what is broken."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_breast_cancer, load_digits

import fedrane
from fedrane import Experiment, methods, tree
from fedrane.config import reference
from harness import Driver

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*(DOCS / "howto").glob("[!i]*.md"), *(DOCS / f"{name}.md" for name in ("index", "start", "coming-from"))]
)
"""Those whose commands and snippets all run, in order, in one folder. The guide's and the README's Python runs in
test_docs.py, the commands of deploy.md in tests/deploy."""


@pytest.fixture(scope="session")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", DOCS / "build_site.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_site"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


# ---- commands and snippets


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found]


def lines(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").strip().splitlines()


def shown(line: str) -> str:
    """A line of output without its numbers, and with single spaces: speeds and the last digits differ."""
    return " ".join(re.sub(r"\d[\d.,:]*", "0", line).split())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_and_snippet_of_a_page_runs(
    page: Path, command: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: set[str] = set()
    for block in blocks(page):
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)  # noqa: S102 - our own text
        elif block.language == "sh":
            for line in lines(block):
                if line == "pip install -e '.[report]'":  # what tests/install does, in a new environment
                    continue
                program, *words = shlex.split(line)
                assert program == "fedrane", line
                ended = command(*words, cwd=tmp_path)
                assert ended.status == 0, (line, ended.stderr[-2000:])
                output = (ended.stdout + ended.stderr).replace(str(tmp_path), "/home/you")
                printed |= {shown(text) for text in output.splitlines()}
        else:
            assert block.language == "text", block
            assert [text for text in block.text.splitlines() if shown(text) not in printed] == []


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "guide.md", DOCS / "reproduce.md"]
ELSEWHERE = re.compile(r"data get|fmnist|table-gfl --tuned")
"""Commands that need a dataset which must be downloaded."""


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_the_commands_of_a_document_run(
    document: Path, command: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order and in one folder, with few rounds, where the files that the text speaks of are."""
    monkeypatch.chdir(tmp_path)
    x, _ = load_digits(return_X_y=True)
    np.savez("examples.npz", x=(x[:9].reshape(-1, 8, 8) / 16).astype(np.float32))
    patients = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "diagnosis"})
    patients["hospital"], patients["id"] = [f"h{row % 4}" for row in range(len(patients))], range(len(patients))
    patients.to_csv("patients.csv", index=False)
    patients.drop(columns=["diagnosis", "hospital", "id"]).to_csv("new.csv", index=False)
    (Path("prox.py")).write_text(next(b.text for b in blocks(ROOT / "CONTRIBUTING.md") if b.language == "python"))
    fedrane.run(["model=mlp", "clients=5", "rounds=1", "partition.kind=shards"], "runs/shards")
    ran = 0
    for block in blocks(document):
        if block.language == "toml" and block.text.startswith("# first.toml"):
            Path("first.toml").write_text(block.text)
        for line in lines(block) if block.language == "sh" else ():
            if not line.startswith("fedrane ") or ELSEWHERE.search(line):
                continue
            quick = re.sub(r"(--)?rounds([= ])\d\d+", r"\1rounds\g<2>3", line)
            quick = re.sub(r"(--)?rounds([= ])[4-9]\b", r"\1rounds\g<2>2", re.sub(r"--seeds [2-9]", "--seeds 1", quick))
            _, *words = shlex.split(quick, comments=True)
            ended = command(*words, cwd=tmp_path)
            assert ended.status == 0, (quick, ended.stdout[-500:], ended.stderr[-2000:])
            ran += 1
    assert ran


def test_the_data_of_a_page_are_read_as_it_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are what tests/report/test_browser.py downloads from a page, but for most of their columns."""
    monkeypatch.chdir(tmp_path)
    Path("report.csv").write_text("method,seed,round,stage,global/accuracy\nFedAvg,0,1,training,0.5\n")
    Path("report.json").write_text('{"methods": [{"runs": [{"seed": 0}]}]}')
    (snippet,) = [block for block in blocks(DOCS / "report.md") if block.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(snippet.text, "report.md", "exec"), names)  # noqa: S102 - our own text
    assert names["runs"] == [{"seed": 0}]
    assert "FedAvg" in capsys.readouterr().out


def test_a_page_with_commands_is_among_those_that_run() -> None:
    """Or its commands run in another test: see PAGES."""
    elsewhere = {DOCS / f"{name}.md" for name in ("guide", "deploy", "reproduce", "report")}
    pages = {path for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}  # records of what was tried
    assert {
        page for page in pages if any(block.language in ("sh", "python") for block in blocks(page))
    } - elsewhere == set(PAGES)


# ---- what the pages say


def test_the_navigation_has_every_page(site: ModuleType) -> None:
    config = yaml.safe_load((DOCS / "site.yml").read_text(encoding="utf-8"))

    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(inner)

    pages = {name for _, name in site.sources() if not name.startswith("decisions/0")}
    assert sorted(leaves(config["nav"])) == sorted(pages)


def test_every_method_has_a_page_and_every_field_is_on_it(site: ModuleType) -> None:
    for name, method in reference.built_in().items():
        if not method.preset:
            page = site.page(DOCS / "methods" / f"{name}.md", f"methods/{name}.md")
            assert "\n    " in page, f"{name}: no equation"
            assert "## Laws" in page
            for key in method.fields:
                assert f"| `{key.name}` |" in page
                assert key.meaning.replace("|", "\\|") in page


@pytest.mark.parametrize("name", [name for name, entry in methods.METHODS.items() if not entry.preset])
def test_the_defaults_in_a_methods_file_are_those_of_the_program(site: ModuleType, name: str) -> None:
    """A default is the first word of its cell."""
    table = site.FIELDS.search((DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8"))
    fields = {key.name: key.word for key in reference.built_in()[name].fields}
    assert bool(table) == bool(fields)
    rows = [site.cells(line) for line in table[0].splitlines()[2:]] if table else []
    written = {name.strip("`"): default.strip("`").split(" ")[0] for name, _, default, *_ in rows}
    assert written.keys() == fields.keys()
    assert {field: _number(word) for field, word in written.items()} == {f: _number(w) for f, w in fields.items()}


def _number(word: str) -> str | float:
    return float(word) if re.fullmatch(r"[\d.]+", word) else word


def rows() -> dict[str, list[str]]:
    """The table of methods, by name."""
    text = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[`([\w-]+)`\]\(.*?\) \| (.*) \|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in found}


def test_the_table_of_methods_is_that_of_the_program() -> None:
    expected = {
        name: [str(entry.year or "–"), entry.category] for name, entry in methods.METHODS.items() if not entry.preset
    }
    assert {name: cells[:2] for name, cells in rows().items()} == expected


SENT = sorted(name for name, entry in methods.METHODS.items() if not entry.preset)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "scaffold" else pytest.mark.slow) for n in SENT])
@pytest.mark.filterwarnings("ignore")
def test_the_traffic_in_the_table_is_measured(name: str) -> None:
    """In the second round: in the first, APPLE and frozen heads send more."""
    plain, result = (
        fedrane.run(Experiment(method=each, clients=4, rounds=2, epochs=1, batch=64, engine="sequential"))
        for each in ("fedavg", name)
    )
    model = plain.history[1]["bytes_up"]
    measured = (
        result.history[1]["bytes_up"],
        result.history[1]["bytes_down"],
        4 * tree.nbytes(result.client_states[0]),
    )
    assert [f"{each / model:.2f}" for each in measured] == rows()[name][2:5]


# ---- the builder


def test_generated_parts_replace_what_stands_for_them(site: ModuleType, tmp_path: Path) -> None:
    """And nothing is left to be made on any page."""
    pages = site.assemble(tmp_path).parent / "pages"
    assert not [path for path in pages.rglob("*.md") if "<!-- make:" in path.read_text(encoding="utf-8")]
    keys = (pages / "reference" / "keys.md").read_text(encoding="utf-8")
    expected = [site.row(f"`{key.name}`", key.type)[:-1] for key in reference.keys()]
    assert [start for start in expected if start not in keys] == []
    assert "## fedrane data get" in (pages / "reference" / "commands.md").read_text(encoding="utf-8")


def test_a_link_out_of_the_pages_becomes_a_name(site: ModuleType) -> None:
    """A forge shows the file; the site does not have it."""
    page = site.page(DOCS / "reproduce.md", "reproduce.md")
    assert "](../src" not in page
    assert "`src/fedrane/experiments`" in page
    assert "](contributing.md)" in site.page(DOCS / "protocol.md", "protocol.md")


def test_a_notebook_becomes_a_page_with_what_it_printed(site: ModuleType) -> None:
    cells = [
        {"cell_type": "markdown", "source": "# Title\n\nOne. Two."},
        {"cell_type": "code", "source": "x = 1\nprint(x)", "outputs": [{"text": "1\n"}]},
        {"cell_type": "code", "source": "y = 2", "outputs": []},
    ]
    page = "# Title\n\nOne. Two.\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n```python\ny = 2\n```\n"
    assert site.prose({"cells": cells}) == page
    assert site.Lesson("Title", "tutorials/title.md", page).first_sentence == "One."


def test_laws_are_in_words_beside_the_defects(site: ModuleType) -> None:
    """Names of tests would fill half the page, and cannot be broken on a phone."""
    page = site.page(DOCS / "defects.md", "defects.md")
    assert "::" not in page
    assert "| a client ends at the proximal minimiser |" in page
    assert "| fedavg: one seed gives the same bytes |" in page


def test_the_check_finds_what_is_broken(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="#top"></a><a href="https://example.org/a"></a>')
    assert list(site.check(tmp_path)) == []
    for part, problem in (
        ('<a href="absent.html"></a>', "is not there"),
        ('<a href="good.html#absent"></a>', "has no such anchor"),
        ('<a href="https://nowhere"></a>', "is no address"),
        ('<script src="https://example.org/x.js"></script>', "from another host"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "from another host"),
        ("<p>:func:<code>run</code></p>", "write the name alone"),
    ):
        (tmp_path / "bad.html").write_text(part)
        assert [problem in found for found in site.check(tmp_path)] == [True], part
    (tmp_path / "bad.html").unlink()
    (tmp_path / "font.css").write_text("@font-face { src: url(https://example.org/x.woff) }")
    assert ["from another host" in found for found in site.check(tmp_path)] == [True]
