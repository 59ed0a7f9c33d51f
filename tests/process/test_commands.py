"""The commands, as their user calls them."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedrane as library
from fedrane import data, methods
from fedrane.data.heterogeneity import Heterogeneity
from fedrane.experiment import KEYS
from fedrane.methods.fedprox import FedProx
from fedrane.report.runs import gather
from fedrane.testing import conformance
from fedrane.training.run_folder import CALIBRATION, Folder
from harness import TINY, USER_METHODS, Driver, checkpoints, executable, metrics, refused, same_run

WORDS = (*TINY, "rounds=3")
DIGITS = data.load("digits")


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def personal(fedrane: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a model for each client."""
    run = tmp_path_factory.mktemp("personal") / "run"
    assert fedrane("run", "--out", run, *WORDS, "method=local").status == 0
    return run


@pytest.fixture(scope="module")
def shared(fedrane: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with one global model."""
    run = tmp_path_factory.mktemp("shared") / "run"
    assert fedrane("run", "--out", run, *WORDS, "lr=0.5").status == 0
    return run


# ---- run and resume


def test_run_of_a_file_with_words_over_it(fedrane: Driver, tmp_path: Path) -> None:
    """Words win over the file; what neither sets has its default."""
    (tmp_path / "mine.toml").write_text(
        'rounds = 9\nclients = 4\nepochs = 1\nmodel = "mlp"\nmethod = "local"\n[partition]\nalpha = 0.3\nminimum = 20\n'
    )
    words = ("rounds=2", "partition.alpha=0.7", "batch=256", "device=cpu")
    assert fedrane("run", "mine.toml", *words, "--out", "run", cwd=tmp_path).status == 0
    written = library.Experiment.from_toml(tmp_path / "run" / "config.toml")
    assert (written.rounds, written.clients, written.method_name, written.batch) == (2, 4, "local", 256)
    assert (written.partition.alpha, written.partition.minimum, written.seed) == (0.7, 20, 0)
    assert fedrane("run", tmp_path / "run" / "config.toml", "--out", tmp_path / "again").status == 0
    same_run(tmp_path / "run", tmp_path / "again")


def test_run_of_a_file_whose_method_the_words_replace(fedrane: Driver, tmp_path: Path) -> None:
    """One line reports what of the file is not used; the configuration that is kept runs again without a message."""
    (tmp_path / "c.toml").write_text('[method]\nname = "fedprox"\nstrength = 5\n[partition]\nalpha = 0.1\n')
    for method, expected in (("fedprox", 0), ("fedavg", 1)):
        words = (*WORDS, f"method={method}", "--out", method)
        ended = fedrane("run", "c.toml", *words, cwd=tmp_path)
        assert (ended.status, ended.stderr.count("\n")) == (0, expected), ended.stderr
        assert library.Experiment.from_toml(tmp_path / method / "config.toml").method_name == method
        again = fedrane("run", f"{method}/config.toml", "--out", f"{method}-again", cwd=tmp_path)
        assert (again.status, again.stderr) == (0, "")
        same_run(tmp_path / method, tmp_path / f"{method}-again")
    assert ended.stderr.startswith("note: c.toml: method.strength=5 is not used: meant for fedprox, and the method is")
    assert library.Experiment.from_toml(tmp_path / "fedprox" / "config.toml").algorithm == FedProx(5.0)
    ended = fedrane("run", "--json", "c.toml", *WORDS, "partition.kind=iid", cwd=tmp_path)
    assert ended.stderr.startswith("note: c.toml: partition.alpha=0.1 is not used")
    assert all(line["event"] in ("round", "end") for line in parsed(ended.stdout))


def test_run_prints_its_progress(fedrane: Driver, tmp_path: Path) -> None:
    """Without a terminal: what is run, one line a round, a table, and where the results are."""
    ended = fedrane("run", *WORDS, cwd=tmp_path)
    head, *rounds = ended.stdout.splitlines()[:4]
    assert not ended.stderr
    assert head.startswith("fedavg on digits: 4 clients")
    assert "seed 0" in head
    assert [line.split()[:2] for line in rounds] == [["round", f"{n}/3"] for n in (1, 2, 3)]
    assert all("global" in line and "loss" in line and "samples/s" in line and "left" in line for line in rounds)
    accuracy = 100 * metrics(tmp_path / "runs" / "digits-fedavg-seed0")[-1]["global/accuracy"]
    assert f"{accuracy:.2f}" in ended.stdout.split("method")[1]
    assert ended.stdout.splitlines()[-1] == "results: runs/digits-fedavg-seed0"
    assert "\x1b" not in ended.stdout
    assert "results: runs/digits-fedavg-seed0-2" in fedrane("run", *WORDS, cwd=tmp_path).stdout


def test_run_into_a_folder_with_an_odd_name(fedrane: Driver, tmp_path: Path) -> None:
    """Brackets are no markup, and a long path is not broken."""
    run = tmp_path / "a run [/bold] of mine" / ("x" * 150)
    ended = fedrane("run", "--out", run, *WORDS)
    assert ended.status == 0
    assert f"results: {run}\n" in ended.stdout
    assert f"fedrane resume {run}" in fedrane("run", "--out", run, *WORDS).stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_output_that_is_not_utf8(tmp_path: Path, encoding: str) -> None:
    """A character that it does not have is escaped, and does not end the run."""
    ended = executable(tmp_path, "run", "--out", "run", *WORDS, env={"PYTHONIOENCODING": encoding}).wait()
    assert ended.status == 0, ended.stderr
    assert "\\u03b1" in ended.stdout, "the α of the partition"


def test_a_folder_whose_name_is_not_utf8(fedrane: Driver, tmp_path: Path) -> None:
    """It can be made, resumed and read; what needs a name in UTF-8 says so before the run."""
    run = tmp_path / os.fsdecode(b"run-\xff")
    for more, who in (("--tensorboard", "TensorBoard"), ("--profile", "profiler")):
        refused(fedrane("run", more, "--out", run, *WORDS), f"{who} cannot write to", "not UTF-8")
    assert not run.exists()
    assert fedrane("run", "--out", run, *WORDS).status == 0
    assert json.loads((run / "sessions.json").read_text())[0]["command"].count(str(run)) == 1
    assert fedrane("resume", run, "rounds=4").status == 0
    assert metrics(run)[-1]["round"] == 4
    inputs = tmp_path / os.fsdecode(b"x-\xff.npz")
    np.savez(inputs, x=DIGITS.x_test[:3])
    assert fedrane("predict", run, inputs).status == 0
    assert fedrane("report", run, "--samples", "0", "-o", tmp_path / "page.html").status == 0
    np.savez(inputs, x=DIGITS.x[:300], y=DIGITS.y[:300])
    words = [word for word in WORDS if not word.startswith("dataset=")]
    refused(fedrane("run", f"dataset={inputs}", "--out", tmp_path / "new", *words), "cannot be saved", "UTF-8")
    assert not (tmp_path / "new").exists()


def test_run_as_json(fedrane: Driver, tmp_path: Path) -> None:
    """Standard output is lines of JSON and nothing else: each round as recorded, then the summary."""
    ended = fedrane("run", "--json", "--out", tmp_path / "run", *WORDS)
    *rounds, end = parsed(ended.stdout)
    who = {"event": "round", "method": "fedavg", "seed": 0}
    assert [{**who, **record} for record in metrics(tmp_path / "run")] == rounds
    summary = Folder(tmp_path / "run").read_json("summary.json")
    assert end == {"event": "end", "finished": True, "folder": str(tmp_path / "run"), **summary}
    assert not ended.stderr


def test_run_quietly(fedrane: Driver, tmp_path: Path) -> None:
    """Only the result."""
    ended = fedrane("run", "--quiet", "--out", tmp_path / "run", *WORDS)
    assert ended.status == 0
    assert "round 1" not in ended.stdout
    assert "fedavg" in ended.stdout
    assert f"results: {tmp_path / 'run'}" in ended.stdout


def test_run_for_tensorboard(fedrane: Driver, tmp_path: Path) -> None:
    """Its scalars are in the run folder, those of a resumed run in a file of their own."""
    run = tmp_path / "run"
    assert fedrane("run", "--tensorboard", "--out", run, *WORDS).status == 0
    (written,) = (run / "tensorboard").glob("events.out.tfevents.*")
    assert b"global/accuracy" in written.read_bytes()
    newest = run / "checkpoints" / max(checkpoints(run))
    newest.write_bytes(b"")
    assert fedrane("resume", "--tensorboard", run).status == 0
    assert len(list((run / "tensorboard").iterdir())) == 2


def test_resume_of_a_finished_run(fedrane: Driver, tmp_path: Path) -> None:
    """Nothing is trained, and nothing is changed."""
    run = tmp_path / "run"
    assert fedrane("run", "--out", run, *WORDS).status == 0
    before = {path: path.read_bytes() for path in stamps(run)}
    trained = stamps(run / "checkpoints")
    ended = fedrane("resume", run)
    assert ended.status == 0
    assert "results:" in ended.stdout
    assert {path: path.read_bytes() for path in stamps(run)} == before
    assert stamps(run / "checkpoints") == trained


def test_files_can_be_read_by_those_who_may_read_the_others(fedrane: Driver, tmp_path: Path) -> None:
    """A checkpoint has the permissions of every other file."""
    run = tmp_path / "run"
    assert fedrane("run", "--out", run, *WORDS).status == 0
    assert len({path.stat().st_mode for path in stamps(run)}) == 1


def test_a_users_method(fedrane: Driver, tmp_path: Path) -> None:
    """Named by a path from here, killed, and resumed from elsewhere."""
    (tmp_path / "mine.py").write_text(USER_METHODS.read_text())
    words = (*TINY, "method=mine.py:Gliding", "method.glide=0.25", "rounds=4")
    assert fedrane("run", "--out", "run", *words, cwd=tmp_path, sabotage={"trigger": "line", "at": 3}).killed
    assert fedrane("resume", tmp_path / "run", cwd=Path("/")).status == 0
    ended = fedrane("run", "--out", "reference", *words, cwd=tmp_path)
    assert ended.status == 0
    assert "\n  mine.py:Gliding  " in ended.stdout, "its file in the table, and not the whole path"
    same_run(tmp_path / "run", tmp_path / "reference")
    assert library.Experiment.from_toml(tmp_path / "run" / "config.toml").to_dict()["method"]["glide"] == 0.25
    assert all("length" in record for record in metrics(tmp_path / "run")[:-1])
    killed, resumed = json.loads((tmp_path / "run" / "sessions.json").read_text())
    assert (killed["end"], killed["outcome"]) == (None, None)
    assert (resumed["outcome"], resumed["rounds"]["before"]) == ("finished", 2)


def test_a_users_network(fedrane: Driver, tmp_path: Path) -> None:
    """Named by a path from here, killed, and resumed from elsewhere."""
    (tmp_path / "mine.py").write_text(USER_METHODS.read_text())
    tiny = [word for word in TINY if word != "model=mlp"]
    words = (*tiny, "model=mine.py:network", "model_head=classifier", "rounds=4")
    assert fedrane("run", "--out", "run", *words, cwd=tmp_path, sabotage={"trigger": "line", "at": 3}).killed
    assert fedrane("resume", tmp_path / "run", cwd=Path("/")).status == 0
    assert fedrane("run", "--out", "reference", *words, cwd=tmp_path).status == 0
    same_run(tmp_path / "run", tmp_path / "reference")
    assert library.load(tmp_path / "run").model(torch.from_numpy(DIGITS.x_test[:5])).shape == (5, 10)


def test_more_rounds(fedrane: Driver, tmp_path: Path) -> None:
    """A finished run goes on to the end of one that was planned so; nothing else of it can be changed."""
    assert fedrane("run", "--out", tmp_path / "reference", *TINY, "rounds=5").status == 0
    run = tmp_path / "run"
    assert fedrane("run", "--out", run, *WORDS).status == 0
    for words, expected in (
        (["lr=0.5"], "only rounds can be changed"),
        (["rounds=many"], "whole number"),
        (["5"], "only rounds"),
        (["rounds=4", "rounds=5"], "rounds is 4 and 5"),
    ):
        refused = fedrane("resume", run, *words)
        assert refused.status == 2
        assert expected in refused.stderr
    ended = fedrane("resume", run, "rounds=5")
    assert ended.status == 0, ended
    assert "rounds=5 instead of 3; it goes on from round 3." in ended.stdout
    same_run(run, tmp_path / "reference")
    asked = json.loads((run / "sessions.json").read_text())[1]
    assert asked["command"].endswith(f"resume {run} rounds=5")


def test_a_folder_on_another_machine(fedrane: Driver, tmp_path: Path) -> None:
    """Where its method is not, and its user has not run it: the copy predicts once it is trusted."""
    (tmp_path / "mine.py").write_text(USER_METHODS.read_text())
    tiny = (word for word in TINY if not word.startswith("model="))
    words = (*tiny, "method=mine.py:Gliding", "model=mine.py:network", "model_head=classifier", "rounds=2")
    assert fedrane("run", "--out", tmp_path / "run", *words, cwd=tmp_path).status == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "mine.py").unlink()
    np.savez(tmp_path / "x.npz", x=DIGITS.x_test[:3])
    ask = ("predict", tmp_path / "moved", tmp_path / "x.npz", "--json")
    here, elsewhere = fedrane(*ask), {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    assert here.status == 0, here
    refused = fedrane(*ask, env=elsewhere)
    assert refused.status == 2
    assert "--trust-code" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert fedrane(*ask, "--trust-code", env=elsewhere).stdout == here.stdout
    page = ("report", tmp_path / "moved", "--out", tmp_path / "page.html")
    assert fedrane(*page, env={"XDG_STATE_HOME": str(tmp_path / "third")}).status == 0
    assert "--trust-code" in (tmp_path / "page.html").read_text(encoding="utf-8")


# ---- compare


def test_compare(fedrane: Driver, tmp_path: Path) -> None:
    """A table over two seeds, in the terminal and in a file, and a page; called again, nothing is trained."""
    command = ("compare", "--methods", "fedavg,local", "--seeds", "2", "--out", "all", *WORDS, "seed=3")
    ended = fedrane(*command, cwd=tmp_path)
    assert ended.status == 0
    assert "fedavg, seed 3 round 1/3" in ended.stdout
    assert "local, seed 4 round 3/3" in ended.stdout
    table = (tmp_path / "all" / "table.md").read_text()
    examples = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "±" in line][:2]
    assert [row[0] for row in examples] == ["fedavg", "local"]
    for row in examples:
        shown = next(line for line in ended.stdout.splitlines() if line.split()[:1] == [row[0]] and "±" in line)
        assert all(cell in shown for cell in row)
    ends = [metrics(tmp_path / "all" / "fedavg" / f"seed-{seed}")[-1]["global/accuracy"] for seed in (3, 4)]
    assert f"{100 * np.mean(ends):.2f} ± {100 * np.std(ends, ddof=1):.2f}" == examples[0][1]
    assert examples[0][3] == examples[1][1] == "–"
    runs = stamps(tmp_path / "all")
    again = fedrane(*command, cwd=tmp_path)
    assert again.status == 0
    assert "round 1" not in again.stdout
    renewed = ("table.md", "table.csv", "table.tex", "report.html")
    assert {path: stamp for path, stamp in stamps(tmp_path / "all").items() if path.name not in renewed} == {
        path: stamp for path, stamp in runs.items() if path.name not in renewed
    }
    assert (tmp_path / "all" / "table.md").read_text() == table
    numbers = list(csv.DictReader((tmp_path / "all" / "table.csv").read_text().splitlines()))
    assert [row["method"] for row in numbers] == ["fedavg", "local"]
    assert float(numbers[0]["global_last"]) == pytest.approx(np.mean(ends))
    assert f"{100 * np.mean(ends):.2f} $\\pm$" in (tmp_path / "all" / "table.tex").read_text()
    assert ended.stdout.splitlines()[-1] == "page: all/report.html"
    page = (tmp_path / "all" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert '"tsne-0"' in page, "FedAvg has a global model, whose features are shown"
    assert '"tsne-1"' not in page, "local training has none"


def test_compare_with_other_settings(fedrane: Driver, tmp_path: Path) -> None:
    """Results of another experiment are not taken for this one's; more seeds and methods are simply added."""
    command = ("compare", "--no-report", "--out", tmp_path / "all", *WORDS)
    assert fedrane(*command, "--methods", "fedavg").status == 0
    refused = fedrane(*command, "--methods", "fedavg", "partition.alpha=0.1")
    assert refused.status == 2
    assert "partition.alpha=0.5" in refused.stderr
    assert "--out" in refused.stderr
    assert fedrane(*command, "--methods", "fedavg,local", "--seeds", "2").status == 0
    assert len(list((tmp_path / "all").rglob("summary.json"))) == 4
    assert not (tmp_path / "all" / "report.html").exists()


def test_compare_one_method_with_itself(fedrane: Driver, tmp_path: Path) -> None:
    """Labels name the folders, the table's rows, the page's lines; the same command goes on after a kill."""
    words = (*WORDS, "lr=0.5", "weak.strength=0.1", "strong.strength=10", "strong.lr=0.05", "seed=1")
    command = ("compare", "--methods", "weak=fedprox,strong=fedprox,fedavg", "--out", "all", *words)
    assert fedrane(*command, "--no-report", cwd=tmp_path, sabotage={"trigger": "line", "at": 3}).killed
    assert [line.name for line in gather([tmp_path / "all"])[0]] == ["weak"], "known as soon as there is a run"
    alone = fedrane("resume", "all/weak/seed-1", cwd=tmp_path)
    assert any(line.split()[:1] == ["weak"] for line in alone.stdout.splitlines()), "its row in the table"
    ended = fedrane(*command, cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    assert "strong, seed 1 round 3/3" in ended.stdout
    assert "weak, seed 1 round" not in ended.stdout
    for label, method in (("weak", FedProx(0.1)), ("strong", FedProx(10.0))):
        written = library.Experiment.from_toml(tmp_path / "all" / label / "seed-1" / "config.toml")
        assert (written.algorithm, written.lr) == (method, 0.05 if label == "strong" else 0.5)
    table = (tmp_path / "all" / "table.md").read_text()
    assert [line.split()[1] for line in table.splitlines() if line.startswith("| ")][2:] == ["weak", "strong", "fedavg"]
    assert "weak is fedprox (strength=0.1, lr=0.5); strong is fedprox (strength=10.0, lr=0.05)" in table
    lines, notes = gather([tmp_path / "all"])
    assert [line.name for line in lines] == ["weak", "strong", "FedAvg"], "in the order in which they were named"
    assert not notes
    assert "strong" in (tmp_path / "all" / "report.html").read_text()
    refused = fedrane(*command[:-4], "weak.strength=0.2", "seed=1", cwd=tmp_path)
    assert "all/weak/seed-1 holds a run with method.strength=0.1, not 0.2" in refused.stderr
    more = fedrane(
        "compare", "--json", "--no-report", "--methods", "third=fedprox", "--out", "all", *WORDS, cwd=tmp_path
    )
    events = parsed(more.stdout)
    assert {line["label"] for line in events if line["event"] in ("round", "end")} == {"third"}
    assert list(events[-1]["runs"]) == ["third"]
    names = [line.name for line in gather([tmp_path / "all"])[0]]
    assert names == ["third", "weak", "strong", "FedAvg"], "those of before keep their labels and their order"


def test_compare_with_a_file_of_one_of_the_methods(fedrane: Driver, tmp_path: Path) -> None:
    """Its fields go to that method; there is a message only if nobody has a use for them."""
    (tmp_path / "c.toml").write_text('[method]\nname = "fedprox"\nstrength = 5\n')
    for names, expected in (("fedavg,fedprox", 0), ("fedavg,local", 1)):
        ended = fedrane("compare", "c.toml", "--no-report", "--methods", names, "--out", names, *WORDS, cwd=tmp_path)
        assert (ended.status, ended.stderr.count("note: c.toml: method.strength=5 is not used")) == (0, expected)
    written = library.Experiment.from_toml(tmp_path / "fedavg,fedprox" / "fedprox" / "seed-0" / "config.toml")
    assert written.algorithm == FedProx(5.0)


def test_compare_goes_on_where_the_dataset_names_the_clients(fedrane: Driver, tmp_path: Path) -> None:
    """Called again it trains nothing: neither where the dataset names the clients nor where a partition was saved."""
    owners = np.arange(len(DIGITS.y)) % 6
    np.savez(tmp_path / "mine.npz", x=DIGITS.x, y=DIGITS.y, client=owners, classes=np.array(DIGITS.classes))
    assert fedrane("partition", "dataset=digits", "clients=5", "--save", "p.npz", cwd=tmp_path).status == 0
    quick = ("--methods", "fedavg", "--no-report", "rounds=1", "epochs=1", "model=mlp")
    (tmp_path / "c.toml").write_text("[partition]\nalpha = 0.1\n")
    for words in (
        ("dataset=mine.npz", "--out", "owned"),
        ("c.toml", "dataset=mine.npz", "--out", "owned-too"),
        ("partition.file=p.npz", "--out", "saved"),
    ):
        for _ in range(2):
            ended = fedrane("compare", *quick, *words, cwd=tmp_path)
            assert ended.status == 0, ended.stderr
        assert "round 1" not in ended.stdout


def test_compare_after_a_users_method_has_changed(fedrane: Driver, tmp_path: Path) -> None:
    """Its earlier results are not shown for what it does now."""
    mine = tmp_path / "mine.py"
    mine.write_text(USER_METHODS.read_text())
    command = ("compare", "--no-report", "--out", "all", "--methods", "mine.py:Gliding", *WORDS)
    for status in (0, 0):
        assert fedrane(*command, cwd=tmp_path).status == status
    mine.write_text(USER_METHODS.read_text() + "# changed\n")
    refused = fedrane(*command, cwd=tmp_path)
    assert refused.status == 2
    assert "mine.py has changed since" in refused.stderr


def test_compare_as_json_with_a_users_method(fedrane: Driver, tmp_path: Path) -> None:
    """Lines of JSON alone; a field of one method goes to it alone; all folders are below the one named."""
    names = f"fedavg,{USER_METHODS}:Gliding"
    words = (*WORDS, f"{USER_METHODS}:Gliding.glide=0.1")
    for page in ("--no-report", "--report"):
        ended = fedrane("compare", "--json", page, "--methods", names, "--out", tmp_path / "all", *words)
        assert ended.status == 0
        last = parsed(ended.stdout)[-1]
        assert last["event"] == "comparison"
        assert [runs[0]["rounds"] for runs in last["runs"].values()] == [3, 4]
        assert last["report"] == (str(tmp_path / "all" / "report.html") if page == "--report" else None)
    assert len(list((tmp_path / "all").glob("*/seed-0/summary.json"))) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "all"]


# ---- report


def test_report(fedrane: Driver, shared: Path, personal: Path, tmp_path: Path) -> None:
    """On runs that were made one by one: a page where it was asked for, and figures beside it."""
    words = ("--samples", "50", "--title", "<mine>", "--target", "0.5")
    ended = fedrane("report", shared, personal, "-o", "some/page.html", "--figures", "pictures", *words, cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["page: some/page.html", "figures: pictures"]
    page = (tmp_path / "some" / "page.html").read_text()
    assert "<title>&lt;mine&gt;</title>" in page
    assert "50 %, global model</option>" in page
    assert (tmp_path / "pictures" / "accuracy.png").stat().st_size > 1000
    assert (tmp_path / "pictures" / "features.svg").read_text().startswith("<?xml")


def test_report_on_a_run_from_elsewhere(fedrane: Driver, shared: Path, tmp_path: Path) -> None:
    """Whose dataset and method are not on this machine: everything but the features is there, with the reason."""
    shutil.copytree(shared, tmp_path / "run")
    config = (shared / "config.toml").read_text()
    for old, new in (('name = "fedavg"', 'name = "/their/home/own.py:Own"'), ('"digits"', '"/their/data.npz"')):
        assert old in config
        config = config.replace(old, new)
    (tmp_path / "run" / "config.toml").write_text(config)
    ended = fedrane("report", "run", cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    page = (tmp_path / "report.html").read_text()
    assert '"accuracy-global"' in page
    assert "t-SNE of features: Own:" in page
    assert "/their/home/own.py" in page


def test_report_on_nothing(fedrane: Driver, tmp_path: Path) -> None:
    """One line, no page, no folder."""
    (tmp_path / "empty").mkdir()
    for what, expected in (("empty", "holds no run"), ("nowhere", "no such folder")):
        ended = fedrane("report", what, "-o", "page.html", cwd=tmp_path)
        assert ended.status == 2
        assert expected in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# ---- data


def test_partition_kept_for_later(fedrane: Driver, tmp_path: Path) -> None:
    """Drawn, saved, and used again under another seed: the clients hold the same examples."""
    words = (*TINY, "partition.alpha=0.2", "seed=5")
    ended = fedrane("partition", "--plot", "it.png", "--save", "it.npz", *words, cwd=tmp_path)
    assert ended.status == 0
    assert not ended.stderr
    assert "4 clients" in ended.stdout
    assert "α 0.2" in ended.stdout
    assert "partition.file=it.npz" in ended.stdout
    assert "label skew (mean over clients, from 0 to 1): Jensen-Shannon 0." in ended.stdout
    assert "size skew: Gini 0." in ended.stdout
    with Image.open(tmp_path / "it.png") as picture:
        assert min(picture.size) > 100
    for name, more in (("one", words), ("two", (*TINY, "partition.file=it.npz"))):
        assert fedrane("run", "--out", name, *more, "rounds=1", cwd=tmp_path).status == 0
    saved = [np.load(tmp_path / path) for path in ("it.npz", "one/partition.npz", "two/partition.npz")]
    for name in ("examples", "offsets"):
        assert all(np.array_equal(saved[0][name], other[name]) for other in saved)
    for file in saved:
        file.close()
    labels = [json.loads((tmp_path / name / "metadata.json").read_text())["labels"] for name in ("one", "two")]
    assert np.sum(labels[0], axis=1).tolist() == np.sum(labels[1], axis=1).tolist()


def test_heterogeneity_for_machines(fedrane: Driver) -> None:
    """The same measures as in the text, the settings and the counts they are made of, on one line."""
    ended = fedrane(
        "partition", "--json", *TINY, "partition.kind=pathological", "partition.classes=3", "skew.rotation=30"
    )
    [measured] = parsed(ended.stdout)
    assert "feature skew: rotation from −30° to 30°" in ended.stderr
    assert (measured["clients"], measured["partition"]["kind"], measured["skew"]["rotation"]) == (4, "pathological", 30)
    counts = np.array(measured["labels"])
    assert Heterogeneity.of(counts) == Heterogeneity(
        *(tuple(measured[name]) for name in ("sizes", "classes")),
        *(measured[name] for name in ("jensen_shannon", "total_variation", "gini")),
    )
    assert measured["classes"] == [3, 3, 3]


def test_datasets(fedrane: Driver) -> None:
    """All that are known, ready or not, for people and for machines."""
    actual = {entry["name"]: entry for entry in parsed(fedrane("datasets", "--json").stdout)}
    assert {"digits", "fmnist", "emnist-letters", "cifar10", "cifar100"} <= actual.keys()
    assert actual["digits"]["ready"] is True
    assert actual["cifar100"]["classes"] == 100
    shown = fedrane("datasets", env={"COLUMNS": "80"})
    assert shown.status == 0
    assert all(name in shown.stdout for name in actual)
    assert "data root" in shown.stdout
    table, _, _ = shown.stdout.partition("download: fedrane data get NAME")
    absent = [line for line in table.splitlines() if line.split() and line.split()[-1] in ("download", "hand")]
    assert len(absent) == sum(not entry["ready"] for entry in actual.values())
    assert max(map(len, absent)) <= 80, "a terminal need not break them"


# ---- methods


def test_methods(fedrane: Driver) -> None:
    """Each with its models and its fields, for people and for machines."""
    actual = {entry["name"]: entry for entry in parsed(fedrane("methods", "--json").stdout)}
    assert actual.keys() == methods.METHODS.keys()
    assert actual["fedavg"]["models"] == ["global"]
    assert actual["local"]["models"] == ["personal"]
    assert all(entry["summary"] for entry in actual.values())
    shown = fedrane("methods", env={"COLUMNS": "200"})
    assert shown.status == 0
    assert all(name in shown.stdout for name in actual)


def test_a_method_s_fields(fedrane: Driver) -> None:
    """Type, default, values and meaning of each, and the paper; also of a method of one's own."""
    shown = " ".join(fedrane("methods", "fedbabu", env={"COLUMNS": "200"}).stdout.split())
    for text in ("Oh, Kim & Yun", "a global model and personal", "method.tune str full", "values: full, head, body"):
        assert text in shown
    (mine,) = parsed(fedrane("methods", f"{USER_METHODS}:Forgetful", "--json").stdout)
    assert mine["summary"]
    refused = fedrane("methods", "fedproxx")
    assert refused.status == 2
    assert "Did you mean 'fedprox'" in refused.stderr


def test_keys(fedrane: Driver) -> None:
    """All of them, or those that have to do with a word: by name, meaning, value or alias."""
    listed = {key["name"]: key for key in parsed(fedrane("keys", "--json").stdout)}
    assert listed.keys() == {"method", "preset", *KEYS}
    assert listed["rounds"]["default"] == 50
    shown = fedrane("keys", env={"COLUMNS": "200"})
    assert all(name in shown.stdout for name in listed)
    for word, key in (("CLIP", "clip"), ("norm of the whole", "clip"), ("groupnorm", "norm"), ("wd", "weight_decay")):
        found = {each["name"] for each in parsed(fedrane("keys", word, "--json").stdout)}
        assert key in found
        assert found < listed.keys()
    assert "no key has to do with" in fedrane("keys", "nonsense").stderr


def test_what_was_meant(fedrane: Driver) -> None:
    """Settings written as options, and a command left out, are one line that says what to write."""
    for words, expected in (
        (("run", "--rounds", "5"), "write rounds=5"),
        (("compare", "--lr=0.1"), "write lr=0.1"),
        (("fedprox",), "run method=fedprox"),
        (("dataset=digits",), "run dataset=digits"),
        (("run", "device=gpu"), "device=cuda is the GPU"),
    ):
        ended = fedrane(*words)
        assert ended.status == 2
        assert expected in ended.stderr
        assert ended.stderr.count("\n") == 1
    unknown = fedrane("methods", "--rounds", "5")
    assert unknown.status == 2
    assert "No such option" in unknown.stderr, "there is nothing to set"


def test_check(fedrane: Driver) -> None:
    """A method that keeps the laws, and one of one's own that does not."""
    good = fedrane("check", "fedavg")
    assert good.status == 0
    assert "fails" not in good.stdout
    assert "laws hold" in good.stdout
    bad = fedrane("check", f"{USER_METHODS}:Forgetful")
    assert bad.status == 1
    assert "fails" in bad.stdout
    assert "seed" in bad.stdout


def test_check_of_a_method_that_crashes(fedrane: Driver, tmp_path: Path) -> None:
    """The error once, with its line and its hook; the other laws are not run."""
    lines = (
        "from fedrane import Algorithm",
        "class Torn(Algorithm):",
        "    def begin(self, task, ctx):",
        "        1 / 0",
    )
    (tmp_path / "torn.py").write_text("\n".join(lines))
    ended = fedrane("check", f"{tmp_path / 'torn.py'}:Torn")
    assert ended.status == 1
    assert ended.stdout.count("ZeroDivisionError") == ended.stdout.count("fails") == 1
    assert f"{tmp_path / 'torn.py'}:4, in Torn.begin" in ended.stdout
    assert ended.stdout.count("not run") == len(conformance.LAWS) - 1
    assert ended.stdout.splitlines()[-1].startswith(f"0 of {len(conformance.LAWS)} laws hold")


# ---- predict


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "examples.npz", x=DIGITS.x_test[:20])
    return tmp_path / "examples.npz"


def expected(model: library.Predictor, x: np.ndarray[Any, Any]) -> tuple[list[str], list[float]]:
    with torch.no_grad():
        chances = model.predict_proba(torch.from_numpy(x))
    return [str(label) for label in chances.argmax(1).tolist()], chances.max(1).values.tolist()


def test_predict_arrays(fedrane: Driver, shared: Path, examples: Path) -> None:
    """Each example of a file with its class and its probability, as the loaded model gives them."""
    actual = parsed(fedrane("predict", shared, examples, "--json").stdout)
    classes, chances = expected(library.load(shared).model, DIGITS.x_test[:20])
    assert [prediction["class"] for prediction in actual] == classes
    assert [prediction["probability"] for prediction in actual] == pytest.approx(chances, abs=1e-6)
    assert [prediction["input"] for prediction in actual] == [f"{examples}[{n}]" for n in range(20)]
    assert np.mean(np.array(classes, dtype=int) == DIGITS.y_test[:20]) > 0.3
    shown = fedrane("predict", shared, examples, env={"COLUMNS": "300"})
    assert shown.status == 0
    assert all(
        word in shown.stdout for word in ("input", "class", "probability", f"{examples}[19]", f"{chances[19]:.3f}")
    )
    assert "training examples" in shown.stdout


def test_predict_with_a_model_that_is_not_calibrated(
    fedrane: Driver, shared: Path, examples: Path, tmp_path: Path
) -> None:
    """Of a run that was stopped, or of an older version: a score is not called a probability."""
    old = tmp_path / "old"
    shutil.copytree(shared, old)
    (old / CALIBRATION).unlink()
    actual = parsed(fedrane("predict", old, examples, "--json").stdout)
    with torch.no_grad():
        scores = library.load(old).model(torch.from_numpy(DIGITS.x_test[:20])).max(1).values.tolist()
    assert [prediction["score"] for prediction in actual] == pytest.approx(scores, abs=1e-6)
    shown = fedrane("predict", old, examples, env={"COLUMNS": "300"}).stdout
    assert "score" in shown
    assert "probabilit" not in shown


def test_predict_images_with_a_clients_model(fedrane: Driver, personal: Path, tmp_path: Path) -> None:
    """Each client predicts with its own model; a grey picture and the same in colour are alike."""
    for number in range(3):
        Image.fromarray(DIGITS.x_test[number, 0]).save(tmp_path / f"{number}.png")
    Image.fromarray(DIGITS.x_test[0, 0]).convert("RGB").save(tmp_path / "colour.png")
    files = [tmp_path / name for name in ("0.png", "1.png", "2.png", "colour.png")]
    for client in (0, 3):
        actual = parsed(fedrane("predict", personal, *files, "--client", str(client), "--json").stdout)
        classes, chances = expected(library.load(personal).personal(client), DIGITS.x_test[[0, 1, 2, 0]])
        assert [prediction["class"] for prediction in actual] == classes
        assert [prediction["probability"] for prediction in actual] == pytest.approx(chances, abs=1e-6)
        assert [prediction["input"] for prediction in actual] == [str(file) for file in files]


def test_predict_needs_a_model_that_there_is(fedrane: Driver, shared: Path, personal: Path, examples: Path) -> None:
    """A global method has no client's model, a personal one no global model, and no run has client 4 of 4."""
    for command, word in (
        ((shared, examples, "--client", "0"), "global"),
        ((personal, examples), "personal"),
        ((personal, examples, "--client", "4"), "0 … 3"),
    ):
        ended = fedrane("predict", *command)
        assert ended.status == 2
        assert ended.stderr.count("\n") == 1
        assert word in ended.stderr


def test_predict_from_a_file_that_does_not_fit(fedrane: Driver, shared: Path, tmp_path: Path) -> None:
    """The file and what is wrong with it are named."""
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 1, 9, 9), np.uint8))
    np.savez(tmp_path / "none.npz", y=np.zeros(2))
    np.savez(tmp_path / "floats.npz", x=DIGITS.x_test.astype(np.float32))
    Image.new("L", (9, 9)).save(tmp_path / "wide.png")
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    for name in ("wide.npz", "none.npz", "floats.npz", "wide.png", "torn.png", "nowhere.png", "nowhere.npz"):
        ended = fedrane("predict", shared, tmp_path / name)
        assert ended.status == 2, ended
        assert ended.stderr.count("\n") == 1
        assert name in ended.stderr


