"""What a run needs before its first round: dataset, partition, network, task, federation and engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrane import data, engines, models
from fedrane.algorithm import Algorithm
from fedrane.config import effects, hints, settings
from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset, Target
from fedrane.data.federation import Federation
from fedrane.data.objects import MapStyle, Splits, handed_over
from fedrane.data.tabular import Frame, read_table
from fedrane.engines.processes import impossible, require_possible
from fedrane.errors import ConfigError, nearest
from fedrane.experiment import PYTHON, Experiment
from fedrane.ops import adam
from fedrane.ops.attack import LABELS
from fedrane.system import loading
from fedrane.system.files import user_path
from fedrane.system.threads import cores
from fedrane.task import Task

Source = Dataset | MapStyle | Splits | Frame | None
Network = nn.Module | models.Factory | None


def algorithm_at(experiment: Experiment, round: int) -> Algorithm:
    """The method; in a round after the last, the one of its post-training stage."""
    stages = (experiment.algorithm, *experiment.algorithm.post_training())
    return stages[max(0, round - experiment.rounds)]


def at_rest(experiment: Experiment) -> Experiment:
    """The experiment as its models are used afterwards: on the CPU, with all the digits they have."""
    precision = "float64" if experiment.precision == "float64" else "float32"
    return experiment.replace(device="cpu", precision=precision)


def as_dataset(experiment: Experiment, given: Source) -> Dataset:
    if given is None:
        if experiment.dataset == PYTHON:
            raise ConfigError(
                "this run's dataset was handed over from Python", "it is not in the folder", "Pass dataset=… again"
            )
        root = Path(experiment.data_root) if experiment.data_root else None
        return data.load(experiment.dataset, root, experiment.image_size, experiment.table_options, experiment.window)
    if experiment.image_size and isinstance(given, Frame | Dataset):
        raise effects.no_effect("image_size", experiment.image_size, "only images that are read are resized")
    if isinstance(given, Frame):
        return read_table(given, experiment.table_options)
    dataset = (
        given if isinstance(given, Dataset) else handed_over(given, experiment.table_options, experiment.image_size)
    )
    options = dataset.options
    for key, value in asdict(experiment.table_options).items():
        if value not in (getattr(Experiment, key), options.get(key)):
            why = "the dataset that was passed is not a data frame, nor are its items dictionaries"
            if options:
                why = f"the dataset that was passed was read with {key}={options[key] or 'nothing'}"
            raise effects.no_effect(key, value, why)
    return dataset


def resolve(experiment: Experiment, dataset: Dataset, given_dataset: bool, given_model: bool) -> Experiment:
    """The experiment with every ``auto`` replaced by what it came to."""
    device = pick_device(experiment.device)
    changes: dict[str, Any] = {
        "dataset": PYTHON if given_dataset else _absolute(experiment.dataset, dataset),
        "model": PYTHON if given_model else automatic_model(experiment.model, dataset.shape, dataset.vocabulary),
        "device": str(device),
        "precision": automatic_precision(experiment.precision, device),
        "partition": partitioning(experiment, dataset),
        **dataset.options,
    }
    return experiment.replace(**changes).set_by(experiment.origin)


def settled(
    experiment: Experiment, dataset: Dataset, given_dataset: bool, given_model: bool
) -> tuple[Experiment, list[settings.Notice]]:
    """The experiment resolved, and without settings that have no effect on this dataset, network and device."""
    made, unused = effects.settle(resolve(experiment, dataset, given_dataset, given_model))
    return resolve(
        made, dataset, given_dataset, given_model
    ), unused  # what was taken out may have left an ``auto`` behind


def _absolute(name: str, dataset: Dataset) -> str:
    """An absolute path: a run may be resumed from another working directory."""
    return name if dataset.name == name else str(user_path(name).resolve())


def automatic_model(model: str, shape: tuple[int, ...], vocabulary: int = 0) -> str:
    """The paper's choice: ConvNet for grey images, ResNet-18 for colour; an MLP for tables. An LSTM for text."""
    if model != "auto":
        return loading.absolute(model)
    if vocabulary:
        return "lstm"
    return "mlp" if len(shape) == 1 else "convnet" if shape[0] == 1 else "resnet18"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        reason, remedy = str(error).splitlines()[0], hints.for_key(name) or "Use device=auto or device=cpu"
        raise ConfigError(f"device={name} cannot be used: {reason}", remedy=remedy) from error
    return device


