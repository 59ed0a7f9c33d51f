"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Each client minimises its loss with a pull towards the model it was sent,

    f_k(θ) + (μ/2) ‖θ − θ_t‖²,

the *squared* distance, over all trained parameters. The paper tunes μ in {0.001, 0.01, 0.1, 1}.

*Deviations*: all clients run the same number of epochs. The paper's γ-inexact solutions (clients that stop early) are
simulated by ``client_dropout`` and ``epochs`` of the experiment. Clients are sampled uniformly and uploads weighted by
number of examples; the paper samples clients by number of examples and weights uploads equally.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid, Outcome
from fedrane.errors import check_ranges
from fedrane.task import Batch, Context, Model, Task


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term."""

    grid: ClassVar[Grid] = {"strength": (0.001, 0.01, 0.1, 1.0)}

    strength: float = 0.01
    """μ, the weight of the proximal term towards the server's model; 0 is FedAvg."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6))
        if self.strength == 0:
            warnings.warn("FedProx with method.strength=0 is FedAvg", stacklevel=3)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        sent = self.exchanged(task, ctx.down.model.params)
        away = tree.sub({name: model.params[name] for name in sent}, sent)
        return loss + self.strength / 2 * tree.dot(away, away), outcome
