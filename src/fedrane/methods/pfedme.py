"""pFedMe: T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

Client k minimises the Moreau envelope of its loss, F_k(w) = min_θ f_k(θ) + (λ/2) ‖θ − w‖², whose gradient is
λ (w − θ_k(w)). From w = θ = the model sent, each batch makes K inner steps and one outer step,

    θ ← θ − α (∇f_k(θ) + λ (θ − w)),        w ← w − η λ (w − θ),

and the server sets w ← (1 − β) w + β · mean of w_k. Client k predicts with θ_k.

*Deviations*: uploads are weighted by number of examples, as in the authors' code; the paper weights them equally. In
the paper all clients train in every round and only a sample is aggregated; here only the cohort trains. A round has
epochs, not R batches. Their weight decay of 0.001 in the inner steps is the experiment's ``weight_decay``; momentum,
clip and Adam apply there too. AdamW, whose steps do not end in the minimum θ_k(w), is refused. Both learning rates are
the method's own: ``lr`` and its schedule are not used, and the first round logs this. BatchNorm's statistics come from
the passes of θ; they are uploaded with w and averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Done, Grid, Outcome, Work
from fedrane.errors import ConfigError, check_ranges
from fedrane.ops import adam
from fedrane.ops.reduction import Totals
from fedrane.task import Batch, Client, Context, Model, State, Task


@dataclass(frozen=True)
class PFedMe(Algorithm):
    """Personal models near a global one that minimises their Moreau envelopes."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"strength": (5.0, 15.0), "outer_lr": (0.02, 0.05)}

    strength: float = 15.0
    """λ, the weight of the pull of a personal model towards the client's copy of the global one."""
    inner_steps: int = 5
    """K, the steps on each batch that approximate a personal model."""
    inner_lr: float = 0.03
    """α, the learning rate of the personal models."""
    outer_lr: float = 0.05
    """η, the learning rate of the client's copy of the global model."""
    blend: float = 1.0
    """β, the weight of the average of the uploads in the new global model; the rest is the old one."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(1e-6, 1e6), inner_steps=(1, 1000), inner_lr=(1e-9, 1e3))
        check_ranges(self, outer_lr=(1e-9, 1e3), blend=(0, 10))
        for name in ("inner_lr", "outer_lr"):
            if getattr(self, name) * self.strength >= 2:
                raise ConfigError(
                    f"method.{name}={getattr(self, name)} with method.strength={self.strength}",
                    "if their product is 2 or more, the steps diverge",
                    f"Use method.{name} below {2 / self.strength:.3g}",
                )
        if self.blend == 0:
            raise ConfigError("method.blend=0", "the global model would never change", "Use 1, or another number > 0")

    def prepare(self, task: Task) -> Task:
        why = "θ_k(w) is a minimum, and weight decay outside of the gradient moves the end away from it"
        adam.require(task.optimizer, ("sgd", "adam"), "pfedme", why)
        return task

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        """The inner problem; ``step`` passes the current w as the model that was sent."""
        loss, outcome = super().objective(task, ctx, model, batch)
        local = self.exchanged(task, ctx.down.model.params)
        away = tree.sub({name: model.params[name] for name in local}, local)
        return loss + self.strength / 2 * tree.dot(away, away), outcome

    def begin(self, task: Task, ctx: Context) -> Work:
        return super().begin(task, ctx)._replace(extra={"local": self.exchanged(task, ctx.down.model.params)})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        local = work.extra["local"]
        client = ctx.client._replace(lr=torch.full_like(ctx.client.lr, self.inner_lr))
        around = ctx._replace(down=State(Model(local, {}), {}), client=client)
        for _ in range(self.inner_steps):
            work = super().step(task, around, work, batch)
        share = self.outer_lr * self.strength
        moved = {name: value - share * (value - work.model.params[name]) for name, value in local.items()}
        return work._replace(extra={"local": moved})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        up = done.up._replace(model=Model(work.extra["local"], done.up.model.stats))
        return done._replace(up=up, client_state=State(work.model, {}))

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        params = totals["params"].mean(self.blend)
        if int(cohort.round.min()) == 1:
            lrs = f"method.inner_lr={self.inner_lr} and method.outer_lr={self.outer_lr}"
            record["messages"] = [f"pFedMe uses its own learning rates, {lrs}; lr and its schedule are not used"]
        return averaged._replace(model=Model(params, averaged.model.stats)), record
