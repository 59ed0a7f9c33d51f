"""What the engines are measured on: the paper's two networks, on real data where there are any, else on noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedrane import data
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Partitioning
from fedrane.experiment import Experiment

SHAPES = {"fmnist": ((1, 28, 28), 60_000), "cifar10": ((3, 32, 32), 50_000)}
MODELS = {"fmnist": "convnet", "cifar10": "resnet18", "digits": "mlp"}
DIGITS_CLIENTS = {"clients": 100, "batch": 16}
"""For digits: a hundred clients with about a dozen examples each."""
LRS = {"fedavg": 0.05, "fedrane": 0.3}


def dataset(name: str, root: Path | None) -> Dataset:
    """The real one, or noise of its shape: the time of a step does not depend on the pixels."""
    if root is not None or name == "digits":
        return data.load(name, root or Path(), 0)
    shape, examples = SHAPES[name]
    numbers = np.random.Generator(np.random.Philox(0))
    y = numbers.integers(0, 10, examples + 10_000)
    x = numbers.integers(0, 255, (examples + 10_000, *shape), dtype=np.uint8)
    classes, middle = tuple("abcdefghij"), (0.5,) * shape[0]
    return Dataset(
        f"noise like {name}", x[:examples], y[:examples], x[examples:], y[examples:], classes, middle, middle
    )


def experiment(name: str, method: str, **changes: Any) -> Experiment:
    """The setting of the measurements: 20 clients, α 0.5, batches of 128; for digits ``DIGITS_CLIENTS``."""
    settings: dict[str, Any] = {"clients": 20, "epochs": 5, "batch": 128, "lr": LRS.get(method, 0.05)}
    settings |= {"method": method, "model": MODELS[name], "partition": Partitioning(alpha=0.5), "eval_every": 10_000}
    return Experiment(**settings | (DIGITS_CLIENTS if name == "digits" else {}) | changes)
