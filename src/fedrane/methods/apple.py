"""APPLE: Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022.

Client i has a core w_i, which all clients may download, and a directed relation p_i, which never leaves it and starts
as p0, p0_j = n_j / n. Its model is the mix Σ_j p_ij w_j, and in round r = 0, 1, … it minimises over both w_i and p_i

    f_i(Σ_j p_ij w_j) + λ(r) (μ/2) ‖p_i − p0‖²,        the other cores being those of the last round,

with λ(r) = (1 + cos(π r / L)) / 2 or 0.001^(r/L), and 0 from r = L on. It predicts with the mix that it has trained,
and uploads its core. With at most M downloads a client keeps its last copy of each core and requests the next with its
upload: first those it never had, then core j at random with weight b^|p_ij|, b = max(1.5, r M / N).

*Deviations*: all cores start from the same weights; in the authors' code from different ones. That code lacks the 1/2,
and does not record which cores were received, so all choices are uniform. A client that never uploaded is sent the M
next in number. The learning rate of p has no schedule, weight decay or clip. BatchNorm's statistics stay with the
client. A core moves its mix by p_ii² ≈ 1/N² of ``lr``; ``core_lr``, a factor of its gradient, is not in the paper.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Choices, Done, Grid, Needs, Outcome, Work
from fedrane.errors import check_choices, check_ranges
from fedrane.ops import core_models
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task


@dataclass(frozen=True)
class APPLE(Algorithm):
    """Every client mixes all clients' core models with coefficients that it learns."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"strength": (0.01, 0.1), "coefficient_lr": (0.001, 0.01)}
    choices: ClassVar[Choices] = {"schedule": ("exponential", "cosine")}
    needs: ClassVar[Needs] = {"optimizer=sgd": ("core_lr",)}  # Adam takes no notice of a gradient's scale
    coefficient_lr: float = 0.001
    """The learning rate of the mixing coefficients p; 0 learns none."""
    strength: float = 0.1
    """μ, the weight of the penalty that keeps p near the clients' shares of the examples."""
    schedule: str = "exponential"
    """How the weight of the penalty falls over the rounds: from 1 to 0.001 (``exponential``), or to 0 (``cosine``)."""
    horizon: int = 16
    """L, the round from which on the penalty is zero."""
    downloads: int = 0
    """M, how many of the other clients' core models a client downloads in a round; 0 is all."""
    core_lr: float = 1.0
    """The factor on the gradient of a client's core model."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, coefficient_lr=(0, 1e3), strength=(0, 1e6), horizon=(1, 1e9))
        check_ranges(self, downloads=(0, 1e9), core_lr=(1e-6, 1e6))
        if self.coefficient_lr == 0:
            warnings.warn("APPLE with method.coefficient_lr=0 learns no relation: all mix equally", stacklevel=3)

    def init(self, task: Task, roster: Roster) -> State:
        model, sizes = task.init(), roster.sizes
        extra = {"wanted": core_models.next_in_number(sizes, self.downloads)} if self.downloads else {}
        extra["prior"] = (sizes.double() / sizes.sum().clamp(min=1)).to(task.dtype)
        return State(model, {"cores": core_models.copies(self.exchanged(task, model.params), len(sizes)), **extra})

    def join(self, task: Task, server: State, client: Client) -> State:
        (params, stats), cores, prior = server.model, server.extra["cores"], server.extra["prior"]
        extra = {"core": {name: value[int(client.index)] for name, value in cores.items()}, "relation": prior}
        if self.downloads:  # the server's model stays the initial one, so these are copies of all initial cores
            return State(server.model, {**extra, **core_models.first(self.exchanged(task, params), client)})
        mixed = {name: torch.tensordot(prior, value, 1) for name, value in cores.items()}
        return State(Model({**params, **mixed}, stats), extra)

    def send(self, task: Task, server: State, client: Client) -> State:
        which = server.extra["wanted"][client.index] if self.downloads else core_models.others(client)
        sent = {name: core[which] for name, core in server.extra["cores"].items()}
        return State(Model({}, {}), {"cores": sent, "which": which, "prior": server.extra["prior"]})

    def start(self, task: Task, ctx: Context) -> Model:
        return Model({**ctx.client_state.model.params, **ctx.client_state.extra["core"]}, ctx.client_state.model.stats)

    def begin(self, task: Task, ctx: Context) -> Work:
        relation = {"relation": ctx.client_state.extra["relation"]}
        extra = {**relation, "optimizer": task.optimizer.init(relation), "key": torch.zeros_like(ctx.client.index)}
        return super().begin(task, ctx)._replace(extra=extra)

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        params, stats = work.model

        def loss(trained: tree.Tensors, relation: Tensor) -> tuple[Tensor, Outcome]:
            mixed = Model({**params, **trained, **core_models.mix(ctx, trained, relation)}, stats)
            value, outcome = self.objective(task, ctx, mixed, batch)
            away = (relation - ctx.down.extra["prior"]).square().sum()
            return value + self._focus(ctx.client) * self.strength / 2 * away, outcome

        trained, relation = tree.pick(params, self.trains), work.extra["relation"]
        (grads, grad_p), (_, outcome) = grad_and_value(loss, argnums=(0, 1), has_aux=True)(trained, relation)
        grads |= tree.scale({name: grads[name] for name in ctx.down.extra["cores"]}, self.core_lr)
        trained, optimizer = task.optimizer.update(trained, grads, work.optimizer, ctx.client.lr)
        plain, lr = replace(task.optimizer, weight_decay=0.0, clip=0.0), torch.full_like(relation, self.coefficient_lr)
        moved, pace = plain.update({"relation": relation}, {"relation": grad_p}, work.extra["optimizer"], lr)
        examples = batch.mask.sum().to(work.examples)
        sums = {name: total + examples * outcome.metrics[name].detach() for name, total in work.sums.items()}
        model = Model({**params, **trained}, {name: value.detach() for name, value in outcome.stats.items()})
        return Work(model, optimizer, work.examples + examples, sums, {**moved, "optimizer": pace, "key": batch.key})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done, relation = super().finish(task, ctx, work), work.extra["relation"]
        core, up = done.up.model.params, {}
        kept = {"core": core, "relation": relation}
        if self.downloads:
            kept |= core_models.keep(ctx)
            up["wanted"] = core_models.next_request(ctx, relation, kept["had"], work.extra["key"])
        mixed = Model({**work.model.params, **core_models.mix(ctx, core, relation)}, work.model.stats)
        return done._replace(up=State(Model(core, {}), up), client_state=State(mixed, kept))

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        uploads = {"cores": ups.model.params, **tree.map(lambda index: index % cohort.population, ups.extra)}
        updated = {name: core_models.put(server.extra[name], cohort.index, new) for name, new in uploads.items()}
        return server._replace(extra=server.extra | updated), {}

    def _focus(self, client: Client) -> Tensor:  # λ(r)
        progress = (client.round - 1).to(client.lr.dtype) / self.horizon
        decay = (1 + torch.cos(torch.pi * progress)) / 2 if self.schedule == "cosine" else 0.001**progress
        return torch.where(progress < 1, decay, 0)
