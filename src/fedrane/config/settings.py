"""Combines settings from a preset, a file and ``key=value`` words; each overrides the one before.

The order of words does not matter, and a key with two different values is an error. No setting is ignored silently: one
that cannot be used is an error, or a :class:`Notice` if it comes from a file or a preset.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fedrane import methods
from fedrane.algorithm import Algorithm
from fedrane.config import hints
from fedrane.errors import ConfigError, nearest
from fedrane.system import loading, named_code
from fedrane.system.files import MARK

Settings = dict[str, Any]
"""An experiment's values by their dotted keys."""
NAME, FIELD = "method.name", "method."
WORD, PRESET = "", "preset="
"""The source of a setting given as a word, and the prefix of a preset's source."""
ALIASES = {
    "algorithm": "method",
    "alpha": "partition.alpha",
    "batch_size": "batch",
    "client_fraction": "participation",
    "data": "dataset",
    "dirichlet_alpha": "partition.alpha",
    "grad_clip": "clip",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "num_clients": "clients",
    "num_epochs": "epochs",
    "num_rounds": "rounds",
    "random_seed": "seed",
    "wd": "weight_decay",
}
"""Names that other libraries use, and the keys they stand for. They are accepted everywhere."""


class Layer(NamedTuple):
    """Settings and their source: the name of a file or a preset, or :data:`WORD`."""

    source: str
    values: Mapping[str, Any]


class Notice(NamedTuple):
    """A setting of a file or a preset that is not used, and why."""

    source: str
    key: str
    value: Any
    why: str


def as_messages(notices: Iterable[Notice]) -> list[str]:
    """Return one line per source and reason, for all settings that are not used.

    >>> as_messages([Notice("a.toml", "schedule.factor", 0.5, "that needs schedule.kind=step")])
    ['a.toml: schedule.factor=0.5 is not used: that needs schedule.kind=step']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for notice in notices:
        groups.setdefault((notice.source, notice.why), []).append(f"{notice.key}={notice.value}")
    return [
        f"{source}: {' and '.join(pairs)} {'is' if len(pairs) == 1 else 'are'} not used: {why}"
        for (source, why), pairs in groups.items()
    ]


# ---- dotted and nested settings


def dotted(values: Mapping[str, Any]) -> Settings:
    """Return nested values by their dotted keys.

    >>> dotted({"lr": 0.1, "partition": {"alpha": 0.5}})
    {'lr': 0.1, 'partition.alpha': 0.5}
    """
    flat: Settings = {}
    for key, value in values.items():
        flat |= (
            {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, Mapping) else {key: value}
        )
    return flat


def flat(values: Mapping[str, Any]) -> Settings:
    """Nested values by their real keys, dotted; a method's bare name is its ``method.name``.

    >>> flat({"batch_size": 32, "alpha": 0.5, "method": "fedavg"})
    {'batch': 32, 'partition.alpha': 0.5, 'method.name': 'fedavg'}
    """
    plain = dotted(values)
    _require_one_name(plain)
    return {canonical(key): value for key, value in plain.items()}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`flat`.

    >>> nested({"lr": 0.1, "partition.alpha": 0.5})
    {'lr': 0.1, 'partition': {'alpha': 0.5}}
    """
    tables: dict[str, Any] = {}
    for key, value in values.items():
        table, dot, name = key.partition(".")
        if not dot:
            if isinstance(tables.get(key), dict):
                raise ConfigError(f"{key}={value}", f"{key} is a table", f"Set its keys: {key}.NAME=…")
            tables[key] = value
        elif isinstance(inner := tables.setdefault(table, {}), dict):
            inner[name] = value
        else:
            raise ConfigError(f"unknown key {key!r}", f"{table} is a value, not a table")
    return tables


def parse(words: Iterable[str], example: str = "clients=10 or partition.alpha=0.1") -> dict[str, str]:
    """Return the values of ``key=value`` words by their dotted keys."""
    values: dict[str, str] = {}
    written: list[str] = []
    for word, following in itertools.pairwise([*words, ""]):
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{word!r} is not key=value", remedy=hints.for_word(word, following) or f"Write for instance {example}"
            )
        written.append(key)
        _require_one_name(written)
        key = canonical(key)
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{key.removesuffix('.name')} is {values[key]} and {value}", "a key has one value")
    return values


