"""What a user asks for: a preset, a file and ``key=value`` words, each laid over the one before.

Words are a set: their order does not matter, and a key that stands twice with two values is an error. Nothing that was
asked for vanishes: what cannot be used is an error, or a :class:`Notice` where it came from a file or a preset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fedrane import loading, methods
from fedrane.algorithm import Algorithm
from fedrane.errors import ConfigError, nearest

Settings = dict[str, Any]
"""An experiment's values by their dotted keys."""
NAME, FIELD = "method.name", "method."
WORD, PRESET = "", "preset="
"""The source of what was set by a word; how that of a preset begins."""
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
    "num_clients": "clients",
    "num_epochs": "epochs",
    "num_rounds": "rounds",
    "random_seed": "seed",
    "wd": "weight_decay",
}
"""Names that other libraries use, and the keys they stand for. They are accepted wherever a key is."""


class Layer(NamedTuple):
    """Settings, and where they come from: a file's name, a preset's, or :data:`WORD`."""

    source: str
    values: Mapping[str, Any]


class Notice(NamedTuple):
    """A setting of a file or a preset that is not used, and why."""

    source: str
    key: str
    value: Any
    why: str


def as_messages(notices: Iterable[Notice]) -> list[str]:
    """One line for all settings of one source that are not used for the same reason.

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


# ---- forms of settings


def dotted(values: Mapping[str, Any]) -> Settings:
    """Nested values by their dotted keys.

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
    made: dict[str, Any] = {}
    for key, value in values.items():
        table, dot, name = key.partition(".")
        if not dot:
            if isinstance(made.get(key), dict):
                raise ConfigError(f"{key}={value}", "it is a table", f"Set its keys: {key}.NAME=…")
            made[key] = value
        elif isinstance(inner := made.setdefault(table, {}), dict):
            inner[name] = value
        else:
            raise ConfigError(f"{key!r} has a part too many", f"{table} is a value, not a table")
    return made


def parse(words: Iterable[str], example: str = "clients=10 or partition.alpha=0.1") -> dict[str, str]:
    """``key=value`` words by their dotted keys."""
    found: dict[str, str] = {}
    written: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not key=value", remedy=f"Write for instance {example}")
        written.append(key)
        _require_one_name(written)
        key = canonical(key)
        if found.setdefault(key, value) != value:
            raise ConfigError(f"{key.removesuffix('.name')} is {found[key]} and {value}", "a key has one value")
    return found


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
    """The layers laid over each other, the source of each value, and what of them is not used.

    A layer's fields are of the method that it names, or that is named below it. They go to another method of the same
    class (an ablation), and to no other.
    """
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
            kept, lost = _for_another(mine, owner, chosen)
            why = f"meant for {owner}, and the method is {chosen}"
            notices += [Notice(source, key, value, why) for key, value in lost.items()]
        values |= kept
        sources |= dict.fromkeys(kept, source)
    return {**values, NAME: chosen}, sources, notices


def _for_another(mine: Mapping[str, Any], owner: str, chosen: str) -> tuple[Settings, Settings]:
    """A layer's settings without those of its method that another has no use for; and those, but defaults."""
    old, new = _find(owner), methods.find(chosen)
    own = {key: value for key, value in mine.items() if key.startswith(FIELD) and key != NAME}
    if old is not None and old.kind is new.kind:
        # What makes an ablation one is said by the new name.
        apart = {FIELD + name for name in (*old.preset, *new.preset)}
        return {key: value for key, value in mine.items() if key not in apart}, {}
    usual = {f"{FIELD}{name}": value for name, value in old.fields.items()} if old else {}
    lost = {key: value for key, value in own.items() if key not in usual or usual[key] != value}
    return {key: value for key, value in mine.items() if key not in own}, lost


def _find(name: str) -> methods.Method | None:
    try:
        return methods.find(name)
    except ConfigError:  # it may lie on another machine, and is not what is asked for
        return None


# ---- several methods


