"""FedLC: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.

A client with n_c examples of class c shifts its scores s before the softmax, in training only,

    −log( e^{s_y − τ n_y^(−1/4)} / Σ_c e^{s_c − τ n_c^(−1/4)} ),

so that between classes y and c there is a margin of τ (n_y^(−1/4) − n_c^(−1/4)): a rare class must win by more. The
global model predicts with s.

*Deviations*: a class without examples has, as the formula says, an infinite margin: it is left out of the sum, so its
scores are neither raised nor lowered (``absent="excluded"``). With ``absent="one"``, which is not in the paper, it has
the margin of a class with one example. With mixup, the loss of an example is the mean of those of both labels, by their
weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrane.algorithm import Algorithm, Choices, Grid, Outcome
from fedrane.errors import check_choices, check_ranges
from fedrane.ops.balance import margin
from fedrane.task import Batch, Context, Model, Task, cross_entropy


@dataclass(frozen=True)
class FedLC(Algorithm):
    """FedAvg with scores that are calibrated by a client's class counts."""

    needs_classes: ClassVar[str] = "its margins need the counts of the classes"
    grid: ClassVar[Grid] = {"strength": (0.1, 0.5, 1.0), "absent": ("excluded", "one")}
    choices: ClassVar[Choices] = {"absent": ("excluded", "one")}

    strength: float = 0.5
    """τ, the margin of a class with one example; 0 is FedAvg."""
    absent: str = "excluded"
    """What a class without examples is: ``excluded`` from the loss, or treated as a class with ``one`` example."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e4))
        check_choices(self)
        if self.strength == 0:
            warnings.warn("FedLC with method.strength=0 is FedAvg", stacklevel=3)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        assert ctx.client.labels is not None  # noqa: S101 - only a cohort has none
        counts = ctx.client.labels.clamp(min=1 if self.absent == "one" else 0)
        net = task.training(model, batch)
        scores = net.head(net.body(batch.x)) + margin(counts, self.strength)
        loss = cross_entropy(scores, batch)
        return loss, Outcome(net.stats, {"loss": loss})
