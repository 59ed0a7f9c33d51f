"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020.

Clients with more local steps move further, so FedAvg follows them more than their examples justify. Here every change
is divided by what its steps add up to, and the average is as long as one of average steps,

    θ ← θ + τ_eff Σ_k (n_k / n) (θ_k − θ) / ‖a_k‖₁,        τ_eff = Σ_k (n_k / n) ‖a_k‖₁,

where (a_k)_s counts how much the gradient of step s is in θ_k − θ: ‖a_k‖₁ is the number of steps for plain SGD, and
Σ_s (1 − ρ^s) / (1 − ρ) over the steps s = 1 … τ_k with momentum ρ.

*Deviations*: of the paper's local solvers, SGD with and without momentum; no momentum at the server (see FedAvgM).
Adam's change is no sum of gradients with known weights, so it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedrane.algorithm import Algorithm, sample_ratio
from fedrane.ops import adam
from fedrane.ops.reduction import Summary, Term, Totals
from fedrane.task import Client, Model, State, Task


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Changes are divided by their numbers of local steps before they are averaged."""

    def prepare(self, task: Task) -> Task:
        why = "it divides a change by the gradients it adds up to, and Adam's steps add up none"
        adam.require(task.optimizer, ("sgd",), "fednova", why)
        return task

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        weights = cohort.size / self._added(task, cohort).clamp(min=1)
        return {
            **super().summary(task, server, ups, cohort),
            "params": Term(ups.model.params, weights, server.model.params),
        }

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        effective = (sample_ratio(cohort) * self._added(task, cohort)).sum()
        params = totals["params"].added(server.model.params, effective, cohort.size.sum().clamp(min=1))
        return server._replace(model=Model(params, averaged.model.stats)), record | {"nova/steps": effective}

    def _added(self, task: Task, cohort: Client) -> Tensor:
        return added_gradients(cohort.steps.double(), task.sgd.momentum)


def added_gradients(steps: Tensor, momentum: float) -> Tensor:
    """‖a‖₁: how many gradients the change of this many steps adds up to."""
    if not momentum:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
