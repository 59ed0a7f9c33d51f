"""Every setting is used, in any order of the words; one that cannot be used is an error or a notice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fedrane import Algorithm, Experiment, Partitioning
from fedrane.algorithm import Needs
from fedrane.config import effects
from fedrane.config.settings import ALIASES, WORD, addressed, as_messages, by_label, parse
from fedrane.errors import ConfigError
from fedrane.experiment import KEYS
from fedrane.methods.ditto import Ditto
from fedrane.methods.fedprox import FedProx

PROX = 'clients = 7\n[method]\nname = "fedprox"\nstrength = 5\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(PROX)
    return path


def strength(e: Experiment) -> float:
    assert isinstance(e.algorithm, FedProx | Ditto)
    return e.algorithm.strength


# ---- the order of words does not matter


def test_the_order_of_words_does_not_matter() -> None:
    words = ["method=fedprox", "method.strength=5", "clients=3", "partition.kind=shards", "partition.shards=4"]
    made = [Experiment.from_words(order) for order in itertools.permutations(words)]
    assert strength(made[0]) == 5.0
    assert all(e == made[0] for e in made)


@pytest.mark.parametrize("words", [["method.nonsense=5", "method=fedprox"], ["method=fedprox", "method.nonsense=5"]])
def test_a_field_that_no_method_has(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'method\.nonsense': fedprox has no such field\. .*method\.strength"):
        Experiment.from_words(words)


def test_a_field_of_other_methods_names_them() -> None:
    with pytest.raises(
        ConfigError, match=r"scaffold has no such field; .*fedprox, feddyn, moon, .* have it\. .*Known: method\.option"
    ):
        Experiment.from_words(["method.strength=5", "method=scaffold"])
    with pytest.raises(ConfigError, match=r"fedavg has no such field; moon has it\. It has no fields"):
        Experiment.from_words(["method.width=5"])


@pytest.mark.parametrize(
    "pair", [("lr=1", "lr=2"), ("method=fedavg", "method=local"), ("method=ditto", "method.name=local")]
)
def test_a_key_with_two_values(pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="a key has one value"):
        Experiment.from_words(pair)
    assert Experiment.from_words([pair[0], pair[0]]) == Experiment.from_words(pair[:1]), "twice the same is no harm"


def test_every_alias_stands_for_a_key_and_is_none() -> None:
    keys = {"method", *KEYS}
    assert set(ALIASES.values()) <= keys
    assert not keys & ALIASES.keys()


@pytest.mark.parametrize(
    ("alias", "key", "value"),
    [("batch_size", "batch", "16"), ("num_clients", "clients", "3"), ("alpha", "partition.alpha", "0.3")],
)
def test_an_alias_is_its_key(tmp_path: Path, alias: str, key: str, value: str) -> None:
    """As a word, in a file, and as a word over a file that has the key; the settings have the real key."""
    wanted = Experiment.from_words([f"{key}={value}"])
    assert Experiment.from_words([f"{alias}={value}"]) == wanted
    assert parse([f"{alias}={value}"]) == {key: value}
    (tmp_path / "short.toml").write_text(f"{alias} = {value}\n")
    assert Experiment.from_toml(tmp_path / "short.toml") == wanted
    assert f"{alias} =" not in wanted.to_toml() or key.endswith(f".{alias}")
    (tmp_path / "whole.toml").write_text(Experiment().to_toml())
    assert Experiment.from_toml(tmp_path / "whole.toml", [f"{alias}={value}"]) == wanted
    origin = Experiment.from_words([f"{alias}={value}"]).origin
    assert origin is not None
    assert origin[key] == WORD, "a setting without effect is an error under either name"


@pytest.mark.parametrize("pair", [("lr", "learning_rate"), ("local_epochs", "num_epochs"), ("method", "algorithm")])
def test_a_key_under_two_names(tmp_path: Path, pair: tuple[str, str]) -> None:
    """It is an error even if both have the same value, among words and in a file."""
    first, second = pair
    for names in (pair, pair[::-1]):
        with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} are both set"):
            Experiment.from_words([f"{name}=1" for name in names])
    (tmp_path / "both.toml").write_text(f"{first} = 1\n{second} = 1\n")
    with pytest.raises(ConfigError, match=f"{first} and {second} are both set"):
        Experiment.from_toml(tmp_path / "both.toml")


def test_an_alias_and_the_table_that_has_its_key(tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text("alpha = 0.1\n[partition]\nalpha = 0.1\n")
    with pytest.raises(ConfigError, match=r"alpha and partition\.alpha are both set"):
        Experiment.from_toml(tmp_path / "both.toml")


def test_an_alias_for_one_of_several_methods() -> None:
    labels = {"fedavg": "fedavg", "fedprox": "fedprox"}
    shared, per_label = addressed(parse(["fedprox.learning_rate=1", "batch_size=8"]), labels, KEYS)
    assert (shared, per_label) == ({"batch": "8"}, {"fedavg": {}, "fedprox": {"lr": "1"}})
    with pytest.raises(ConfigError, match=r"fedprox\.lr and fedprox\.learning_rate are both set"):
        addressed(parse(["fedprox.lr=1", "fedprox.learning_rate=1"]), labels, KEYS)


def test_a_table_is_no_value() -> None:
    for words in itertools.permutations(["partition=iid", "partition.alpha=1"]):
        with pytest.raises(ConfigError, match="table"):
            Experiment.from_words(words)


def test_another_method_s_name_as_a_key() -> None:
    with pytest.raises(ConfigError, match=r"'fedprox': it is a method\. Write method=fedprox method\.FIELD"):
        Experiment.from_words(["fedprox.strength=1"])


# ---- words that override a file


def test_the_file_s_own_fields_stay_under_its_own_method(file: Path) -> None:
    """There are no notices: warnings are errors in tests."""
    for words in ([], ["method=fedprox"], ["lr=1"]):
        assert strength(Experiment.from_toml(file, words)) == 5.0
    assert strength(Experiment.from_toml(file, ["method.strength=2", "method=fedprox"])) == 2.0


def test_the_file_s_fields_under_another_method_are_not_used_and_that_is_reported(file: Path) -> None:
    """Also if the other method has a field of that name: its meaning and scale are different."""
    for name in ("fedavg", "ditto"):
        e, notices = Experiment.asked([f"method={name}"], file)
        assert e.algorithm == Experiment(method=name).algorithm
        assert e.clients == 7, "the rest of the file is kept"
        assert as_messages(notices) == [
            f"{file}: method.strength=5 is not used: meant for fedprox, and the method is {name}"
        ]
        with pytest.warns(UserWarning, match=r"method\.strength=5 is not used"):
            Experiment.from_toml(file, [f"method={name}"])
    assert strength(Experiment.asked(["method=ditto", "method.strength=2"], file)[0]) == 2.0


def test_defaults_of_another_method_are_not_worth_a_line(file: Path) -> None:
    file.write_text(Experiment(method="fedrane").to_toml())
    assert Experiment.from_toml(file, ["method=fedavg"]).method_name == "fedavg"


def test_a_method_whose_code_is_missing_can_be_replaced(file: Path) -> None:
    file.write_text('[method]\nname = "gone.py:Gone"\npull = 3\n')
    e, notices = Experiment.asked(["method=fedavg"], file)
    assert e.method_name == "fedavg"
    assert [notice.key for notice in notices] == ["method.pull"]


def test_a_method_of_ones_own_is_the_same_from_anywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes the absolute path; a word may have a relative one."""
    (file.parent / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom fedrane import Algorithm\n\n"
        "@dataclass(frozen=True)\nclass Mine(Algorithm):\n    pull: float = 2.0\n"
    )
    monkeypatch.chdir(file.parent)
    file.write_text(Experiment.from_words(["method=mine.py:Mine", "method.pull=3"]).to_toml())
    assert str(file.parent) in file.read_text()
    assert Experiment.from_toml(file, ["method=mine.py:Mine"]).to_dict()["method"]["pull"] == 3.0


