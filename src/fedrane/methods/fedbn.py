"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

FedAvg, except that the BatchNorm layers, affine parameters as well as running statistics, stay with their client:

    θ ← Σ_k (n_k / n) θ_k,        client k predicts with (θ, BN_k).

This is FedAvg under ``norm=local``, which works with every method, under the name of its paper: it holds whether the
experiment says ``norm=local`` or leaves the default. With ``norm=batch`` or ``norm=group``, and in a network without
BatchNorm, there is no layer to keep: the run logs that what is left is FedAvg.

*Deviations*: uploads are weighted by examples, where the authors' code weights clients equally. That code finds the
layers by "bn" in their names and so shares those of other names; here they are found by their type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedrane.algorithm import PERSONAL, Algorithm
from fedrane.ops.reduction import Totals
from fedrane.task import Client, Context, Model, State, Task


@dataclass(frozen=True)
class FedBN(Algorithm):
    """FedAvg with normalisation layers that never leave their client."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def prepare(self, task: Task) -> Task:
        return replace(task, norm="local") if task.norm == "shared" else task

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        if int(cohort.round.min()) == 1 and not any(map(task.private, task.norm_names)):
            why = "the network has no BatchNorm" if task.norm == "local" else f"norm={task.norm} keeps no layer local"
            record["messages"] = [f"FedBN is FedAvg here: {why}"]
        return averaged, record

    def personal_model(self, task: Task, ctx: Context) -> Model:
        """The server's model with the client's layers, also where it has none and so keeps the model it trained."""
        return self.start(task, ctx)
