"""Fed-RoD: Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

A client trains two predictors with two losses. The generic one, body f and head g, is trained as if the classes were
balanced (n_c examples of class c); the personal one adds h_k(z) to it, for the client's own distribution:

    balanced softmax   −log( n_y^γ e^{g(z)_y} / Σ_c n_c^γ e^{g(z)_c} ),        z = f(x),
    cross entropy      of  g(z) + h_k(z)  with neither z nor g(z) having a gradient.

f and g are averaged as in FedAvg; h_k and the counts n_c stay with the client. The server predicts with g(z), client k
with g(z) + h_k(z).

*Deviations*: the authors' repository holds no code to compare with. h_k is linear; the variant with a hypernetwork that
makes h_k from the class distribution is not implemented. h_k starts at zero, so a client first predicts as the server.
Personal predictions use the server's latest f and g. ``clip`` applies to the gradients of both losses together.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Grid, Outcome
from fedrane.errors import check_ranges
from fedrane.ops.balance import balanced_cross_entropy
from fedrane.task import Batch, Context, Model, State, Task, cross_entropy


class ZeroLinear(nn.Linear):
    """A linear layer that is initialised to zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


@dataclass(frozen=True)
class FedRoD(Algorithm):
    """A generic predictor for balanced classes, and a personal one added to it."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)
    needs_classes: ClassVar[str] = "its balanced loss needs the counts of the classes"
    grid: ClassVar[Grid] = {"balance": (0.5, 1.0)}

    balance: float = 1.0
    """γ, the exponent of the class counts in the balanced softmax; 0 is plain cross entropy."""

    def __post_init__(self) -> None:
        check_ranges(self, balance=(0, 100))
        if self.balance == 0:
            warnings.warn("Fed-RoD with method.balance=0 has FedAvg's global model", stacklevel=3)

    def prepare(self, task: Task) -> Task:
        return task.add("personal", ZeroLinear(task.width, task.classes))

    def shares(self, name: str) -> bool:
        return not _personal(name)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        features = net.body(batch.x)
        scores = net.head(features)
        generic = balanced_cross_entropy(scores, _counts(ctx), batch, self.balance)
        personal = cross_entropy(scores.detach() + net.part("personal", features.detach()), batch)
        return generic + personal, Outcome(net.stats, {"loss": generic, "personal": personal})

    def global_model(self, task: Task, server: State) -> Model:
        return Model(tree.pick(server.model.params, self.shares), server.model.stats)

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        features = net.body(x)
        scores = net.head(features)
        return scores + net.part("personal", features) if any(map(_personal, model.params)) else scores


def _personal(name: str) -> bool:
    return name.startswith("personal.")


def _counts(ctx: Context) -> Tensor:
    assert ctx.client.labels is not None  # noqa: S101 - only a cohort has none
    return ctx.client.labels