def automatic_precision(name: str, device: torch.device) -> str:
    """bf16 with float32 parameters on a GPU that has it (docs/performance.md)."""
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def partitioning(experiment: Experiment, dataset: Dataset) -> partitions.Partitioning:
    return experiment.partition.resolved(dataset.client is not None, bool(dataset.alphabet), dataset.target is not None)


def make_partition(experiment: Experiment, dataset: Dataset) -> partitions.Partition:
    """The experiment sets the number of clients, unless the data or a saved partition have one.

    A number that the user has set must then be the same.
    """
    how = partitioning(experiment, dataset)
    explicit = "clients" in (experiment.origin or ()) or experiment.clients != Experiment.clients
    clients = experiment.clients if explicit or not (how.file or how.kind == "natural") else 0
    return partitions.partition(dataset.y, len(dataset.classes), clients, how, experiment.seed, dataset.client)


def positive_class(name: str, classes: Sequence[str]) -> int:
    """Return the index of the class that ``positive`` names; the second if it names none."""
    if not name:
        return 1
    if len(classes) != 2:
        raise effects.no_effect("positive", name, f"the dataset has {len(classes)} classes, and that needs two")
    if name not in classes:
        known = " and ".join(repr(each) for each in classes)
        raise ConfigError(f"positive={name} is no class", f"they are {known}", nearest(name, classes))
    return classes.index(name)


def make_task(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: Sequence[str],
    given: Network,
    vocabulary: int = 0,
    target: Target | None = None,
) -> Task:
    if target:
        _require_regression(experiment)
    body, head = _network(experiment, shape, len(classes) or 1, given, vocabulary)
    tf32 = experiment.precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    task = Task.build(
        body,
        head,
        shape,
        len(classes),
        vocabulary=vocabulary,
        target=target,
        positive=positive_class(experiment.positive, classes),
        optimizer=_optimizer(experiment),
        norm=experiment.norm,
        seed=experiment.seed,
        fresh=not (isinstance(given, nn.Module) or experiment.pretrained),
        dtype=torch.float64 if experiment.precision == "float64" else torch.float32,
        compute=torch.bfloat16 if experiment.precision == "bf16" else None,
        device=torch.device(experiment.device),
    )
    task = experiment.algorithm.prepare(task)
    return _frozen(experiment, task) if experiment.freeze else task


def _require_regression(experiment: Experiment) -> None:
    """Raise an error for a method or an attack that only works with classes."""
    for algorithm in (experiment.algorithm, *experiment.algorithm.post_training()):
        if algorithm.needs_classes:
            raise ConfigError(
                f"method={experiment.method_name} where a number is predicted (regression)",
                algorithm.needs_classes,
                "Use a method without classes, for instance fedavg or scaffold, or group the numbers into classes",
            )
    if experiment.attack.kind == LABELS:
        raise ConfigError(
            "attack.kind=labels where a number is predicted", "it exchanges classes", "Use another attack"
        )


def _frozen(experiment: Experiment, task: Task) -> Task:
    """The task without the parameters that the experiment freezes; an error if the method could not train then."""
    before = task.init().params
    task = task.freeze(pattern.strip() for pattern in experiment.freeze.split(","))
    if own := sorted(name for name in task.frozen & before.keys() if not experiment.algorithm.trains(name)):
        raise ConfigError(
            f"freeze={experiment.freeze} includes {own[0]}",
            f"{experiment.method_name} decides itself when this is trained",
            "Freeze other parameters, or use another method",
        )
    left = task.init().params
    for algorithm in (experiment.algorithm, *experiment.algorithm.post_training()):
        if algorithm.trains_model and not any(algorithm.trains(name) for name in left):
            raise ConfigError(
                f"freeze={experiment.freeze} leaves {experiment.method_name} nothing to train",
                f"of the others, {', '.join(left) or 'there are none'}, it trains none",
                "Freeze less, or use another method",
            )
    return task


