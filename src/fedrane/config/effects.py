"""The rules for which settings have an effect, given the others.

A setting without effect is never ignored silently. From a ``key=value`` word or from Python it is an error. From a file
it is reported and removed, since a word that overrides the file may be the cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from fedrane import models
from fedrane.algorithm import Algorithm, Needs
from fedrane.config.settings import FIELD, PRESET, WORD, Notice
from fedrane.data import catalogue
from fedrane.data.partition import CONSECUTIVE, Partitioning
from fedrane.data.tabular import is_table
from fedrane.data.text import SUFFIX, is_text
from fedrane.errors import ConfigError, NoEffect
from fedrane.experiment import PYTHON, Experiment


class Rule(NamedTuple):
    """A setting, whether it has an effect, what it needs for that, and the settings that decide it."""

    key: str
    works: Callable[[Experiment], bool]
    needs: str
    deciding: Sequence[str]
    settled: Sequence[str] = ()
    """Values that a run may have filled in for ``auto``: the user did not set them."""

    def why(self, e: Experiment) -> str:
        deciding = next((key for key in self.deciding if _get(e, key)), self.deciding[-1])
        return f"that needs {self.needs}, and {deciding} is {_get(e, deciding) or 'empty'}"


def _drawn(*kinds: str) -> Callable[[Experiment], bool]:
    return lambda e: not e.partition.file and e.partition.kind in kinds


ALPHA = ("dirichlet", "dirichlet-capped", "quantity", "dirichlet-quantity")
FALLING = ("step", "exponential")
PARTITION = ("partition.file", "partition.kind")
TABLE = (
    (
        "client",
        "a table that names each row's client, dataset=FILE.csv or FILE.parquet (clients is the number of clients)",
    ),
    *((key, "a table, dataset=FILE.csv or FILE.parquet") for key in ("label", "drop", "categories", "impute", "task")),
)
RULES = (
    Rule(
        "partition.kind",
        lambda e: not e.partition.file,
        "a partition that is drawn",
        PARTITION,
        ("natural", "iid", CONSECUTIVE, ALPHA[0]),
    ),
    Rule("partition.alpha", _drawn("auto", *ALPHA), f"partition.kind={' or '.join(ALPHA)}", PARTITION),
    Rule("partition.shards", _drawn("shards"), "partition.kind=shards", PARTITION),
    Rule("partition.classes", _drawn("pathological"), "partition.kind=pathological", PARTITION),
    Rule("partition.size_alpha", _drawn("dirichlet-quantity"), "partition.kind=dirichlet-quantity", PARTITION),
    Rule(
        "partition.minimum",
        _drawn("auto", "iid", "shards", "pathological", CONSECUTIVE, *ALPHA),
        "a partition that is drawn",
        PARTITION,
    ),
    Rule(
        "schedule.factor",
        lambda e: e.schedule.kind in FALLING,
        f"schedule.kind={' or '.join(FALLING)}",
        ("schedule.kind",),
    ),
    Rule("epochs", lambda e: not e.steps, "training by epochs (steps=0)", ("steps",)),
    Rule("momentum", lambda e: e.optimizer == "sgd", "optimizer=sgd (Adam has adam.momentum)", ("optimizer",)),
    *(
        Rule(f"adam.{key}", lambda e: e.optimizer != "sgd", "optimizer=adam or adamw", ("optimizer",))
        for key in ("momentum", "decay", "floor")
    ),
    Rule("schedule.every", lambda e: e.schedule.kind == "step", "schedule.kind=step", ("schedule.kind",)),
    Rule("schedule.floor", lambda e: e.schedule.kind == "cosine", "schedule.kind=cosine", ("schedule.kind",)),
    Rule(
        "image_size",
        lambda e: (
            e.dataset not in catalogue.NAMES and not e.dataset.endswith((".npz", SUFFIX)) and not is_table(e.dataset)
        ),
        "a dataset that is a folder of images",
        ("dataset",),
    ),
    Rule(
        "window", lambda e: e.dataset in catalogue.TEXTS or is_text(e.dataset), "a text, dataset=FILE.txt", ("dataset",)
    ),
    *(Rule(key, lambda e: e.dataset == PYTHON or is_table(e.dataset), needs, ("dataset",)) for key, needs in TABLE),
    *(
        Rule(
            key,
            lambda e: e.model not in ("auto", *models.MODELS),
            "a network of your own (model=path.py:function)",
            ("model",),
        )
        for key in ("model_head", "pretrained")
    ),
    Rule(
        "norm",
        lambda e: e.model not in models.WITHOUT_NORM,
        "a network with BatchNorm (model=resnet18, or your own)",
        ("model",),
    ),
    *(
        Rule(f"gate.{key}", lambda e: bool(e.gate.on(e.engine)), "gate.kind=refuse or clip", ("gate.kind",))
        for key in ("factor", "norm")
    ),
    Rule("attack.share", lambda e: e.attack.kind != "none", "an attack", ("attack.kind",)),
    Rule(
        "attack.factor",
        lambda e: e.attack.kind not in ("none", "labels"),
        "attack.kind=sign, scale or noise",
        ("attack.kind",),
    ),
    Rule("precision", lambda e: (e.precision, e.device) != ("tf32", "cpu"), "a GPU", ("device",)),
)


_KEYS = frozenset(f.name for f in dataclasses.fields(Experiment))


def uses_alpha(how: Partitioning) -> bool:
    """Whether a partition is drawn with α."""
    return not how.file and how.kind in ALPHA


def idle(e: Experiment) -> dict[str, str]:
    """Return the settings that have no effect, and why."""
    reasons = {rule.key: rule.why(e) for rule in RULES if not rule.works(e)}
    for name, need in idle_fields(e.algorithm).items():
        other = need.partition("=")[0]
        reasons[FIELD + name] = f"that needs {FIELD}{need}, and {FIELD}{other} is {getattr(e.algorithm, other)}"
    for name, need in unmet(_of_experiment(e.algorithm), vars(e)).items():
        reasons[FIELD + name] = f"that needs {need}, and that is {getattr(e, need.partition('=')[0])}"
    return reasons


def _of_experiment(algorithm: Algorithm) -> Needs:
    """Those conditions of a method that are on keys of the experiment, and not on its own fields."""
    own = {f.name for f in dataclasses.fields(algorithm)}
    fields = {condition: condition.partition("=")[0] for condition in algorithm.needs}
    return {c: algorithm.needs[c] for c, field in fields.items() if field not in own and field in _KEYS}


def idle_fields(algorithm: Algorithm) -> dict[str, str]:
    """Return the fields of a method that have no effect given its other fields, and the condition each needs."""
    known = {f.name for f in dataclasses.fields(algorithm)}
    needs = {c: names for c, names in algorithm.needs.items() if c not in _of_experiment(algorithm)}
    for condition, names in needs.items():
        if unknown := {condition.partition("=")[0], *names} - known:
            what = f"{type(algorithm).__name__}.needs names {', '.join(sorted(unknown))}"
            raise ConfigError(what, "it is not a field of the method", "Write for instance {'a=True': ('b',)}")
    return unmet(needs, {name: getattr(algorithm, name) for name in known})


def unmet(needs: Needs, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields whose condition the values of the others do not meet, and that condition."""
    conditions: dict[str, str] = {}
    for condition, names in needs.items():
        field, _, values = condition.partition("=")
        if str(fields[field]) not in values.split("|"):
            conditions |= dict.fromkeys(names, condition.replace("|", " or "))
    return conditions


