"""FedMTL: Smith et al., "Federated Multi-Task Learning" (MOCHA), NeurIPS 2017. A primal reading for networks.

The clients' models are the columns of W, and a matrix Ω describes how N tasks are related. With Ω positive definite of
trace 1, W and Ω are learnt in turn on

    Σ_k f_k(w_k) + (λ/N) tr(W Ω⁻¹ Wᵀ).

With Ω fixed, client k minimises the terms that contain its w, with the other clients' models of the last round,

    f_k(w) + (λ/N) (Ω⁻¹_kk ‖w‖² + 2 ⟨w, Σ_{j≠k} Ω⁻¹_kj w_j⟩);

only that sum and Ω⁻¹_kk are sent to it. With W fixed, the server sets the optimal Ω = (WᵀW)^½ / tr (WᵀW)^½.

*Deviations*: MOCHA solves for W in the dual, which needs convex losses of linear models; here the experiment's
optimiser minimises the primal. The paper has no 1/N: trace 1 makes Ω's mean eigenvalue 1/N, so without it the pull
would grow with N. Equal models make WᵀW singular, so Ω is optimal among those whose eigenvalues are at least floor/N.
The first Ω is optimal for the first W, whose columns are equal; the authors' code starts from I/N. The strongest pull
then has curvature 2λ/floor; with SGD, ``lr`` times it must stay below 2, otherwise the first round logs a message.
Every client keeps its BatchNorm statistics. The rows of absent clients stay in W.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Done, Grid, Outcome, Work
from fedrane.errors import check_ranges
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task
from fedrane.tree import Tensors


@dataclass(frozen=True)
class FedMTL(Algorithm):
    """A model for each client, and a learnt covariance of the clients that pulls related models together."""

    strength: float = 0.03
    """λ, the weight of the penalty that pulls related models together; 0 is local training."""
    floor: float = 0.1
    """The smallest eigenvalue of the clients' covariance Ω, as a multiple of 1/N; 1 keeps Ω = I/N."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"strength": (0.01, 0.03, 0.1)}

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6), floor=(1e-6, 1))
        notes = {"strength=0 is local training": self.strength == 0, "floor=1 learns no relation": self.floor == 1}
        for note in (note for note, applies in notes.items() if applies):
            warnings.warn(f"FedMTL with method.{note}", stacklevel=3)

    def init(self, task: Task, roster: Roster) -> State:
        model, population = task.init(), len(roster.sizes)
        rows = {k: v.expand(population, *v.shape) for k, v in self.exchanged(task, model.params).items()}
        return State(model, {"rows": rows, "covariance": covariance(rows, self.floor)})

    def join(self, task: Task, server: State, client: Client) -> State:
        """Its row of W, and the rest of the initial model."""
        row = {name: rows[int(client.index)] for name, rows in server.extra["rows"].items()}
        return State(Model({**server.model.params, **row}, server.model.stats), {})

    def send(self, task: Task, server: State, client: Client) -> State:
        omega = server.extra["covariance"]
        me = torch.arange(len(omega), device=omega.device) == client.index
        precision = torch.linalg.solve(omega, me.to(omega.dtype)).to(task.dtype)
        others = torch.where(me, 0, precision)
        pull = {name: torch.tensordot(others, rows, 1) for name, rows in server.extra["rows"].items()}
        return State(Model({}, {}), {"pull": pull, "precision": precision[client.index]})

    def start(self, task: Task, ctx: Context) -> Model:
        return ctx.client_state.model

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        pull = ctx.down.extra["pull"]
        here = {name: model.params[name] for name in pull}
        penalty = ctx.down.extra["precision"] * tree.dot(here, here) + 2 * tree.dot(here, pull)
        return loss + self.strength / ctx.client.population * penalty, outcome

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(Model(done.up.model.params, {}), {}), client_state=State(work.model, {}))

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        new = ups.model.params
        rows = {k: v.index_copy(0, cohort.index, new[k]) for k, v in server.extra["rows"].items()}
        omega = covariance(rows, self.floor)
        mean = server.model.params | {name: stacked.mean(0) for name, stacked in rows.items()}
        record: dict[str, Any] = {}
        factor, limit = float(cohort.lr.max()) * 2 * self.strength / self.floor, task.optimizer.stable
        if factor >= limit and int(cohort.round.min()) == 1:
            remedy = "use a smaller lr or method.strength, or a larger method.floor"
            record["messages"] = [
                f"lr · 2 · strength / floor is {factor:.3g}, and from {limit:.3g} on training is unstable: {remedy}"
            ]
        return State(Model(mean, server.model.stats), {"rows": rows, "covariance": omega}), record


def covariance(rows: Tensors, floor: float) -> Tensor:
    """The Ω of trace 1 that minimises tr(W Ω⁻¹ Wᵀ) among those whose eigenvalues are at least ``floor`` / N."""
    base = tree.row(rows, 0)
    population, device = len(next(iter(rows.values()))), next(iter(base.values())).device
    gram = torch.zeros(population, population, dtype=torch.float64, device=device)
    for part, _ in tree.blocks(base, rows):
        gram += part.double() @ part.double().T
    if not bool(torch.isfinite(gram).all()):
        return gram  # a model is not finite; the run then stops and names the client
    values, vectors = torch.linalg.eigh(gram)
    roots, least = values.clamp(min=1e-200).sqrt(), floor / population
    # The largest m share in proportion what the floor leaves of trace 1; m is maximal such that all stay above it.
    largest = roots.flip(0)
    left = 1 - least * torch.arange(population - 1, -1, -1, dtype=gram.dtype, device=device)
    m = max(1, int((left * largest >= least * largest.cumsum(0)).sum()))
    shares = (roots * left[m - 1] / largest[:m].sum()).clamp(min=least)
    omega: Tensor = (vectors * shares) @ vectors.T
    return omega
