"""Where and when hooks run. Engines know no method; the sequential one is the reference for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedrane.algorithm import Algorithm
from fedrane.errors import ConfigError, nearest
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
    if name not in ENGINES:
        raise ConfigError(f"engine={name!r} is not known", remedy=nearest(name, ENGINES))
    return ENGINES[name](algorithm, federation)


from fedrane.engines.sequential import Sequential  # noqa: E402 - they need the types above
from fedrane.engines.stacked import Stacked  # noqa: E402
from fedrane.engines.threaded import Threaded  # noqa: E402


def automatic(algorithm: Algorithm, federation: Federation) -> Engine:
    """Stacked on a GPU, sequential on a CPU (docs/performance.md)."""
    return (Stacked if federation.task.device.type == "cuda" else Sequential)(algorithm, federation)


ENGINES: dict[str, Callable[[Algorithm, Federation], Engine]] = {
    "auto": automatic,
    "sequential": Sequential,
    "stacked": Stacked,
    "threaded": Threaded,
}
