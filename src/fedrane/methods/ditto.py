"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

The global model w is FedAvg's. Each client also keeps a personal model v_k, pulled towards the w it was sent,

    v_k ← v_k − η (∇f_k(v_k) + λ (v_k − w)),

in separate steps that do not affect w. Client k predicts with v_k. With norm=local a client keeps the normalisation
layers of both: those of w, as in FedAvg, and those of v_k.

*Deviations*: v_k is trained on the same batches as w, ``personal_steps`` steps each, by the experiment's optimiser.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Done, Grid, Outcome, Work
from fedrane.errors import check_ranges
from fedrane.task import Batch, Client, Context, Model, State, Task
from fedrane.tree import Tensors


@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg, and a personal model pulled towards the global one."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"strength": (0.1, 0.5, 1.0, 2.0)}

    strength: float = 1.0
    """λ, the weight of the pull of the personal model towards the global one."""
    personal_steps: int = 1
    """Steps of the personal model for each batch of local training."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6), personal_steps=(1, 1000))
        if self.strength == 0:
            warnings.warn("Ditto with method.strength=0 is local training", stacklevel=3)

    def join(self, task: Task, server: State, client: Client) -> State:
        return State(server.model, self._kept(task, server.model))

    def start(self, task: Task, ctx: Context) -> Model:
        """The global model with its private layers, not those of v_k."""
        return super().start(task, ctx._replace(client_state=State(Model(**ctx.client_state.extra["global"]), {})))

    def begin(self, task: Task, ctx: Context) -> Work:
        personal = ctx.client_state.model
        optimizer = task.optimizer.init(tree.pick(personal.params, self.trains))
        return super().begin(task, ctx)._replace(extra={"personal": personal._asdict(), "optimizer": optimizer})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        personal, optimizer = Model(**work.extra["personal"]), work.extra["optimizer"]
        for _ in range(self.personal_steps):
            personal, optimizer = self._personal_step(task, ctx, personal, optimizer, batch)
        return after._replace(extra={"personal": personal._asdict(), "optimizer": optimizer})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        personal = State(Model(**work.extra["personal"]), self._kept(task, work.model))
        return super().finish(task, ctx, work)._replace(client_state=personal)

    def _kept(self, task: Task, model: Model) -> dict[str, Any]:
        """The part of the global model that stays with the client: normalisation layers under norm=local."""
        return {"global": self._part(task, model, shared=False)._asdict()}

    def _personal_step(
        self, task: Task, ctx: Context, model: Model, optimizer: dict[str, Any], batch: Batch
    ) -> tuple[Model, dict[str, Any]]:
        def loss(trained: Tensors) -> tuple[Tensor, Outcome]:
            value, outcome = self.objective(task, ctx, Model({**model.params, **trained}, model.stats), batch)
            sent = self.exchanged(task, ctx.down.model.params)
            away = tree.sub({name: trained[name] for name in sent}, sent)
            return value + self.strength / 2 * tree.dot(away, away), outcome

        trained = tree.pick(model.params, self.trains)
        grads, (_, outcome) = grad_and_value(loss, has_aux=True)(trained)
        trained, optimizer = task.optimizer.update(trained, grads, optimizer, ctx.client.lr)
        return Model({**model.params, **trained}, {k: v.detach() for k, v in outcome.stats.items()}), optimizer
