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
from fedrane.config.hints import for_key
from fedrane.data import tabular
from fedrane.data.augment import Augmentation
from fedrane.data.partition import Partitioning
from fedrane.data.sampling import Span, Steps
from fedrane.data.skew import FeatureSkew
from fedrane.data.text import WINDOW
from fedrane.errors import ConfigError, nearest
from fedrane.models.norms import check_policy
from fedrane.ops.adam import OPTIMIZERS, AdamConstants
from fedrane.ops.attack import Attack
from fedrane.ops.gate import Gate
from fedrane.ops.sgd import Schedule
from fedrane.system import threads
from fedrane.system.files import as_toml, read_text

PRECISIONS = ("auto", "float32", "float64", "tf32", "bf16")
PYTHON = "<python>"
"""Written instead of a dataset or a network that was passed as a Python object."""
ELSEWHERE = frozenset({"data_root", "engine", "threads", "device", "checkpoint_every"})
"""The keys that decide where and how an experiment runs, and not its result."""
MOST_ROUNDS = 10**9
D = TypeVar("D")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result.

    >>> Experiment(method="fedavg", dataset="digits", clients=10).rounds
    50
    """

    method: Algorithm | str = "fedavg"
    """How clients train and the server aggregates: a known name, ``path.py:Class`` or ``package.module:Class``."""
    dataset: str = "digits"
    """A known name (``fedrane datasets``), a CSV, Parquet, .npz or .txt file, or a folder of images."""
    label: str = ""
    """Of a table, or a dataset whose items are dictionaries: the column to predict."""
    client: str = ""
    """Of a table, or a dataset whose items are dictionaries: the column that says which client an example belongs to;
    empty: it names no clients."""
    drop: str = ""
    """Of a table, or a dataset whose items are dictionaries: columns to leave out, separated by commas."""
    categories: str = ""
    """Of a table: columns of numbers that are categories (codes), separated by commas."""
    impute: str = tabular.NONE
    """Of a table: ``median`` replaces missing values by the median of the training examples, and
    missing categories by the most frequent; with ``none`` they are an error."""
    task: str = tabular.BY_DATASET
    """Of a table: ``regression`` reads the label as a number to predict, ``dataset`` as a class. Other datasets
    decide that themselves."""
    data_root: str = ""
    """The folder of the known datasets; empty is ``$FEDRANE_DATA``, else ``~/.cache/fedrane``."""
    image_size: int = 0
    """Resize the images of a folder, or of a dataset passed from Python, to this height and width; 0 means no
    resizing."""
    positive: str = ""
    """Of a dataset with two classes: the name of the one to find, of which F1, AUPRC and sensitivity are; empty is the
    second."""
    window: int = WINDOW
    """Of a text: the number of characters from which the next one is predicted."""
    model: str = "auto"
    """A known name, or ``path.py:function`` (input shape, classes) → network; ``auto`` depends on the dataset."""
    model_head: str = ""
    """The submodule that is the classifier, for your own network."""
    pretrained: bool = False
    """Start from the weights that your own network comes with; otherwise they are drawn from the seed. A module that is
    passed from Python always keeps its weights."""
    freeze: str = ""
    """Names of parameters that are not trained, separated by commas; ``*`` stands for anything: ``body.*`` trains the
    head alone."""
    norm: str = "shared"
    """What happens to BatchNorm: ``shared`` averages its statistics over clients, ``batch`` uses those of each batch,
    ``local`` keeps its layers with the client, ``group`` replaces it by GroupNorm."""
    clients: int = 20
    """The number of clients; not needed if the data or a saved partition name them."""
    rounds: int = 50
    """The number of communication rounds."""
    epochs: int | float = 5
    """Local epochs: passes of a client over its training examples in a round. A fraction (0.5) ends within a pass,
    after that part of its batches, rounded up."""
    steps: int = 0
    """Local steps of a client in a round, instead of epochs: the same for all clients, in as many passes over its
    examples as they take; 0 trains ``epochs``."""
    batch: int = 128
    """Examples per local step, at most."""
    lr: float = 0.1
    """The clients' learning rate; ``schedule.kind`` changes it from round to round. SGD's default is far too large for
    Adam, which needs about 0.001."""
    optimizer: str = "sgd"
    """The clients' optimiser: ``sgd``, ``adam`` or ``adamw``. Its state is not kept from one round to the next."""
    momentum: float = 0.0
    """The momentum of the clients' SGD; it starts at zero in every round. Adam has ``adam.momentum``."""
    weight_decay: float = 0.0
    """The weight decay of the clients' optimiser, as in ``torch.optim``: part of the gradient with ``sgd`` and
    ``adam``; with ``adamw`` it shrinks the weights by itself."""
    clip: float = 0.0
    """The maximum norm of the whole gradient of a local step; 0 means no limit."""
    participation: float = 1.0
    """The fraction of clients sampled for a round."""
    client_dropout: float = 0.0
    """The probability that the update of a sampled client is lost (simulated)."""
    validation: float = 0.0
    """The fraction of each client's training examples held out for early stopping or tuning."""
    patience: int = 0
    """Stop when the validation accuracy has not improved for this many evaluations; 0 trains all rounds."""
    seed: int = 0
    """The seed of everything random: partition, initial weights, cohorts, batches and augmentation."""
    engine: str = "auto"
    """How clients are trained: one after another (``sequential``), all at once in stacked tensors (``stacked``), in
    parallel in threads or processes (``threaded``, ``processes``), in the workers of a Ray cluster (``ray``), or as
    simulated nodes of Flower. ``auto`` chooses the fastest of the first four."""
    threads: int = 0
    """Threads of one operation, or workers of the engines ``threaded``, ``processes`` and ``ray``; 0 chooses by the
    workload. In a Ray cluster that is joined, it is as many workers as there are free cores or GPUs."""
    device: str = "auto"
    """Where the networks are: ``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` is the GPU if there is one."""
    precision: str = "auto"
    """The arithmetic of training; ``auto`` is bf16 on a GPU that supports it, else float32. With ``bf16`` and ``tf32``
    parameters stay float32."""
    eval_every: int = 1
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    checkpoint_every: int = 1
    """Rounds from one checkpoint to the next; the last round is always saved."""
    partition: Partitioning = field(default_factory=Partitioning)
    skew: FeatureSkew = field(default_factory=FeatureSkew)
    schedule: Schedule = field(default_factory=Schedule)
    adam: AdamConstants = field(default_factory=AdamConstants)
    augment: Augmentation = field(default_factory=Augmentation)
    gate: Gate = field(default_factory=Gate)
    attack: Attack = field(default_factory=Attack)

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
    def table_options(self) -> tabular.TableOptions:
        """How a table is read."""
        return tabular.TableOptions(*(getattr(self, key) for key in tabular.TABLE_KEYS))

    @property
    def length(self) -> Span:
        """How long a client trains in a round: so many epochs, or so many steps."""
        return Steps(self.steps) if self.steps else self.epochs

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
        for name in ("partition", "skew", "schedule", "adam", "augment", "gate", "attack"):
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
    def asked(
        cls, words: Iterable[str], file: Path | None = None, above: Iterable[settings.Layer] = ()
    ) -> tuple[Experiment, list[settings.Notice]]:
        """Return the experiment of a file and the words that override it, and the settings that are not used.

        Layers ``above`` the file override it; words override them.
        """
        layers = [settings.Layer(str(file), settings.flat(read_toml(file)))] if file else []
        layers += above
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
        return tomllib.loads(read_text(path))
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
            similar = nearest(prefix + key, names) if names else "There are no keys"
            raise ConfigError(f"unknown key '{prefix}{key}'", remedy=("" if prefix else for_key(key)) or similar)
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
    return word[_as_str(value).lower()]


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
_TYPE_NAMES["int or float"] = _TYPE_NAMES["float"]


