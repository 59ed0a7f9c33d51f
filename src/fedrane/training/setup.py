"""What a run needs before its first round: dataset, partition, network, task, federation and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrane import data, engines, models
from fedrane.algorithm import Algorithm
from fedrane.config import effects, settings
from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset
from fedrane.data.federation import Federation
from fedrane.data.readers import MapStyle, from_torch
from fedrane.engines.processes import impossible
from fedrane.errors import ConfigError
from fedrane.experiment import PYTHON, Experiment
from fedrane.ops.sgd import SGD
from fedrane.system import loading
from fedrane.system.threads import cores
from fedrane.task import Task

Source = Dataset | MapStyle | None
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
        return data.load(experiment.dataset, root, experiment.image_size)
    return given if isinstance(given, Dataset) else from_torch(given)


def resolve(experiment: Experiment, dataset: Dataset, given_dataset: bool, given_model: bool) -> Experiment:
    """The experiment with every ``auto`` replaced by what it came to."""
    device = pick_device(experiment.device)
    changes: dict[str, Any] = {
        "dataset": PYTHON if given_dataset else _absolute(experiment.dataset, dataset),
        "model": PYTHON if given_model else automatic_model(experiment.model, dataset.shape),
        "device": str(device),
        "precision": automatic_precision(experiment.precision, device),
        "partition": experiment.partition.resolved(dataset.client is not None),
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
    return name if dataset.name == name else str(Path(name).resolve())


def automatic_model(model: str, shape: tuple[int, ...]) -> str:
    """The paper's choice: ConvNet for grey images, ResNet-18 for colour; an MLP for tables."""
    if model != "auto":
        return loading.absolute(model)
    return "mlp" if len(shape) == 1 else "convnet" if shape[0] == 1 else "resnet18"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name} cannot be used: {reason}", remedy="Use device=auto or device=cpu") from error
    return device


def automatic_precision(name: str, device: torch.device) -> str:
    """bf16 with float32 parameters on a GPU that has it (docs/performance.md)."""
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def make_partition(experiment: Experiment, dataset: Dataset) -> partitions.Partition:
    """The experiment sets the number of clients, unless the data or a saved partition have one.

    A number that the user has set must then be the same.
    """
    how = experiment.partition
    explicit = "clients" in (experiment.origin or ()) or experiment.clients != Experiment.clients
    clients = experiment.clients if explicit or not (how.file or how.kind == "natural") else 0
    return partitions.partition(dataset.y, len(dataset.classes), clients, how, experiment.seed, dataset.client)


def make_task(experiment: Experiment, shape: tuple[int, ...], classes: int, given: Network) -> Task:
    body, head = _network(experiment, shape, classes, given)
    tf32 = experiment.precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    task = Task.build(
        body,
        head,
        shape,
        classes,
        sgd=SGD(experiment.momentum, experiment.weight_decay, experiment.clip),
        norm=experiment.norm,
        seed=experiment.seed,
        fresh=not isinstance(given, nn.Module),
        dtype=torch.float64 if experiment.precision == "float64" else torch.float32,
        compute=torch.bfloat16 if experiment.precision == "bf16" else None,
        device=torch.device(experiment.device),
    )
    return experiment.algorithm.prepare(task)


def _network(
    experiment: Experiment, shape: tuple[int, ...], classes: int, given: Network
) -> tuple[nn.Module, nn.Module]:
    if given is None and experiment.model == PYTHON:
        raise ConfigError("this run's network was handed over from Python", remedy="Pass model=… again")
    if given is None and not loading.is_reference(experiment.model):
        return models.build(experiment.model, shape, classes)
    if given is None:
        given = models.load(experiment.model)
    if isinstance(given, nn.Module):
        return models.split_head(given, experiment.model_head, shape)
    if not callable(given):
        raise ConfigError(f"model={experiment.model} is a {type(given).__name__}", "it must be a function or a module")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        try:
            network = given(shape, classes)
        except (Exception, SystemExit) as error:
            raise loading.failed(f"model={experiment.model} raised an error", error) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model={experiment.model} returned a {type(network).__name__}",
            "a model is a function of an input shape and a number of classes, and returns a torch.nn.Module",
        )
    return models.split_head(network, experiment.model_head, shape)


def make_federation(
    experiment: Experiment, dataset: Dataset, partition: partitions.Partition, given: Network
) -> Federation:
    task = make_task(experiment, dataset.shape, len(dataset.classes), given)
    split = partitions.split(partition, experiment.seed, experiment.partition.test, experiment.validation)
    return Federation.of(task, dataset, split, experiment.batch, experiment.seed, experiment.augment)


def choose_engine(
    experiment: Experiment, federation: Federation, max_threads: int, resumed: bool = False
) -> tuple[Experiment, list[str]]:
    """The experiment with its engine and threads, where they were left open, and what the user should know of it.

    A run that is resumed keeps its own, as far as this machine has them.
    """
    engine, threads, notes = experiment.engine, experiment.threads, []
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
