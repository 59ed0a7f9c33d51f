"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

Every client has a model of its own, which never leaves it. What is sent are prototypes: the mean features C_k^c of a
client's examples of class c, and their means over the clients that have the class,

    C^c ← Σ_k n_k^c C_k^c / Σ_k n_k^c,

to which the features z = f_k(x) of the examples are pulled in training:

    cross entropy + λ/d ‖z − C^y‖²,        d the number of features.

Client k predicts the class, of those it has, whose C^c is nearest to z. A class without examples has no prototype, and
a client that no prototype has reached predicts with its head.

*Deviations*: the paper's mean has a further factor 1/(number of clients), with which prototypes would shrink to zero;
the authors' code weights clients equally (``weighting``). The paper pulls each batch's mean of a class, that code each
example, as here. C_k^c is the mean over the last epoch, in that code of the training passes, here of passes in
evaluation mode after each step. The server keeps a prototype until a client sends it again, in that code for a round.
All clients have the same network.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Choices, Done, Grid, Outcome, Work
from fedrane.errors import check_choices, check_ranges
from fedrane.ops.prototypes import Nearest, mean_by_class, weighted
from fedrane.ops.reduction import Summary, Term, Totals
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task, cross_entropy, masked_mean


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Personal models whose features meet in class prototypes, which are all that is sent."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    needs_classes: ClassVar[str] = "its prototypes are of classes"
    grid: ClassVar[Grid] = {"strength": (0.1, 1.0, 10.0)}
    choices: ClassVar[Choices] = {"classifier": ("prototypes", "head"), "weighting": ("examples", "clients")}

    strength: float = 1.0
    """λ, the weight of the distance between features and prototypes."""
    classifier: str = "prototypes"
    """What a client predicts with: the nearest of the ``prototypes``, or its ``head``."""
    weighting: str = "examples"
    """What counts in the mean over clients: their ``examples`` of the class, or ``clients`` equally."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, strength=(0, 1e6))
        if self.strength == 0:
            warnings.warn("FedProto with method.strength=0 is local training", stacklevel=3)

    def prepare(self, task: Task) -> Task:
        return task.add("prototypes", Nearest(task.classes, task.width)) if self.classifier == "prototypes" else task

    def shares(self, name: str) -> bool:
        return False

    def init(self, task: Task, roster: Roster) -> State:
        points = torch.zeros(task.classes, task.width, dtype=task.dtype, device=task.device)
        return State(task.init(), {"prototypes": points, "known": points[:, 0].clone()})

    def send(self, task: Task, server: State, client: Client) -> State:
        return State(Model({}, {}), server.extra)

    def begin(self, task: Task, ctx: Context) -> Work:
        zero = {"sums": ctx.down.extra["prototypes"], "counts": ctx.down.extra["known"]}
        return super().begin(task, ctx)._replace(extra=tree.zeros_like(zero))

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        features = net.body(batch.x)
        loss = cross_entropy(net.head(features), batch)
        known = batch.targets(task.classes) * ctx.down.extra["known"]
        free = 1 - known.sum(1, keepdim=True)  # where the class has no prototype, features are pulled to themselves
        away = features - known @ ctx.down.extra["prototypes"] - free * features.detach()
        distance = masked_mean(away.square().mean(1), batch.mask)
        return loss + self.strength * distance, Outcome(net.stats, {"loss": loss, "distance": distance})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        features = task.evaluating(after.model, batch.mask).body(batch.x)
        pair = (batch.targets(task.classes).to(features), features)
        labels, features = (torch.where(batch.mask[:, None], each, 0) for each in pair)
        epochs = work.examples / ctx.client.size
        goes_on = epochs > epochs.floor()  # otherwise an epoch begins, and the last one is forgotten
        earlier = tree.map(lambda total: torch.where(goes_on, total, 0), work.extra)
        extra = {"sums": earlier["sums"] + labels.T @ features, "counts": earlier["counts"] + labels.sum(0)}
        return after._replace(extra=extra)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done, counts = super().finish(task, ctx, work), work.extra["counts"]
        prototypes = work.extra["sums"] / torch.where(counts > 0, counts, 1)[:, None]
        weights = counts if self.weighting == "examples" else (counts > 0).to(counts.dtype)
        return done._replace(up=State(done.up.model, {"prototypes": prototypes, "weights": weights}))

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        return {"classes": Term(weighted(**ups.extra))}

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        (means, present), before = mean_by_class(**totals["classes"].sums), server.extra
        prototypes = torch.where(present[:, None], means.to(task.dtype), before["prototypes"])
        return server._replace(extra={"prototypes": prototypes, "known": before["known"].masked_fill(present, 1)}), {}

    def personal_model(self, task: Task, ctx: Context) -> Model:
        params, stats = ctx.client_state.model
        if self.classifier == "head":
            return Model(params, stats)
        assert ctx.client.labels is not None  # noqa: S101 - only a cohort has none
        has = (ctx.client.labels > 0) * ctx.down.extra["known"]
        return Model(params, {**stats, "prototypes.points": ctx.down.extra["prototypes"], "prototypes.known": has})

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        features = net.body(x)
        scores = net.head(features)
        return scores if self.classifier == "head" else net.part("prototypes", features, scores)
