"""The reference of all keys and fields: it is that of the classes, complete, and needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedrane import Experiment, methods
from fedrane.config import reference
from fedrane.config.reference import Key
from fedrane.config.settings import ALIASES, dotted
from fedrane.engines import registry
from fedrane.errors import ConfigError
from fedrane.experiment import KEYS

ALL = tuple(reference.keys())
FIELDS = [(name, field) for name, method in reference.built_in().items() for field in method.fields]


def test_the_file_is_up_to_date() -> None:
    made = reference.FILE.read_text(encoding="utf-8")
    assert made == reference.as_json(), "make it again: python -m fedrane.config.reference"


def test_every_key_and_every_method_is_in_it() -> None:
    assert {key.name for key in ALL} == {"method", "preset", *KEYS}
    assert list(reference.built_in()) == list(methods.METHODS)
    for name, method in reference.built_in().items():
        assert {field.name: field.default for field in method.fields} == methods.find(name).fields
    assert {alias: key.name for key in ALL for alias in key.aliases} == ALIASES


@pytest.mark.parametrize("key", [*ALL, *(field for _, field in FIELDS)], ids=lambda key: key.name)
def test_everything_has_a_meaning_and_a_type(key: Key) -> None:
    assert key.meaning.endswith(".")
    assert not key.plain.count("`")
    assert type(key.default).__name__ in key.type.split(" | ")


def _accept(word: str) -> None:
    experiment = Experiment.from_words([word])
    if word.startswith("engine="):
        registry.make(experiment.engine, experiment.algorithm, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [k for k in ALL if k.choices and not k.open], ids=lambda key: key.name)
def test_the_choices_of_a_key_are_the_accepted_values(key: Key) -> None:
    for value in key.choices:
        if key.name != "engine":
            _accept(f"{key.name}={value}")
    with pytest.raises(ConfigError) as error:
        _accept(f"{key.name}=nonsense")
    assert all(value in str(error.value) for value in key.choices if value != "auto" or key.name != "engine")


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda each: getattr(each, "name", each))
def test_the_choices_of_a_field_are_the_accepted_values(name: str, field: Key) -> None:
    assert bool(field.choices) == (field.type == "str")
    cls, also = methods.METHODS[name].cls, {"head": "linear"} if field.name == "scope" else {}
    for value in field.choices:
        cls(**{**also, field.name: value})
    if field.choices:
        with pytest.raises(ConfigError, match=f"method.{field.name}"):
            cls(**{field.name: "nonsense"})


def test_a_method_of_your_own_is_described_from_its_class(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from fedrane.algorithm import Choices\nfrom fedrane.methods.fedprox import FedProx\n\n\n"
        '@dataclass(frozen=True)\nclass Mine(FedProx):\n    """Mine."""\n\n'
        '    choices: ClassVar[Choices] = {"how": ("a", "b")}\n    how: str = "a"\n'
        '    """How it is done, in\n    ``a`` word."""\n    plain: int = 3\n'
    )
    mine = reference.find(f"{tmp_path / 'mine.py'}:Mine")
    assert (mine.summary, mine.paper, mine.category) == ("Mine.", "", "global")
    strength, how, plain = mine.fields
    assert strength.meaning == reference.find("fedprox").fields[0].meaning
    assert how == Key("how", "str", "a", "How it is done, in `a` word.", ("a", "b"))
    assert plain == Key("plain", "int", 3, "")


def test_a_new_key_needs_no_change_here() -> None:
    @dataclasses.dataclass
    class Settings:
        new: int = 1
        """A new key."""

    assert list(reference._fields(Settings, vars(Settings()), {})) == [Key("new", "int", 1, "A new key.")]
    assert dotted({"a": {"b": 1}}) == {"a.b": 1}
