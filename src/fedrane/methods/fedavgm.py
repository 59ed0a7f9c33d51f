"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv 2019.

The server adds momentum to the average change of a round,

    m ← β m + Σ_k (n_k / n) (θ_k − θ),        θ ← θ + η m.

*Deviations*: none in the equations. BatchNorm's statistics are averaged by sample ratio; they are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid
from fedrane.errors import check_ranges
from fedrane.ops.reduction import Totals
from fedrane.task import Client, Model, Roster, State, Task


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Momentum at the server."""

    grid: ClassVar[Grid] = {"momentum": (0.7, 0.9, 0.97), "global_lr": (0.1, 0.3, 1.0)}

    momentum: float = 0.9  # β
    """The fraction of the last step that the next one keeps."""
    global_lr: float = 1.0  # η
    """The learning rate of the server."""

    def __post_init__(self) -> None:
        check_ranges(self, momentum=(0, 0.9999), global_lr=(1e-6, 1e3))

    def init(self, task: Task, roster: Roster) -> State:
        start = super().init(task, roster)
        return start._replace(extra={"momentum": tree.zeros_like(self.exchanged(task, start.model.params))})

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        before, after, kept = server.model.params, averaged.model.params, server.extra["momentum"]
        momentum = {name: self.momentum * m + (after[name] - before[name]) for name, m in kept.items()}
        params = before | {name: before[name] + self.global_lr * m for name, m in momentum.items()}
        return State(Model(params, averaged.model.stats), {"momentum": momentum}), record
