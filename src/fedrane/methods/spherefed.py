"""SphereFed: Dong, Zhang, Li & Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022.

Features z are on the unit sphere. The classifier W, random and orthonormal, is fixed and the same for all clients. The
body is trained with the squared error ½‖Wz − e_y‖² and averaged as in FedAvg.

After the last round the global model's classifier is calibrated in closed form. Each client uploads two sums over its
examples, with the features of the global model in evaluation mode, and the server solves

    (Σ z zᵀ + ρ I) Wᵀ = Σ z e_yᵀ,

ridge regression on the examples of all clients, for any partition.

*Deviations*: no code of the authors was found. ρ keeps the system solvable if Σ z zᵀ is singular. The server and the
personal models keep the fixed head; the calibrated one is stored separately and replaces it in the global model. With
norm=batch features depend on their batch, and so does the calibration. With norm=local there is no global model, and
nothing is calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Done, Grid, Needs, Outcome, Work
from fedrane.errors import check_ranges
from fedrane.ops import sphere
from fedrane.task import Batch, Client, Context, Model, Net, State, Task

HEAD = "head.weight"


@dataclass(frozen=True)
class SphereFed(Algorithm):
    """A fixed orthonormal head on unit features, calibrated in closed form."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)
    grid: ClassVar[Grid] = {"ridge": (1e-4, 1e-3, 1e-2)}
    needs: ClassVar[Needs] = {"calibrate=True": ("ridge",)}

    calibrate: bool = True
    ridge: float = 1e-3  # ρ

    def __post_init__(self) -> None:
        check_ranges(self, ridge=(1e-9, 1e6))

    def prepare(self, task: Task) -> Task:
        return sphere.with_head(task, "orthonormal")

    def trains(self, name: str) -> bool:
        return name != HEAD

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        loss = sphere.squared_error(net.head(_features(net, batch.x)), batch)
        return loss, Outcome(net.stats, {"loss": loss})

    def post_training(self) -> tuple[Algorithm, ...]:
        return (Calibration(self.calibrate, self.ridge),) if self.calibrate else ()

    def global_model(self, task: Task, server: State) -> Model:
        return Model(server.model.params | server.extra, server.model.stats)

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        return net.head(_features(net, x))


@dataclass(frozen=True)
class Calibration(SphereFed):
    """SphereFed's post-training stage: one pass over all examples, without training."""

    trains_model: ClassVar[bool] = False

    def local_epochs(self, epochs: int) -> int:
        return 1

    def begin(self, task: Task, ctx: Context) -> Work:
        zeros = sphere.Moments.zeros(task.width, task.classes, task.device)
        return super().begin(task, ctx)._replace(extra=zeros._asdict())

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        net = task.evaluating(work.model, batch.mask)
        z = _features(net, batch.x)
        examples = batch.mask.sum().to(work.examples.dtype)
        loss = work.sums["loss"] + examples * sphere.squared_error(net.head(z), batch)
        sums = tree.add(work.extra, sphere.Moments.of(z, batch, task.classes)._asdict())
        return work._replace(examples=work.examples + examples, sums={"loss": loss}, extra=sums)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(Model({}, {}), work.extra), client_state=ctx.client_state)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        if GLOBAL not in self.models_on(task):
            return server, {"messages": ["no calibration: with norm=local there is no global model"]}
        moments = sphere.Moments(**{name: moment.sum(0) for name, moment in ups.extra.items()})
        head = moments.ridge_regression(self.ridge)
        record = {"calibration/loss": float(moments.squared_error(head))}  # train/loss is that of the fixed head
        return server._replace(extra={HEAD: head.to(task.dtype).contiguous()}), record

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()


def _features(net: Net, x: Tensor) -> Tensor:
    return sphere.unit(net.body(x))
