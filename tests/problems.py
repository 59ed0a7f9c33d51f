"""Small problems with known answers, for the laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrane import Experiment
from fedrane.conformance import blobs
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Split
from fedrane.federation import Federation
from fedrane.models import split_head
from fedrane.sgd import SGD
from fedrane.task import Task

DOUBLE = torch.float64


def dense(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A smooth network without normalisation or dropout."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes))


def table(rows: int = 120, seed: int = 3) -> Dataset:
    return blobs(rows, seed)


def task_of(network: nn.Module, head: str, shape: tuple[int, ...], classes: int, **settings: Any) -> Task:
    return Task.build(*split_head(network, head, shape), shape, classes, **{"dtype": DOUBLE, **settings})


def federation(
    dataset: Dataset,
    clients: list[list[int]],
    network: Callable[[tuple[int, ...], int], nn.Module] = dense,
    head: str = "2",
    batch: int = 10_000,
    sgd: SGD | None = None,
    **settings: Any,
) -> Federation:
    """A federation whose clients train on exactly these rows."""
    task = task_of(
        network(dataset.shape, len(dataset.classes)),
        head,
        dataset.shape,
        len(dataset.classes),
        sgd=sgd or SGD(),
        **settings,
    )
    train = tuple(np.array(rows, dtype=np.int64) for rows in clients)
    nothing = tuple(np.zeros(0, np.int64) for _ in clients)
    return Federation.of(task, dataset, Split(train, nothing, train), batch, seed=settings.get("seed", 0))


def quick(**changes: Any) -> Experiment:
    """An experiment of a second."""
    settings: dict[str, Any] = {
        "dataset": "digits",
        "model": "mlp",
        "clients": 4,
        "rounds": 3,
        "epochs": 1,
        "batch": 64,
    }
    return Experiment(**(settings | changes))
