"""Which cells a target has, what their settings are, and when two are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedrane.config import effects
from fedrane.config.settings import flat
from fedrane.data.partition import Partitioning
from fedrane.errors import ConfigError, DataError
from fedrane.experiment import Experiment
from fedrane.reproduce.targets import (
    Condition,
    Selection,
    _with_model,
    absent,
    cells,
    key_of,
    known,
    parse_seeds,
    row,
    row_names,
    settings_of,
    targets,
)

USER_METHODS = Path(__file__).with_name("user_methods.py")


def test_all_targets_of_the_paper_are_there() -> None:
    names = ["table-gfl", "table-pfl", "cosine", "tsne", "clients", "epochs", "lambda-cd", "temperature", "minority"]
    assert known() == names
    assert [target.name for target in targets("all")] == names


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("table-gfl", 11 * 12 * 5),
        ("table-pfl", 11 * 12 * 5),
        ("cosine", 4),
        ("tsne", 6),
        ("clients", 3 * 5 * 5),
        ("epochs", 3 * 4 * 5),
        ("lambda-cd", 5 * 2 * 5),
        ("temperature", 5 * 2 * 5),
        ("minority", 4 * 6 * 5),
    ],
)
def test_a_target_has_its_cells_each_once(name: str, count: int) -> None:
    made = cells(targets(name)[0])
    assert len({cell.key for cell in made}) == len(made) == count
    assert {cell.experiment.rounds for cell in made if cell.experiment} == {100}


def test_filters_choose_and_stand_in() -> None:
    (target,) = targets("table-gfl")
    chosen = Selection(("digits",), (0.1,), ("fedrane", "fedavg"), (0, 1), ("rounds=5",))
    made = cells(target, chosen)
    assert [(cell.row.name, cell.condition, cell.seed) for cell in made] == [
        (name, Condition("digits", 0.1), seed) for seed in (0, 1) for name in ("fedavg", "fedrane")
    ], "all of the first seed first, comparison methods before ours"
    assert {cell.experiment.rounds for cell in made if cell.experiment} == {5}


def test_a_varied_value_is_in_the_experiment() -> None:
    (target,) = targets("lambda-cd")
    values = [
        c.experiment.algorithm.contrast for c in cells(target, Selection(("fmnist",), seeds=(0,))) if c.experiment
    ]  # type: ignore[attr-defined]
    assert values == [0, 0.1, 0.5, 0.8, 1]
    with pytest.raises(ConfigError, match="varies"):
        cells(target, Selection(words=("method.contrast=1",)))
    with pytest.raises(ConfigError, match="varies"):
        cells(target, Selection(words=("fedrane.contrast=1",)))


def test_words_go_to_all_rows_or_to_one() -> None:
    (target,) = targets("table-gfl")
    words = ("epochs=1", "fedprox.strength=1")
    prox, avg = cells(target, Selection(("digits",), (0.5,), ("fedprox", "fedavg"), (0,), words))
    assert prox.settings["epochs"] == avg.settings["epochs"] == 1
    assert prox.settings["method.strength"] == 1.0
    prox, avg = cells(target, Selection(("digits",), (0.5,), ("fedprox", "fedavg"), (0,), ("fedprox.lr=0.03",)))
    assert (prox.settings["lr"], avg.settings["lr"]) == (0.03, 0.1), "a setting of the experiment as well"
    with pytest.raises(ConfigError, match="--dataset"):
        cells(target, Selection(words=("dataset=digits",)))
    with pytest.raises(ConfigError, match="--seeds"):
        cells(target, Selection(words=("fedavg.seed=7",)))
    with pytest.raises(ConfigError, match=r"ditto is not one of the methods\. They are: fedprox"):
        cells(target, Selection(methods=("fedprox",), words=("ditto.strength=1",)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("epochs=1", "epochs=2"), "epochs is 1 and 2"),
        (("method.strength=1",), r"fedavg has no such field.*fedprox\.strength=1"),
        (("preset=paper",), "each row has its settings"),
        (("partition.shards=3",), "partition.shards=3 would have no effect"),
        (("fedprox.strength=1", "fedprox.strength=2"), "a key has one value"),
    ],
)
def test_words_that_would_vanish_are_refused(words: tuple[str, ...], message: str) -> None:
    (target,) = targets("table-gfl")
    with pytest.raises(ConfigError, match=message):
        cells(target, Selection(("digits",), (0.5,), ("fedprox", "fedavg"), (0,), words))


def test_a_word_without_effect_on_some_datasets_is_left_out_there() -> None:
    """So that a cell it does nothing to is the plain one; without effect on all of them it is an error."""
    (target,) = targets("table-gfl")
    chosen = Selection(("digits", "cifar10"), (0.5,), ("fedavg", "fedprox"), (0,))
    plain = cells(target, chosen)
    for words in (("norm=local",), ("fedavg.norm=local", "fedprox.norm=local")):
        made = cells(target, replace(chosen, words=words))
        assert [cell.settings["norm"] for cell in made] == ["shared", "shared", "local", "local"]
        assert [cell.key == before.key for cell, before in zip(made, plain, strict=True)] == [True, True, False, False]
        for cell in made:
            assert cell.experiment is not None
            assert effects.settle(_with_model(cell.experiment))[1] == []
    with pytest.raises(ConfigError, match=r"^norm=shared would have no effect: .* model is convnet"):
        cells(target, replace(chosen, datasets=("digits",), words=("norm=shared",)))
    with pytest.raises(ConfigError, match=r"^fedprox\.norm=local would have no effect"):
        cells(target, replace(chosen, datasets=("digits",), words=("fedprox.norm=local",)))


def test_the_condition_s_alpha_is_not_held_against_a_saved_partition(tmp_path: Path) -> None:
    """It then only names the column; the run reports that it is not used."""
    (tmp_path / "p.npz").write_bytes(b"")
    (target,) = targets("table-gfl")
    words = (f"partition.file={tmp_path / 'p.npz'}",)
    (cell,) = cells(target, Selection(("digits",), (0.1,), ("fedavg",), (0,), words))
    assert cell.experiment is not None
    settled, notices = effects.settle(cell.experiment)
    assert [(n.source, n.key, n.value) for n in notices] == [("table-gfl", "partition.alpha", 0.1)]
    assert settled.partition.alpha == 0.5
    assert cell.settings["partition.alpha"] == 0.1, "what it is recorded under stays"


@pytest.mark.parametrize("name", known())
def test_no_shipped_setting_is_without_effect(name: str) -> None:
    (target,) = targets(name)
    for cell in cells(target, Selection(seeds=(0,))):
        assert cell.experiment is not None
        plain = cell.experiment.set_by(dict.fromkeys(flat(cell.experiment.to_dict()), "shipped"))
        assert effects.settle(plain)[1] == [], cell.name


def test_a_user_s_own_method_stands_among_them() -> None:
    (target,) = targets("table-gfl")
    made = cells(target, Selection(("digits",), (0.5,), ("all", f"{USER_METHODS}:Plain"), (0,)))
    groups = [cell.row.group for cell in made]
    assert groups == ["comparison"] * 8 + ["user"] + ["ours"] * 3
    with pytest.raises(ConfigError, match="not known"):
        cells(target, Selection(methods=("fedavgg",)))


def test_a_method_of_the_paper_that_is_not_here_is_a_cell_without_an_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedrane import methods

    monkeypatch.setattr(methods, "METHODS", {k: v for k, v in methods.METHODS.items() if k != "fedprox"})
    (target,) = targets("table-gfl")
    (cell,) = cells(target, Selection(("digits",), (0.5,), ("fedprox",), (0,)))
    assert cell.experiment is None
    assert "fedprox" in cell.problem


def test_every_row_file_can_be_read() -> None:
    assert len(row_names()) == 17
    for name in row_names():
        assert row(name).title


def test_an_own_target_is_a_file(tmp_path: Path) -> None:
    text = 'title = "Mine"\nkind = "curve"\nmeasures = ["global"]\nrows = ["fedavg"]\ndatasets = ["digits"]\n'
    path = tmp_path / "mine.toml"
    path.write_text(text + 'alphas = [0.5]\nseeds = 1\nvary = "batch"\nlabel = "batch"\nvalues = [8, 16]\n')
    (target,) = targets(str(path))
    assert [cell.settings["batch"] for cell in cells(target)] == [8, 16]
    path.write_text(text + "alphas = [0.5]\nseed = 1\n")
    with pytest.raises(ConfigError, match="'seed'"):
        targets(str(path))


WHOLE: dict[str, object] = {
    "title": "Mine", "kind": "table", "measures": ["global"], "rows": ["fedavg"], "datasets": ["digits"],
    "alphas": [0.5], "seeds": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"measures": "global"},
        {"measures": []},
        {"seeds": "3"},
        {"seeds": 0},
        {"seeds": -1},
        {"alphas": 0.5},
        {"alphas": ["0.5"]},
        {"datasets": []},
        {"kind": "tabel"},
        {"values": [1, 2]},
        {"vary": "batch"},
        {"settings": 3},
    ],
    ids=str,
)
def test_a_mistake_in_an_own_target_is_named(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in (WHOLE | wrong).items()))
    with pytest.raises(ConfigError, match=rf"mine\.toml: .*{next(iter(wrong))}"):
        targets(str(path))


@pytest.mark.parametrize("word", ["engine=flowr", "model=mlpp", "model=nofile.py:net", "partition.file=nofile.npz"])
def test_a_misspelt_word_is_reported_before_any_cell(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[2].partition(":")[0]):
        cells(targets("table-gfl")[0], Selection(("digits",), seeds=(0,), words=(word,)))


def test_what_is_named_twice_counts_once() -> None:
    assert parse_seeds("1,1,0") == (1, 0)
    (target,) = targets("table-gfl")
    made = cells(target, Selection(("digits", "digits"), (0.5, 0.5), ("fedavg", "fedavg"), (0,)))
    assert len(made) == 1


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="table-gfl"):
        targets("table-glf")
    with pytest.raises(DataError, match="fmnits"):
        absent(["fmnits"], str(tmp_path))
    assert list(absent(["digits", "cifar10"], str(tmp_path))) == ["cifar10"]
    for text in ("0", "x", "4-2"):
        with pytest.raises(ConfigError):
            parse_seeds(text)


# ---- when two cells are the same


def test_where_a_cell_runs_does_not_make_it_another() -> None:
    here = settings_of(Experiment(method="fedprox", device="cpu", data_root="/a", checkpoint_every=3))
    there = settings_of(Experiment(method="fedprox", device="auto", engine="sequential", data_root="/b"))
    assert key_of(here) == key_of(there)


@pytest.mark.parametrize(
    "word", ["lr=0.2", "seed=1", "method.strength=0.1", "partition.alpha=0.1", "precision=float64"]
)
def test_what_decides_the_result_makes_it_another(word: str) -> None:
    base = ["method=fedprox"]
    assert key_of(settings_of(Experiment.from_words([*base, word]))) != key_of(settings_of(Experiment.from_words(base)))


def test_a_record_from_before_a_field_was_added_still_counts() -> None:
    """As long as the field is at its default; and a record survives its way through JSON."""
    now = settings_of(Experiment(method="fedprox"))
    before = {key: value for key, value in now.items() if key not in ("method.strength", "clip")}
    assert key_of(json.loads(json.dumps(before))) == key_of(now)
    assert key_of(before) != key_of({**now, "method.strength": 0.5})


def test_a_field_without_effect_does_not_make_it_another() -> None:
    """So that a record counts after the default of such a field has changed."""
    plain = settings_of(Experiment(method="fedrane-wo-gne"))
    assert key_of({**plain, "method.power": 0.0, "method.scope": "model"}) == key_of(plain)
    assert key_of({**plain, "method.contrast": 0.1}) != key_of(plain)
    both = settings_of(Experiment(method="fedrane"))
    assert key_of({**both, "method.power": 0.0}) != key_of(both)


def test_an_own_method_is_known_by_its_content(tmp_path: Path) -> None:
    keys = []
    for folder, comment in (("a", ""), ("b", ""), ("c", "# changed\n")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "user_methods.py"
        path.write_text(USER_METHODS.read_text() + comment)
        keys.append(key_of(settings_of(Experiment(method=f"{path}:Plain"))))
    assert keys[0] == keys[1] != keys[2]


def test_own_data_are_known_by_their_content(tmp_path: Path) -> None:
    """In any folder; a changed file, image or partition makes another cell."""
    keys: dict[str, list[str]] = {"dataset": [], "folder": [], "partition": []}
    for condition, content in (("a", b"rows"), ("b", b"rows"), ("c", b"other")):
        (tmp_path / condition / "images" / "cat").mkdir(parents=True)
        file, image = tmp_path / condition / "mine.npz", tmp_path / condition / "images" / "cat" / "1.png"
        file.write_bytes(content)
        image.write_bytes(content)
        by_file = Experiment(partition=Partitioning(file=str(file)))
        for name, made in (
            ("dataset", Experiment(dataset=str(file))),
            ("folder", Experiment(dataset=str(image.parent.parent))),
            ("partition", by_file),
        ):
            keys[name].append(key_of(settings_of(made)))
    for name, digests in keys.items():
        assert digests[0] == digests[1] != digests[2], name


def test_a_file_that_changes_in_place_makes_another_cell(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    file.write_bytes(b"rows")
    before = key_of(settings_of(Experiment(dataset=str(file))))
    file.write_bytes(b"others")
    assert key_of(settings_of(Experiment(dataset=str(file)))) != before
