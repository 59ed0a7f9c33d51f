"""The page as text: complete in itself, everything escaped, and missing parts named."""

from __future__ import annotations

import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

import folders
from fedrane import report
from fedrane.cli.commands import app
from fedrane.errors import FedraneError
from fedrane.report import measures, page, plots, provenance
from fedrane.report.runs import gather
from harness import TINY
from report_pages import CLASSES, HOSTILE, full, many, runs


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
    assert sum(tag == "script" for tag, _ in read.elements) == 4
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
    wanted = [
        "results",
        "accuracy",
        "classes",
        "clients",
        "cost",
        "cosine",
        "bargain",
        "features",
        "partition",
        "configuration",
    ]
    assert keys == wanted
    links = [(attributes["href"] or "").removeprefix("#") for tag, attributes in read.elements if tag == "a"]
    assert links == ["results", *wanted], "the first is for those who skip the header"
    for section, lines in (("cosine", (0, 2, 3)), ("weights", (2, 3)), ("tsne", (0, 2, 3))):
        assert {key for key in read.plots if key.startswith(f"{section}-")} == {f"{section}-{k}" for k in lines}


def test_the_header_has_how_the_runs_were_made(read: Reader) -> None:
    """What differs from the defaults, versions, machine, date and commands, once each; hostile ones as text."""
    texts = [text.strip() for text in read.texts]
    for words in (
        "clients=5", "lr=0.5", "model=mlp", "fedrane 0.1.0", "torch 2.9.0",
        "a processor · cpu · engine stacked · 2 threads", "2026-01-02, 03:04 to 03:06 UTC (2 min 0 s)",
        "fedrane run lr=0.1",
    ):  # fmt: skip
        assert texts.count(words) == 1, words
    assert f"a processor · cpu · engine {HOSTILE} · 2 threads" in texts
    assert [text for text in texts if text.startswith("fedrane run '<img' src=x ")]
    assert not [text for text in texts if text.startswith("dataset=")], "it has its default"


def test_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    """Of all, then of each method; its fields without their table; what ``auto`` stands for apart."""
    folders.simple(tmp_path / "a", name="fedprox", participation=0.25)
    config = tmp_path / "a" / "config.toml"
    config.write_text(config.read_text().replace("[method]", "[method]\nstrength = 0.75"))
    folders.simple(tmp_path / "b", participation=0.25, lr=0.5)
    facts = {fact.title: fact for fact in provenance.facts(gather([tmp_path])[0])}
    assert facts["Not the defaults"].rows == [
        ("", ["clients=5", "rounds=3", "participation=0.25"]),
        ("FedProx", ["strength=0.75"]),
        ("FedAvg", ["lr=0.5"]),
    ]
    assert ("", ["model=mlp", "precision=auto", "partition.kind=auto"]) in facts["Default is auto"].rows
    assert set(facts) == {"Not the defaults", "Default is auto", "Seeds"}, "these folders have no sessions"


def test_the_data_are_those_of_the_runs(read: Reader, tmp_path: Path) -> None:
    """Each run with its settings, and each round with its numbers."""
    found = json.loads(read.scripts[1])
    lines = runs(tmp_path)
    assert [method["name"] for method in found["methods"]] == [line.name for line in lines]
    for method, line in zip(found["methods"], lines, strict=True):
        for data, run in zip(method["runs"], line.runs, strict=True):
            assert (data["seed"], data["rounds"], data["classes"]) == (run.seed, run.rounds, list(CLASSES))
            assert data["training_examples"] == run.labels.tolist()
            assert data["settings"] == dict(run.settings)
            for key, column in data["metrics"].items():
                assert column == pytest.approx([record[key] for record in run.history], rel=1e-5)
            assert "cosine" not in data["metrics"]
            assert data["last"].get("cosine", []) == pytest.approx(
                run.history[-1].get("cosine", []), rel=1e-5, abs=1e-12
            )


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """A folder may hold anything: infinite losses, dates and texts where numbers are expected."""
    records = [folders.record(1, **{"global/loss": 0.5}), folders.record(2, **{"global/loss": "many"})]
    path = folders.write(tmp_path / "run", records)
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"global/loss": 0.5', '"global/loss": Infinity'))
    config = path / "config.toml"
    config.write_text(config.read_text().replace("[method]", "since = 2026-01-02\nfar = inf\n[method]"))
    read = Reader(page.html(gather([path])[0], [], {}))
    (run,) = json.loads(read.scripts[1])["methods"][0]["runs"]
    assert run["metrics"]["global/loss"] == [None, None]
    assert (run["settings"]["since"], run["settings"]["far"]) == ("2026-01-02", None)


