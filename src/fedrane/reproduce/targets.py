"""A table or figure of the paper: a target, its rows, and the cells that must be run for it.

Targets and rows are TOML files in ``fedrane/experiments``. The settings of a cell, each overriding those before: common
to all, the dataset's, the row's, the target's, tuned ones, the condition's, and the user's.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedrane import engines, methods, models
from fedrane.config import effects, sources
from fedrane.config.settings import FIELD, WORD, Settings, addressed, canonical, flat, nested, parse
from fedrane.data import catalogue
from fedrane.errors import ConfigError, nearest
from fedrane.experiment import ELSEWHERE, KEYS, Experiment, defaults, read_toml
from fedrane.report import style
from fedrane.reproduce.names import ALL, COMMON, FOLDER, PAPER, known
from fedrane.system import loading
from fedrane.system.files import user_path
from fedrane.training.setup import automatic_model

KINDS = ("table", "heat-map", "scatter", "curve", "pairs")
OURS, COMPARISON, USERS = "ours", "comparison", "user"
FIXED = ("method", "method.name", "dataset", "partition.alpha", "seed")
"""Keys that have many values in a table."""


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table: a method with its settings."""

    name: str
    title: str
    group: str
    settings: Settings
    datasets: Mapping[str, Settings] = field(default_factory=dict)
    """Settings that are different on some datasets."""


@dataclass(frozen=True)
class Condition:
    """A column of a table, or a point of a curve: the dataset, α, and the value that the target varies."""

    dataset: str
    alpha: float
    value: float | None = None
    """None where the target varies nothing."""


@dataclass(frozen=True, eq=False)
class Target:
    """A table or figure."""

    name: str
    title: str
    kind: str
    measures: tuple[str, ...]
    """The measures shown, the most important first."""
    rows: tuple[str, ...]
    datasets: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: int
    vary: str = ""
    label: str = ""
    values: tuple[float, ...] = ()
    panels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The rows that a measure is plotted for, if not all."""
    pairs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Pairs of rows, plotted as without and with something."""
    words: tuple[str, ...] = ("without", "with")
    """The words for the two rows of a pair."""
    drawn: tuple[str, ...] = ()
    """The measures that are plotted in pairs, if not all."""
    keeps: tuple[str, ...] = ()
    """Extra data that its cells must record."""
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The part of a target that the user asks for. What is empty is as in the target."""

    datasets: tuple[str, ...] = ()
    alphas: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    tuned: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: a row under a condition, with a seed."""

    row: Row
    condition: Condition
    seed: int
    settings: Settings
    """All that decides the result."""
    experiment: Experiment | None
    keeps: tuple[str, ...] = ()
    problem: str = ""
    """Why the experiment is None."""

    @cached_property
    def key(self) -> str:
        return key_of(self.settings)

    @property
    def where(self) -> str:
        value = "" if self.condition.value is None else f", {self.condition.value:g}"
        return f"{self.condition.dataset}, α {self.condition.alpha:g}{value}, seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{self.row.title} on {self.where}"


# ---- the files


def targets(name: str) -> list[Target]:
    """The target of that name, all of them, or the one in a user's file."""
    if name.endswith(".toml"):
        return [_target(Path(name).stem, read_toml(Path(name)))]
    if name == ALL:
        return [target for each in known() for target in targets(each)]
    if name not in known():
        remedy = nearest(name, [*known(), ALL]) + ", or a file of yours: target.toml"
        raise ConfigError(f"target {name!r} is not known", remedy=remedy)
    return [_target(name, _shipped(name))]


@cache
def paper() -> dict[str, dict[str, dict[str, list[float]]]]:
    """The numbers of the paper's tables: by measure, dataset and row, in the order of α."""
    return {key: value for key, value in _shipped(PAPER).items() if isinstance(value, dict)}


@cache
def paper_alphas() -> tuple[float, ...]:
    return tuple(_shipped(PAPER)["alphas"])


def in_paper(measure: str, row: str, condition: Condition) -> float | None:
    """The paper's number under a condition; None if there is none."""
    values = paper().get(measure, {}).get(condition.dataset, {}).get(row)
    if values is None or condition.value is not None or condition.alpha not in paper_alphas():
        return None
    return values[paper_alphas().index(condition.alpha)]