MAX_ADAM_LR = 0.03
"""Of Adam, steps are about lr long in every weight."""


def advice(e: Experiment) -> list[str]:
    """What is allowed, and rarely meant."""
    if e.optimizer == "sgd" or e.lr <= MAX_ADAM_LR:
        return []
    given = f"lr={e.lr:g} with optimizer={e.optimizer}"
    return [f"{given} changes every weight by about {e.lr:g} in each step: use for instance lr=0.001"]


def _optimizer(e: Experiment) -> adam.Optimizer:
    return adam.optimizer(e.optimizer, e.adam, e.momentum, e.weight_decay, e.clip)


def _network(
    experiment: Experiment, shape: tuple[int, ...], classes: int, given: Network, vocabulary: int
) -> tuple[nn.Module, nn.Module]:
    if given is None and experiment.model == PYTHON:
        raise ConfigError("this run's network was handed over from Python", remedy="Pass model=… again")
    if given is None and not loading.is_reference(experiment.model):
        return models.build(experiment.model, shape, classes, vocabulary)
    if given is None:
        given = models.load(experiment.model)
    if isinstance(given, nn.Module):
        return models.split_head(given, experiment.model_head, shape, vocabulary)
    if not callable(given):
        raise ConfigError(f"model={experiment.model} is a {type(given).__name__}", "it must be a function or a module")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        try:
            network = given(shape, classes, **_extra(given, vocabulary))
        except (Exception, SystemExit) as error:
            raise loading.failed(f"model={experiment.model} raised an error", error) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model={experiment.model} returned a {type(network).__name__}",
            "a model is a function of an input shape and a number of classes, and returns a torch.nn.Module",
        )
    return models.split_head(network, experiment.model_head, shape, vocabulary)


def _extra(function: models.Factory, vocabulary: int) -> dict[str, int]:
    """The size of the vocabulary, for a function that has a parameter of that name."""
    if not vocabulary:
        return {}
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a readable signature
        return {}
    return {"vocabulary": vocabulary} if "vocabulary" in names else {}


def make_federation(
    experiment: Experiment, dataset: Dataset, partition: partitions.Partition, given: Network
) -> Federation:
    task = make_task(experiment, dataset.shape, dataset.classes, given, dataset.vocabulary, dataset.target)
    shares = experiment.partition.test, experiment.validation
    split = partitions.split(partition, experiment.seed, *shares, ordered=bool(dataset.alphabet))
    dataset = replace(dataset, x=experiment.skew.applied(dataset.x, partition.clients, experiment.seed))
    if experiment.attack.kind == LABELS:
        hostile = experiment.attack.hostile(len(split.train), experiment.seed)
        flipped = experiment.attack.labels(dataset.y, len(dataset.classes), [split.train[k] for k in hostile])
        dataset = replace(dataset, y=flipped)
    return Federation.of(task, dataset, split, experiment.batch, experiment.seed, experiment.augment)


def choose_engine(
    experiment: Experiment, federation: Federation, max_threads: int, resumed: bool = False
) -> tuple[Experiment, list[str]]:
    """The experiment with its engine and threads, where they were left open, and what the user should know of it.

    A run that is resumed keeps its own, as far as this machine has them.
    """
    engine, threads, notes = experiment.engine, experiment.threads, []
    if not resumed and engine == "processes":
        require_possible()
    if resumed and engine == "processes" and (why := impossible()):
        engine = "threaded"
        reason = f"engine=processes cannot be used here: {why}"
        notes.append(f"{reason}. Going on with engine=threaded, to the same bits")
    engine, threads = engines.choose(engine, threads, experiment.algorithm, federation, max_threads)
    if resumed and engine in engines.WORKERS:
        threads = min(threads, max_threads)  # they decide how fast it goes, and nothing else
    elif resumed and threads > cores():
        here = f"this machine has {cores()}"
        notes.append(f"begun on {threads} threads, and {here}: last digits may differ, and it may be slow")
    return experiment.replace(engine=engine, threads=threads), notes
