"""The page as text: complete in itself, everything escaped, and missing parts named."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

import folders
from fedrane import report
from fedrane.cli.app import app
from fedrane.errors import FedraneError
from fedrane.report import page
from fedrane.report.runs import gather
from harness import TINY
from report_pages import CLASSES, HOSTILE, full, runs


class Reader(HTMLParser):
    """The elements of a page, its texts and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.inside == "script" else self.texts).append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    @property
    def plots(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return full(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    return Reader(text)


def test_nothing_is_fetched(read: Reader) -> None:
    """No element names another place, and the page forbids the browser to look for one."""
    for tag, attributes in read.elements:
        assert "src" not in attributes, tag
        if "href" in attributes:
            assert re.match(r"#|data:", attributes["href"] or ""), attributes
    policy = next(a["content"] for _, a in read.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not {"connect-src", "font-src", "frame-src"} & set(re.findall(r"[\w-]+-src", policy))


def test_names_are_names(read: Reader) -> None:
    """Names of methods, classes and notes, with any characters."""
    assert sum(tag == "script" for tag, _ in read.elements) == 3
    assert not {"img", "b", "iframe"} & {tag for tag, _ in read.elements}
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    texts = [text.strip() for text in read.texts]
    assert HOSTILE in texts
    assert set(CLASSES) <= set(texts)
    assert f"a note on {HOSTILE}" in texts
    shown = json.dumps([read.plots[key] for key in ("accuracy-global", "partition-0", "tsne-0")])
    assert "<img" not in shown
    assert "<b>" not in shown
    assert "&lt;b&gt;one" in shown


def test_every_plot_is_one_that_plotly_knows(read: Reader) -> None:
    """Each of its settings; and each plot has its place on the page, and something to draw."""
    ids = [attributes["id"] for _, attributes in read.elements if attributes.get("class") == "plot"]
    assert sorted(map(str, ids)) == sorted(read.plots)
    assert len(ids) == len(set(ids))
    for key, plot in read.plots.items():
        go.Figure(plot)  # raises on what it does not know
        for trace in plot["data"]:
            values = trace.get("z") or trace.get("y")
            assert json.dumps(values).strip("[], nul"), key


def test_every_section_is_there(read: Reader) -> None:
    keys = [attributes["id"] for tag, attributes in read.elements if tag == "section"]
    wanted = ["results", "accuracy", "clients", "cost", "cosine", "bargain", "features", "partition", "configuration"]
    assert keys == wanted
    links = [(attributes["href"] or "").removeprefix("#") for tag, attributes in read.elements if tag == "a"]
    assert links == wanted
    for section, lines in (("cosine", (0, 2, 3)), ("weights", (2, 3)), ("tsne", (0, 2, 3))):
        assert {key for key in read.plots if key.startswith(f"{section}-")} == {f"{section}-{k}" for k in lines}


def test_the_table_says_what_was_measured(tmp_path: Path) -> None:
    """Mean and deviation over seeds in per cent, and nothing where there is no such model."""
    table = page._results(runs(tmp_path))
    last = table["rows"][0]["cells"][0]
    values = [folders.record(3, seed)["global/accuracy"] for seed in (0, 1)]
    assert float(last["value"]) == pytest.approx(sum(values) / 2)
    assert last["text"] == f"{50 * sum(values):.2f}"
    assert last["about"].startswith("±")
    absent = table["rows"][1]["cells"][0]
    assert (absent["value"], absent["text"]) == ("", "–")
    assert [group["name"] for group in table["groups"]] == ["Global model", "Personal models", "A run"]
    assert sum(group["span"] for group in table["groups"]) == len(table["columns"])
    for column in zip(*(row["cells"] for row in table["rows"]), strict=True):
        best = [float(cell["value"]) for cell in column if cell["best"]]
        assert not best or min(best) == max(float(cell["value"]) for cell in column if cell["value"])


@pytest.mark.parametrize(
    ("make", "absent"),
    [
        (folders.simple, ["Bargaining weights: no run bargains", "t-SNE of features: it was not requested"]),
        (folders.alone, ["Cosines: no run records them", "Bargaining weights"]),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, make: Any, absent: list[str]) -> None:
    """In one line each, in place of the section."""
    lines, _ = gather([make(tmp_path / "run")])
    read = Reader(page.html(lines, [], {}))
    assert "One seed each, so there is no band." in read.texts
    for words in absent:
        assert [text for text in read.texts if text.startswith(words)], words
    links = {(attributes["href"] or "").removeprefix("#") for tag, attributes in read.elements if tag == "a"}
    assert links == {str(attributes["id"]) for tag, attributes in read.elements if tag == "section"} - {"absent"}


def test_a_run_that_was_never_evaluated(tmp_path: Path) -> None:
    """Still has its cosines, its partition and its settings."""
    records = [{key: v for key, v in folders.record(r).items() if not key.startswith("global/")} for r in (1, 2)]
    lines, _ = gather([folders.write(tmp_path / "run", records)])
    read = Reader(page.html(lines, [], {}))
    assert set(read.plots) == {"cosine-0", "partition-0"}
    assert [text for text in read.texts if text.startswith("Accuracy over rounds: no run has been evaluated yet.")]


def test_what_differs_comes_first(tmp_path: Path) -> None:
    """Then the fields of one method, then what all have in common; nothing is lost."""
    lines = runs(tmp_path)
    assert [row["key"] for row in page._differing(lines)] == ["rounds", "lr", "method.name"]
    shown = {row["key"] for row in page._differing(lines)}
    shown |= {key for block in page._settings(lines) for key, _ in block["pairs"]}
    assert shown == {key for line in lines for key in line.settings}


def test_the_same_runs_make_the_same_page(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    lines = [gather([folders.simple(tmp_path / name / "run")])[0] for name in ("one", "two")]
    assert page.html(lines[0], [], {}) == page.html(lines[1], [], {})


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with how to install it, before anything is written."""
    run = folders.simple(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FedraneError, match=r"pip install 'fedrane\[report\]'"):
        report.write([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_comparison_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is completed, and one line has how to get the page."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    ended = CliRunner().invoke(
        app, ["compare", "--methods", "local", "--out", str(tmp_path / "all"), *TINY, "rounds=1"]
    )
    assert ended.exit_code == 0
    assert ended.output.splitlines()[-1].startswith("no page was written: the page needs the extra 'report'")
    assert "pip install 'fedrane[report]'" in ended.output
    assert (tmp_path / "all" / "table.md").exists()
    assert not (tmp_path / "all" / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"target": 90.0}, "between 0 and 1"), ({"samples": 3}, "t-SNE"), ({"samples": -1}, "t-SNE")],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FedraneError, match=message):
        report.write([folders.simple(tmp_path / "run")], tmp_path / "report.html", **options)


def test_a_page_cannot_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FedraneError, match=r"report\.html"):
        report.write([folders.simple(tmp_path / "run")], tmp_path)


def test_the_target_that_was_asked_for_is_shown_first(tmp_path: Path) -> None:
    choices = list(page._targets(runs(tmp_path), 0.42))
    assert [choice["name"] for choice in choices if choice["first"]] == ["42 %, global model"]
    assert [choice["name"] for choice in page._targets(runs(tmp_path / "again"), None) if choice["first"]]
