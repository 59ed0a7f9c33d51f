"""FedAdagrad, FedAdam and FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

The average change of a round, Δ = Σ_k (n_k / n) (θ_k − θ), is the server's negative gradient. Every parameter has a
learning rate of its own, by its second moment v:

    m ← β₁ m + (1 − β₁) Δ,        θ ← θ + η m / (√v + τ),
    v ← v + Δ²                              (FedAdagrad),
    v ← β₂ v + (1 − β₂) Δ²                  (FedAdam),
    v ← v − (1 − β₂) Δ² sign(v − Δ²)        (FedYogi),

from m = 0 and v = τ². As in the paper, there is no correction of the bias.

*Deviations*: none in the equations. BatchNorm's statistics are averaged by sample ratio; they are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid
from fedrane.errors import check_ranges
from fedrane.ops.reduction import Totals
from fedrane.task import Client, Model, Roster, State, Task


@dataclass(frozen=True)
class FedAdagrad(Algorithm):
    """Adagrad at the server."""

    grid: ClassVar[Grid] = {"global_lr": (0.003, 0.01, 0.03, 0.1)}

    global_lr: float = 0.03  # η
    """The learning rate of the server: about the length of a step in every parameter."""
    momentum: float = 0.0  # β₁
    """The weight of earlier rounds in the direction."""
    floor: float = 1e-3  # τ
    """Added to the root of the second moment: changes below it are not scaled up."""

    def __post_init__(self) -> None:
        check_ranges(self, momentum=(0, 0.9999), global_lr=(1e-6, 1e3), floor=(1e-9, 1))

    def init(self, task: Task, roster: Roster) -> State:
        start = super().init(task, roster)
        zero = tree.zeros_like(self.exchanged(task, start.model.params))
        return start._replace(extra={"momentum": zero, "variance": tree.map(lambda z: z + self.floor**2, zero)})

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().update(task, server, totals, cohort)
        before, after = server.model.params, averaged.model.params
        m, v = server.extra["momentum"], server.extra["variance"]
        change = {name: after[name] - before[name] for name in m}
        m = {name: self.momentum * m[name] + (1 - self.momentum) * each for name, each in change.items()}
        v = {name: self.second_moment(v[name], each) for name, each in change.items()}
        step = {name: self.global_lr * m[name] / (v[name].sqrt() + self.floor) for name in m}
        params = before | {name: before[name] + each for name, each in step.items()}
        return State(Model(params, averaged.model.stats), {"momentum": m, "variance": v}), record

    def second_moment(self, v: Tensor, change: Tensor) -> Tensor:
        """Of one tensor of parameters, after a round with this change."""
        return v + change.square()


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Adam at the server."""

    global_lr: float = 0.01  # η
    """The learning rate of the server: about the length of a step in every parameter."""
    momentum: float = 0.9  # β₁
    """The weight of earlier rounds in the direction."""
    decay: float = 0.99  # β₂
    """The weight of earlier rounds in the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, decay=(0, 0.9999))

    def second_moment(self, v: Tensor, change: Tensor) -> Tensor:
        return self.decay * v + (1 - self.decay) * change.square()


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi at the server: the second moment changes by no more than a part of the square."""

    def second_moment(self, v: Tensor, change: Tensor) -> Tensor:
        square = change.square()
        return v - (1 - self.decay) * square * torch.sign(v - square)