@cache
def _shipped(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def _common(dataset: str) -> Settings:
    values = dict(_shipped(COMMON))
    datasets = values.pop("datasets")
    return {**flat(values), **flat(datasets.get(dataset, {}))}


def _target(name: str, values: dict[str, Any]) -> Target:
    known_keys = [f.name for f in fields(Target) if f.name != "name"]
    hints = typing.get_type_hints(Target)
    for key in values:
        if key not in known_keys:
            raise ConfigError(f"{name}.toml: unknown key {key!r}", remedy=nearest(key, known_keys))
    needed = ("title", "kind", "measures", "rows", "datasets", "alphas", "seeds")
    if missing := [key for key in needed if key not in values]:
        raise ConfigError(f"{name}.toml lacks {', '.join(missing)}", remedy=f"See {FOLDER / 'clients.toml'}")
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise ConfigError(f"{name}.toml: {key} = {value!r}", f"it is {_type_name(hints[key])}")
    if values["kind"] not in KINDS:
        raise ConfigError(f"{name}.toml: kind={values['kind']!r}", remedy=nearest(values["kind"], KINDS))
    if empty := [key for key in needed if not values[key] or (key == "seeds" and values[key] < 1)]:
        raise ConfigError(f"{name}.toml: {empty[0]} = {values[empty[0]]!r}", "nothing would be run or shown")
    if bool(values.get("vary")) != bool(values.get("values")):
        raise ConfigError(f"{name}.toml: it has one of vary and values", "a figure varies a key over values")
    made: dict[str, Any] = {k: tuple(v) if typing.get_origin(hints[k]) is tuple else v for k, v in values.items()}
    vary, settings = canonical(values.get("vary", "")), flat(values.get("settings", {}))
    return Target(**{**made, "name": name, "vary": vary, "settings": settings})


def _fits(value: object, hint: Any) -> bool:
    """Whether a TOML value fits a field's type."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin in (Mapping, dict):
        return isinstance(value, dict)
    return isinstance(value, int | float if origin is float else origin) and not isinstance(value, bool)


def _type_name(hint: Any) -> str:
    names = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        tuple: "a list",
        dict: "a table",
        Mapping: "a table",
    }
    return names[typing.get_origin(hint) or hint]


def row(name: str) -> Row:
    """The row of that name, or of a method that has none: one of the registry, or a user's ``path.py:Class``."""
    path = FOLDER / "rows" / f"{name}.toml"
    if not loading.is_reference(name) and path.is_file():
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = {"method.name": name, **flat(values["settings"])}
        per_dataset = {key: flat(value) for key, value in values.get("datasets", {}).items()}
        return Row(name, values.get("title", style.title(name)), values["group"], settings, per_dataset)
    methods.find(name)  # an unknown name is an error at once
    title = f"{style.title(name)} (user's)" if loading.is_reference(name) else style.title(name)
    return Row(name, title, USERS, {"method.name": loading.absolute(name)})


def row_names() -> list[str]:
    return sorted(path.name.removesuffix(".toml") for path in (FOLDER / "rows").iterdir())


# ---- the cells


def rows_of(target: Target, chosen: Sequence[str]) -> list[Row]:
    """The target's rows, or those the user names; ``all`` among them stands for the target's."""
    names: list[str] = []
    for name in chosen or target.rows:
        names += [n for n in (target.rows if name == ALL else (name,)) if n not in names]
    rows = [row(name) for name in names]
    # As in the paper: comparison methods first, then the user's, then ours.
    return sorted(rows, key=lambda row: (COMPARISON, USERS, OURS).index(row.group))


def conditions_of(target: Target, selection: Selection) -> list[Condition]:
    conditions = (
        Condition(dataset, alpha, value)
        for dataset in selection.datasets or target.datasets
        for alpha in selection.alphas or target.alphas
        for value in target.values or (None,)
    )
    return list(dict.fromkeys(conditions))


def seeds_of(target: Target, selection: Selection) -> tuple[int, ...]:
    return selection.seeds or tuple(range(target.seeds))


def cells(target: Target, selection: Selection = Selection()) -> list[Cell]:  # noqa: B008 - it is frozen
    """All that must be run, seed by seed: a table is complete with one seed before the next begins."""
    rows, conditions = rows_of(target, selection.methods), conditions_of(target, selection)
    words = _words(selection.words, rows)
    if any(target.vary in mine for mine in words.values()):
        raise ConfigError(f"{target.vary}= for {target.name}", "that is what it varies", "Leave it out")
    here = {row.name: _is_here(str(row.settings["method.name"])) for row in rows}

    def make(row: Row, condition: Condition, seed: int, idle: Iterable[str] = ()) -> Cell:
        mine = {key: value for key, value in (words[""] | words.get(row.name, {})).items() if key not in idle}
        return _cell(target, row, condition, seed, selection.tuned, mine, here[row.name])

    made = [
        make(row, condition, seed) for seed in seeds_of(target, selection) for condition in conditions for row in rows
    ]
    _check_names([cell.experiment for cell in made if cell.experiment])
    idle = [_idle_words(cell.experiment) for cell in made]
    _check_words(words, made, idle)
    # A setting may be meant for some datasets only. Where it has no effect, the cell is the one without it.
    return [
        make(cell.row, cell.condition, cell.seed, unused) if unused else cell
        for cell, unused in zip(made, idle, strict=True)
    ]


def _idle_words(experiment: Experiment | None) -> dict[str, str]:
    """The user's settings that have no effect on an experiment, and why."""
    if experiment is None:
        return {}
    origin, idle = experiment.origin or {}, effects.idle(_with_model(experiment))
    return {key: why for key, why in idle.items() if origin.get(key) == WORD}


def _check_words(words: Mapping[str, Settings], made: Sequence[Cell], idle: Sequence[Mapping[str, str]]) -> None:
    """A setting without effect in all its cells is one error before the first cell, not a failure of each."""
    for name, mine in words.items():
        for key, value in mine.items():
            reasons = [
                unused.get(key)
                for cell, unused in zip(made, idle, strict=True)
                if cell.experiment and name == (cell.row.name if key in words.get(cell.row.name, {}) else "")
            ]
            if reasons and all(reasons):
                raise effects.no_effect(f"{name}.{key.removeprefix(FIELD)}" if name else key, value, str(reasons[0]))


def _check_names(experiments: Sequence[Experiment]) -> None:
    """A misspelt name is one error before the first cell, not a failure of each."""
    for engine in dict.fromkeys(e.engine for e in experiments):
        engines.check(engine)
    for model in dict.fromkeys(e.model for e in experiments):
        if loading.is_reference(model):
            models.load(model)
        elif model != "auto":
            models.check(model)
    for file in dict.fromkeys(e.partition.file for e in experiments):
        if file and not Path(file).is_file():
            raise ConfigError(
                f"partition.file={file}: there is no such file", remedy="Make it with fedrane partition --save"
            )


def _is_here(method: str) -> bool:
    return method in methods.METHODS or loading.is_reference(method) or method in methods.known()


def _cell(
    target: Target,
    row: Row,
    condition: Condition,
    seed: int,
    tuned: Sequence[Mapping[str, Any]],
    words: Settings,
    here: bool,
) -> Cell:
    values: Settings = {
        "method.name": row.name,  # first: what follows may be fields of it
        **_common(condition.dataset),
        **row.settings,
        **row.datasets.get(condition.dataset, {}),
        **target.settings,
        **best_settings(tuned, row.name, condition),
        "dataset": condition.dataset,
        "partition.alpha": condition.alpha,
        "seed": seed,
        **({target.vary: condition.value} if condition.value is not None else {}),
        **words,
    }
    if not here:
        settings = {key: value for key, value in values.items() if key not in ELSEWHERE}
        problem = f"method {values['method.name']!r} is not known here"
        return Cell(row, condition, seed, settings, None, target.keeps, problem)
    asked = dict.fromkeys((*target.settings, "partition.alpha", *([target.vary] if target.vary else [])), target.name)
    experiment = Experiment.from_dict(nested(values)).set_by(asked | dict.fromkeys(words, WORD))
    return Cell(row, condition, seed, settings_of(experiment), experiment, target.keeps)


def best_settings(tuned: Iterable[Mapping[str, Any]], row: str, condition: Condition) -> Settings:
    """The tuned settings of a row on a dataset: for this α if there are any, else for another."""
    fitting = [t for t in tuned if t["method"] == row and t["dataset"] == condition.dataset]
    exact = [t for t in fitting if t["alpha"] == condition.alpha]
    return flat((exact or fitting or [{"settings": {}}])[-1]["settings"])


def _words(words: Iterable[str], rows: Sequence[Row]) -> dict[str, Settings]:
    """The settings for all rows, under the empty name, and those for one row only, ``NAME.KEY=value``."""
    given = parse(words, example="epochs=1 or fedprox.strength=1")
    labels = {row.name: str(row.settings["method.name"]) for row in rows}
    shared, per_row = addressed(given, labels, KEYS, row_names())
    if partitioned := [
        f"{name}.{key}" for name, mine in per_row.items() for key in mine if key.startswith(("partition.", "skew."))
    ]:
        raise ConfigError(partitioned[0], "all rows of a table are on the same partitions", "Set it for all of them")
    for key in (key for mine in (shared, *per_row.values()) for key in mine):
        if key in FIXED:
            raise ConfigError(f"{key}=… for a table", "it has many", "Use --methods, --dataset, --alpha and --seeds")
        if key == "preset":
            raise ConfigError("preset=… for a table", "each row has its settings", "Leave it out")
    return {"": dict(shared), **{name: dict(mine) for name, mine in per_row.items()}}


# ---- the identity of a cell


def settings_of(experiment: Experiment) -> Settings:
    """All that decides the result, the same on every machine: a user's file by its name and its content."""
    plain = flat(_with_model(experiment).to_dict())
    settings = {key: value for key, value in plain.items() if key not in ELSEWHERE}
    digests = sources.contents(experiment)
    for key, path in sources.user_files(experiment).items():
        _, colon, attribute = str(settings[key]).rpartition(":") if path.suffix == ".py" else ("", "", "")
        settings[key] = f"{path.name}{colon}{attribute}"
        settings[f"{key.partition('.')[0]}.source"] = digests[key]
    return settings


def _with_model(experiment: Experiment) -> Experiment:
    """With the network that ``auto`` means, if the dataset is a known one."""
    shape = shapes().get(experiment.dataset)
    if experiment.model != "auto" or not shape:
        return experiment
    return experiment.replace(model=automatic_model("auto", shape))


def key_of(settings: Mapping[str, Any]) -> str:
    """A digest of the settings that have an effect.

    A key that was added later counts with its default, so older records keep their digest. A field of the method
    without effect does not count, so that its default may change.
    """
    name = str(settings["method.name"])
    complete = {**{key: value for key, value in defaults(name).items() if key not in ELSEWHERE}, **settings}
    if name in methods.METHODS:
        values = {key.removeprefix(FIELD): value for key, value in complete.items() if key.startswith(FIELD)}
        for field in effects.unmet(methods.METHODS[name].cls.needs, complete | values):
            del complete[FIELD + field]
    return hashlib.sha256(json.dumps(complete, sort_keys=True).encode()).hexdigest()[:16]


# ---- data


def shapes() -> dict[str, tuple[int, ...]]:
    embedded = {name: entry.shape for name, entry in catalogue.EMBEDDED.items()}
    return embedded | {name: entry.shape for name, entry in catalogue.KNOWN.items()}


def absent(datasets: Iterable[str], root: str) -> dict[str, str]:
    """The datasets that are not on this machine, and how to get them; an unknown name is an error."""
    states = {state.name: state for state in catalogue.status(catalogue.data_root(root or None))}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(datasets):
        if name in states:
            if not states[name].ready:
                missing[name] = states[name].how
        elif not user_path(name).exists():
            raise catalogue.unknown(name)
    return missing


def parse_seeds(text: str) -> tuple[int, ...]:
    """From a count, a range or a list.

    >>> parse_seeds("3"), parse_seeds("2-4"), parse_seeds("1,7")
    ((0, 1, 2), (2, 3, 4), (1, 7))
    """
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            seeds = tuple(range(first, last + 1))
        elif "," in text:
            seeds = tuple(int(part) for part in text.split(",") if part.strip())
        else:
            seeds = tuple(range(int(text)))
    except ValueError:
        seeds = ()
    if not seeds:
        raise ConfigError(f"--seeds {text}", "it is a count, a range or a list", "Use for instance 3, or 2-4, or 1,7")
    return tuple(dict.fromkeys(seeds))
