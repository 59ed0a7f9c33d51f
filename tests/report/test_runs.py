"""Which runs a report is about: found, grouped by what they have in common, and refused with one clear line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import folders
from fedrane.data.augment import Augmentation
from fedrane.errors import FedraneError
from fedrane.methods import METHODS
from fedrane.report import style
from fedrane.report.runs import differing, folders_in, gather, names


def test_repetitions_are_one_line(tmp_path: Path) -> None:
    """In any order of the folders; a folder that is named twice counts once."""
    for name in ("fedavg", "local"):
        for seed in (0, 1, 2):
            folders.simple(tmp_path / name / f"seed-{seed}", name=name, seed=seed)
    lines, notes = gather([tmp_path])
    assert [(line.name, [run.seed for run in line.runs]) for line in lines] == [
        ("FedAvg", [0, 1, 2]),
        ("Local", [0, 1, 2]),
    ]
    assert not notes
    turned = [tmp_path / "local" / "seed-2", tmp_path / "local", tmp_path / "fedavg" / "seed-1", tmp_path / "fedavg"]
    again, notes = gather(turned)
    assert [(line.name, [run.seed for run in line.runs]) for line in again] == [
        ("Local", [0, 1, 2]),
        ("FedAvg", [0, 1, 2]),
    ]
    assert not notes


def test_runs_are_found_at_any_depth_and_other_programs_files_are_not(tmp_path: Path) -> None:
    folders.simple(tmp_path / "a" / "b" / "c" / "d" / "e" / "run")
    (tmp_path / "config.toml").write_text("[other]\nprogram = true\n")
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "config.toml").write_text("")
    (line,), _ = gather([tmp_path / "a"])
    assert len(line.runs) == 1
    assert [folder.path.name for folder in folders_in(tmp_path / "a")] == ["run"]
    with pytest.raises(FedraneError, match="holds no run"):
        folders_in(tmp_path / "tool" / "..nothing")


def test_a_run_that_diverged_is_named_as_such(tmp_path: Path) -> None:
    folders.write(tmp_path / "run", [folders.record(1)], finished=False, rounds=3)
    folders.session(tmp_path / "run", outcome="Diverged: round 2: the model is no longer finite")
    _, notes = gather([tmp_path / "run"])
    assert notes == [f"{tmp_path / 'run'} diverged: 1 of 3 rounds."]


def test_where_a_run_was_made_and_by_which_version_makes_no_other_line(tmp_path: Path) -> None:
    """Seeds of one experiment are put together though ``auto`` chose another engine; what an older version did not
    write is at its default, and shown where another run differs."""
    folders.simple(tmp_path / "a", engine="stacked", threads=1)
    folders.simple(tmp_path / "b", seed=1, engine="processes", threads=8)
    old = folders.simple(tmp_path / "c", seed=2) / "config.toml"
    left = old.read_text().partition("[augment]")[0]
    old.write_text(re.sub(r"^(threads|floor) = .*\n", "", left, flags=re.MULTILINE))
    lines, notes = gather([tmp_path])
    assert [(line.name, [run.seed for run in line.runs]) for line in lines] == [("FedAvg", [0, 1, 2])]
    assert not notes
    folders.simple(tmp_path / "d", augment=Augmentation(mixup=0.2))
    lines, _ = gather([tmp_path / "c", tmp_path / "d"])
    assert [line.name for line in lines] == ["FedAvg (augment.mixup=0.0)", "FedAvg (augment.mixup=0.2)"]


def test_a_federation_of_several_machines_stands_beside_its_simulation(tmp_path: Path) -> None:
    folders.simple(tmp_path / "a", engine="stacked")
    folders.simple(tmp_path / "b", engine="flower-remote")
    assert [line.name for line in gather([tmp_path])[0]] == [
        "FedAvg (engine=stacked)",
        "FedAvg (engine=flower-remote)",
    ]


def test_one_method_with_two_settings_is_two_lines(tmp_path: Path) -> None:
    folders.simple(tmp_path / "a", lr=0.1)
    folders.simple(tmp_path / "b", lr=0.5)
    folders.simple(tmp_path / "c", lr=0.5, name="other", checkpoint_every=7)
    lines, _ = gather([tmp_path])
    assert [line.name for line in lines] == ["FedAvg (lr=0.1)", "FedAvg (lr=0.5)", "other"]
    assert differing([line.settings for line in lines]) == ["lr", "method.name"]


def test_names_of_namesakes() -> None:
    """Of two methods of one name in two files, each is named by its file."""
    one, other = ({"method.name": f"/{folder}/prox.py:Prox"} for folder in ("a", "b"))
    assert names([one, other]) == ["Prox (name=/a/prox.py:Prox)", "Prox (name=/b/prox.py:Prox)"]
    assert names([one]) == ["Prox"]


def test_methods_have_the_names_of_their_papers() -> None:
    """One for each of the registry; a label is kept as it is."""
    assert set(style.TITLES) == set(METHODS)
    for name, spelt in style.TITLES.items():
        plain = spelt.replace("w/o", "wo").replace(" ", "-").replace("+", "").lower()
        assert plain.replace("-", "") == name.replace("-", "")
    settings = [{"method.name": name} for name in ("scaffold", "fedrane-wo-lra", "pfedme")]
    assert names(settings) == ["SCAFFOLD", "FedRANE w/o LRA", "pFedMe"]
    assert names(settings, ["", "scaffold", ""]) == ["SCAFFOLD", "scaffold", "pFedMe"]


def test_the_methods_of_a_comparison_keep_their_order(tmp_path: Path) -> None:
    """That in which they were named, also where only the folder is; others come after them, by path."""
    for name in ("apple", "fedavg", "local", "moon"):
        for seed in (0, 1):
            folders.simple(tmp_path / name / f"seed-{seed}", name=name, seed=seed)
    assert [line.name for line in gather([tmp_path])[0]] == ["APPLE", "FedAvg", "Local", "MOON"]
    order = tmp_path / "comparison.json"
    order.write_text('{"order": ["moon", "fedavg"], "labels": {}}')
    assert [line.name for line in gather([tmp_path])[0]] == ["MOON", "FedAvg", "APPLE", "Local"]
    order.write_text('{"order": "moon"}')
    with pytest.raises(FedraneError, match=r"comparison\.json: the order"):
        gather([tmp_path])


def test_unfinished_runs(tmp_path: Path) -> None:
    """It is left out if another repetition is finished, and shown otherwise; a note reports both."""
    folders.simple(tmp_path / "fedavg" / "seed-0")
    cut = folders.simple(tmp_path / "fedavg" / "seed-1", seed=1, rounds=2, finished=False)
    cut.joinpath("config.toml").write_text(cut.joinpath("config.toml").read_text().replace("rounds = 2", "rounds = 3"))
    lines, notes = gather([tmp_path])
    assert [run.seed for run in lines[0].runs] == [0]
    assert notes == [f"{cut} is unfinished: 2 of 3 rounds; it is left out, because others are finished."]
    lines, notes = gather([cut])
    assert [run.seed for run in lines[0].runs] == [1]
    assert notes == [f"{cut} is unfinished: 2 of 3 rounds."]


def test_a_run_that_has_not_finished_a_round(tmp_path: Path) -> None:
    """Is left out with a note; where there is nothing else, there is no report."""
    empty = folders.write(tmp_path / "empty", [], rounds=3, finished=False)
    folders.simple(tmp_path / "whole")
    lines, notes = gather([tmp_path])
    assert len(lines) == 1
    assert notes == [f"{empty} is left out: no round of it is finished yet."]
    with pytest.raises(FedraneError, match="nothing to report"):
        gather([empty])


def test_a_copy_of_a_run_counts_once(tmp_path: Path) -> None:
    folders.simple(tmp_path / "a")
    folders.simple(tmp_path / "b", data_root="elsewhere")
    lines, notes = gather([tmp_path])
    assert len(lines[0].runs) == 1
    assert notes == [f"{tmp_path / 'b'} is left out: it repeats {tmp_path / 'a'}, seed included."]


def test_the_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    run = folders.simple(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "global/acc')
    lines, _ = gather([run])
    assert [record["round"] for record in lines[0].first.history] == [1, 2, 3]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.toml", "seed = ", "TOML"),
        ("config.toml", "rounds = 3", "no seed"),
        ("config.toml", 'seed = 0\nrounds = "x"', "rounds=x"),
        ("metrics.jsonl", "{]\n{}\n", "line 1"),
        ("metrics.jsonl", '{"round": 1}\n[1]\n', "line 2"),
        ("metrics.jsonl", '{"loss": 1}\n', "line 1"),
        ("metrics.jsonl", '{"round": 1, "global/accuracy": {}}\n', "line 1"),
        ("metrics.jsonl", '{"round": 1, "cohort": [0, 9]}\n', "round 1 has cohort"),
        ("metrics.jsonl", '{"round": 1, "global/local_clients": [0.5]}\n', "round 1 has a global/local_clients"),
        ("metadata.json", "{}", "classes"),
        ("metadata.json", '{"inputs": {"classes": ["a"]}, "labels": [[1, 2]]}', "1 classes"),
        ("metadata.json", None, "missing"),
    ],
)
def test_damaged_folders(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    """One line that names the file and what is wrong with it."""
    run = folders.simple(tmp_path / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    with pytest.raises(FedraneError, match=message) as error:
        gather([run])
    assert file in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(FedraneError, match="holds no run"):
            gather([path])


def test_labels_of_a_comparison_name_its_lines(tmp_path: Path) -> None:
    """Also where one of its folders alone is asked for; two with one label are named by what differs."""
    for out, lr in (("one", 0.1), ("two", 0.5)):
        folders.simple(tmp_path / out / "weak" / "seed-0", lr=lr)
        folders.simple(tmp_path / out / "fedavg" / "seed-0", lr=lr, momentum=0.9)
        (tmp_path / out / "comparison.json").write_text('{"labels": {"weak": "weak"}}')
    assert [line.name for line in gather([tmp_path / "one"])[0]] == ["FedAvg", "weak"]
    assert [line.name for line in gather([tmp_path / "one" / "weak"])[0]] == ["weak"]
    both = [tmp_path / out / "weak" for out in ("one", "two")]
    assert [line.name for line in gather(both)[0]] == ["weak (lr=0.1)", "weak (lr=0.5)"]
    (tmp_path / "one" / "comparison.json").write_text('{"labels": ["weak"]}')
    with pytest.raises(FedraneError, match=r"comparison\.json has no labels"):
        gather([tmp_path / "one"])
