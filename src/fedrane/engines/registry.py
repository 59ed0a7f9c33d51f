"""The engines by name, and what ``auto`` comes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation
from fedrane.engines.base import Engine
from fedrane.engines.processes import Processes, impossible
from fedrane.engines.sequential import Sequential
from fedrane.engines.stacked import Stacked
from fedrane.engines.threaded import Threaded
from fedrane.errors import ConfigError, nearest
from fedrane.system import extras


def make(name: str, algorithm: Algorithm, federation: Federation) -> Engine:
    """The engine of that name; one with workers has as many as torch has threads now."""
    maker = (ENGINES | DEPLOYED).get(name)
    if maker is None:
        raise _unknown(name)
    return maker(algorithm, federation)


def choose(name: str, threads: int, algorithm: Algorithm, federation: Federation, max_threads: int) -> tuple[str, int]:
    """The engine and the number of threads for ``auto`` and 0; explicit values are kept."""
    check(name)
    if name == AUTO:
        name = automatic(algorithm, federation, threads or max_threads)
    return name, threads or automatic_threads(name, algorithm, federation, max_threads)


def server_threads(name: str, threads: int) -> int:
    """Threads of an operation at the server. Where workers have the cores, aggregation takes one thread, so that the
    result does not depend on how many cores there are."""
    return 1 if name in WORKERS else threads


def check(name: str) -> None:
    """Raise unless this process can run the engine: it exists, it needs no other machine, its packages are there."""
    if name in DEPLOYED:
        raise ConfigError(
            "this run is of a federation of several machines",
            "its clients' examples are with them",
            "Go on with: flwr run",
        )
    if name not in (AUTO, *ENGINES):
        raise _unknown(name)
    if name in FLOWER:
        _simulation()
    if name == RAY:
        _ray()


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"engine={name!r} is not known", remedy=nearest(name, (AUTO, *ENGINES)))


def opened(name: str, federation: Federation, threads: int = 1) -> AbstractContextManager[object]:
    """What an engine of that name needs around its rounds: the nodes of Flower's simulation, or Ray's workers."""
    if name == RAY:
        context: AbstractContextManager[object] = _ray().opened(federation.task.device.type == "cuda", threads)
        return context
    return _simulation().simulation(federation) if name in FLOWER else nullcontext()


def _ray() -> Any:
    extras.require("ray", "engine=ray", "ray")
    from fedrane.engines import ray_workers  # Ray is slow to import

    return ray_workers


def _on_ray(algorithm: Algorithm, federation: Federation) -> Engine:
    engine: Engine = _ray().Ray(algorithm, federation)
    return engine


def _simulation() -> Any:
    extras.require("flower", "engine=flower", "ray", "fedrane.flower.simulation")
    from fedrane.flower import simulation  # Flower and Ray are slow to import

    return simulation


def _simulated(algorithm: Algorithm, federation: Federation, bf16: bool = False) -> Engine:
    engine: Engine = _simulation().SimulationEngine(algorithm, federation, bf16)
    return engine


def _deployed(algorithm: Algorithm, federation: Federation) -> Engine:
    extras.require("flower", "a federation of several machines", "fedrane.flower.remote")
    from fedrane.flower import remote

    return remote.make_engine(algorithm, federation)


MAX_STACKED_MACS, CONVOLUTION_COST = 64_000_000, 10
"""On a CPU, clients are stacked if a batch takes at most this number of multiply-adds. Convolutions are slow in a stack
there: each of their multiply-adds is counted ``CONVOLUTION_COST`` times (docs/performance.md)."""
MIN_PROCESS_CORES, MIN_PROCESS_MACS = 4, 20_000_000_000
"""From this number of cores on, threads wait too long for Python's lock. Processes take time to start, so they are used
if an epoch of all clients takes at least this number of multiply-adds, counted as above."""
MIN_PARALLEL_STACK_MACS, MAX_STACK_CORES = 1_000_000_000, 16
"""A stack whose step takes at least this number of multiply-adds, counted as above, uses half of the cores, but no more
than half of ``MAX_STACK_CORES``. A smaller stack gains little, and loses much on a busy machine."""


def automatic(algorithm: Algorithm, federation: Federation, max_threads: int) -> str:
    """The fastest engine. On a GPU: stacked. On a CPU: stacked if steps are small, else one client per core, in
    processes if there are enough cores and enough work to pay for starting them."""
    device = federation.task.device.type
    work = 0.0 if device == "cuda" else _macs_per_example(algorithm, federation)
    if federation.batch * work <= MAX_STACKED_MACS:
        return "stacked"
    enough_work = work * sum(map(len, federation.split.train)) >= MIN_PROCESS_MACS
    can_fork = device == "cpu" and max_threads >= MIN_PROCESS_CORES and not impossible()
    return "processes" if can_fork and enough_work else "threaded"


def automatic_threads(name: str, algorithm: Algorithm, federation: Federation, max_threads: int) -> int:
    """As many threads as pay off on a shared machine (docs/decisions/0013-threads.md). The number depends on the
    experiment and the machine, not on its load: the same command gives the same bits."""
    if name in WORKERS:
        return max_threads
    if max_threads == 1 or name in FLOWER or federation.task.device.type != "cpu":
        return 1
    step = federation.batch * _macs_per_example(algorithm, federation)
    if name == "stacked":
        large = step * federation.population >= MIN_PARALLEL_STACK_MACS
        return max(1, min(max_threads, MAX_STACK_CORES) // 2) if large else 1
    return max_threads if step > MAX_STACKED_MACS else 1


def _macs_per_example(algorithm: Algorithm, federation: Federation) -> float:
    try:
        return _counted(algorithm, federation)
    except Exception:  # noqa: BLE001 - an error in a hook is reported when it runs; one example may be too few
        return math.inf


@torch.no_grad()
def _counted(algorithm: Algorithm, federation: Federation) -> int:
    """Multiply-adds of the network's forward pass, weighted by their cost in a stack on a CPU."""
    task = federation.task
    x, mask = federation.train.take(np.zeros(1, dtype=np.int64))[0], torch.ones(1, dtype=torch.bool, device=task.device)
    with _Products() as counter:
        algorithm.predict(task, task.init(), x, mask)
    return int(counter.macs)


class _Products(TorchFunctionMode):
    """Counts multiply-adds of products and of convolutions; the library's own counter takes a second to start."""

    macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.macs += out.numel() * args[1][0].numel()
        elif func in (torch.conv1d, torch.conv2d, torch.conv3d):
            self.macs += CONVOLUTION_COST * out.numel() * args[1][0].numel()
        elif func in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__):
            self.macs += out.numel() * args[0].shape[-1]
        return out


Maker = Callable[[Algorithm, Federation], Engine]
FLOWER: dict[str, Maker] = {"flower": _simulated, "flower-bf16": partial(_simulated, bf16=True)}
"""A simulated federation; the second sends bfloat16."""
RAY = "ray"
ENGINES: dict[str, Maker] = {
    "sequential": Sequential,
    "stacked": Stacked,
    "threaded": Threaded,
    "processes": Processes,
    RAY: _on_ray,
    **FLOWER,
}
DEPLOYED: dict[str, Maker] = {"flower-remote": _deployed}
"""Engines whose clients are other machines: only the server of a Flower app can make them."""
AUTO = "auto"
AUTOMATIC = ("stacked", "threaded", "processes")
"""What ``auto`` may come to."""
WORKERS = ("threaded", "processes", RAY)
"""Engines whose workers compute on one thread each."""