def test_more_methods_than_a_plot_can_hold(tmp_path: Path) -> None:
    """Each has its own plot, all with the same axes; costs are one point each."""
    read = Reader(many(tmp_path))
    alone = {key: plot for key, plot in read.plots.items() if key.startswith("accuracy-")}
    assert len([key for key in alone if "global" in key]) == 15
    assert (
        len({json.dumps([plot["layout"][axis]["range"] for axis in ("xaxis", "yaxis")]) for plot in alone.values()})
        == 1
    )
    for plot in alone.values():
        assert len({trace["legendgroup"] for trace in plot["data"] if trace.get("meta") != "shade"}) == 1
    assert [len(trace["x"]) for trace in read.plots["time-global"]["data"]] == [1] * 15
    marks = {(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in read.plots["time-global"]["data"]}
    assert len(marks) == 15, "no two look the same"


def test_paired_axes_share_a_range(read: Reader) -> None:
    for keys, axes in (
        (["accuracy-global", "accuracy-personal"], ["xaxis", "yaxis"]),
        (["time-global", "time-personal"], ["xaxis", "yaxis"]),
        (["sent-global", "sent-personal"], ["xaxis", "yaxis"]),
        (["clients-global", "clients-personal"], ["xaxis"]),
        (["weights-2", "weights-3"], ["coloraxis"]),
    ):
        for axis in axes:
            layouts = [read.plots[key]["layout"][axis] for key in keys]
            ranges = [layout.get("range", layout.get("cmax")) for layout in layouts]
            assert ranges[0] is not None
            assert ranges[0] == ranges[1], (keys, axis)
    for plot in (read.plots[key] for key in ("accuracy-global", "accuracy-personal")):
        low, high = plot["layout"]["yaxis"]["range"]
        values = [y for trace in plot["data"] for y in trace["y"]]
        assert low <= min(values) <= max(values) <= high


def test_clients_have_one_order(read: Reader) -> None:
    """The one with the most training examples first, with their number, in every plot of clients."""
    labels = np.arange(1, 21).reshape(5, 4).sum(1)
    wanted = [f"{client} ({labels[client]})" for client in np.argsort(-labels)]
    for key in ("cosine-0", "cosine-3", "weights-2"):
        plot = read.plots[key]
        assert plot["layout"]["yaxis"]["ticktext"] == wanted
        assert [row[0] for row in plot["data"][0]["customdata"]] == [[c, labels[c]] for c in np.argsort(-labels)]
    assert read.plots["cosine-0"]["data"][0]["z"][0][0] == pytest.approx(0.9 - 0.3 * 4), "client 4 is the first"
    assert read.plots["partition-0"]["layout"]["xaxis"]["ticktext"] == ["4", "3", "2", "1", "0"]
    assert read.plots["partition-0"]["data"][1]["y"] == sorted(labels.tolist(), reverse=True)
    for key in ("worst-global", "worst-personal"):
        shown = [who[2] for who in read.plots[key]["data"][0]["customdata"][0]]
        assert shown == sorted(shown, reverse=True)
    assert not [words for words in read.texts if "lowest accuracy on average" in words], "all five are shown"
    for axis in ("xaxis", "yaxis", "yaxis2"):
        assert read.plots["partition-0"]["layout"][axis]["title"]["text"]


@pytest.mark.parametrize(("classes", "angle"), [(["malignant", "benign"], 0), (["aeroplane"] * 10, -40)])
def test_names_of_classes_are_level_where_they_fit(classes: list[str], angle: int, tmp_path: Path) -> None:
    """Two words fit under a plot on a phone, ten do not."""
    recalls = measures.Recalls([0], np.full((1, len(classes)), 0.5))
    plot = plots.recall(runs(tmp_path), recalls, classes)
    assert plot["layout"]["xaxis"]["tickangle"] == angle


def test_post_training_rounds_are_marked(read: Reader) -> None:
    """In curves by a ring, in maps of rounds by a line, and the text names the methods."""
    rings = [t for t in read.plots["accuracy-global"]["data"] if t.get("marker", {}).get("symbol") == "diamond-open"]
    assert [(ring["legendgroup"], ring["x"]) for ring in rings] == [("2", [4.0])]
    assert [shape["x0"] for shape in read.plots["cosine-2"]["layout"]["shapes"]] == [3.5]
    assert "shapes" not in read.plots["cosine-0"]["layout"]
    assert [text for text in read.texts if "◇ is the post-training stage: FedRANE." in text]


def test_a_residual_of_rounding_error_is_a_line_of_text(read: Reader, tmp_path: Path) -> None:
    assert "residual" not in read.plots
    assert [text for text in read.texts if "is at most 1e-11" in text]
    records = [folders.record(r, **folders.bargain(r) | {"gne/residual": 10.0**-r}) for r in (1, 2)]
    other = Reader(page.html(gather([folders.write(tmp_path / "run", records)])[0], [], {}))
    assert "residual" in other.plots
    assert not [text for text in other.texts if "rounding error" in text]


def test_two_classes_have_an_f1(tmp_path: Path) -> None:
    recall = {"global/recall": [0.5, 0.75], "global/accuracy": 0.625, "global/balanced_accuracy": 0.625}
    run = folders.write(tmp_path / "run", [folders.record(1, **recall)], classes=("benign", "malignant"))
    table = page._results(gather([run])[0])
    shown = {name: row["text"] for name, row in zip(table["columns"], table["rows"][0]["cells"], strict=True)}
    assert shown["balanced"] == "62.50"
    assert shown["macro F1"] == "61.90"  # 2·0.5/(2·0.5+0.25+0.5) and 2·0.75/(2·0.75+0.5+0.25), their mean


def of_two_classes(root: Path, methods: int = 2, **more: Any) -> Path:
    """Methods with both models, on two classes."""
    for number in range(methods):
        records = [
            folders.record(r, **folders.personal(0.6))
            | folders.two_classes(0.7 + 0.02 * r + 0.01 * number)
            | folders.two_classes(0.8 + 0.01 * number, "personal/")
            for r in (1, 2, 3)
        ]
        name = ("fedavg", "fedprox")[number] if methods == 2 else f"x.py:M{number}"
        folders.write(root / str(number), records, name=name, classes=("benign", "malignant"), **more)
    return root


def test_two_classes_have_their_section_and_columns(tmp_path: Path) -> None:
    lines, _ = gather([of_two_classes(tmp_path)])
    table = page._results(lines)
    shown = {}
    for name, cell in zip(table["columns"], table["rows"][1]["cells"], strict=True):
        shown.setdefault(name, []).append(cell["text"])
    assert shown["AUROC"] == ["77.00", "81.00"]
    assert shown["AUPRC"] == ["67.00", "71.00"]
    assert shown["sensitivity"] == ["47.00", "51.00"]
    assert shown["F1"] == ["57.00", "61.00"]
    read = Reader(page.html(lines, [], {}))
    for key, value in (("auroc-global", 77), ("auprc-global", 67), ("auroc-personal", 81), ("auprc-personal", 71)):
        plot = read.plots[key]
        assert plot["data"][1]["y"][-1] == pytest.approx(value)
        assert plot["layout"]["yaxis"]["title"]["text"] == f"{key.partition('-')[0].upper()}, %"
        go.Figure(plot)
    assert [text for text in read.texts if "of the positive class, malignant." in text]
    assert [text for text in read.texts if "3 of 5 clients have test examples of both classes" in text]
    spoken = [a["aria-label"] or "" for _, a in read.elements if a.get("id") == "auroc-personal"]
    assert "AUROC, mean over clients" in spoken[0]
    assert "FedProx ends at 81.00 %" in spoken[0]


def test_the_page_names_the_class_that_was_to_be_found(tmp_path: Path) -> None:
    """Which may be called anything."""
    read = Reader(page.html(gather([of_two_classes(tmp_path, positive="<i>benign")])[0], [], {}))
    assert [text for text in read.texts if "are of the class <i>benign" in text]
    assert "i" not in {tag for tag, _ in read.elements}


def test_many_methods_have_a_plot_of_two_classes_each(tmp_path: Path) -> None:
    read = Reader(page.html(gather([of_two_classes(tmp_path, 8)])[0], [], {}))
    for kind in ("auroc-global", "auprc-personal"):
        each = [plot for key, plot in read.plots.items() if key.startswith(kind)]
        assert len(each) == 8
        assert len({str(plot["layout"]["yaxis"]["range"]) for plot in each}) == 1


def test_a_record_of_two_classes_without_them_is_shown(tmp_path: Path) -> None:
    """An edited file: nothing says which class it is of."""
    run = folders.write(tmp_path / "run", [folders.record(1, **folders.two_classes(0.7))])
    read = Reader(page.html(gather([run])[0], [], {}))
    assert "auroc-global" in read.plots


def test_names_do_not_cover_each_other(read: Reader) -> None:
    """At the ends of lines, and inside the plot."""
    for key in ("accuracy-global", "accuracy-personal"):
        low, high = read.plots[key]["layout"]["yaxis"]["range"]
        heights = sorted(t["y"][0] for t in read.plots[key]["data"] if t.get("meta") == "name")
        assert len(heights) == 3
        assert low <= heights[0] <= heights[-1] <= high
        assert min(np.diff(heights)) >= 0.999 * plots.NAME_HEIGHT / 330 * (high - low)


def test_headings_and_tables_have_names(read: Reader) -> None:
    """No level of headings is skipped; each table has a caption, each plot a text."""
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    tags = [tag for tag, _ in read.elements]
    assert tags.count("table") == tags.count("caption") == 3
    spoken = [a["aria-label"] for _, a in read.elements if a.get("class") == "plot"]
    assert all(spoken)
    assert [text for text in spoken if text and "FedAvg ends at" in text]


def test_the_table_names_what_was_measured(tmp_path: Path) -> None:
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
def test_what_is_missing_is_reported(tmp_path: Path, make: Any, absent: list[str]) -> None:
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
