"""Comparisons from Python: what is asked for, the table in each of its formats, and the files."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedrane
from fedrane import Comparison, Experiment
from fedrane.errors import ConfigError
from fedrane.methods.fedprox import FedProx
from fedrane.report.comparison import COLUMNS
from problems import Listener, quick

WORDS = ["dataset=digits", "model=mlp", "clients=4", "rounds=2", "epochs=1", "batch=256", "device=cpu"]


def summary(accuracy: float, speed: float = 1000.0, of: str = "global") -> dict[str, Any]:
    return {f"{of}/{which}": {f"{of}/accuracy": accuracy} for which in ("last", "best")} | {"samples_per_second": speed}


@pytest.fixture
def made() -> Comparison:
    """Of numbers made up: two that are equal as printed, one that is better for the clients, one that diverged."""
    runs = {
        "fedavg": [summary(0.8), summary(0.9)],
        "my_method": [summary(0.850001), summary(0.850002)],
        "local": [summary(0.7, of="personal")],
        "a|b": [],
    }
    return Comparison(runs, diverged={"a|b": "it diverged"}, labels={"my_method": "prox.py:Prox (strength=50 %)"})


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return fedrane.compare(["fedavg", "weak=fedprox", "local"], [*WORDS, "weak.strength=0.5"], seeds=2)


def test_as_on_the_command_line(compared: Comparison, tmp_path: Path) -> None:
    """In memory, the numbers are those of runs made one by one; each setting reaches its method alone."""
    assert list(compared.runs) == ["fedavg", "weak", "local"]
    assert compared.finished
    assert compared.folder is None
    plain = Experiment.from_words(WORDS)
    for label, method in (("fedavg", "fedavg"), ("weak", FedProx(strength=0.5)), ("local", "local")):
        for seed in (0, 1):
            alone = fedrane.run(plain.replace(method=method, seed=seed)).summary
            for _, model, which in COLUMNS:
                assert compared.runs[label][seed].get(f"{model}/{which}") == alone.get(f"{model}/{which}"), label
    assert not list(tmp_path.iterdir())


def test_the_settings_may_be_a_file_or_an_experiment(compared: Comparison, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(Experiment.from_words([*WORDS, "rounds=2"]).to_toml())
    for settings in (tmp_path / "exp.toml", str(tmp_path / "exp.toml"), Experiment.from_words(WORDS)):
        again = fedrane.compare("fedavg", settings, seeds=[1])
        assert again.runs["fedavg"][0]["global/last"] == compared.runs["fedavg"][1]["global/last"]


def test_whole_experiments_by_label(compared: Comparison) -> None:
    one = Experiment.from_words(WORDS)
    done = fedrane.compare({"plain": one, "strong": one.replace(method=FedProx(strength=0.5))})
    assert done.runs["plain"][0]["global/last"] == compared.runs["fedavg"][0]["global/last"]
    assert done.runs["strong"][0]["global/last"] == compared.runs["weak"][0]["global/last"]
    assert done.labels == {"plain": "fedavg", "strong": "fedprox"}


def test_a_folder_has_the_tables_and_is_gone_on_with(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def watch(name: str, seed: int) -> list[Listener]:
        calls.append((name, seed))
        return []

    stopped = fedrane.compare(
        ["fedavg", "local"], WORDS, out=tmp_path / "all", callbacks=watch, stop=lambda: len(calls) == 2
    )
    assert not stopped.finished
    assert "unfinished" in stopped.caption
    assert not (tmp_path / "all" / "table.md").exists()
    done = fedrane.compare(["fedavg", "local"], WORDS, out=tmp_path / "all", callbacks=watch)
    assert calls == [("fedavg", 0), ("local", 0), ("local", 0)], "what is finished is not run again"
    assert (tmp_path / "all" / "table.md").read_text() == done.to_markdown()
    assert (tmp_path / "all" / "table.csv").read_text() == done.to_csv()
    assert (tmp_path / "all" / "table.tex").read_text() == done.to_latex()


def test_a_table_of_another_measure(tmp_path: Path) -> None:
    """After the last round only: "best" is by accuracy. The runs are made once."""
    words = ["dataset=breast-cancer", "clients=3", "rounds=2", "epochs=1", "batch=64", "device=cpu", "lr=0.01"]
    plain = fedrane.compare(["fedavg", "local"], words, out=tmp_path)
    calls: list[str] = []
    done = fedrane.compare(
        ["fedavg", "local"], words, out=tmp_path, metric="auroc", callbacks=lambda name, seed: calls.append(name) or []
    )
    assert not calls
    assert plain.by("auroc") == done
    fedavg, local = done.rows
    assert fedavg["global_auroc"] == done.runs["fedavg"][0]["global/last"]["global/auroc"]
    assert fedavg["personal_auroc"] is None
    assert local["personal_auroc"] == done.runs["local"][0]["personal/last"]["personal/auroc"]
    assert (tmp_path / "table.md").read_text() == done.to_markdown()
    assert "| method | global AUROC | personal AUROC | samples/s |" in done.to_markdown()
    assert "AUROC in %, after the last round" in done.caption
    assert done.by("accuracy").to_markdown() == plain.to_markdown()


def test_a_measure_that_is_not_known_is_refused_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric=auc is not known.*auroc"):
        fedrane.compare(["fedavg"], WORDS, out=tmp_path / "all", metric="auc")
    assert not (tmp_path / "all").exists()


def test_runs_without_the_measure_have_none(made: Comparison) -> None:
    rows = made.by("sensitivity_at_specificity_95").rows
    assert all(row["global_sensitivity_at_specificity_95"] is None for row in rows)
    assert "or its runs no such measure" in made.by("f1").caption
    assert made.caption.startswith("accuracy in %, mean")


@pytest.mark.parametrize(
    ("methods", "settings", "seeds", "message"),
    [
        ([], WORDS, 1, "no methods are named"),
        ({}, (), 1, "there are no methods"),
        (["fedavg"], WORDS, 0, "seeds=0"),
        (["fedavg"], [*WORDS, "method=local"], 1, "method=local in a comparison"),
        (["fedprox", "fedprox"], WORDS, 1, "fedprox occurs twice among the methods"),
        (["fedavg", "a=fedprox"], [*WORDS, "a.clients=3"], 1, "a.clients=3.*Set clients for all"),
        ({"a": quick(), "b": quick(clients=7)}, (), 1, "b has clients=7, and a has clients=.*Set clients for all"),
        ({"a": quick(), "b": quick(seed=4)}, (), 1, "b has seed=4"),
        (["fedavg", "a=fedprox"], [*WORDS, "a.positive=7"], 1, "a.positive=7.*Set positive for all"),
        ({"a": quick(), "b": quick(rounds=7)}, WORDS, 1, "they have theirs already"),
        (["fedavg"], "clients=4 rounds=2", 1, "is one word.*Write .'clients=4', 'rounds=2'."),
        (["fedavg"], ["a.toml", "b.toml"], 1, "a.toml and b.toml: one experiment is one file"),
    ],
)
def test_mistakes(methods: Any, settings: Any, seeds: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fedrane.compare(methods, settings, seeds=seeds, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_what_a_file_has_for_nobody_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text("rounds = 1\n[schedule]\nfactor = 0.5\n")
    with pytest.warns(UserWarning, match=r"schedule\.factor=0\.5 is not used") as seen:
        fedrane.compare(["fedavg"], [tmp_path / "exp.toml", *(word for word in WORDS if word[:6] != "rounds")])
    assert [warning.filename for warning in seen] == [__file__]


# ---- formats


def test_the_rows_are_numbers(made: Comparison) -> None:
    fedavg, mine, local, diverged = made.rows
    assert fedavg["method"] == "fedavg"
    assert fedavg["global_last"] == pytest.approx(0.85)
    assert fedavg["global_last_std"] == pytest.approx(0.1 / 2**0.5)
    assert (mine["seeds"], local["seeds"], diverged["seeds"]) == (2, 1, 0)
    assert (local["global_best"], local["personal_best"], local["personal_best_std"]) == (None, 0.7, None)
    assert (diverged["samples_per_second"], diverged["diverged"], fedavg["diverged"]) == (None, True, False)


def test_csv_has_the_rows(made: Comparison, tmp_path: Path) -> None:
    text = made.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert lines == [{k: "" if v is None else str(v) for k, v in row.items()} for row in made.rows]


def test_a_data_frame_has_the_rows(made: Comparison) -> None:
    frame = made.to_pandas()
    assert list(frame.index) == [row["method"] for row in made.rows]
    for row in made.rows:
        for name, value in row.items():
            if name != "method":
                found = frame.loc[row["method"], name]
                assert (found != found) if value is None else (found == value), name
    assert {str(frame[name].dtype) for name in frame if name not in ("seeds", "diverged")} == {"float64"}


def test_without_pandas_the_error_names_the_extra(made: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"to_pandas needs the extra 'pandas'.*pip install 'fedrane\[pandas\]'"):
        made.to_pandas()


def marked(made: Comparison) -> dict[str, list[str]]:
    """The marked entries in each format, as plain text."""
    console = Console(record=True, width=200, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(made.table())
    screen = re.findall(r"\x1b\[1m(\d.*?)\x1b\[0m", console.export_text(styles=True))
    tex = [text.replace(r"$\pm$", "±") for text in re.findall(r"\\textbf\{(.*?)\}", made.to_latex())]
    html = re.findall(r"<b>(.*?)</b>", made._repr_html_())
    return {"md": re.findall(r"\*\*(.*?)\*\*", made.to_markdown()), "tex": tex, "html": html, "screen": screen}


def test_every_format_marks_the_same_as_best(made: Comparison) -> None:
    """Equal as printed is equal; a column with one method has no best."""
    for form, found in marked(made).items():
        assert sorted(found) == sorted(2 * ["85.00 ± 7.07", "85.00 ± 0.00"]), form


def test_the_text_tables_are_whole(made: Comparison) -> None:
    table, caption = made.to_markdown().split("\n\n")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} == {7}
    assert str(made) == made.to_markdown()
    assert "my_method is prox.py:Prox (strength=50 %)" in caption
    assert "a|b diverged" in caption
    assert made._repr_html_().count("<tr>") == 5
    lines = [line for line in made.to_latex().splitlines() if line.endswith(r"\\")]
    assert len(lines) == 5
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {5}


def test_a_notebook_gets_no_markup_of_a_name() -> None:
    assert "<script>" not in Comparison({"<script>": [summary(0.5)]})._repr_html_()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("pdflatex") or os.environ.get("CI")), reason="there is no LaTeX here")
def test_latex_compiles(made: Comparison, tmp_path: Path) -> None:
    head = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
    (tmp_path / "table.tex").write_text(head + made.to_latex(tmp_path / "only.tex") + "\\end{document}\n")
    assert (tmp_path / "only.tex").read_text() == made.to_latex()
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_nothing_is_reported_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedrane.compare(["fedavg"], WORDS)


def test_a_comparison_on_a_text_is_made_again_from_its_folder(tmp_path: Path) -> None:
    """Its ``auto`` partition is consecutive, not one of those of images."""
    words = ["dataset=zen", "clients=3", "rounds=1", "epochs=1", "window=8", "engine=sequential"]
    first, again = (fedrane.compare(["fedavg"], words, out=tmp_path) for _ in range(2))
    assert first.rows == again.rows
