"""What the adapters of ``benchmarks/peers.py`` share: the job, its network, and the report.

It runs in the environments of other libraries, so it needs NumPy and PyTorch alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

START = "start/"
done = Counter[str]()
"""Steps and examples of this process's training, counted by the network itself."""


class Clock:
    """Marks the start and the end of each round, in seconds of the wall and of the processor."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def __call__(self, elsewhere: float = 0.0) -> None:
        """With the seconds of the processor that other processes have taken until now."""
        self.marks.append((time.perf_counter(), time.process_time() + elsewhere))


class Job(NamedTuple):
    """FedAvg with every client in every round, plain SGD, and uploads weighted by examples."""

    rounds: int
    epochs: int
    batch: int
    lr: float
    pixels: Tensor
    """Of the training set, in uint8."""
    y: Tensor
    test_pixels: Tensor
    test_y: Tensor
    mean: Tensor
    std: Tensor
    clients: list[Tensor]
    """The numbers of each client's examples."""
    start: dict[str, Tensor]

    def images(self, pixels: Tensor) -> Tensor:
        """Normalised, in float32."""
        return (pixels.float() / 255 - self.mean.reshape(1, -1, 1, 1)) / self.std.reshape(1, -1, 1, 1)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return self.images(self.pixels[self.clients[k]]), self.y[self.clients[k]]

    def network(self) -> Network:
        network = Network()
        network.load_state_dict(self.start)
        return network

    @property
    def steps(self) -> int:
        """Of all clients in all rounds; a last batch that is not full is a step."""
        return self.rounds * self.epochs * sum(-(-len(each) // self.batch) for each in self.clients)

    @property
    def examples(self) -> int:
        """The same for examples: one counts each time it is trained on."""
        return self.rounds * self.epochs * sum(map(len, self.clients))


class Network(nn.Sequential):
    """The library's ConvNet, in its order of layers."""

    def __init__(self) -> None:
        layers: list[tuple[str, nn.Module]] = []
        for number, (inputs, outputs) in enumerate([(1, 16), (16, 32)], 1):
            layers.append((f"conv{number}", nn.Conv2d(inputs, outputs, 5)))
            layers += [(f"pool{number}", nn.MaxPool2d(2)), (f"relu{number}", nn.ReLU())]
        layers += [("flatten", nn.Flatten()), ("embed", nn.Linear(512, 64)), ("head", nn.Linear(64, 10))]
        super().__init__(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            done.update(steps=1, examples=len(x))
        return super().forward(x)


def write(path: Path, job: Job) -> None:
    arrays = {name: getattr(job, name).numpy() for name in ("pixels", "y", "test_pixels", "test_y", "mean", "std")}
    arrays |= {name: np.asarray(getattr(job, name)) for name in ("rounds", "epochs", "batch", "lr")}
    arrays |= {START + name: value.numpy() for name, value in job.start.items()}
    sizes = np.asarray([len(each) for each in job.clients])
    np.savez(path, sizes=sizes, clients=torch.cat(job.clients).numpy(), **arrays)


@lru_cache(maxsize=1)
def read(path: str) -> Job:
    with np.load(path) as file:
        tensors = {name: torch.from_numpy(file[name]) for name in file.files}
    clients = list(tensors["clients"].split(tensors["sizes"].tolist()))
    start = {name.removeprefix(START): value for name, value in tensors.items() if name.startswith(START)}
    numbers = {name: tensors[name].item() for name in ("rounds", "epochs", "batch", "lr")}
    rest = {name: tensors[name] for name in ("pixels", "y", "test_pixels", "test_y", "mean", "std")}
    return Job(**numbers, **rest, clients=clients, start=start)


def batches(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of one epoch, shuffled, from memory."""
    for piece in torch.randperm(len(y)).split(size):
        yield x[piece], y[piece]


def train(network: nn.Module, job: Job, k: int) -> None:
    """A client's local epochs, for libraries that leave these to their users."""
    x, y = job.client(k)
    optimizer = torch.optim.SGD(network.parameters(), lr=job.lr)
    network.train()
    for _ in range(job.epochs):
        for images, labels in batches(x, y, job.batch):
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(network: nn.Module, job: Job) -> float:
    """Of the global model on the official test set."""
    network.eval()
    pieces = zip(job.test_pixels.split(1000), job.test_y.split(1000), strict=True)
    return sum(int((network(job.images(x)).argmax(1) == y).sum()) for x, y in pieces) / len(job.test_y)


def parameters(network: nn.Module) -> int:
    return sum(value.numel() for value in network.parameters())


def main(run: Callable[[Job, str], dict[str, Any]], *packages: str) -> None:
    """``python ADAPTER JOB REPORT``: do the job and write what was done.

    ``run`` gives the ``marks`` of its clock, the global model's ``accuracy`` and what the library really did: the
    ``sizes`` of the clients it knows, its network's ``parameters``, and the ``steps`` and ``examples`` it trained.
    """
    torch.manual_seed(0)
    job, report = sys.argv[1:]
    result = {"threads": torch.get_num_threads(), **run(read(job), job)}
    result["versions"] = {name: _version(name) for name in (*packages, "torch")}
    Path(report).write_text(json.dumps(result))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"
