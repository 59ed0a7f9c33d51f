"""The contract of an engine: train the clients of a round, and evaluate all clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.data.sampling import Span
from fedrane.engines import evaluation
from fedrane.engines.evaluation import Metrics, Predicted
from fedrane.errors import FedraneError
from fedrane.ops.reduction import Partial
from fedrane.task import Client, Model, State, Task

COLUMNS = ("index", "size", "steps", "round", "lr")
"""What a server knows of each client of a cohort."""


class Trained(NamedTuple):
    """A round's training: what arrived at the server, in the order of client numbers."""

    ups: State
    """Empty if the engine was asked to sum them up: then ``sums`` has what is left of them."""
    cohort: Client
    client_states: dict[int, State]
    """To be committed when the uploads have been aggregated."""
    metrics: dict[str, list[float]]
    examples: int
    """Examples trained on, padding not counted."""
    bytes_down: int
    bytes_up: int
    messages: tuple[str, ...] = ()
    """What the user should know."""
    refused: Mapping[str, str] = MappingProxyType({})
    """Clients whose replies could not be used, and why."""
    clipped: Mapping[str, str] = MappingProxyType({})
    """Clients whose uploads the gate has scaled down, and why."""
    sums: Sums | None = None


class Summed(NamedTuple):
    """What is left of the uploads of some neighbours in the cohort."""

    first: int
    """The position of the first of them."""
    partial: Partial
    finite: list[bool]
    """Whether each client's upload was."""

    @classmethod
    def of(cls, algorithm: Algorithm, task: Task, server: State, ups: State, cohort: Client, first: int) -> Summed:
        partial = Partial.of(algorithm.summary(task, server, ups, cohort), first)
        return cls(first, partial, tree.finite_rows(ups) or [True] * len(cohort.index))


class Sums:
    """The uploads of a round, summed up as they come."""

    def __init__(self, algorithm: Algorithm, task: Task, server: State) -> None:
        self.algorithm, self.task, self.server = algorithm, task, server
        self._partial: Partial | None = None
        self._finite: dict[int, list[bool]] = {}

    @property
    def finite(self) -> list[bool]:
        """Whether each client's upload was, in the order of clients."""
        return [finite for _, part in sorted(self._finite.items()) for finite in part]

    def add(self, ups: State, cohort: Client) -> None:
        """The stacked uploads of the next clients."""
        self.take(Summed.of(self.algorithm, self.task, self.server, ups, cohort, len(self.finite)))

    def take(self, part: Summed) -> None:
        """Neighbours, who may have come before others that are before them in the cohort."""
        self._partial = part.partial if self._partial is None else self._partial + part.partial
        self._finite[part.first] = part.finite

    def update(self, cohort: Client) -> tuple[State, dict[str, Any]]:
        """The server's step from them."""
        assert self._partial is not None  # noqa: S101 - no engine trains an empty cohort
        return self.algorithm.update(self.task, self.server, self._partial.totals(len(self.finite)), cohort)


def joined(parts: Sequence[Trained], sums: Sums | None) -> Trained:
    """The whole of a round that was trained in parts, which are ranges of its clients in their order."""
    first = parts[0]
    for part in parts:
        require_same_metrics(int(first.cohort.index[0]), first.metrics, int(part.cohort.index[0]), part.metrics)
    columns: dict[str, Any] = {name: torch.cat([getattr(part.cohort, name) for part in parts]) for name in COLUMNS}
    return Trained(
        ups=tree.map(lambda *rows: torch.cat(rows), *(part.ups for part in parts)),
        cohort=first.cohort._replace(**columns),
        client_states={k: state for part in parts for k, state in part.client_states.items()},
        metrics={name: [value for part in parts for value in part.metrics[name]] for name in first.metrics},
        examples=sum(part.examples for part in parts),
        bytes_down=sum(part.bytes_down for part in parts),
        bytes_up=sum(part.bytes_up for part in parts),
        messages=tuple(dict.fromkeys(message for part in parts for message in part.messages)),
        sums=sums,
    )


def require_same_metrics(one: int, metrics: Mapping[str, Any], other: int, others: Mapping[str, Any]) -> None:
    """Raise an error unless two clients report the same metrics."""
    if others.keys() != metrics.keys():
        raise FedraneError(
            f"client {other} reports {sorted(others)}, client {one} {sorted(metrics)}",
            "a metric is logged for all clients of a round",
            "Have the hook finish give every client the same names",
        )


class Engine(Protocol):
    """Runs a method's hooks for the clients of a federation."""

    def train_round(
        self,
        server: State,
        client_states: Mapping[int, State],
        clients: list[int],
        round: int,
        lr: float,
        epochs: Span,
        reduce: bool = False,
    ) -> Trained:
        """Train these clients from the server's state; ``client_states`` has those of clients that trained before.

        With ``reduce`` it may give the sums of their uploads instead of all of these.
        """

    def evaluate(self, server: State, client_states: Mapping[int, State], round: int) -> Metrics:
        """Every measure of :mod:`fedrane.engines.evaluation` that the method's models allow, over all clients."""


class LocalEngine(ABC):
    """An engine that has the clients' models and examples on this machine, and so can predict with them itself."""

    algorithm: Algorithm
    federation: Federation

    @abstractmethod
    def train_round(
        self,
        server: State,
        client_states: Mapping[int, State],
        clients: list[int],
        round: int,
        lr: float,
        epochs: Span,
        reduce: bool = False,
    ) -> Trained: ...

    @abstractmethod
    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model: ...

    @abstractmethod
    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted: ...

    @abstractmethod
    def predict_each(
        self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]
    ) -> list[Predicted]: ...

    def evaluate(self, server: State, client_states: Mapping[int, State], round: int) -> Metrics:
        return evaluation.evaluate(self, self.federation, self.algorithm, server, client_states, round)
