"""FedALA: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.

FedAvg, except for what training starts from. In the lower layers it is the global model Θ; in the top p layers it is a
mix of Θ and the client's last model Θ_i with a weight for each parameter,

    Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i,        W_i ← clip(W_i − η ∇_W f_i(Θ̂_i), 0, 1),

which is learned first, on s of the client's examples. W_i is all ones at first and stays with the client. Client i
predicts with the model that it trained last.

*Deviations*: learning W_i takes one epoch of each round, of which the batches after the first s of the examples are not
used. The paper repeats that epoch until the loss settles when a client does it for the first time, which would depend
on the data. In round 1 Θ_i = Θ, so W_i does not move; the authors' code skips it. That code counts p in tensors, here p
counts layers. It evaluates Θ̂_i before local training; the paper's result is the trained model, as here. While W_i is
learned, BatchNorm's running statistics stay. They start from the global model's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.func import grad

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Done, Grid, Span, Work, epochs_after
from fedrane.errors import check_ranges
from fedrane.task import Batch, Client, Context, Model, State, Task
from fedrane.tree import Tensors

T = TypeVar("T")


@dataclass(frozen=True)
class FedALA(Algorithm):
    """FedAvg whose clients learn how much of the global model's top layers each parameter takes over."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"weight_lr": (0.1, 1.0, 10.0), "layers": (1, 2)}

    layers: int = 1
    """p, the number of top layers with learned weights; the layers below are the global model's."""
    examples: float = 0.8
    """s, the part of the client's examples that the weights are learned on."""
    weight_lr: float = 1.0
    """η, the learning rate of the weights."""

    def __post_init__(self) -> None:
        check_ranges(self, layers=(1, 1000), examples=(1e-6, 1), weight_lr=(0, 1e6))
        if self.weight_lr == 0:
            warnings.warn("FedALA with method.weight_lr=0 trains as FedAvg does", stacklevel=3)

    def join(self, task: Task, server: State, client: Client) -> State:
        ones = {name: torch.ones_like(server.model.params[name]) for name in self._top(task)}
        return State(server.model, {"weights": ones})

    def local_epochs(self, epochs: Span) -> Span:
        return epochs_after(1, epochs, "fedala")

    def start(self, task: Task, ctx: Context) -> Model:
        params, stats = super().start(task, ctx)
        return Model({**params, **_mix(ctx, ctx.client_state.extra["weights"])}, stats)

    def begin(self, task: Task, ctx: Context) -> Work:
        return super().begin(task, ctx)._replace(extra={"weights": ctx.client_state.extra["weights"]})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after, weights = super().step(task, ctx, work, batch), work.extra["weights"]
        learning = work.examples < self.examples * ctx.client.size
        training = work.examples >= ctx.client.size

        def loss(weights: Tensors) -> Tensor:
            mixed = Model({**work.model.params, **_mix(ctx, weights)}, work.model.stats)
            return self.objective(task, ctx, mixed, batch)[0]

        learned = tree.map(lambda w, g: (w - self.weight_lr * g).clamp(0, 1), weights, grad(loss)(weights))
        weights = _choose(learning, learned, weights)
        params, stats = _choose(training, after.model, work.model)
        top = {name: params[name] for name in weights}
        model = Model({**params, **_choose(learning, _mix(ctx, weights), top)}, stats)
        optimizer = _choose(training, after.optimizer, work.optimizer)
        return after._replace(model=model, optimizer=optimizer, extra={"weights": weights})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        return super().finish(task, ctx, work)._replace(client_state=State(work.model, work.extra))

    def _top(self, task: Task) -> list[str]:
        """The parameters of the top layers that are sent, in the order of the network."""
        parts = ((part, module.named_parameters()) for part, module in task.parts.items())
        names = [f"{part}.{name}" for part, named in parts for name, _ in named]
        names = [name for name in names if not task.private(name)]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))[-self.layers :]
        return [name for name in names if name.rpartition(".")[0] in layers]


def _mix(ctx: Context, weights: Tensors) -> Tensors:
    mine, sent = ctx.client_state.model.params, ctx.down.model.params
    return {name: (1 - weight) * mine[name] + weight * sent[name] for name, weight in weights.items()}


def _choose(condition: Tensor, new: T, old: T) -> T:
    return tree.map(lambda a, b: torch.where(condition, a, b), new, old)