def by_label(text: str, reserved: Iterable[str]) -> dict[str, str]:
    """The methods of ``--methods`` by their labels: their names, or what is written before them.

    >>> by_label("fedavg, weak=fedprox, strong=fedprox", ())
    {'fedavg': 'fedavg', 'weak': 'fedprox', 'strong': 'fedprox'}
    """
    found: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        before, equals, after = part.partition("=")
        has_label = bool(equals) and not re.search(r"[/\\]", before)  # the = of a path is none of ours
        label, name = (before, after) if has_label else (part, part)
        if has_label and not re.fullmatch(r"[\w+-]+", label):
            why = "a label is letters, digits, _, + and -"
            raise ConfigError(f"the label {label!r} of {name}", why, f"Write for instance a={name}")
        if not name:
            raise ConfigError(f"--methods {part}", f"the label {label} has no method", f"Write {label}=NAME")
        if label in found:
            raise ConfigError(
                f"{label} stands twice in --methods",
                "each line of the table needs a name of its own",
                f"Give labels: --methods a={name},b={name}, and a.FIELD=value for a field of one",
            )
        if label != name and (label in reserved or label in methods.known()):
            raise ConfigError(f"the label {label!r} of {name}", "it already names something else", "Choose another")
        found[label] = name
    return found


def addressed(
    given: Mapping[str, str], labels: Mapping[str, str], keys: Iterable[str], others: Iterable[str] = ()
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The words for all of several methods, and by label those for one alone.

    ``LABEL.NAME=value`` is a field of that method, or else one of the experiment's ``keys``. ``others`` are names that
    are no settings, beside those of the methods.
    """
    shared: dict[str, str] = {}
    own: dict[str, dict[str, str]] = {label: {} for label in labels}
    named: dict[str, list[str]] = {label: [] for label in labels}
    known = {*methods.known(), *others}
    tables = {"method", *(key.partition(".")[0] for key in keys if "." in key)}
    for key, value in given.items():
        mine = max((label for label in labels if key.startswith(f"{label}.")), key=len, default=None)
        if mine is not None:
            name = key.removeprefix(f"{mine}.")
            if name in _fields(labels[mine]) or canonical(name) not in keys:
                own[mine][FIELD + name] = value
            else:
                named[mine].append(name)
                _require_one_name(named[mine], f"{mine}.")
                own[mine][canonical(name)] = value
        elif key.partition(".")[0] in known or loading.is_reference(key):
            raise ConfigError(
                f"{key}={value}",
                f"{key.rpartition('.')[0]} is not among the methods",
                f"There are: {', '.join(labels)}",
            )
        elif "." in key and key.partition(".")[0] not in tables:
            raise ConfigError(f"unknown key '{key}'", remedy=nearest(key.partition(".")[0], [*labels, *sorted(tables)]))
        else:
            shared[key] = value
            if key.startswith(FIELD) and key != NAME:
                _require_all(key, value, labels)
    return shared, own


def _require_all(key: str, value: str, labels: Mapping[str, str]) -> None:
    field = key.removeprefix(FIELD)
    here = {label: name for label, name in labels.items() if _find(name)}
    having = [label for label, name in here.items() if field in _fields(name)]
    lacking = [label for label in here if label not in having]
    if having and lacking:
        raise ConfigError(
            f"{key}={value}",
            f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no such field",
            f"Set it where it is: {' '.join(f'{label}.{field}={value}' for label in having)}",
        )


def _fields(name: str) -> list[str]:
    method = _find(name)
    return [f.name for f in fields(method.kind)] if method else []


def unknown_field(field: str, name: str, kind: type[Algorithm]) -> ConfigError:
    """That a method has no such field: which others have, and which it has."""
    own = [f"{FIELD}{f.name}" for f in fields(kind)]
    having = [other for other, method in methods.METHODS.items() if field in {f.name for f in fields(method.kind)}]
    elsewhere = f"; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else ""
    remedy = nearest(FIELD + field, own) if own else "It takes none"
    return ConfigError(f"unknown key '{FIELD}{field}'", f"{name} has no such field{elsewhere}", remedy)
