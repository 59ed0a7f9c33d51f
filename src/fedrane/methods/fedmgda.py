"""FedMGDA+: Hu, Shaloudegi, Zhang & Yu, "Federated Learning Meets Multi-Objective Optimization", IEEE TNSE 2022.

Every client's loss is an objective of its own. The server takes the shortest mix of the clients' normalised changes: to
first order it makes no client that it is free to weight worse, and a client cannot count for more by moving further.

    d = argmin ‖Σ_k λ_k u_k‖,    u_k = (θ_k − θ) / ‖θ_k − θ‖,    over λ ≥ 0, Σ λ = 1, |λ_k − p_k| ≤ ε,
    θ ← θ + η d,

with p_k the clients' shares of the examples. ε = 1 leaves λ free (MGDA), ε = 0 is the average of normalised changes.

*Deviations*: a client whose change is zero is left out, as d would be zero; the paper does not mention it. So is one
whose upload is not finite. η falls by the same part in every round.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid, sample_ratio
from fedrane.errors import check_ranges
from fedrane.ops import simplex
from fedrane.ops.nash import gram
from fedrane.task import Client, Model, State, Task


@dataclass(frozen=True)
class FedMGDA(Algorithm):
    """The shortest mix of normalised changes: no client is made worse."""

    grid: ClassVar[Grid] = {"radius": (0.1, 0.5, 1.0), "global_lr": (0.3, 1.0, 3.0)}

    radius: float = 0.1
    """ε, how far a client's weight may be from its share of the examples; 1 leaves it free."""
    global_lr: float = 1.0
    """η, the learning rate of the server: the length of its step if all clients agree."""
    decay: float = 0.0
    """The part of the server's learning rate that is lost with each round."""

    def __post_init__(self) -> None:
        check_ranges(self, radius=(0, 1), global_lr=(1e-6, 1e3), decay=(0, 0.9999))
        if self.radius == 0:
            warnings.warn("FedMGDA+ with method.radius=0 only averages normalised changes", stacklevel=3)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        (params, stats), rows = server.model, ups.model
        inner = gram(params, rows.params)
        lengths = inner.diagonal().sqrt()
        finite = torch.tensor(tree.finite_rows(rows), device=lengths.device)
        counted = finite & (lengths > 0) & (cohort.size > 0)
        if not counted.any():
            stats = tree.move(stats, rows.stats, _among(cohort, finite))
            return server._replace(model=Model(params, stats)), {"messages": ["no client has a finite change"]}
        box = _among(cohort, counted)[counted]
        units = inner[counted][:, counted] / (lengths[counted, None] * lengths[counted])
        low, high = ((box + side).clamp(0, 1).cpu().numpy() for side in (-self.radius, self.radius))
        mix = simplex.shortest_mix(units.cpu().numpy(), low, high)
        chosen = torch.from_numpy(mix.weights).to(lengths)
        lr = self.global_lr * (1 - self.decay) ** (cohort.round[0].double() - 1)
        weights = torch.zeros_like(lengths)
        weights[counted] = lr * chosen / lengths[counted]
        left_out = cohort.index[~counted].tolist()
        record = {
            "messages": [f"clients {left_out} are left out: their change is zero or not finite"] if left_out else [],
            "fedmgda/weights": torch.zeros_like(lengths).masked_scatter(counted, chosen),
            "fedmgda/length": (chosen @ units @ chosen).clamp(min=0).sqrt(),
            "fedmgda/gap": mix.gap,
        }
        moved = tree.move(params, rows.params, weights), tree.move(stats, rows.stats, _among(cohort, finite))
        return server._replace(model=Model(*moved)), record


def _among(cohort: Client, kept: torch.Tensor) -> torch.Tensor:
    """Each client's share of the examples of those that are kept."""
    return sample_ratio(cohort._replace(size=cohort.size * kept))