def canonical(key: str) -> str:
    """The real key, dotted, that a key or an alias stands for."""
    key = ALIASES.get(key, key)
    return NAME if key == "method" else key


def _require_one_name(written: Iterable[str], prefix: str = "") -> None:
    """It is an error to set a key both by an alias and by another of its names."""
    names: dict[str, str] = {}
    for name in written:
        other = names.setdefault(canonical(name), name)
        if other != name and not ALIASES.keys().isdisjoint((name, other)):
            key = canonical(name).removesuffix(".name")
            both = f"{prefix}{other} and {prefix}{name} are both set"
            raise ConfigError(both, f"they are the same key, {key}", "Leave one of them out")


# ---- layers


def combine(layers: Sequence[Layer]) -> tuple[Settings, dict[str, str], list[Notice]]:
    """Combine the layers. Return the settings, the source of each, and those that are not used.

    A layer's method fields belong to the method that it names, or that a layer below names. Another method uses them
    only if it is of the same class (an ablation).
    """
    _require_named(layers)
    names = [str(layer.values[NAME]) for layer in layers if NAME in layer.values]
    chosen = names[-1] if names else "fedavg"
    values: Settings = {}
    sources: dict[str, str] = {}
    notices: list[Notice] = []
    owner = ""
    for source, mine in layers:
        owner = str(mine.get(NAME, owner))
        kept = dict(mine)
        if owner and loading.absolute(owner) != loading.absolute(chosen) and source != WORD:
            kept, unused = _for_another(mine, owner, chosen)
            why = f"meant for {owner}, and the method is {chosen}"
            notices += [Notice(source, key, value, why) for key, value in unused.items()]
        values |= kept
        sources |= dict.fromkeys(kept, source)
    return {**values, NAME: chosen}, sources, notices


def _require_named(layers: Sequence[Layer]) -> None:
    """Report the code that a file names, where no word does; in a run folder the user must have named it before."""
    by_word = {str(value) for source, mine in layers if source == WORD for value in mine.values()}
    for source, mine in layers:
        named = {key: name for key, name in named_code.references(mine).items() if name not in by_word}
        if source == WORD or source.startswith(PRESET) or not named:
            continue
        in_run_folder = (Path(source).parent / MARK).is_file()
        words = " ".join(f"{named_code.KEYS[key]}={name}" for key, name in named.items())
        named_code.require(source, named, trust=not in_run_folder, remedy=f"name it yourself as well: {words}")


def _for_another(mine: Mapping[str, Any], owner: str, chosen: str) -> tuple[Settings, Settings]:
    """Split a layer's settings into those that another method can use and those that it cannot, except defaults."""
    old, new = _find(owner), methods.find(chosen)
    method_fields = {key: value for key, value in mine.items() if key.startswith(FIELD) and key != NAME}
    if old is not None and old.cls is new.cls:
        # The new name defines the ablation, so the fields that define either of them are dropped.
        ablated = {FIELD + name for name in (*old.preset, *new.preset)}
        return {key: value for key, value in mine.items() if key not in ablated}, {}
    defaults = {f"{FIELD}{name}": value for name, value in old.fields.items()} if old else {}
    unused = {key: value for key, value in method_fields.items() if key not in defaults or defaults[key] != value}
    return {key: value for key, value in mine.items() if key not in method_fields}, unused


def _find(name: str) -> methods.Method | None:
    try:
        return methods.find(name)
    except ConfigError:  # its code may be on another machine, and it is not the method to run
        return None


# ---- several methods


