"""A sweep as real processes: it fills its table, outlives a kill, and shares its work with another."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from fedrane.experiment import Experiment
from fedrane.reproduce.results import lock
from fedrane.reproduce.targets import key_of
from harness import Driver, lines, until
from problems import SLOW

USER_METHODS = Path(__file__).parent.parent / "reproduce" / "user_methods.py"
TINY = ("model=mlp", "clients=4", "epochs=1", "batch=256", "device=cpu", "checkpoint_every=1")
TABLE = ("reproduce", "table-gfl", "--dataset", "digits", "--alpha", "0.5")


def results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "experiments" / "results" / "digits.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finished_cells(output: str) -> list[str]:
    """The cells that were run, in their order."""
    return re.findall(r"^\[\d+/\d+\] (.*?):", output, re.MULTILINE)


def test_a_table_fills_and_a_failing_row_is_marked(fedrane: Driver, tmp_path: Path) -> None:
    names = f"fedavg,fedprox,{USER_METHODS}:Broken,fedrane-wo-lra"
    command = (*TABLE, "--methods", names, "--seeds", "2", "--rounds", "2", *TINY)
    at_once = fedrane(*command, "--dry-run", "--json", cwd=tmp_path)
    assert at_once.status == 0, at_once.stderr
    assert [json.loads(line)["seconds"] for line in at_once.stdout.splitlines()] == [None] * 8, (
        "nothing is recorded yet"
    )
    assert "the speed of 8 cells on this machine is not known" in at_once.stderr
    assert "measuring" not in at_once.stderr
    planned = fedrane(*command, "--dry-run", "--measure", "--json", cwd=tmp_path)
    cells = [json.loads(line) for line in planned.stdout.splitlines()]
    assert planned.status == 0, planned.stderr
    assert [(cell["method"].rpartition(":")[2], cell["seed"]) for cell in cells] == [
        (name, seed) for seed in (0, 1) for name in ("fedavg", "fedprox", "Broken", "fedrane-wo-lra")
    ]
    assert {cell["status"] for cell in cells} == {"waiting"}
    assert all(cell["seconds"] is None if "Broken" in cell["method"] else cell["seconds"] > 0 for cell in cells)
    assert not results(tmp_path), "a dry run runs nothing"

    ended = fedrane(*command, cwd=tmp_path)
    assert ended.status == 1, "a cell has failed"
    assert len(finished_cells(ended.stdout)) == len(cells)
    row = r"{} +\d+\.\d\d ± \d+\.\d\d"
    for title in ("FedAvg", "FedProx", "FedRANE w/o LRA"):
        assert re.search(row.format(title), ended.stdout), ended.stdout
    assert re.search(r"Broken \(user's\) +failed", ended.stdout)
    assert "ZeroDivisionError: nobody is left" in ended.stdout
    for suffix in ("md", "csv", "tex"):
        assert "Broken" in (tmp_path / "runs" / "reproduce" / f"table-gfl.{suffix}").read_text()

    again = fedrane(*command, "--show", cwd=tmp_path)
    assert finished_cells(again.stdout) == []
    tables = [text.partition("Methods of the G-FL table")[2] for text in (ended.stdout, again.stdout)]
    assert tables[0] == tables[1], "the table needs only the results"


@SLOW
def test_killed_and_started_again_it_runs_what_is_missing(fedrane: Driver, tmp_path: Path) -> None:
    command = (*TABLE, "--methods", "fedavg,fedprox,feddyn", "--seeds", "1", "--rounds", "40", *TINY)
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for folder in (reference, killed):
        folder.mkdir()
    assert fedrane(*command, cwd=reference).status == 0
    process = fedrane.start(*command, cwd=killed)
    second = killed / "runs" / "reproduce" / "cells"
    until(lambda: any(lines(path) >= 5 for path in second.glob("*-fedprox-*")), "the second cell is on its way")
    process.send(signal.SIGKILL)
    assert process.wait().killed
    before = results(killed)
    assert [record["method"] for record in before] == ["fedavg"]
    ended = fedrane(*command, cwd=killed)
    assert ended.status == 0, ended.stderr
    assert finished_cells(ended.stdout) == [f"{name} on digits, α 0.5, seed 0" for name in ("FedProx", "FedDYN")]
    after = results(killed)
    assert after[0] == before[0], "what was done is left alone"
    assert after[1]["other_seconds"] is None, "the cell that was killed was resumed, not begun again"
    for one, other in zip(after, results(reference), strict=True):
        assert [one["settings"], one["global"]] == [other["settings"], other["global"]]


def test_two_sweeps_share_the_work(fedrane: Driver, tmp_path: Path) -> None:
    names = "fedavg,fedprox,feddyn,scaffold"
    command = (*TABLE, "--methods", names, "--seeds", "3", "--rounds", "5", *TINY)
    both = [fedrane.start(*command, cwd=tmp_path) for _ in range(2)]
    ended = [process.wait() for process in both]
    assert [end.status for end in ended] == [0, 0], [end.stderr for end in ended]
    done = [cell for end in ended for cell in finished_cells(end.stdout)]
    assert sorted(done) == sorted(set(done)), "no cell was run twice"
    assert len(done) == len(results(tmp_path)) == 12


def test_tuning_goes_on_and_its_file_is_read(fedrane: Driver, tmp_path: Path) -> None:
    grid = ("--grid", "lr=1e-9,0.5", "--grid", "method.strength=0.01")
    command = ("tune", "fedprox", "--rounds", "3", *grid, *TINY)
    first = fedrane(*command, cwd=tmp_path)
    assert first.status == 0, first.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    trials = finished_cells(first.stdout)
    assert len(trials) == 2
    for line, lr in zip(trials, ("1e-09", "0.5"), strict=True):
        assert f"lr={lr} method.strength=0.01" in line, "each trial says what it tries"
    (marked,) = (line for line in first.stdout.splitlines() if line.rstrip().endswith("best"))
    assert marked.split()[0] == "0.5"
    again = fedrane(*command, cwd=tmp_path)
    assert not finished_cells(again.stdout), "nothing is tried twice"
    assert "2 are done" in again.stdout
    ended = fedrane(
        *TABLE, "--methods", "fedprox", "--seeds", "1", "--rounds", "1", "--tuned", "runs/tuned/tuned.toml", *TINY,
        cwd=tmp_path,
    )  # fmt: skip
    assert ended.status == 0, ended.stderr
    (record,) = results(tmp_path)
    assert record["settings"]["lr"] == 0.5, "a learning rate near zero learns nothing"


TUNED = """
[[tuned]]
method = "fedprox"
dataset = "digits"
alpha = 0.1
settings = { lr = 0.3, method.strength = 0.7 }
"""


def test_a_run_and_a_comparison_use_tuned_settings(fedrane: Driver, tmp_path: Path) -> None:
    """They override a file's, words override them, and what they are is printed."""
    (tmp_path / "tuned.toml").write_text(TUNED)
    (tmp_path / "c.toml").write_text("lr = 0.2\nrounds = 1\nmethod = { name = 'fedprox', strength = 0.1 }\n")
    with_file = ("run", "c.toml", "--tuned", "tuned.toml", *TINY)
    ended = fedrane(*with_file, "--out", "a", cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    assert "note: fedprox: lr=0.3 method.strength=0.7 from tuned.toml" in ended.stderr
    assert fedrane(*with_file, "--out", "b", "lr=0.4", cwd=tmp_path).status == 0
    compare = ("compare", "c.toml", "--methods", "fedprox,fedavg", "--no-report", "--out", "c")
    compared = fedrane(*compare, "--tuned", "tuned.toml", *TINY, cwd=tmp_path)
    assert compared.status == 0, compared.stderr
    assert "tuned.toml has nothing for fedavg" in compared.stderr
    made = {name: Experiment.from_toml(tmp_path / name / "config.toml") for name in ("a", "b", "c/fedprox/seed-0")}
    assert {name: (e.lr, e.algorithm.strength) for name, e in made.items()} == {  # type: ignore[attr-defined]
        "a": (0.3, 0.7),
        "b": (0.4, 0.7),
        "c/fedprox/seed-0": (0.3, 0.7),
    }
    assert Experiment.from_toml(tmp_path / "c" / "fedavg" / "seed-0" / "config.toml").lr == 0.2
    for words in (("method=fedavg",), ("method=fedprox", "dataset=mine.npz")):
        refused = fedrane("run", *words, "--tuned", "tuned.toml", cwd=tmp_path)
        assert refused.status == 2
        assert "it has settings of fedprox on digits" in refused.stderr


def test_nothing_is_chosen_while_another_tries(fedrane: Driver, tmp_path: Path) -> None:
    """Of two tunings at once, the one that ends last chooses, among all trials."""
    words = ("--grid", "lr=1e-9,0.5", "--grid", "method.strength=0.01", "--rounds", "2", *TINY)
    command = ("tune", "fedprox", *words, "--out", str(tmp_path / "out"))
    assert fedrane(*command, cwd=tmp_path).status == 0
    tuned, results = tmp_path / "out" / "tuned.toml", tmp_path / "out" / "results" / "tune"
    chosen = tuned.read_text()
    tuned.unlink()
    worse, better = (results / "digits.jsonl").read_text().splitlines()
    (results / "digits.jsonl").write_text(worse + "\n")
    with lock(tmp_path / "out" / "tune" / ".locks" / key_of(json.loads(better)["settings"])):
        ended = fedrane(*command, cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    assert "another process is running 1 trial of fedprox" in ended.stdout
    assert not tuned.exists()
    assert fedrane(*command, cwd=tmp_path).status == 0
    assert tuned.read_text() == chosen


def test_a_file_that_tuning_cannot_write_is_an_error_before_the_trials(fedrane: Driver, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = fedrane("tune", "fedprox", "--tuned", "file/tuned.toml", *TINY, cwd=tmp_path)
    assert ended.status == 2
    assert "cannot be written" in ended.stderr
    assert not finished_cells(ended.stdout)


def test_a_method_without_a_good_trial_does_not_stop_the_others(fedrane: Driver, tmp_path: Path) -> None:
    method = f"{USER_METHODS}:Exploding"
    ended = fedrane("tune", f"{method},fedavg", "--grid", "lr=0.1", "--rounds", "2", *TINY, cwd=tmp_path)
    assert ended.status == 1
    assert f"no trial of {method} finished" in ended.stdout
    assert 'method = "fedavg"' in (tmp_path / "runs" / "tuned" / "tuned.toml").read_text()


def test_mistakes_are_one_line(fedrane: Driver, tmp_path: Path) -> None:
    head = 'title = "Mine"\nkind = "table"\nmeasures = ["globl"]\nrows = ["fedavg"]\n'
    (tmp_path / "mine.toml").write_text(head + 'datasets = ["digits"]\nalphas = [0.5]\nseeds = 1\n')
    for words, expected in (
        (("reproduce", "table-glf"), "Did you mean 'table-gfl'"),
        ((*TABLE, "--methods", "fedavgg"), "Did you mean 'fedavg'"),
        (("reproduce", "table-gfl", "--dataset", "fmnits"), "Did you mean 'fmnist'"),
        ((*TABLE, "epochs"), "not key=value"),
        ((*TABLE, "engine=flowr"), "engine='flowr' is not known"),
        ((*TABLE, "--methods", ","), "names nothing"),
        (("reproduce", "mine.toml"), "Did you mean 'global'"),
        (("tune", "fedprox", "--measure", "globall"), "Did you mean 'global'"),
        (("tune", "fedprox", "--measure", "personal"), "no personal model"),
        (("tune", "fedprox", "--grid", "fedprox.lr=0.1"), "--grid fedprox.lr"),
        (("tune", ""), "names nothing"),
    ):
        ended = fedrane(*words, cwd=tmp_path)
        assert ended.status == 2
        assert expected in ended.stderr
        assert ended.stderr.count("\n") == 1
        assert not results(tmp_path), "nothing is recorded"
