"""FedSAM: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022; Caldarola et al.,
"Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022.

Clients minimise the largest loss within a distance ρ (Foret et al., "Sharpness-Aware Minimization", ICLR 2021). Every
local step has the gradient at the point that is worst to first order,

    θ ← θ − η ∇f(θ + ρ g / ‖g‖),        g = ∇f(θ),

both on the same batch and with the same dropout; ‖g‖ is over all trained parameters together.

*Deviations*: the gradient of ρ g / ‖g‖ is left out, as in all of these papers. Metrics and BatchNorm's statistics are
those at θ; in the code of Caldarola et al. the second pass changes the statistics once more. Their ASAM and SWA, and
the momentum of Qu et al. at the server (MoFedSAM), are not implemented.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid, Outcome
from fedrane.errors import check_ranges
from fedrane.task import Batch, Context, Model, Task
from fedrane.tree import Tensors


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """FedAvg with sharpness-aware local steps."""

    grid: ClassVar[Grid] = {"radius": (0.01, 0.05, 0.1, 0.5)}

    radius: float = 0.05
    """ρ, the distance at which the gradient is taken; 0 is FedAvg."""

    def __post_init__(self) -> None:
        check_ranges(self, radius=(0, 1e3))
        if self.radius == 0:
            warnings.warn("FedSAM with method.radius=0 is FedAvg", stacklevel=3)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        """The loss at the worst point nearby, which moves along with θ; what is recorded is from θ."""

        def loss(trained: Tensors) -> tuple[Tensor, Outcome]:
            return Algorithm.objective(self, task, ctx, Model({**model.params, **trained}, model.stats), batch)

        here = tree.pick(model.params, self.trains)
        gradient, (_, outcome) = grad_and_value(loss, has_aux=True)(tree.map(Tensor.detach, here))
        away = tree.scale(gradient, self.radius / (tree.norm(gradient) + 1e-12))
        return loss(tree.add(here, away))[0], outcome
