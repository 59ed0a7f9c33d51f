"""q-FFL: Li, Sanjabi, Beirami & Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020.

The server minimises Σ_k p_k F_k(θ)^(q+1) / (q + 1): the larger q, the more clients with a large loss count. A step on
that needs its Lipschitz constant, and that depends on θ. q-FedAvg estimates it from L, that of F_k, for every round,

    d_k = L (θ − θ_k),        h_k = q F_k(θ)^(q−1) ‖d_k‖² + L F_k(θ)^q,
    θ ← θ − Σ_k p_k F_k(θ)^q d_k / Σ_k p_k h_k,

where θ_k is the model after local training and L = 1 / lr. With q = 0 it is FedAvg.

*Deviations*: uploads are weighted by p_k, their share of the examples, where the paper samples clients by it and
weights them equally. F_k(θ) is measured along with local training (:class:`fedrane.ops.received.ReceivedLoss`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Grid, sample_ratio
from fedrane.errors import check_ranges
from fedrane.ops.nash import gram
from fedrane.ops.received import ReceivedLoss
from fedrane.task import Client, Model, State, Task


@dataclass(frozen=True)
class QFFL(ReceivedLoss):
    """Clients count by a power of their loss: fairer accuracies."""

    grid: ClassVar[Grid] = {"power": (0.1, 1.0, 5.0)}

    power: float = 1.0
    """q, the exponent of the loss by which a client counts in addition to its examples; 0 is FedAvg."""

    def __post_init__(self) -> None:
        check_ranges(self, power=(0, 100))
        if self.power == 0:
            warnings.warn("q-FFL with method.power=0 is FedAvg", stacklevel=3)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().aggregate(task, server, ups, cohort)
        squares = gram(server.model.params, ups.model.params).diagonal()
        weights = self.weights(sample_ratio(cohort), ups.extra["loss"].double(), squares, 1 / cohort.lr.double())
        params = tree.move(server.model.params, ups.model.params, weights)
        return server._replace(model=Model(params, averaged.model.stats)), record | {"qffl/weights": weights}

    def weights(self, ratio: Tensor, loss: Tensor, squares: Tensor, lipschitz: Tensor) -> Tensor:
        """Of the changes θ_k − θ, from p, F(θ), ‖θ − θ_k‖² and L."""
        largest = loss.max().clamp(min=1e-30)  # to divide by it changes no weight, and no power overflows
        relative = (loss / largest).clamp(min=1e-10)  # a client without any loss has no change either
        curvature = self.power * relative ** (self.power - 1) * lipschitz.square() * squares / largest
        total = (ratio * (curvature + lipschitz * relative**self.power)).sum()
        return ratio * relative**self.power * lipschitz / total.clamp(min=1e-300)
