"""Where and when hooks run. Engines know no method; the sequential one is the reference for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

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
    """The engine of that name; ``auto`` takes the fastest that suits the device."""
    check(name)
    return ENGINES[name](algorithm, federation)


def check(name: str) -> None:
    """Whether there is such an engine, on this machine alone."""
    if name == REMOTE:
        raise ConfigError(
            "this run is of a federation of several machines", "its clients' rows are with them", "Go on with: flwr run"
        )
    if name not in ENGINES:
        raise ConfigError(f"engine={name!r} is not known", remedy=nearest(name, ENGINES))


def opened(name: str, federation: Federation) -> AbstractContextManager[object]:
    """What an engine of that name needs around its rounds: for Flower, the nodes of a simulation."""
    return _simulation().simulation(federation) if name in FLOWER else nullcontext()


def _simulation() -> Any:
    try:
        from fedrane.engines import simulation  # Flower and Ray are an extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"engine=flower cannot be used: {error}", "Flower is not installed", "pip install 'fedrane[flower]'"
        ) from error
    return simulation


def _flower(algorithm: Algorithm, federation: Federation, short: bool = False) -> Engine:
    engine: Engine = _simulation().Simulated(algorithm, federation, short)
    return engine


from fedrane.engines.sequential import Sequential  # noqa: E402 - they need the types above
from fedrane.engines.stacked import Stacked  # noqa: E402


def automatic(algorithm: Algorithm, federation: Federation) -> Engine:
    """Stacked on a GPU, sequential on a CPU (docs/performance.md)."""
    return (Stacked if federation.task.device.type == "cuda" else Sequential)(algorithm, federation)


Maker = Callable[[Algorithm, Federation], Engine]
FLOWER: dict[str, Maker] = {"flower": _flower, "flower-bf16": partial(_flower, short=True)}
"""A simulated federation; the second sends numbers of 16 bits."""
ENGINES: dict[str, Maker] = {"auto": automatic, "sequential": Sequential, "stacked": Stacked, **FLOWER}