def settle(e: Experiment, also: Mapping[str, str] = MappingProxyType({})) -> tuple[Experiment, list[Notice]]:
    """Return the experiment without settings that have no effect, and a notice for each of them.

    ``also`` gives further settings that have no effect where this experiment runs, and why.
    """
    notices = []
    for key, value, default, why in list(_without_effect(e, {**idle(e), **also})):
        source = None if e.origin is None else e.origin.get(key)
        if e.origin is None or source == WORD:
            raise no_effect(key, value, why)
        if source and not source.startswith(PRESET):  # a preset's values were not written for this experiment
            notices.append(Notice(source, key, value, why))
        e = _with(e, key, default)
    return e, notices


def no_effect(key: str, value: Any, why: str) -> NoEffect:
    return NoEffect(f"{key}={_text(value)} would have no effect", why, f"Leave {key} out, or set what it needs")


def _without_effect(e: Experiment, idle: Mapping[str, str]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the settings that the user set but that have no effect: key, value, default and reason."""
    settled = {rule.key: rule.settled for rule in RULES}
    for key, why in idle.items():
        value, default = _get(e, key), _default(e, key)
        is_word = e.origin is not None and e.origin.get(key) == WORD
        if is_word or (value != default and value not in settled.get(key, ())):
            yield key, value, default, why


def _default(e: Experiment, key: str) -> Any:
    if not key.startswith(FIELD):
        return _get(_defaults(), key)
    return getattr(type(e.algorithm), key.removeprefix(FIELD), _get(e, key))


@cache
def _defaults() -> Experiment:
    return Experiment()


def _get(e: Experiment, key: str) -> Any:
    value: Any = e
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _with(e: Experiment, key: str, value: Any) -> Experiment:
    table, _, name = key.partition(".")
    changed = dataclasses.replace(getattr(e, table), **{name: value}) if name else value
    return e.replace(**{table: changed}).set_by(e.origin)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
