"""Clients on other machines, as the server knows them: how many examples they have, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation, describe, each_of
from fedrane.data.sampling import Span, local_steps
from fedrane.errors import ConfigError
from fedrane.flower.client_state import NEVER
from fedrane.flower.engine import FlowerEngine
from fedrane.flower.nodes import NodePool
from fedrane.task import Client, Model, State


@dataclass(frozen=True, eq=False, kw_only=True)
class RemoteFederation(Federation):
    """A federation whose examples are with its clients, and the nodes by which these are reached."""

    pool: NodePool
    late_clients: dict[int, int] = field(default_factory=dict)
    """Training examples of those who came after the start: they get the model, and take no part."""

    def takes_part(self, client: int) -> bool:
        """Whether the run started with this client."""
        return client < self.population and len(self.split.train[client]) > 0

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All examples of a client as if of one class: the others are not the server's to know."""
        return np.array([[len(examples)] for examples in self.split.train])

    def client(self, index: int, round: int, lr: float, epochs: Span) -> Client:
        size = self.late_clients[index] if index in self.late_clients else len(self.split.train[index])
        steps = local_steps(size, self.batch, epochs)
        no_labels = np.zeros((self.population, self.task.outputs), np.int64)
        client = each_of(describe(self.task, [0], no_labels, round, lr, [steps]))[0]
        return client._replace(index=torch.full_like(client.index, index), size=torch.full_like(client.size, size))


class RemoteStates:
    """The server holds no client's state: only which of its uploads was aggregated last."""

    def aggregated(self, client: int, client_state: State | None, round: int) -> int:
        return NEVER if client_state is None else int(client_state.extra["aggregated"])

    def committed(self, client: int, round: int) -> State:
        return State(Model({}, {}), {"aggregated": torch.tensor(round)})


def make_engine(algorithm: Algorithm, federation: Federation) -> FlowerEngine:
    if not isinstance(federation, RemoteFederation):
        raise ConfigError("engine=flower-remote", "its clients are other machines", "Run the app: flwr run")
    return FlowerEngine(algorithm, federation, federation.pool, RemoteStates())
