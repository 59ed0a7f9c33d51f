"""Features on the unit sphere and a fixed orthonormal head (SphereFed, Dong et al. 2022)."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Span, Work
from fedrane.errors import ConfigError
from fedrane.task import Batch, Client, Context, Model, State, Task, masked_mean

HEAD = "head.weight"


def unit(features: Tensor) -> Tensor:
    """Each row divided by its norm; a zero row stays zero, with a finite gradient."""
    return features * torch.rsqrt(features.square().sum(-1, keepdim=True).clamp(min=1e-12))


class OrthonormalHead(nn.Linear):
    """A linear head without bias and with random orthonormal rows."""

    def __init__(self, width: int, classes: int) -> None:
        if classes > width:
            raise ConfigError(
                f"an orthonormal head for {classes} classes on {width} features",
                "there cannot be more orthonormal vectors than features",
                "Use a wider model (fedrane also has method.head=linear)",
            )
        super().__init__(width, classes, bias=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)


CHOICES = {"head": ("orthonormal", "linear", "mlp"), "loss": ("mse", "ce")}
NEEDS = {"head=orthonormal": ("scale", "calibrate"), "loss=ce": ("scale",), "predict_on=direct": ("calibrate",)}
"""When fields of a method with a choice of heads have an effect. ``scale`` multiplies the scores of unit features."""


def with_head(task: Task, head: str) -> Task:
    """The task with that head, one of ``CHOICES``; ``linear`` keeps the network's."""
    if head == "orthonormal":
        return task.add("head", OrthonormalHead(task.width, task.classes))
    if head == "mlp":
        layers = nn.Linear(task.width, task.width), nn.ReLU(), nn.Linear(task.width, task.classes)
        return task.add("head", nn.Sequential(*layers))
    return task


def squared_error(scores: Tensor, batch: Batch) -> Tensor:
    """The mean of ½‖scores − e_y‖² without padding."""
    target = batch.targets(scores.shape[-1]).to(scores.dtype)
    return masked_mean(0.5 * (scores - target).square().sum(-1), batch.mask)


class Moments(NamedTuple):
    """Sums over examples in float64, enough to solve for the best linear head. Those of several clients add up."""

    gram: Tensor
    """Σ z zᵀ."""
    cross: Tensor
    """Σ z e_yᵀ."""
    examples: Tensor

    @classmethod
    def zeros(cls, width: int, classes: int, device: torch.device) -> Moments:
        return cls(
            *(torch.zeros(size, dtype=torch.float64, device=device) for size in ((width,) * 2, (width, classes), ()))
        )

    @classmethod
    def of(cls, features: Tensor, batch: Batch, classes: int) -> Moments:
        z = torch.where(batch.mask[:, None], features, 0).double()
        return cls(z.mT @ z, z.mT @ batch.targets(classes).double(), batch.mask.sum().double())

    def ridge_regression(self, ridge: float) -> Tensor:
        """The head W that minimises Σ ‖Wz − e_y‖² + ridge ‖W‖²."""
        eye = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        transposed: Tensor = torch.linalg.solve(self.gram + ridge * eye, self.cross)
        return transposed.mT

    def squared_error(self, head: Tensor) -> Tensor:
        """The mean of ½‖Wz − e_y‖² over the examples; ‖e_y‖ is 1."""
        head = head.double()
        total = (head @ self.gram * head).sum() - 2 * (head * self.cross.mT).sum() + self.examples
        return 0.5 * total / self.examples.clamp(min=1)


class Calibrated(Algorithm):
    """A method with a frozen head on unit features whose global model's head is calibrated after the last round.

    The calibrated head is stored separately: the server and the personal models keep the frozen one.
    """

    needs_classes: ClassVar[str] = "its head has a fixed direction for each class"

    def global_model(self, task: Task, server: State) -> Model:
        return Model(server.model.params | server.extra, server.model.stats)


class CalibrationStage(Algorithm):
    """The post-training stage of such a method, a base class in front of it: one pass over all examples, no training.

    Each client uploads two sums over its examples, with the features of the global model in evaluation mode, and the
    server solves (Σ z zᵀ + ρ I) Wᵀ = Σ z e_yᵀ: ridge regression on the examples of all clients, for any partition.
    """

    trains_model: ClassVar[bool] = False
    ridge: float = 1e-3
    """ρ, unless it is a field of the method."""

    def local_epochs(self, epochs: Span) -> Span:
        return 1

    def begin(self, task: Task, ctx: Context) -> Work:
        work, zeros = super().begin(task, ctx), Moments.zeros(task.width, task.classes, task.device)
        return work._replace(sums={"loss": work.sums["loss"]}, extra=zeros._asdict())

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        net = task.evaluating(work.model, batch.mask)
        z = unit(net.body(batch.x))
        examples = batch.mask.sum().to(work.examples.dtype)
        loss = work.sums["loss"] + examples * squared_error(net.head(z), batch)
        sums = tree.add(work.extra, Moments.of(z, batch, task.classes)._asdict())
        return work._replace(examples=work.examples + examples, sums={"loss": loss}, extra=sums)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(Model({}, {}), work.extra), client_state=ctx.client_state)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        if task.norm == "local" and task.norm_names:
            return server, {"messages": ["no calibration: with norm=local there is no global model"]}
        if task.depends_on_batch:  # those of a client's few classes are not those of a test batch
            return server, {"messages": ["no calibration: with norm=batch features depend on their batch"]}
        moments = Moments(**{name: moment.sum(0) for name, moment in ups.extra.items()})
        head = moments.ridge_regression(self.ridge)
        record = {"calibration/loss": float(moments.squared_error(head))}  # train/loss is that of the frozen head
        return server._replace(extra={HEAD: head.to(task.dtype).contiguous()}), record

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()
