"""The configuration of one experiment: a frozen dataclass, read from and written to TOML and ``key=value`` words."""

from __future__ import annotations

import copy
import dataclasses
import math
import tomllib
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fedrane import methods
from fedrane.algorithm import Algorithm
from fedrane.config import settings
from fedrane.data.augment import Augmentation
from fedrane.data.partition import Partitioning
from fedrane.errors import ConfigError, nearest
from fedrane.models.norms import check_policy
from fedrane.ops.gate import Gate
from fedrane.ops.sgd import Schedule
from fedrane.system import threads
from fedrane.system.files import as_toml

PRECISIONS = ("auto", "float32", "float64", "tf32", "bf16")
PYTHON = "<python>"
"""Written instead of a dataset or a network that was passed as a Python object."""
ELSEWHERE = frozenset({"data_root", "engine", "threads", "device", "checkpoint_every"})
"""The keys that decide where and how an experiment runs, and not its result."""
D = TypeVar("D")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result.

    >>> Experiment(method="fedavg", dataset="digits", clients=10).rounds
    50
    """

    method: Algorithm | str = "fedavg"
    dataset: str = "digits"
    """A known name, an .npz file, or a folder of images."""
    data_root: str = ""
    image_size: int = 0
    """Resize a folder's images to this height and width; 0 means no resizing."""
    model: str = "auto"
    """A known name, or ``path.py:function`` (input shape, classes) → network; ``auto`` depends on the dataset."""
    model_head: str = ""
    """The submodule that is the classifier, for your own network."""
    norm: str = "shared"
    clients: int = 20
    rounds: int = 50
    epochs: int = 5
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    participation: float = 1.0
    """The fraction of clients sampled for a round."""
    client_dropout: float = 0.0
    """The probability that the update of a sampled client is lost (simulated)."""
    validation: float = 0.0
    """The fraction of each client's training examples held out for early stopping or tuning."""
    patience: int = 0
    """Stop when the validation accuracy has not improved for this many evaluations; 0 trains all rounds."""
    seed: int = 0
    engine: str = "auto"
    threads: int = 0
    """Threads of one operation, or workers of the engines ``threaded`` and ``processes``; 0 chooses by the workload."""
    device: str = "auto"
    precision: str = "auto"
    eval_every: int = 1
    checkpoint_every: int = 1
    partition: Partitioning = field(default_factory=Partitioning)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augmentation = field(default_factory=Augmentation)
    gate: Gate = field(default_factory=Gate)

    origin: ClassVar[Mapping[str, str] | None] = None
    """The source of each key: a word, a file or a preset; None for an experiment created in Python."""

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", _method({"name": self.method}))
        hints = typing.get_type_hints(Experiment)
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _convert(getattr(self, f.name), hints[f.name], f.name))
        _check(self)

    @property
    def algorithm(self) -> Algorithm:
        assert isinstance(self.method, Algorithm)  # noqa: S101 - converted in __post_init__
        return self.method

    @property
    def method_name(self) -> str:
        return methods.name_of(self.algorithm)

    def replace(self, **changes: Any) -> Experiment:
        changed = dataclasses.replace(self, **changes)
        if self.origin is None:
            return changed
        return changed.set_by({key: by for key, by in self.origin.items() if key.partition(".")[0] not in changes})

    def set_by(self, origin: Mapping[str, str] | None) -> Experiment:
        """Return a copy with this origin."""
        copied = copy.copy(self)
        object.__setattr__(copied, "origin", origin)
        return copied

    # ---- to and from text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, nested as in the TOML file."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["method"] = {"name": self.method_name, **dataclasses.asdict(self.algorithm)}
        for name in ("partition", "schedule", "augment", "gate"):
            plain[name] = dataclasses.asdict(plain[name])
        return plain

    def to_toml(self) -> str:
        plain = self.to_dict()
        tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
        top = as_toml({key: value for key, value in plain.items() if key not in tables})
        return "\n".join([top, *(as_toml(values, f"[{table}]") for table, values in tables.items())])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        layers = [*_preset(values), settings.Layer("", _without_preset(settings.flat(values)))]
        combined, _, notices = settings.combine(layers)
        _warn(notices)
        return cls._of(combined)

    @classmethod
    def from_toml(cls, path: str | Path, words: Iterable[str] = ()) -> Experiment:
        """Read a file and the words that override it; settings of the file that are not used cause a warning."""
        experiment, notices = cls.asked(words, Path(path))
        _warn(notices)
        return experiment

    @classmethod
    def from_words(cls, words: Iterable[str]) -> Experiment:
        """Read ``key=value`` words with dotted keys, in any order.

        >>> Experiment.from_words(["clients=5", "partition.alpha=0.1"]).partition.alpha
        0.1
        """
        experiment, notices = cls.asked(words)
        _warn(notices)
        return experiment

    @classmethod
    def asked(cls, words: Iterable[str], file: Path | None = None) -> tuple[Experiment, list[settings.Notice]]:
        """Return the experiment of a file and the words that override it, and the settings that are not used."""
        layers = [settings.Layer(str(file), settings.flat(read_toml(file)))] if file else []
        layers.append(settings.Layer(settings.WORD, settings.parse(words)))
        below = [layer for values in layers[::-1] for layer in _preset(values.values)][:1]
        layers = [layer._replace(values=_without_preset(layer.values)) for layer in layers]
        combined, origin, notices = settings.combine([*below, *layers])
        return cls._of(combined).set_by(origin), notices

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Experiment:
        """Build an experiment from settings by their dotted keys."""
        plain = settings.nested(values)
        return _build(cls, {**plain, "method": _method(plain["method"])}, "")


