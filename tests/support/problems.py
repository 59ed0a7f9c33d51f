"""Small problems with known solutions, for the laws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrane import Algorithm, Callback, Context, Experiment, Model, Outcome, State, tree
from fedrane.data.dataset import Dataset
from fedrane.data.federation import Federation
from fedrane.data.partition import Split
from fedrane.engines.processes import impossible
from fedrane.engines.sequential import Sequential
from fedrane.methods import METHODS
from fedrane.methods.fedavg import FedAvg
from fedrane.models import split_head
from fedrane.ops.sgd import SGD
from fedrane.task import Batch, Task
from fedrane.testing.conformance import blobs
from fedrane.tree import Tensors

DOUBLE = torch.float64
FORKS = pytest.mark.skipif(bool(impossible()), reason=f"no processes here: {impossible()}")
"""For tests of ``engine=processes``: on Linux without a GPU, as in CI, none is skipped."""
SLOW = pytest.mark.slow
"""Left to ``make test-slow``. Every law keeps a case without this mark."""


def slow_except(fast: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters, of which those not in ``fast`` are slow."""
    return [name if name in fast else pytest.param(name, marks=SLOW) for name in names]


KINDS = (
    *("fedavg", "local", "scaffold", "feddyn", "moon", "median", "fedfv", "fedmtl", "fedper", "pfedme", "ditto"),
    *("apple", "fedrod", "fedbabu", "fedproto", "spherefed", "fedrane"),
)
"""Of each kind one: what is kept, sent and aggregated, which models there are, what comes after the last round."""
EVERY_METHOD = slow_except(KINDS, METHODS)
"""Of which those that are like one of the kinds are slow."""
ALWAYS_TESTED = ("fedavg", "scaffold", "fedbabu")
"""Methods that are quick: without a state, with one at both sides, with training at the end."""


def dense(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A smooth network without normalisation or dropout."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes))


def table(examples: int = 120, seed: int = 3) -> Dataset:
    return blobs(examples, seed)


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
    """A federation whose clients train on exactly these examples."""
    task = task_of(
        network(dataset.shape, len(dataset.classes)),
        head,
        dataset.shape,
        len(dataset.classes),
        **{"optimizer": sgd or SGD(), **settings},
    )
    train = tuple(np.array(examples, dtype=np.int64) for examples in clients)
    nothing = tuple(np.zeros(0, np.int64) for _ in clients)
    return Federation.of(task, dataset, Split(train, nothing, train), batch, seed=settings.get("seed", 0))


class Listener(Callback):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def quick(**changes: Any) -> Experiment:
    """An experiment of a second, by the reference engine."""
    settings: dict[str, Any] = {
        "dataset": "digits",
        "model": "mlp",
        "clients": 4,
        "rounds": 3,
        "epochs": 1,
        "batch": 64,
        "engine": "sequential",
    }
    return Experiment(**(settings | changes))


class Quadratics:
    """Clients whose loss is ½ (w − a_k)ᵀ H_k (w − a_k) in the head's weight, for any examples: minima are known.

    Replaces the protocol's objective, so that every method built upon it runs on quadratics unchanged.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clients: int = 3, size: int = 4, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(clients, size, generator=draws, dtype=DOUBLE)
        factors = torch.randn(clients, size, size, generator=draws, dtype=DOUBLE)
        self.curvatures = factors @ factors.mT / size + 0.5 * torch.eye(size, dtype=DOUBLE)
        examples = [list(range(10 * k, 10 * k + 4 + k)) for k in range(clients)]
        network = nn.Sequential(nn.Identity(), nn.Linear(6, 3))
        self.federation = federation(table(10 * clients), examples, lambda shape, classes: network, "1")

        def objective(
            method: Algorithm, task: Task, ctx: Context, model: Model, batch: Batch
        ) -> tuple[Tensor, Outcome]:
            away = self.point(model.params) - self.centres[ctx.client.index]
            loss = 0.5 * away @ self.curvatures[ctx.client.index] @ away
            return loss, Outcome(model.stats, {"loss": loss})

        monkeypatch.setattr(Algorithm, "objective", objective)

    def point(self, params: dict[str, Tensor]) -> Tensor:
        """The numbers that count."""
        return params["head.weight"].flatten()[: self.centres.shape[1]]

    def losses(self, point: Tensor) -> Tensor:
        """Of all clients."""
        away = point - self.centres
        return 0.5 * (away[:, None] @ self.curvatures @ away[..., None]).flatten()


def server_rounds(method: Algorithm, count: int = 4) -> Iterator[tuple[Tensors, Tensors, State]]:
    """The model before each round, the average change that FedAvg would have made, and the server after it."""
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    server = method.init(fed.task, fed.roster)
    for round in range(1, count + 1):
        sent = Sequential(method, fed).train_round(server, {}, [0, 1], round, 0.1, 1)
        averaged, _ = FedAvg().aggregate(fed.task, server, sent.ups, sent.cohort)
        before = server.model.params
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        yield before, tree.sub(averaged.model.params, before), server
