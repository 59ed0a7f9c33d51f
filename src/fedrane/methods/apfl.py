"""APFL: Deng, Kamani & Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020.

The global model w is FedAvg's. Each client also keeps a model v_k, which is trained inside a mix with w, and may learn
the weight of the mix:

    w_k ← w_k − η ∇f_k(w_k),        v̄_k = α_k v_k + (1 − α_k) w_k,
    v_k ← v_k − η α_k ∇f_k(v̄_k),        α_k ← α_k − η ⟨v_k − w_k, ∇f_k(v̄_k)⟩,  clipped to [0, 1],

all three from the same point. Client k predicts with v̄_k, and only w_k is uploaded.

*Deviations*: uploads are weighted by examples; the paper weights clients equally. The step of α has no momentum and no
clip. The mix has BatchNorm statistics of its own, those of its passes; with norm=local a client keeps the layers of
both models. The authors' code mixes the models' scores instead of their parameters, trains v after the step of w, and
updates α once in a round, by α ∇f_k(v) + (1 − α) ∇f_k(w) with a decay of 0.02 α.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Done, Grid, Outcome, Work
from fedrane.errors import check_ranges
from fedrane.task import Batch, Client, Context, Model, State, Task
from fedrane.tree import Tensors


@dataclass(frozen=True)
class APFL(Algorithm):
    """FedAvg, and a personal model trained in a mix with the global one, whose weight it may learn."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"weight": (0.25, 0.5, 0.75)}

    weight: float = 0.5
    """α, the weight of the personal model in the mix; the rest is the global one's."""
    adaptive: bool = False
    """Whether each client learns its α, starting from ``weight``."""

    def __post_init__(self) -> None:
        check_ranges(self, weight=(0, 1))
        if self.weight in (0, 1) and not self.adaptive:
            left = "local training" if self.weight else "FedAvg"
            warnings.warn(f"APFL with method.weight={self.weight:g} is {left}", stacklevel=3)

    def join(self, task: Task, server: State, client: Client) -> State:
        weight = torch.full((), self.weight, dtype=task.dtype, device=task.device)
        return State(server.model, {"weight": weight, **self._kept(task, server.model)})

    def start(self, task: Task, ctx: Context) -> Model:
        """The global model with its private layers, not those of v_k."""
        return super().start(task, ctx._replace(client_state=State(Model(**ctx.client_state.extra["global"]), {})))

    def begin(self, task: Task, ctx: Context) -> Work:
        personal = ctx.client_state.model
        optimizer = task.optimizer.init(tree.pick(personal.params, self.trains))
        extra = {"personal": personal._asdict(), "optimizer": optimizer, "weight": ctx.client_state.extra["weight"]}
        return super().begin(task, ctx)._replace(extra=extra)

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        personal, weight = Model(**work.extra["personal"]), work.extra["weight"]

        def loss(trained: Tensors, weight: Tensor) -> tuple[Tensor, Outcome]:
            mixed = _mix({**personal.params, **trained}, work.model.params, weight)
            return self.objective(task, ctx, Model(mixed, personal.stats), batch)

        trained = tree.pick(personal.params, self.trains)
        (grads, grad_weight), (_, outcome) = grad_and_value(loss, argnums=(0, 1), has_aux=True)(trained, weight)
        trained, optimizer = task.optimizer.update(trained, grads, work.extra["optimizer"], ctx.client.lr)
        stats = {name: value.detach() for name, value in outcome.stats.items()}
        extra = {"personal": Model({**personal.params, **trained}, stats)._asdict(), "optimizer": optimizer}
        extra["weight"] = (weight - ctx.client.lr * grad_weight).clamp(0, 1) if self.adaptive else weight
        return after._replace(extra=extra)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        weight = work.extra["weight"]
        kept = State(Model(**work.extra["personal"]), {"weight": weight, **self._kept(task, work.model)})
        done = super().finish(task, ctx, work)
        return done._replace(client_state=kept, metrics={**done.metrics, "weight": weight})

    def personal_model(self, task: Task, ctx: Context) -> Model:
        """The mix with the global model as it is sent now."""
        params, stats = ctx.client_state.model
        return Model(_mix(params, self.start(task, ctx).params, ctx.client_state.extra["weight"]), stats)

    def _kept(self, task: Task, model: Model) -> dict[str, Any]:
        """The part of the global model that stays with the client: normalisation layers under norm=local."""
        return {"global": self._part(task, model, shared=False)._asdict()}


def _mix(personal: Tensors, shared: Tensors, weight: Tensor) -> Tensors:
    return {name: weight * value + (1 - weight) * shared[name] for name, value in personal.items()}