def by_label(text: str, reserved: Iterable[str]) -> dict[str, str]:
    """Return the methods of a comparison by their labels: LABEL=NAME, or the name itself.

    >>> by_label("fedavg, weak=fedprox, strong=fedprox", ())
    {'fedavg': 'fedavg', 'weak': 'fedprox', 'strong': 'fedprox'}
    """
    method_of: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        before, equals, after = part.partition("=")
        has_label = bool(equals) and not re.search(r"[/\\]", before)  # a path may contain "=" as well
        label, name = (before, after) if has_label else (part, part)
        if has_label and not re.fullmatch(r"[\w+-]+", label):
            why = "a label consists of letters, digits, _, + and -"
            raise ConfigError(f"the label {label!r} of {name}", why, f"Write for instance a={name}")
        if not name:
            raise ConfigError(f"the method {part}", f"the label {label} has no method", f"Write {label}=NAME")
        if label in method_of:
            raise ConfigError(
                f"{label} occurs twice among the methods",
                "each line of the table needs a different name",
                f"Give labels: a={name},b={name}, and set a field of one with a.FIELD=value",
            )
        if label != name and (label in reserved or label in methods.known()):
            raise ConfigError(f"the label {label!r} of {name}", "it already names something else", "Choose another")
        method_of[label] = name
    return method_of


def addressed(
    given: Mapping[str, str], labels: Mapping[str, str], keys: Iterable[str], others: Iterable[str] = ()
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Split the settings into those for all methods and, by label, those for one method.

    ``LABEL.NAME=value`` sets a field of that method, or one of the experiment's ``keys``. ``others`` are further names,
    in addition to those of the methods, that are not settings.
    """
    shared: dict[str, str] = {}
    for_one: dict[str, dict[str, str]] = {label: {} for label in labels}
    named: dict[str, list[str]] = {label: [] for label in labels}
    known = {*methods.known(), *others}
    tables = {"method", *(key.partition(".")[0] for key in keys if "." in key)}
    for key, value in given.items():
        mine = max((label for label in labels if key.startswith(f"{label}.")), key=len, default=None)
        if mine is not None:
            name = key.removeprefix(f"{mine}.")
            if name in _fields(labels[mine]) or canonical(name) not in keys:
                for_one[mine][FIELD + name] = value
            else:
                named[mine].append(name)
                _require_one_name(named[mine], f"{mine}.")
                for_one[mine][canonical(name)] = value
        elif key.partition(".")[0] in known or loading.is_reference(key):
            raise ConfigError(
                f"{key}={value}",
                f"{key.rpartition('.')[0]} is not one of the methods",
                f"They are: {', '.join(labels)}",
            )
        elif "." in key and key.partition(".")[0] not in tables:
            start = key.partition(".")[0]
            own = next((label for label in labels if start in re.split(r"[/\\.:]", label)), None)
            remedy = (
                f"Give {own} a label: --methods {start}={own}" if own else nearest(start, [*labels, *sorted(tables)])
            )
            raise ConfigError(f"unknown key '{key}'", remedy=remedy)
        else:
            shared[key] = value
            if key.startswith(FIELD) and key != NAME:
                _require_all(key, value, labels)
    return shared, for_one


def _require_all(key: str, value: str, labels: Mapping[str, str]) -> None:
    field = key.removeprefix(FIELD)
    available = {label: name for label, name in labels.items() if _find(name)}
    having = [label for label, name in available.items() if field in _fields(name)]
    lacking = [label for label in available if label not in having]
    if having and lacking:
        raise ConfigError(
            f"{key}={value}",
            f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no such field",
            f"Set it only for the others: {' '.join(f'{label}.{field}={value}' for label in having)}",
        )


def _fields(name: str) -> list[str]:
    method = _find(name)
    return [f.name for f in fields(method.cls)] if method else []


def unknown_field(field: str, name: str, method_class: type[Algorithm]) -> ConfigError:
    """Return the error for a field that a method does not have; it lists the methods that do."""
    known = [f"{FIELD}{f.name}" for f in fields(method_class)]
    having = [other for other, method in methods.METHODS.items() if field in {f.name for f in fields(method.cls)}]
    elsewhere = f"; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else ""
    remedy = nearest(FIELD + field, known) if known else "It has no fields"
    return ConfigError(f"unknown key '{FIELD}{field}'", f"{name} has no such field{elsewhere}", remedy)
