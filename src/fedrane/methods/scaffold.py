"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

The server keeps a control variate c, each client its c_i. A local step corrects the client's drift,

    y ← y − η_l (g_i(y) − c_i + c),

and after K steps from x, with the cohort S of N clients,

    c_i⁺ = c_i − c + (x − y) / (K η_l)      (option II; option I: the gradient of all its examples at x),
    x ← x + η_g (1/|S|) Σ (y_i − x),        c ← c + (1/N) Σ (c_i⁺ − c_i).

Always (1/N) Σ c_i = c: c_i is committed only together with the upload of its change.

*Deviations*: uploads are weighted equally, as in the paper, not by examples. Option II assumes plain SGD with one
learning rate, so it refuses momentum, clipping and Adam; weight decay is part of the gradient and is corrected with it.
With option I and Adam the corrected gradient goes into Adam; the weight decay of AdamW is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.func import grad

from fedrane import tree
from fedrane.algorithm import Algorithm, Choices, Done, Outcome, Work
from fedrane.errors import ConfigError, check_choices, check_ranges
from fedrane.ops import adam
from fedrane.ops.reduction import Summary, Term, Totals
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task
from fedrane.tree import Tensors


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Control variates against client drift."""

    choices: ClassVar[Choices] = {"option": ("I", "II")}

    option: str = "II"
    """How a control variate is renewed: the gradient at the server's model (``I``), or from the steps (``II``)."""
    global_lr: float = 1.0
    """η_g, the server's learning rate: the factor on the mean of the updates."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, global_lr=(1e-6, 1e3))

    def prepare(self, task: Task) -> Task:
        if self.option == "II":
            why = "it computes the mean gradient from the client's total change, which is only right for plain SGD"
            adam.require(task.optimizer, ("sgd",), "scaffold option II", why, otherwise="method.option=I")
            if task.sgd.momentum or task.sgd.clip:
                remedy = "Set momentum=0 clip=0, or method.option=I"
                raise ConfigError("scaffold option II with momentum or clip", why, remedy)
        return task

    def init(self, task: Task, roster: Roster) -> State:
        model = task.init()
        return State(model, {"control": tree.zeros_like(self.exchanged(task, model.params))})

    def join(self, task: Task, server: State, client: Client) -> State:
        client_state = super().join(task, server, client)
        return client_state._replace(extra={"control": tree.zeros_like(server.extra["control"])})

    def send(self, task: Task, server: State, client: Client) -> State:
        return super().send(task, server, client)._replace(extra=server.extra)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        """A linear term whose gradient is c − c_i."""
        loss, outcome = super().objective(task, ctx, model, batch)
        drift = tree.sub(ctx.down.extra["control"], ctx.client_state.extra["control"])
        return loss + tree.dot(drift, {name: model.params[name] for name in drift}), outcome

    def begin(self, task: Task, ctx: Context) -> Work:
        work = super().begin(task, ctx)
        gradient = tree.zeros_like(ctx.client_state.extra["control"]) if self.option == "I" else {}
        return work._replace(extra={"gradient": gradient})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        if self.option == "II":
            return after
        origin = self.start(task, ctx)
        here = self.exchanged(task, origin.params)

        def loss(trained: Tensors) -> Tensor:
            return Algorithm.objective(self, task, ctx, Model({**origin.params, **trained}, work.model.stats), batch)[0]

        grads, examples = grad(loss)(here), batch.mask.sum().to(work.examples.dtype)
        grads = {name: grads[name] + task.optimizer.penalty * here[name] for name in here}
        return after._replace(extra={"gradient": tree.add(work.extra["gradient"], tree.scale(grads, examples))})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        before, control = ctx.client_state.extra["control"], ctx.down.extra["control"]
        if self.option == "I":
            after = tree.scale(work.extra["gradient"], 1 / work.examples.clamp(min=1))
        else:
            origin = self.start(task, ctx)
            change = {name: origin.params[name] - work.model.params[name] for name in control}
            mean = tree.scale(change, 1 / (ctx.client.steps * ctx.client.lr).clamp(min=1e-30))
            after = tree.add(tree.sub(before, control), mean)
        up = done.up._replace(extra={"control": tree.sub(after, before)})
        return done._replace(up=up, client_state=done.client_state._replace(extra={"control": after}))

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        equally = {"params": Term(ups.model.params, base=server.model.params), "control": Term(ups.extra["control"])}
        return {**super().summary(task, server, ups, cohort), **equally}

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        params = totals["params"].mean(self.global_lr)
        control = totals["control"].added(server.extra["control"], over=cohort.population)
        return State(Model(params, averaged.model.stats), {"control": control}), record