def _check(e: Experiment) -> None:
    def need(holds: bool, key: str, why: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"{key}={getattr(e, key)}", why, remedy)

    need(bool(e.dataset), "dataset", "it is empty", "Use for instance dataset=digits, or the path of a file")
    for key in ("clients", "rounds", "batch", "eval_every", "checkpoint_every"):
        need(getattr(e, key) >= 1, key, "it must be at least 1", f"Use {key}=1 or more")
    need(e.rounds <= MOST_ROUNDS, "rounds", "no machine lasts that long", f"Use rounds={MOST_ROUNDS} or fewer")
    need(e.epochs > 0, "epochs", "it must be more than 0", "Use epochs=1, or for a part of an epoch epochs=0.5")
    need(e.epochs <= 100_000, "epochs", "a round's batches are drawn in advance", "Use more rounds instead")
    need(e.steps >= 0, "steps", "it is a number of local steps", "Use 1 or more, or 0 to train epochs")
    need(e.steps <= 10_000_000, "steps", "a round's batches are drawn in advance", "Use more rounds instead")
    need(e.optimizer in OPTIMIZERS, "optimizer", "it is not known", nearest(e.optimizer, OPTIMIZERS))
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
    need(e.window >= 1, "window", "it counts the characters before the one to predict", "Use window=32")
    need(e.image_size >= 0, "image_size", "it is a size in pixels", "Use 0 for no resizing")
    need(e.precision in PRECISIONS, "precision", "it is not known", nearest(e.precision, PRECISIONS))
    check_policy(e.norm)
    if not e.schedule.warmup < e.rounds:
        given = f"schedule.warmup={e.schedule.warmup} with rounds={e.rounds}"
        raise ConfigError(given, "no round would have the full learning rate", f"Use less than {e.rounds} rounds")
    if e.attack.kind != Attack.kind and e.engine.startswith("flower"):
        need(
            e.gate.kind != Gate.kind,
            "engine",
            "hostile clients meet a gate there and none elsewhere, so the result would depend on the engine",
            "Set gate.kind=refuse, gate.kind=clip or gate.kind=off",
        )
    _ = e.table_options  # it checks itself


KEYS = frozenset(key for key in settings.dotted(Experiment().to_dict()) if not key.startswith(settings.FIELD))
"""All dotted keys except a method's fields."""


@cache
def defaults(method: str) -> Mapping[str, Any]:
    """Return the defaults by dotted key, for settings written before a key was added; no fields of your own methods."""
    known = method in methods.METHODS
    plain = settings.dotted((Experiment(method) if known else Experiment()).to_dict())
    return {key: value for key, value in plain.items() if known or key in KEYS}
