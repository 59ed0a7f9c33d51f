"""FedRANE: Liao et al., "Joint Local Relational Augmentation and Global Nash Equilibrium for Federated Learning with
Non-IID Data", ACM MM 2023.

On each client, local relational augmentation (LRA): a graph over the batch is mined from the Pearson matrix of its
features z (Eq. 2-4), attention over neighbours turns z into z̃ (Eq. 5-6), and λ_CD · CD(z, z̃) joins the loss (Eq. 7-9).

On the server, global Nash equilibrium (GNE): θ ← θ + Gp, GᵀG p = w/p, with the columns θ_k − θ of G (Eq. 10-16).

*Deviations*: the paper cannot be run as written. docs/paper.md has each reading, its reason, and the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Choices, Grid, Needs, Outcome
from fedrane.errors import ConfigError, check_choices, check_ranges
from fedrane.ops import graph, nash, sphere
from fedrane.ops.contrast import discrimination, projection
from fedrane.task import Batch, Client, Context, Model, Net, State, Task, cross_entropy


@dataclass(frozen=True)
class FedRANE(sphere.Calibrated):
    """Relational augmentation on the clients, Nash bargaining on the server."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)
    grid: ClassVar[Grid] = {"contrast": (0.1, 0.2, 0.5), "temperature": (0.2, 0.8)}
    choices: ClassVar[Choices] = {**graph.CHOICES, **sphere.CHOICES, **nash.CHOICES}
    needs: ClassVar[Needs] = {"lra=True": graph.FIELDS, **nash.NEEDS, **sphere.NEEDS}
    lra: bool = True
    """Whether clients use local relational augmentation; false is the ablation ``fedrane-wo-lra``."""
    relation: float = 0.1
    """λ_R, the weight of the low-rank penalty when the graph of a batch is mined."""
    alternations: int = 5
    """How many times the graph B and its penalty's matrix Φ are computed in turn."""
    closed_form: str = "exact"
    """How B is computed from Φ: the ``exact`` minimiser, or as the ``paper`` prints it."""
    graph_gradient: bool = False
    """Whether the loss has a gradient through the mining of the graph."""
    steps: int = 1
    """L, the steps of attention over neighbours."""
    attention: str = "softmax"
    """How the weights of neighbours are formed: ``softmax`` over them, or the plain ``dot`` product."""
    residual: bool = True
    """Whether a step of attention adds to the features instead of replacing them."""
    neighbours: int = 0
    """How many of the strongest neighbours are kept in the graph; 0 is all."""
    contrast: float = 0.2
    """λ_CD, the weight of the contrastive discrimination between z and z̃."""
    temperature: float = 0.8
    """τ₁, the temperature of the contrastive discrimination."""
    projection: int = 0
    """The width of the projection whose outputs are contrasted; 0 contrasts z and z̃ themselves."""
    augmented: float = 0.5
    """The weight of the prediction loss on z̃; the rest is the loss on z."""
    head: str = "orthonormal"
    """The classifier: fixed and ``orthonormal``, the network's ``linear`` one, or an ``mlp``."""
    loss: str = "mse"
    """The prediction loss: squared error (``mse``) or cross entropy (``ce``)."""
    scale: float = 16.0
    """The factor on the scores of an orthonormal head with cross entropy."""
    predict_on: str = "direct"
    """What is classified at test: z (``direct``), or z̃ from the graph of the batch (``relational``)."""
    gne: bool = True
    """Whether the server bargains (global Nash equilibrium); false is the ablation ``fedrane-wo-gne``."""
    power: float = 1.0
    """The exponent of a client's number of examples in its bargaining power: 0 is equal, 1 is by examples."""
    length: str = "average"
    """The step's length: that of the ``average``, by weights that sum to 1 (``simplex``), or the paper's (``ball``)."""
    scope: str = "layer"
    """What is bargained over: the ``model`` as one vector, each ``layer``, or only the ``body`` or ``head``."""
    blend: float = 1.0
    """The weight of the bargain in the server's step; the rest is the average."""
    solver: str = "newton"
    """How the bargain is solved: by ``newton``, or the paper's convex-concave procedure (``sequential``)."""
    gram: str = "exact"
    """The bargain knows ``exact`` inner products of deviations, or those of their random ``sketch``es."""
    sketch: int = 1024
    """How many numbers a sketch has, for each part that is bargained over; a smaller part is sketched exactly."""
    calibrate: bool = True
    """Whether the global model's orthonormal head is calibrated after the last round, as in SphereFed."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, **graph.RANGES, **nash.RANGES, scale=(1e-3, 1e6))
        graph.check_alternations(self.closed_form, self.alternations)
        if self.gne and self.scope == "head" and self.head == "orthonormal":
            raise ConfigError("method.scope=head", "an orthonormal head is frozen", "Use method.head=linear as well")

    def prepare(self, task: Task) -> Task:
        task = sphere.with_head(task, self.head)
        passing = graph.MessagePassing(task.width, self.steps, self.attention, self.residual, self.neighbours)
        if self.lra:
            task = replace(task.add("relate", passing), batch_dependent=self.predict_on == "relational")
        return task.add("project", projection(task.width, self.projection)) if self.lra and self.projection else task

    def trains(self, name: str) -> bool:
        return self.head != "orthonormal" or not name.startswith("head.")

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        net = task.training(model, batch)
        z = self._normalise(net.body(batch.x))
        plain = self._loss(net, z, batch)
        if not self.lra:
            return plain, Outcome(net.stats, {"loss": plain})
        augmented, relations = self._augment(net, z, batch.mask)
        loss = self.augmented * self._loss(net, augmented, batch) + (1 - self.augmented) * plain
        before, after = (net.part("project", each) if self.projection else each for each in (z, augmented))
        cd = discrimination(before, after, batch.mask, self.temperature)
        metrics = {"loss": loss, "cd": cd, **graph.statistics(relations, batch.y, batch.mask)}
        return loss + self.contrast * cd, Outcome(net.stats, metrics)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        if not self.gne:
            return super().aggregate(task, server, ups, cohort)
        model, record = nash.negotiate(server.model, ups.model, cohort, nash.Terms.of(self), task.seed)
        return server._replace(model=model), record

    def post_training(self) -> tuple[Algorithm, ...]:
        calibrates = self.calibrate and self.head == "orthonormal" and self.predict_on == "direct"
        return (Calibration(**vars(self)),) if calibrates else ()

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        net = task.evaluating(model, mask)
        z = self._normalise(net.body(x))
        return self._scores(net, self._augment(net, z, mask)[0] if self.lra and self.predict_on == "relational" else z)

    def _normalise(self, z: Tensor) -> Tensor:
        return sphere.unit(z) if self.head == "orthonormal" else z

    def _augment(self, net: Net, z: Tensor, mask: Tensor) -> tuple[Tensor, graph.Relations]:
        source, args = z if self.graph_gradient else z.detach(), (self.relation, self.alternations, self.closed_form)
        relations = graph.relations(source, mask, *args, differentiable=self.graph_gradient)
        return self._normalise(net.part("relate", z, relations.adjacency, mask)), relations

    def _scores(self, net: Net, z: Tensor) -> Tensor:
        return net.head(z) * (self.scale if self.head == "orthonormal" and self.loss == "ce" else 1.0)

    def _loss(self, net: Net, z: Tensor, batch: Batch) -> Tensor:
        return (cross_entropy if self.loss == "ce" else sphere.squared_error)(self._scores(net, z), batch)


class Calibration(sphere.CalibrationStage, FedRANE):
    """FedRANE's post-training stage."""
