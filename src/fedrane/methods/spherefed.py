"""SphereFed: Dong, Zhang, Li & Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022.

Features z are on the unit sphere. The classifier W, random and orthonormal, is fixed and the same for all clients. The
body is trained with the squared error ½‖Wz − e_y‖² and averaged as in FedAvg.

After the last round the global model's classifier is calibrated in closed form, by ridge regression on the examples of
all clients (:class:`fedrane.ops.sphere.CalibrationStage`).

*Deviations*: no code of the authors was found. ρ keeps the system solvable if Σ z zᵀ is singular. The server and the
personal models keep the fixed head; the calibrated one is stored separately and replaces it in the global model. With
norm=batch features depend on their batch, and with norm=local there is no global model: nothing is calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Grid, Needs, Outcome
from fedrane.errors import check_ranges
from fedrane.ops import sphere
from fedrane.task import Batch, Context, Model, Net, Task


@dataclass(frozen=True)
class SphereFed(sphere.Calibrated):
    """A fixed orthonormal head on unit features, calibrated in closed form."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)
    grid: ClassVar[Grid] = {"ridge": (1e-4, 1e-3, 1e-2)}
    needs: ClassVar[Needs] = {"calibrate=True": ("ridge",)}

    calibrate: bool = True
    """Whether the global model's head is calibrated in closed form after the last round."""
    ridge: float = 1e-3
    """ρ, the ridge of that calibration, which keeps it solvable."""

    def __post_init__(self) -> None:
        check_ranges(self, ridge=(1e-9, 1e6))

    def prepare(self, task: Task) -> Task:
        return sphere.with_head(task, "orthonormal")

    def trains(self, name: str) -> bool:
        return name != sphere.HEAD

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        loss = sphere.squared_error(net.head(_features(net, batch.x)), batch)
        return loss, Outcome(net.stats, {"loss": loss})

    def post_training(self) -> tuple[Algorithm, ...]:
        return (Calibration(**vars(self)),) if self.calibrate else ()

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        return net.head(_features(net, x))


class Calibration(sphere.CalibrationStage, SphereFed):
    """SphereFed's post-training stage."""


def _features(net: Net, x: Tensor) -> Tensor:
    return sphere.unit(net.body(x))
