"""Every key and every method's fields in words, without importing torch: for help, completion and documentation.

The source is the dataclasses: their fields, attribute docstrings and choices. ``reference.json`` beside this file is
made from them by ``python -m fedrane.config.reference``, and a test fails if it is not up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedrane.system import loading

FILE = Path(__file__).with_name("reference.json")
Value = str | int | float | bool


@dataclass(frozen=True)
class Key:
    """A setting: a key of an experiment, dotted, or a field of a method."""

    name: str
    type: str
    """``str``, ``int``, ``float``, ``bool`` or ``int | float``."""
    default: Value
    meaning: str
    """Markdown; empty for a field of your own method without a docstring."""
    choices: tuple[str, ...] = ()
    open: bool = False
    """Whether there are values besides the choices, such as a file of yours."""
    aliases: tuple[str, ...] = ()
    """Other names of the key, which are accepted wherever it is."""

    @property
    def word(self) -> str:
        """The default as it is written in ``key=value``."""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def plain(self) -> str:
        """The meaning without Markdown."""
        return self.meaning.replace("`", "")


@dataclass(frozen=True)
class Method:
    """A method: its paper, its models and its fields."""

    name: str
    summary: str
    paper: str
    """Authors, title, venue and year."""
    venue: str
    year: int | None
    models: tuple[str, ...]
    """``global``, ``personal`` or both."""
    preset: Mapping[str, Value]
    """The fields that the name sets: it is an ablation of another method."""
    fields: tuple[Key, ...]

    @property
    def category(self) -> str:
        """``global``, ``personal`` or ``both``: which models it has."""
        return "both" if len(self.models) > 1 else self.models[0]


def keys() -> tuple[Key, ...]:
    """All keys of an experiment, in the order of its fields, and ``preset``.

    >>> next(key.default for key in keys() if key.name == "partition.alpha")
    0.5
    """
    return tuple(map(_key, _read()["keys"]))


def built_in() -> dict[str, Method]:
    """The methods of this package.

    >>> [field.name for field in built_in()["fedprox"].fields]
    ['strength']
    """
    return {values["name"]: _method(values) for values in _read()["methods"]}


def names() -> list[str]:
    """The names of all methods, those of installed packages included."""
    return list(dict.fromkeys([*built_in(), *loading.installed()]))


def find(name: str) -> Method:
    """A method by name. One that is not built in is imported: a file or module of yours, or an installed package."""
    if name in built_in():
        return built_in()[name]
    return described(name)


@cache
def _read() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    content: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def _key(values: Mapping[str, Any]) -> Key:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Key(**plain)


def _method(values: Mapping[str, Any]) -> Method:
    fields = tuple(map(_key, values["fields"]))
    return Method(**{**values, "models": tuple(values["models"]), "fields": fields})


# ---- from the classes


def described(name: str) -> Method:
    """A method by name, from its class."""
    from fedrane import methods

    entry = methods.find(name)
    choices = entry.cls.choices
    fields = _fields(entry.cls, entry.fields, choices)
    heading = " ".join((getattr(inspect.getmodule(entry.cls), "__doc__", "") or "").partition("\n\n")[0].split())
    cited = re.match(r"[^:]+: (.*\b\d{4})\b", heading) if entry.year else None
    paper, models = cited[1] if cited else "", entry.cls.models
    return Method(name, entry.summary, paper, entry.venue, entry.year, models, dict(entry.preset), tuple(fields))


def _fields(cls: type, values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> Iterator[Key]:
    """The fields of a dataclass with these values as defaults; a field that is a dataclass gives dotted names."""
    documented = _docstrings(cls)
    for field in dataclasses.fields(cls):
        value = values[field.name]
        if dataclasses.is_dataclass(value):
            for inner in _fields(type(value), vars(value), {}):
                yield dataclasses.replace(inner, name=f"{field.name}.{inner.name}")
            continue
        hint = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        yield Key(field.name, hint, value, documented.get(field.name, ""), tuple(choices.get(field.name, ())))


def _docstrings(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class and of those it derives from, as Markdown on one line."""
    docstrings: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        except (OSError, TypeError, SyntaxError):  # there is no source: a class of C, or one made at a prompt
            continue
        lines = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(lines):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                words = ast.literal_eval(text.value) if isinstance(text.value, ast.Constant) else ""
                docstrings[field.target.id] = re.sub(r"``(.*?)``", r"`\1`", " ".join(str(words).split()))
    return docstrings


def _experiment_keys() -> Iterator[Key]:
    from importlib import resources

    from fedrane import methods, models
    from fedrane.config.settings import ALIASES
    from fedrane.data import catalogue, partition, tabular
    from fedrane.engines import registry
    from fedrane.experiment import PRECISIONS, Experiment
    from fedrane.models.norms import POLICIES
    from fedrane.ops import adam, attack, gate, sgd

    closed: dict[str, Sequence[str]] = {
        "impute": tabular.IMPUTE,
        "task": tabular.TASKS,
        "norm": POLICIES,
        "engine": (registry.AUTO, *registry.ENGINES),
        "precision": PRECISIONS,
        "partition.kind": partition.KINDS,
        "optimizer": adam.OPTIMIZERS,
        "schedule.kind": sgd.SCHEDULES,
        "gate.kind": gate.KINDS,
        "attack.kind": attack.KINDS,
    }
    extended: dict[str, Sequence[str]] = {
        "method": tuple(methods.METHODS),
        "dataset": catalogue.NAMES,
        "model": ("auto", *models.MODELS),
        "device": ("auto", "cpu", "cuda"),
    }
    plain = Experiment()
    values = {**vars(plain), "method": plain.method_name}
    for key in _fields(Experiment, values, {}):
        yield dataclasses.replace(
            key,
            type="str" if key.name == "method" else key.type,
            choices=tuple(extended.get(key.name, closed.get(key.name, ()))),
            open=key.name in extended,
            aliases=tuple(sorted(alias for alias, name in ALIASES.items() if name == key.name)),
        )
    files = (path.name for path in resources.files("fedrane.presets").iterdir())
    presets = sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))
    meaning = "Start from these settings, including their method; a file and words override them."
    yield Key("preset", "str", "", meaning, tuple(presets))


def as_json() -> str:
    """The content of ``reference.json``, from the classes."""
    from fedrane import methods

    made = [dataclasses.asdict(described(name)) for name in methods.METHODS]
    for values in made:
        values["fields"] = [_given(key) for key in values["fields"]]
    content = {"keys": [_given(dataclasses.asdict(key)) for key in _experiment_keys()], "methods": made}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _given(key: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name not in ("choices", "open", "aliases") or value}


if __name__ == "__main__":
    FILE.write_text(as_json(), encoding="utf-8")
