"""FedNTD: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022.

Local training forgets the classes that a client does not have. With the scores s of the model in training and ŝ of the
model that was sent, a client minimises

    CE + β · KL( p̂ ‖ p ),        p_c = e^{s_c/τ} / Σ_{j≠y} e^{s_j/τ},  c ≠ y,

and p̂ likewise of ŝ: both softmaxes leave out the true class y, so s_y is not distilled. p̂ has no gradient.

*Deviations*: the model that was sent is in evaluation mode, as MOON's is; in the official code it has the mode that the
model had when it was copied. As in the paper and in the first version of that code, the divergence is not multiplied
by τ²; in later versions it is. With mixup, the divergence of an example is the mean of those with either label as y, by
their weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrane.algorithm import Algorithm, Grid, Outcome
from fedrane.errors import check_ranges
from fedrane.ops.reduction import Totals
from fedrane.task import Batch, Client, Context, Model, State, Task, cross_entropy, masked_mean, one_hot


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """FedAvg with a distillation of the global model on all classes but the true one."""

    needs_classes: ClassVar[str] = "it distils the classes that are not true"
    grid: ClassVar[Grid] = {"strength": (0.3, 1.0, 3.0)}

    strength: float = 1.0
    """β, the weight of the distillation; 0 is FedAvg."""
    temperature: float = 1.0
    """τ, the temperature of both softmaxes."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6), temperature=(1e-3, 1e3))
        if self.strength == 0:
            warnings.warn("FedNTD with method.strength=0 is FedAvg", stacklevel=3)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        scores = net.head(net.body(batch.x))
        fixed = task.evaluating(self.start(task, ctx), batch.mask)
        sent = fixed.head(fixed.body(batch.x)).detach()
        loss = cross_entropy(scores, batch)
        forgotten = self._divergences(sent, scores, batch.y)
        if batch.mixed is not None:
            forgotten = torch.lerp(forgotten, self._divergences(sent, scores, batch.mixed.y), batch.mixed.weight)
        distillation = masked_mean(forgotten, batch.mask)
        return loss + self.strength * distillation, Outcome(net.stats, {"loss": loss, "distillation": distillation})

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        after, record = super().update(task, server, totals, cohort)
        if task.classes == 2 and int(cohort.round.min()) == 1:
            record["messages"] = ["FedNTD on two classes is FedAvg: the one that is not true has probability 1"]
        return after, record

    def _divergences(self, sent: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        """KL(p̂ ‖ p) of each example."""
        true = one_hot(y, scores.shape[-1])
        before, now = (self._not_true(each, true) for each in (sent, scores))
        return (before.exp() * (before - now)).sum(-1)

    def _not_true(self, scores: Tensor, true: Tensor) -> Tensor:
        """log p. The true class has a large negative number: its p is 0, and with −∞ its p · log p would be NaN."""
        return torch.where(true, torch.finfo(scores.dtype).min / 4, scores / self.temperature).log_softmax(-1)