def _preset(values: Mapping[str, Any]) -> list[settings.Layer]:
    if "preset" not in values:
        return []
    name = str(values["preset"])
    return [settings.Layer(settings.PRESET + name, settings.flat(read_preset(name)))]


def _without_preset(values: Mapping[str, Any]) -> settings.Settings:
    return {key: value for key, value in values.items() if key != "preset"}


def _warn(notices: Iterable[settings.Notice]) -> None:
    for text in settings.as_messages(notices):
        warnings.warn(text, stacklevel=3)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}", remedy="Give a TOML file, or key=value words") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad TOML, bad UTF-8, too many digits
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset that ships with the package."""
    paths = {path.name.removesuffix(".toml"): path for path in resources.files("fedrane.presets").iterdir()}
    known = [key for key in paths if not key.startswith("_")]
    if name not in known:
        raise ConfigError(f"preset={name!r} is not known", remedy=nearest(name, known))
    return tomllib.loads(paths[name].read_text(encoding="utf-8"))


def _method(values: Mapping[str, Any]) -> Algorithm:
    values = dict(values)
    name = str(values.pop("name", "fedavg"))
    entry = methods.find(name)
    known = {f.name for f in dataclasses.fields(entry.cls)}
    for key in values:
        if key not in known:
            raise settings.unknown_field(key, name, entry.cls)
    algorithm = _build(entry.cls, {**entry.preset, **values}, "method.")
    for key, value in entry.preset.items():
        if getattr(algorithm, key) != value:
            given = f"method={name} with method.{key}={getattr(algorithm, key)}"
            plain = next(other for other, method in methods.METHODS.items() if method.cls is entry.cls)
            raise ConfigError(given, f"{name} is {plain} with method.{key}={value}", f"Use method={plain}")
    return algorithm


def _build(cls: type[D], values: Mapping[str, Any], prefix: str) -> D:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            if not prefix and key in methods.known():
                raise ConfigError(f"unknown key '{key}'", "it is a method", f"Write method={key} method.FIELD=value")
            names = [f"{prefix}{name}" for name in known]
            raise ConfigError(
                f"unknown key '{prefix}{key}'", remedy=nearest(prefix + key, names) if names else "There are no keys"
            )
        given[key] = _convert(value, hints[key], prefix + key)
    return cls(**given)


def _convert(value: Any, hint: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value}", f"{key} is a table", f"Set its keys: {key}.NAME=…")
        return _build(hint, value, key + ".")  # type: ignore[arg-type]
    if isinstance(value, Algorithm):
        return value
    options = [option for option in typing.get_args(hint) if option is not types.NoneType] or [hint]
    for option in options:
        try:
            return _TYPES[option](value)
        except (KeyError, ValueError, TypeError, OverflowError):
            continue
    name = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ConfigError(f"{key}={value}", f"it must be {_TYPE_NAMES.get(name, name)}")


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    return word[value.lower()]


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError
    return int(value)


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


_TYPES = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
_TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _check(e: Experiment) -> None:
    def need(holds: bool, key: str, why: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"{key}={getattr(e, key)}", why, remedy)

    for key in ("clients", "rounds", "epochs", "batch", "eval_every", "checkpoint_every"):
        need(getattr(e, key) >= 1, key, "it must be at least 1", f"Use {key}=1 or more")
    need(e.epochs <= 100_000, "epochs", "a round's batches are drawn in advance", "Use more rounds instead")
    need(
        0 < e.lr < 1e38, "lr", "the learning rate must be positive and finite, as a float32", "Use for instance lr=0.1"
    )
    need(0 <= e.momentum < 1, "momentum", "from 1 on, the steps grow without bound", "Use 0 <= momentum < 1")
    need(0 <= e.weight_decay < math.inf, "weight_decay", "it is not negative", "Use for instance weight_decay=1e-4")
    need(0 <= e.clip < math.inf, "clip", "it is the maximum gradient norm, 0 for no limit", "Use for instance clip=10")
    need(0 < e.participation <= 1, "participation", "it is a fraction of the clients", "Use 0 < participation <= 1")
    need(
        0 <= e.client_dropout < 1,
        "client_dropout",
        "it is the probability of losing an update",
        "Use 0 <= client_dropout < 1",
    )
    need(0 <= e.validation < 1, "validation", "it is a fraction of the training examples", "Use for instance 0.1")
    need(e.patience >= 0, "patience", "it is a number of evaluations", "Use 0 (never stop early) or more")
    need(
        e.patience == 0 or e.validation > 0,
        "patience",
        "early stopping uses validation examples, never the test set",
        "Set for instance validation=0.1 as well",
    )
    need(e.seed >= 0, "seed", "it is a whole number from 0", "Use seed=0")
    limit = threads.MAX_THREADS
    need(0 <= e.threads <= limit, "threads", "it is a number of threads", f"Use 0 (automatic), or 1 to {limit}")
    need(e.image_size >= 0, "image_size", "it is a size in pixels", "Use 0 for no resizing")
    need(e.precision in PRECISIONS, "precision", "it is not known", nearest(e.precision, PRECISIONS))
    check_policy(e.norm)


KEYS = frozenset(key for key in settings.dotted(Experiment().to_dict()) if not key.startswith(settings.FIELD))
"""All dotted keys except a method's fields."""


@cache
def defaults(method: str) -> Mapping[str, Any]:
    """Return the defaults by dotted key, for settings written before a key was added; no fields of your own methods."""
    known = method in methods.METHODS
    plain = settings.dotted((Experiment(method) if known else Experiment()).to_dict())
    return {key: value for key, value in plain.items() if known or key in KEYS}
