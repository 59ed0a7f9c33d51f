"""The configuration: written, read, overridden, and rejected with the nearest known key."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrane import (
    AdamConstants,
    Algorithm,
    Attack,
    Augmentation,
    Experiment,
    FeatureSkew,
    Gate,
    Partitioning,
    Schedule,
)
from fedrane.errors import ConfigError
from fedrane.methods import METHODS, Method, known, name_of

NUMBERS = st.floats(1e-6, 1e6, allow_nan=False)


@given(
    st.integers(1, 10**6),
    NUMBERS,
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["iid", "dirichlet-capped", "shards"]),
)
def test_toml_round_trip(rounds: int, lr: float, half: bool, path: str, kind: str) -> None:
    made = Experiment(
        rounds=rounds,
        lr=lr,
        participation=0.5 if half else 1.0,
        data_root=path,
        partition=Partitioning(kind=kind, alpha=lr),
        schedule=Schedule("cosine"),
    )
    import tomllib

    assert Experiment.from_dict(tomllib.loads(made.to_toml())) == made


def test_a_file_with_words_over_it(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('clients = 7\nlr = 1\n[method]\nname = "local"\n[partition]\nalpha = 5\n')
    e = Experiment.from_toml(file, ["clients=9", "partition.kind=iid", "lr=1e-2"])
    assert (e.clients, e.lr, e.method_name, e.partition.alpha, e.partition.kind) == (9, 0.01, "local", 5.0, "iid")


@dataclass(frozen=True)
class Own(Algorithm):
    """A user's method."""

    strength: float = 0.1
    steps: int = 3
    squared: bool = True
    kind: str = "a"


def test_a_methods_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "own", Method(Own, "–"))
    monkeypatch.setitem(METHODS, "own-plain", Method(Own, "–", preset={"squared": False}))
    e = Experiment.from_words(["method=own", "method.strength=1e-3", "method.steps=5", "method.squared=no"])
    assert e.algorithm == Own(1e-3, 5, False)
    assert e.method_name == "own-plain", "the entry whose preset it fulfils"
    assert name_of(Own()) == "own"
    assert Experiment.from_words(["method.strength=2", "method=own"]).algorithm == Own(2), "in any order"
    with pytest.raises(ConfigError, match=r"unknown key 'method.strenght'.*'method.strength'"):
        Experiment.from_words(["method=own", "method.strenght=2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cleints=3"], "'clients'"),
        (["partition.alhpa=3"], "'partition.alpha'"),
        (["learning_rate=0"], "lr=0"),
        (["num_clients=0"], "clients=0"),
        (["method=fedavgg"], "'fedavg'"),
        (["clients"], "not key=value"),
        (["=3"], "not key=value"),
        (["clients=3.5"], "whole number"),
        (["clients=many"], "whole number"),
        (["lr=fast"], "a number"),
        (["partition=iid"], "is a table"),
        (["clients.x=1", "clients.y=1"], "whole number"),
        (["lr=nan"], "positive and finite"),
        (["lr=0"], "positive"),
        (["lr=-1"], "positive"),
        (["momentum=1"], "momentum"),
        (["weight_decay=-1"], "weight_decay"),
        (["clip=-1"], "clip"),
        (["clients=0"], "at least 1"),
        (["rounds=0"], "at least 1"),
        (["rounds=1" + "0" * 400], "rounds=1000000000 or fewer"),
        (["epochs=0"], "more than 0"),
        (["epochs=nan"], "more than 0"),
        (["epochs=abc"], "must be a number"),
        (["steps=-1"], "1 or more"),
        (["optimizer=adamm"], "Did you mean"),
        (["adam.momentum=1"], "adam.momentum"),
        (["adam.decay=-0.1"], "adam.decay"),
        (["adam.floor=0"], "divided"),
        (["schedule.warmup=50"], "full learning rate"),
        (["schedule.warmup=-1"], "no warm-up"),
        (["batch=0"], "at least 1"),
        (["eval_every=0"], "at least 1"),
        (["participation=0"], "fraction"),
        (["participation=1.1"], "fraction"),
        (["client_dropout=1"], "probability"),
        (["validation=1"], "fraction"),
        (["patience=2"], "validation=0.1"),
        (["seed=-1"], "from 0"),
        (["precision=float46"], "'float64'"),
        (["norm=shard"], "'shared'"),
        (["image_size=-2"], "pixels"),
    ],
)
def test_mistakes_get_a_clear_error(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.from_words(words)


def test_a_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        Experiment.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("clients = = 3")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        Experiment.from_toml(tmp_path / "bad.toml")


def test_a_number_is_neither_true_nor_false() -> None:
    """A file may hold any type."""
    for value in (1, 1.0, [], None):
        with pytest.raises(ConfigError, match=r"lra=.*true or false"):
            Experiment.from_dict({"method": {"name": "fedrane", "lra": value}})


def test_every_field_can_be_typed() -> None:
    """Every field can be set by a word: what is written is read back."""
    made = Experiment()

    def words(prefix: str, value: Any) -> list[str]:
        return [
            f"{prefix}{f.name}={getattr(value, f.name)}" for f in fields(value) if not _nested(getattr(value, f.name))
        ]

    groups = ("partition", "skew", "schedule", "adam", "augment", "gate", "attack")
    typed = words("", made) + [w for group in groups for w in words(f"{group}.", getattr(made, group))]
    assert Experiment.from_words(typed) == made


def _nested(value: Any) -> bool:
    groups = AdamConstants | Algorithm | Attack | Augmentation | FeatureSkew | Gate | Partitioning | Schedule
    return isinstance(value, groups)


def test_methods_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom fedrane import Algorithm\n\n"
        "@dataclass(frozen=True)\nclass Mine(Algorithm):\n    '''Mine.'''\n    pull: float = 2.0\n\n"
        "class Odd:\n    pass\n\nclass Bare(Algorithm):\n    pull: float = 2.0\n"
    )
    e = Experiment.from_words([f"method={file}:Mine", "method.pull=3"])
    assert e.to_dict()["method"] == {"name": f"{file}:Mine", "pull": 3.0}
    assert Experiment.from_dict(e.to_dict()) == e
    for name, message in ((f"{file}:Mien", "'Mine'"), (f"{file}:Odd", "not a method"), (f"{file}:Bare", "dataclass")):
        with pytest.raises(ConfigError, match=message):
            Experiment(method=name)
    with pytest.raises(ConfigError, match="no file"):
        Experiment(method=f"{tmp_path}/none.py:Mine")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        Experiment(method=f"{tmp_path}/broken.py:Mine")


def test_methods_from_a_module() -> None:
    e = Experiment(method="fedrane.methods.local:Local")
    assert e.method_name == "local"


def test_methods_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded by its entry point, listed, and written by its name; a broken one is one clear error."""
    (tmp_path / "theirs.py").write_text(
        "from fedrane import Algorithm\n\nclass Theirs(Algorithm):\n    '''Theirs.'''\n"
    )
    folder = tmp_path / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[fedrane.methods]\ntheirs = theirs:Theirs\nbroken = nowhere:Nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    e = Experiment(method="theirs")
    assert e.method_name == "theirs"
    assert Experiment.from_dict(e.to_dict()) == e
    assert {"theirs", "broken"} <= set(known())
    with pytest.raises(ConfigError, match=r"cannot be loaded: ModuleNotFoundError"):
        Experiment(method="broken")