# ---- the command itself


def test_the_installed_command(tmp_path: Path) -> None:
    """It knows its version."""
    ended = executable(tmp_path, "--version").wait()
    assert ended.status == 0
    assert ended.stdout.strip() == library.__version__


def test_without_a_word(fedrane: Driver) -> None:
    """It shows what it can do, ``run`` first."""
    ended = fedrane("--help")
    assert fedrane("-h").stdout.strip() == ended.stdout.strip() == fedrane().stdout.strip()
    assert re.findall(r"^. (\w+) ", ended.stdout.partition("Training")[2], re.MULTILINE)[0] == "run"
    assert ended.status == 0
    for command in (
        "run",
        "resume",
        "compare",
        "report",
        "predict",
        "partition",
        "datasets",
        "methods",
        "check",
        "data",
    ):
        assert command in ended.stdout


def test_names_do_not_control_the_terminal(fedrane: Driver, tmp_path: Path) -> None:
    """Of classes, as a CSV file has them, and of folders, as they are found."""
    hostile = "a\x1b[31mred\x1b]0;title\x07\u202e"
    run, table = tmp_path / "all" / hostile, tmp_path / "table.csv"
    table.write_text("x,y\n" + "".join(f"{i},{hostile}{i % 2}\n" for i in range(40)), encoding="utf-8")
    words = [f"dataset={table}", "label=y", "model=mlp", "clients=2", "rounds=1", "partition.kind=iid"]
    said = [fedrane("run", "--out", run, *words), fedrane("verify", tmp_path / "all"), fedrane("predict", run, table)]
    said += [fedrane("report", tmp_path / "all", "-o", tmp_path / "page.html"), fedrane("resume", run, "rounds=2")]
    for ended in said:
        assert ended.status == 0, ended
        assert (ended.stdout + ended.stderr).replace("\n", "").isprintable(), ended
    assert "\\x1b[31mred\\x1b]0;title" in said[2].stdout
    assert "\u202e" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_are_verified(fedrane: Driver, tmp_path: Path) -> None:
    """A line for each file of each run in a folder; the status is 1 if one is damaged."""
    for name in ("one", "two"):
        assert fedrane("run", "--out", tmp_path / "all" / name, *WORDS).status == 0
    intact = fedrane("verify", tmp_path / "all")
    assert intact.status == 0
    assert intact.stdout.count("\nok ") + 1 == 18
    assert intact.stdout.endswith("18 files, none damaged\n")
    metrics_file = tmp_path / "all" / "two" / "metrics.jsonl"
    metrics_file.write_text(metrics_file.read_text().replace('"round": 2', '"round": 3'))
    damaged = fedrane("verify", tmp_path / "all")
    assert damaged.status == 1
    assert f"damaged {metrics_file}: metrics.jsonl, line 2, is not as it was written" in damaged.stdout
    lines = parsed(fedrane("verify", "--json", tmp_path / "all" / "two").stdout)
    assert [line["file"] for line in lines if not line["ok"]] == ["metrics.jsonl", "summary.json"]