def test_a_file_s_fields_without_a_method_wait_for_one(file: Path) -> None:
    file.write_text("[method]\nstrength = 3\n")
    assert strength(Experiment.from_toml(file, ["method=fedprox"])) == 3.0
    with pytest.raises(ConfigError, match="fedavg has no such field"):
        Experiment.from_toml(file)


def test_an_ablation_by_name_over_a_file_that_has_every_field(file: Path) -> None:
    """And back: the name defines the ablation."""
    for old, new in itertools.permutations(["fedrane", "fedrane-wo-lra", "fedrane-wo-gne"], 2):
        file.write_text(Experiment.from_words([f"method={old}", "method.head=linear"]).to_toml())
        e = Experiment.from_toml(file, [f"method={new}"])
        assert e.method_name == new
        assert e.to_dict()["method"]["head"] == "linear", "the rest stays"


def test_a_name_and_a_field_that_contradict_each_other(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedrane-wo-lra with method\.lra=True.*Use method=fedrane\."):
        Experiment.from_words(["method.lra=true", "method=fedrane-wo-lra"])


def test_a_preset_under_another_method() -> None:
    e, notices = Experiment.asked(["method=fedavg", "preset=paper"])
    assert (e.method_name, e.lr) == ("fedavg", 0.5)
    assert as_messages(notices) == [
        "preset=paper: method.length=ball and method.power=0.0 and method.scope=model and method.calibrate=False "
        "are not used: meant for fedrane, and the method is fedavg"
    ]


def test_a_file_between_a_preset_and_words(file: Path) -> None:
    """A field that overrides the preset belongs to the preset's method."""
    file.write_text('preset = "paper"\nlr = 0.3\n[method]\nblend = 0.5\n')
    e = Experiment.from_toml(file)
    assert (e.lr, e.batch, e.to_dict()["method"]["blend"], e.to_dict()["method"]["length"]) == (0.3, 128, 0.5, "ball")
    _, notices = Experiment.asked(["method=local"], file)
    of_preset = [("preset=paper", f"method.{key}") for key in ("length", "power", "scope", "calibrate")]
    assert [(n.source, n.key) for n in notices] == [*of_preset, (str(file), "method.blend")]


# ---- several methods


def test_labels() -> None:
    assert by_label("fedavg, a=fedprox ,b=fedprox,", ()) == {"fedavg": "fedavg", "a": "fedprox", "b": "fedprox"}
    assert by_label("x/a=b/prox.py:Prox", ()) == {"x/a=b/prox.py:Prox": "x/a=b/prox.py:Prox"}, "a path is no label"
    assert by_label("own=prox.py:Prox", ()) == {"own": "prox.py:Prox"}
    for text in ("fedavg,fedavg", "a=fedavg,a=local"):
        with pytest.raises(ConfigError, match=r"occurs twice.*Give labels"):
            by_label(text, ())
    for text in ("local=fedavg", "lr=fedavg"):
        with pytest.raises(ConfigError, match="already names something else"):
            by_label(text, {"lr"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b=fedavg", "the label 'a b' of fedavg: a label consists of letters"),
        ("local,a.b=prox.py:Prox", r"the label 'a\.b' of prox\.py:Prox"),
        ("=fedavg", "the label '' of fedavg"),
        ("weak=", "the label weak has no method"),
    ],
)
def test_a_bad_label_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_label(text, ())


LABELS = {"fedavg": "fedavg", "weak": "fedprox", "fedprox": "fedprox"}


def test_words_for_one_of_several() -> None:
    given = {"lr": "1", "weak.strength": "2", "weak.lr": "3", "fedprox.strength": "4"}
    shared, per_label = addressed(given, LABELS, {"lr"})
    assert shared == {"lr": "1"}
    assert per_label == {"fedavg": {}, "weak": {"method.strength": "2", "lr": "3"}, "fedprox": {"method.strength": "4"}}
    assert addressed({"weak.schedule.kind": "step"}, LABELS, KEYS)[1]["weak"] == {"schedule.kind": "step"}
    apple = {"apple": "apple"}
    given = {"apple.schedule": "cosine", "apple.schedule.kind": "step"}
    assert addressed(given, apple, KEYS)[1]["apple"] == {"method.schedule": "cosine", "schedule.kind": "step"}
    reference = "a.py:A"
    assert addressed({f"{reference}.x": "1"}, {reference: reference}, ())[1] == {reference: {"method.x": "1"}}


@pytest.mark.parametrize("key", ["ditto.strength", "a.py:A.strength"])
def test_a_word_for_one_that_is_not_there(key: str) -> None:
    with pytest.raises(ConfigError, match=r"is not one of the methods\. They are: fedavg, weak, fedprox"):
        addressed({key: "1"}, LABELS, ())


@pytest.mark.parametrize(("key", "meant"), [("waek.strength", "weak"), ("partiton.alpha", "partition")])
def test_a_misspelt_label_or_table(key: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown key '{key}'.*Did you mean '{meant}'.*Known: fedavg, weak, fedprox"
    ):
        addressed({key: "1"}, LABELS, KEYS)


@pytest.mark.parametrize("start", ["prox", "Prox"])
def test_a_field_of_a_file_that_has_no_label(start: str) -> None:
    own = "/home/you/prox.py:Prox"
    with pytest.raises(ConfigError, match=f"Give {own} a label: --methods {start}={own}"):
        addressed({f"{start}.strength": "1"}, {"fedavg": "fedavg", own: own}, KEYS)


def test_a_field_that_only_some_have() -> None:
    with pytest.raises(ConfigError, match=r"fedavg has no such field.* weak\.strength=1 fedprox\.strength=1"):
        addressed({"method.strength": "1"}, LABELS, ())
    both = {"fedprox": "fedprox", "ditto": "ditto"}
    assert addressed({"method.strength": "1"}, both, ())[0] == {"method.strength": "1"}


# ---- settings without effect

IDLE = [
    ["partition.kind=dirichlet", "partition.shards=2"],
    ["partition.kind=iid", "partition.alpha=0.5"],
    ["partition.kind=shards", "partition.alpha=0.5"],
    ["partition.kind=natural", "partition.alpha=0.5"],
    ["partition.kind=natural", "partition.minimum=10"],
    ["partition.file=p.npz", "partition.alpha=0.5"],
    ["partition.file=p.npz", "partition.minimum=10"],
    ["partition.file=p.npz", "partition.kind=dirichlet"],
    ["partition.shards=2"],
    ["schedule.factor=0.99"],
    ["schedule.kind=cosine", "schedule.factor=0.99"],
    ["schedule.kind=exponential", "schedule.every=1"],
    ["dataset=digits", "image_size=0"],
    ["dataset=x.npz", "image_size=32"],
    ["dataset=x.csv", "label=y", "image_size=32"],
    ["dataset=x.npz", "label=y"],
    ["dataset=digits", "client=10"],
    ["dataset=some/folder", "drop=id"],
    ["categories=zip"],
    ["dataset=wine", "impute=none"],
    ["model=mlp", "model_head=fc"],
    ["model_head=fc"],
    ["model=convnet", "norm=batch"],
    ["device=cpu", "precision=tf32"],
    ["method=fedrane-wo-lra", "method.contrast=0.2"],
    ["method=fedrane", "method.lra=no", "method.steps=3"],
    ["method=fedrane-wo-gne", "method.solver=newton"],
    ["method=fedrane", "method.scale=16"],
    ["method=fedrane", "method.sketch=512"],
    ["method=fedrane-wo-gne", "method.gram=sketch"],
    ["method=fedrane", "method.loss=ce", "method.head=linear", "method.scale=16"],
    ["method=spherefed", "method.calibrate=no", "method.ridge=0.001"],
]


@pytest.mark.parametrize("words", IDLE, ids=" ".join)
def test_a_word_without_effect_is_an_error(words: list[str]) -> None:
    """Even with the default value: the user expects that it has an effect."""
    key = words[-1].partition("=")[0]
    for order in (words, words[::-1]):
        with pytest.raises(ConfigError, match=rf"^{key}=.* would have no effect: that needs .* is .*Leave {key} out"):
            effects.settle(Experiment.from_words(order))


@pytest.mark.parametrize(
    "words",
    [
        ["partition.alpha=0.1"],
        ["partition.kind=quantity", "partition.alpha=0.1", "partition.minimum=3"],
        ["partition.kind=shards", "partition.shards=3", "partition.minimum=3"],
        ["schedule.kind=step", "schedule.factor=0.5", "schedule.every=2"],
        ["schedule.kind=exponential", "schedule.factor=0.5"],
        ["dataset=some/folder", "image_size=32"],
        ["dataset=x.CSV.gz", "label=y", "client=c", "drop=id", "categories=zip", "impute=median"],
        ["model=net.py:small", "model_head=fc", "norm=group"],
        ["model=resnet18", "norm=batch"],
        ["method=fedrane", "method.contrast=0.1", "method.solver=newton"],
        ["method=fedrane", "method.loss=ce", "method.scale=8"],
        ["method=spherefed", "method.ridge=0.1"],
    ],
    ids=" ".join,
)
def test_a_word_with_effect_is_none(words: list[str]) -> None:
    e = Experiment.from_words(words)
    assert effects.settle(e) == (e, [])


def test_a_file_s_value_without_effect_is_reported_and_taken_out(file: Path) -> None:
    file.write_text(
        "lr = 0.3\n[partition]\nalpha = 0.1\nshards = 2\n[schedule]\nkind = 'step'\nfactor = 0.5\nevery = 3\n"
    )
    e, notices = effects.settle(Experiment.from_toml(file, ["partition.kind=iid", "schedule.kind=exponential"]))
    assert as_messages(notices) == [
        f"{file}: partition.alpha=0.1 is not used: that needs "
        "partition.kind=dirichlet or dirichlet-capped or quantity or dirichlet-quantity, and partition.kind is iid",
        f"{file}: schedule.every=3 is not used: that needs schedule.kind=step, and schedule.kind is exponential",
    ], "a default is not worth a line: a run's config.toml has all of them"
    assert (e.partition.alpha, e.schedule.every, e.schedule.factor, e.lr) == (0.5, 1, 0.5, 0.3)
    file.write_text(e.to_toml())
    assert effects.settle(Experiment.from_toml(file))[1] == []


def test_a_preset_s_value_without_effect_is_taken_out_without_a_word() -> None:
    """A preset is not written for this experiment; and the saved configuration must run again without notices."""
    e, notices = effects.settle(Experiment.from_words(["preset=paper", "method=fedrane-wo-gne", "model=convnet"]))
    assert not notices
    assert (e.to_dict()["method"]["length"], e.norm, e.lr) == ("average", "shared", 0.5)


def test_from_python_only_a_value_other_than_the_default_is_an_error() -> None:
    plain = Experiment(schedule=Experiment.from_words(["schedule.factor=0.5"]).schedule)
    with pytest.raises(ConfigError, match=r"schedule\.factor=0\.5 would have no effect"):
        effects.settle(plain)
    assert effects.settle(Experiment())[1] == []
    replaced = Experiment.from_words(["schedule.kind=step", "schedule.every=1"]).replace(schedule=Experiment().schedule)
    assert effects.settle(replaced)[1] == [], "a word that was replaced is no longer recorded as a word"


def test_what_a_run_has_put_in_place_of_auto_is_nobody_s_word() -> None:
    """A partition from a file is recorded with the `kind` that would have been drawn."""
    for kind in ("natural", "dirichlet", "iid"):
        e = Experiment(partition=Partitioning(kind=kind, file="p.npz"))
        assert effects.settle(e) == (e, [])
    with pytest.raises(ConfigError, match=r"partition\.kind=shards would have no effect.*partition\.file is p\.npz"):
        effects.settle(Experiment(partition=Partitioning(kind="shards", file="p.npz")))


@dataclass(frozen=True)
class Misspelt(Algorithm):
    """Its ``needs`` names a field that it does not have."""

    needs: ClassVar[Needs] = {"sterngth=1.0": ("width",)}
    strength: float = 1.0
    width: float = 2.0


def test_a_method_whose_needs_are_misspelt() -> None:
    with pytest.raises(ConfigError, match=r"Misspelt\.needs names sterngth: it is not a field"):
        effects.settle(Experiment(method=Misspelt()))


def test_the_needs_of_methods_name_their_fields() -> None:
    from fedrane.methods import METHODS

    for name, entry in METHODS.items():
        for condition, named in entry.cls.needs.items():
            assert {condition.partition("=")[0], *named} <= entry.fields.keys() | {"optimizer"}, name
            values = {"True", "False", "orthonormal", "ce", "direct", "sgd", "sketch"}
            assert set(condition.partition("=")[2].split("|")) <= values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "epochs=3 steps=40",
            r"epochs=3 would .*needs training by epochs \(steps=0\), and steps is 40",
        ),
        ("momentum=0.9 optimizer=adam", r"momentum=0\.9 would have .*optimizer=sgd \(Adam has adam\.momentum\), and"),
        (
            "adam.decay=0.9",
            r"adam\.decay=0\.9 would .*needs optimizer=adam or adamw, and optimizer is sgd",
        ),
        ("method=apple method.core_lr=8 optimizer=adam", r"core_lr=8\.0 would .*needs optimizer=sgd, and that is adam"),
    ],
)
def test_what_the_optimiser_or_steps_leave_without_effect(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        effects.settle(Experiment.from_words(words.split()))
    for key in ("momentum=0.9", "optimizer=adam adam.decay=0.9", "steps=40", "method=apple method.core_lr=8"):
        assert effects.settle(Experiment.from_words(key.split()))[1] == []


def test_steps_replace_the_epochs_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("epochs = 2\n")
    e, notices = effects.settle(Experiment.asked(["steps=40"], tmp_path / "e.toml")[0])
    assert (e.steps, e.epochs) == (40, Experiment.epochs)
    assert [(n.key, n.value) for n in notices] == [("epochs", 2)]


def test_which_networks_have_batchnorm() -> None:
    from torch import nn

    from fedrane import models

    for name in models.MODELS:
        words = name in models.SEQUENCES
        body, _ = models.build(name, (8,), 10, 5) if words else models.build(name, (3, 32, 32), 10)
        has = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in body.modules())
        assert has == (name not in models.WITHOUT_NORM), name
