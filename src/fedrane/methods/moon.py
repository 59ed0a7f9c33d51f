"""MOON: Li, He & Song, "Model-Contrastive Federated Learning", CVPR 2021.

A projection head R maps the features to z. With z of the model in training, z_glob of the model that was sent and
z_prev of the client's model at the end of its last round, each client minimises

    CE + μ · ℓ_con,        ℓ_con = −log( e^{s(z, z_glob)/τ} / (e^{s(z, z_glob)/τ} + e^{s(z, z_prev)/τ}) ),

where s is the cosine: representations are pulled towards the global model's and away from the client's previous ones.
Only z has a gradient; the other two come from fixed models in evaluation mode (the official code's ``eval()``).

*Deviations*: in the paper the output layer follows R (``projection="inline"``). Here R is by default a separate branch,
so that all methods are compared on the same network. Before its first round a client's previous model is the one it is
sent, so ℓ_con is the constant log 2. The official code omits the term in round 1, and uses a random network for a
client that is first sampled later. One previous model is kept, as in the paper's experiments.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fedrane import tree
from fedrane.algorithm import Algorithm, Choices, Done, Grid, Outcome, Work
from fedrane.errors import check_choices, check_ranges
from fedrane.ops.contrast import projection
from fedrane.ops.sphere import unit
from fedrane.task import Batch, Client, Context, Model, State, Task, masked_mean, prediction_loss


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg with a contrastive loss between the global, the current and the previous local model."""

    grid: ClassVar[Grid] = {"strength": (0.1, 1.0, 5.0, 10.0)}
    choices: ClassVar[Choices] = {"projection": ("branch", "inline")}
    strength: float = 5.0
    """μ, the weight of the contrastive loss; 0 is FedAvg."""
    temperature: float = 0.5
    """τ, the temperature of the contrastive loss."""
    width: int = 256
    """The width of the projection."""
    projection: str = "branch"
    """Where the projection is: a ``branch`` beside the head, or ``inline`` before it as in the authors' code."""

    def __post_init__(self) -> None:
        check_ranges(self, strength=(0, 1e6), temperature=(1e-3, 1e3), width=(1, 1e6))
        check_choices(self)
        if self.strength == 0:
            longer = " on a network with a longer head" if self.projection == "inline" else ""
            warnings.warn(f"MOON with method.strength=0 is FedAvg{longer}", stacklevel=3)

    def prepare(self, task: Task) -> Task:
        task = task.add("project", projection(task.width, self.width))
        return task.add("head", nn.Linear(self.width, task.outputs)) if self.projection == "inline" else task

    def join(self, task: Task, server: State, client: Client) -> State:
        return super().join(task, server, client)._replace(extra={"previous": _encoder(server.model)})

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        features = net.body(batch.x)
        z = net.part("project", features)
        loss = prediction_loss(net.head(z if self.projection == "inline" else features), batch)
        sent = self._fixed(task, self.start(task, ctx), batch)
        previous = self._fixed(task, Model(**ctx.client_state.extra["previous"]), batch)
        away = ((unit(z) * previous).sum(-1) - (unit(z) * sent).sum(-1)) / self.temperature
        contrast = masked_mean(F.softplus(away), batch.mask)  # −log(e^a / (e^a + e^b)) = log(1 + e^{b − a})
        return loss + self.strength * contrast, Outcome(net.stats, {"loss": loss, "contrast": contrast})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(client_state=done.client_state._replace(extra={"previous": _encoder(work.model)}))

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        features = net.body(x)
        return net.head(net.part("project", features) if self.projection == "inline" else features)

    def _fixed(self, task: Task, model: Model, batch: Batch) -> Tensor:
        """The normalised z of a fixed model."""
        net = task.evaluating(model, batch.mask)
        return unit(net.part("project", net.body(batch.x))).detach()


def _encoder(model: Model) -> dict[str, Any]:
    """The part of a model that computes z."""

    def wanted(name: str) -> bool:
        return not name.startswith("head.")

    return {"params": tree.pick(model.params, wanted), "stats": tree.pick(model.stats, wanted)}
