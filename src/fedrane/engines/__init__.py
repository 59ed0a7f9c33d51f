"""Where and when hooks run. Engines know no method; the sequential one is the reference for all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedrane import extras
from fedrane.algorithm import Algorithm
from fedrane.errors import ConfigError, nearest
from fedrane.experiment import REMOTE
from fedrane.federation import Federation, Pool
from fedrane.task import Client, Model, State


class Trained(NamedTuple):
    """A round's training: what arrived at the server, in the order of client numbers."""

    ups: State
    cohort: Client
    owns: dict[int, State]
    """To be committed when the uploads have been merged."""
    metrics: dict[str, list[float]]
    rows: int
    """Rows trained on, dead ones not counted."""
    bytes_down: int
    bytes_up: int
    say: tuple[str, ...] = ()
    """What the user should know."""
    refused: Mapping[str, str] = MappingProxyType({})
    """Clients whose answers could not be used, and why."""


class Predicted(NamedTuple):
    labels: NDArray[np.int64]
    losses: NDArray[np.float64]


class Engine(Protocol):
    def train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained: ...

    def personal(self, server: State, own: State | None, client: int, round: int) -> Model: ...

    def predict(self, model: Model, pool: Pool, rows: NDArray[np.int64]) -> Predicted: ...

    def predict_each(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]: ...


def make(name: str, algorithm: Algorithm, federation: Federation) -> Engine:
    """The engine of that name; one with workers has as many as torch has threads now."""
    check(name)
    return ENGINES[name](algorithm, federation)


def choose(name: str, threads: int, algorithm: Algorithm, federation: Federation, most: int) -> tuple[str, int]:
    """What ``auto`` and 0 threads come to where ``most`` threads may be used; what is given stays as it is."""
    check(name)
    if name == AUTO:
        name = automatic(algorithm, federation, threads or most)
    return name, threads or automatic_threads(name, algorithm, federation, most)


def arithmetic(name: str, threads: int) -> int:
    """Threads of an operation outside of the clients' training: where those have the cores, merging takes one, so that
    the result does not depend on how many cores there are."""
    return 1 if name in WORKERS else threads


def check(name: str) -> None:
    """Whether there is such an engine, on this machine alone, with what it needs."""
    if name == REMOTE:
        raise ConfigError(
            "this run is of a federation of several machines", "its clients' rows are with them", "Go on with: flwr run"
        )
    if name not in (AUTO, *ENGINES):
        raise ConfigError(f"engine={name!r} is not known", remedy=nearest(name, (AUTO, *ENGINES)))
    if name in FLOWER:
        _simulation()


def opened(name: str, federation: Federation) -> AbstractContextManager[object]:
    """What an engine of that name needs around its rounds: for Flower, the nodes of a simulation."""
    return _simulation().simulation(federation) if name in FLOWER else nullcontext()


def _simulation() -> Any:
    extras.require("flower", "engine=flower", "fedrane.engines.simulation")
    from fedrane.engines import simulation  # Flower and Ray are slow to import

    return simulation


def _flower(algorithm: Algorithm, federation: Federation, short: bool = False) -> Engine:
    engine: Engine = _simulation().Simulated(algorithm, federation, short)
    return engine


from fedrane.engines.processes import Processes, impossible  # noqa: E402 - they need the types above
from fedrane.engines.sequential import Sequential  # noqa: E402
from fedrane.engines.stacked import Stacked  # noqa: E402
from fedrane.engines.threaded import Threaded  # noqa: E402

MAX_STACKED_WORK = 64_000_000
"""On a CPU clients are stacked if a batch takes at most so many multiply-adds (docs/performance.md)."""
CONVOLUTION_WEIGHT = 10
"""How often a multiply-add of a convolution is counted, which a stack computes slowly on a CPU."""
MIN_PROCESS_CORES = 4
"""From so many cores on threads wait too long for Python's lock."""
MIN_PROCESS_WORK = 20_000_000_000
"""Processes take time to start: they are used if an epoch of all clients takes at least so many multiply-adds."""
MIN_SPREAD_WORK = 1_000_000_000
"""A stack whose step takes at least so many multiply-adds is spread over half of the cores: smaller ones gain little,
and lose much where others want the cores."""
MAX_SPREAD_CORES = 16
"""Of which a stack takes half at most."""


def automatic(algorithm: Algorithm, federation: Federation, most: int) -> str:
    """The fastest: on a GPU stacked; on a CPU stacked where steps are light, else one client per core, in processes
    where there are many cores and much to do."""
    device = federation.task.device.type
    work = 0.0 if device == "cuda" else _work_of_a_row(algorithm, federation)
    if federation.batch * work <= MAX_STACKED_WORK:
        return "stacked"
    heavy = work * sum(map(len, federation.split.train)) >= MIN_PROCESS_WORK
    many = device == "cpu" and most >= MIN_PROCESS_CORES and not impossible()
    return "processes" if many and heavy else "threaded"


def automatic_threads(name: str, algorithm: Algorithm, federation: Federation, most: int) -> int:
    """As many as pay off on a machine that has other work too (docs/decisions/0013-threads.md). It goes by the
    experiment and the machine, never by how busy that is: the same command gives the same bits."""
    if name in WORKERS:
        return most
    if most == 1 or name in FLOWER or federation.task.device.type != "cpu":
        return 1
    step = federation.batch * _work_of_a_row(algorithm, federation)
    if name == "stacked":
        return max(1, min(most, MAX_SPREAD_CORES) // 2) if step * federation.population >= MIN_SPREAD_WORK else 1
    return most if step > MAX_STACKED_WORK else 1


def _work_of_a_row(algorithm: Algorithm, federation: Federation) -> float:
    try:
        return _counted(algorithm, federation)
    except Exception:  # noqa: BLE001 - a mistake in a hook is raised where it is used, and one row may be too few
        return math.inf


@torch.no_grad()
def _counted(algorithm: Algorithm, federation: Federation) -> int:
    """Multiply-adds of the network's answer, as a stack on a CPU feels them."""
    task = federation.task
    x, live = federation.train.take(np.zeros(1, dtype=np.int64))[0], torch.ones(1, dtype=torch.bool, device=task.device)
    with _Products() as counter:
        algorithm.predict(task, task.init(), x, live)
    return int(counter.found)


class _Products(TorchFunctionMode):
    """Counts multiply-adds of products and of convolutions; the library's own counter takes a second to start."""

    found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.found += out.numel() * args[1][0].numel()
        elif func in (torch.conv1d, torch.conv2d, torch.conv3d):
            self.found += CONVOLUTION_WEIGHT * out.numel() * args[1][0].numel()
        elif func in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__):
            self.found += out.numel() * args[0].shape[-1]
        return out


Maker = Callable[[Algorithm, Federation], Engine]
FLOWER: dict[str, Maker] = {"flower": _flower, "flower-bf16": partial(_flower, short=True)}
"""A simulated federation; the second sends numbers of 16 bits."""
ENGINES: dict[str, Maker] = {
    "sequential": Sequential,
    "stacked": Stacked,
    "threaded": Threaded,
    "processes": Processes,
    **FLOWER,
}
AUTO = "auto"
AUTOMATIC = ("stacked", "threaded", "processes")
"""What ``auto`` may come to."""
WORKERS = ("threaded", "processes")
"""Engines whose workers compute on one thread each."""
