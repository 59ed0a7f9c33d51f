"""AFL: Mohri, Sivek & Suresh, "Agnostic Federated Learning", ICML 2019.

No mixture of the clients' distributions is known to be the one that counts, so the server prepares for the worst:

    min_θ max_{λ ∈ Λ} Σ_k λ_k F_k(θ),        Λ = {λ ≥ 0, Σ λ = 1},

by gradient descent in θ and projected gradient ascent in λ, both from (θ, λ) of the last round,

    θ ← θ + Σ_k λ_k (θ_k − θ),        λ ← Π_Λ(λ + γ F(θ)).

*Deviations*: the change θ_k − θ of several local steps stands for the gradient. The first λ are the clients' shares of
the examples. The last model is the result, not the average over the rounds. In a round with the cohort S the weights
are λ_k / Σ_S λ, and the gradient of λ is N / |S| (F_k − the mean of S) for those in S: without bias as in the paper but
for a number that all share, which Π_Λ ignores, so that the absent do not lose by being absent. F_k(θ) is measured
along with local training (:class:`fedrane.ops.received.ReceivedLoss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.nn.functional import one_hot

from fedrane.algorithm import Grid
from fedrane.errors import check_ranges
from fedrane.ops import simplex
from fedrane.ops.received import ReceivedLoss
from fedrane.ops.reduction import Summary, Term, Totals
from fedrane.task import Client, Roster, State, Task


@dataclass(frozen=True)
class AFL(ReceivedLoss):
    """The best model for the worst mixture of the clients."""

    grid: ClassVar[Grid] = {"mixture_lr": (0.001, 0.01, 0.1)}

    mixture_lr: float = 0.01
    """γ, the learning rate of the mixture λ."""

    def __post_init__(self) -> None:
        check_ranges(self, mixture_lr=(1e-9, 1e6))

    def init(self, task: Task, roster: Roster) -> State:
        sizes = roster.sizes.double()
        return super().init(task, roster)._replace(extra={"mixture": sizes / sizes.sum().clamp(min=1)})

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        mixture, loss = server.extra["mixture"], ups.extra["loss"].double()
        losses = one_hot(cohort.index, cohort.population) * loss[:, None]
        return {
            **super().summary(task, server, ups, cohort),
            "params": Term(ups.model.params, mixture[cohort.index], server.model.params),
            "losses": Term({"of": losses}),
        }

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        mixture, loss = server.extra["mixture"], totals["losses"].sums["of"][cohort.index]
        present = mixture[cohort.index]
        weights = present / present.sum().clamp(min=1e-300)
        ascent = self.mixture_lr * cohort.population / len(loss) * (loss - loss.mean())
        mixture = simplex.projection(mixture.index_add(0, cohort.index, ascent))
        if not weights.any():
            record |= {"messages": ["no client of this round counts in the mixture: the server does not move"]}
        return averaged._replace(extra={"mixture": mixture}), record | {"afl/weights": weights}
