"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

Client k keeps g_k, the server h, all zero at first. With θ the model sent and N clients in all,

    θ_k = argmin  f_k(θ') − ⟨g_k, θ'⟩ + (α/2) ‖θ' − θ‖²,        g_k ← g_k − α (θ_k − θ),
    h ← h − (α/N) Σ_{k in the cohort} (θ_k − θ),                θ ← mean of θ_k − h / α.

At a stationary point g_k = ∇f_k(θ) and h = (1/N) Σ g_k = 0: the minimiser of (1/N) Σ f_k, despite the clients' drift.

*Deviations*: the argmin is approximated by the experiment's epochs of SGD, as in the authors' code, or of Adam; AdamW,
which does not end in a minimum of it, is refused. That code also clips gradients (``clip=10``). Its "weight decay + α"
is the quadratic term, explicit here. It also divides α by N n_k / n, which minimises Σ (n_k / n) f_k; here, as in the
paper, all clients have the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Grid, Outcome, Work
from fedrane.errors import check_ranges
from fedrane.ops import adam
from fedrane.ops.reduction import Summary, Term, Totals
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """A regulariser that moves with each client's gradient."""

    grid: ClassVar[Grid] = {"strength": (0.001, 0.01, 0.1)}

    strength: float = 0.01
    """α, the weight of the dynamic regulariser."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(1e-6, 1e6))

    def prepare(self, task: Task) -> Task:
        why = "g_k is the gradient at a minimum, and weight decay outside of the gradient moves the end away from it"
        adam.require(task.optimizer, ("sgd", "adam"), "feddyn", why)
        return task

    def init(self, task: Task, roster: Roster) -> State:
        start = super().init(task, roster)
        return start._replace(extra={"dual": tree.zeros_like(self.exchanged(task, start.model.params))})

    def join(self, task: Task, server: State, client: Client) -> State:
        return super().join(task, server, client)._replace(extra=tree.zeros_like(server.extra))

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        dual = ctx.client_state.extra["dual"]
        here = {name: model.params[name] for name in dual}
        away = tree.sub(here, {name: ctx.down.model.params[name] for name in dual})
        return loss - tree.dot(dual, here) + self.strength / 2 * tree.dot(away, away), outcome

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        dual = {
            name: value - self.strength * (work.model.params[name] - ctx.down.model.params[name])
            for name, value in ctx.client_state.extra["dual"].items()
        }
        return done._replace(client_state=done.client_state._replace(extra={"dual": dual}))

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        equally = Term(ups.model.params, base=server.model.params)
        return {**super().summary(task, server, ups, cohort), "params": equally}

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        mean = averaged.model.params
        share = self.strength * len(cohort.index) / cohort.population
        before, dual = server.model.params, server.extra["dual"]
        dual = {name: value - share * (mean[name] - before[name]) for name, value in dual.items()}
        params = mean | {name: mean[name] - value / self.strength for name, value in dual.items()}
        return State(Model(params, averaged.model.stats), {"dual": dual}), record
