"""Temperature scaling: one temperature, fitted to examples that stay with their clients.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017: with the temperature T that minimises the negative
log-likelihood, the confidence softmax(scores / T) matches the accuracy. For an inverse temperature β = 1/T from the
server, a client sends two sums over its examples, the gradient and the curvature of the negative log-likelihood in β:

    Σ E_p[s] − s_y        Σ Var_p[s],        p = softmax(β s).

The server then makes a Newton step. As in Platt scaling (1999), one wrong prediction is added to those observed, so
that a model without errors gets a finite temperature too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.data.federation import Federation
from fedrane.engines.sequential import MAX_PREDICT_EXAMPLES, Sequential

if TYPE_CHECKING:
    from fedrane.training.predictor import Models, Predictor

VALIDATION, TRAINING = "validation", "training"
RANGE = 1e-3, 1e4
"""The bounds of β. A model no better than chance, whose β would be 0 or negative, gets the lower one."""
MAX_STEPS, TOLERANCE = 60, 1e-9
"""The maximum number of Newton steps, and the relative change of β at which they stop."""


class Calibration(NamedTuple):
    """The temperature that turns a model's scores into probabilities."""

    temperature: float
    examples: str
    """The examples it was fitted to: ``validation``, or ``training`` if none were held out."""


class ClientScores(NamedTuple):
    """A model's scores and the labels of a client's examples; only :meth:`sums` leaves the client."""

    scores: Tensor
    y: Tensor

    def sums(self, beta: float, wrong: float) -> tuple[float, float]:
        """Return gradient and curvature; ``wrong`` is the label smoothing, spread over the other classes."""
        others = (self.scores.sum(1) - self._of_label()) / max(1, self.scores.shape[1] - 1)
        p = (beta * self.scores).softmax(1)
        mean = (p * self.scores).sum(1)
        variance = (p * (self.scores - mean[:, None]).square()).sum(1)
        return float((mean - (1 - wrong) * self._of_label() - wrong * others).sum()), float(variance.sum())

    def _of_label(self) -> Tensor:
        return self.scores.gather(1, self.y[:, None])[:, 0]


def fit(clients: Sequence[ClientScores], wrong: Sequence[float]) -> float:
    """Return the temperature that maximises the likelihood of all clients' examples together."""
    (low, high), beta = RANGE, 1.0
    for _ in range(MAX_STEPS):
        sums = map(ClientScores.sums, clients, [beta] * len(clients), wrong)
        gradient, curvature = map(sum, zip(*sums, strict=True))
        low, high = (beta, high) if gradient < 0 else (low, beta)
        newton = beta - gradient / curvature if curvature else math.nan
        after = newton if low < newton < high else math.sqrt(low * high)
        if abs(after - beta) <= TOLERANCE * beta:
            break
        beta = after
    return 1 / beta


def calibrate(models: Models, federation: Federation, engine: object) -> dict[str, Calibration]:
    """Fit a temperature for the global model and one for all personal models, for those that the method has.

    Validation examples are used if there are any, else training examples. Personal models share one temperature, since
    a single client has too few examples to fit it. Clients run in parallel if the engine does that.
    """
    spread = engine if isinstance(engine, Sequential) else Sequential(models.algorithm, federation)
    held_out = any(len(examples) for examples in federation.split.validation)
    examples = federation.split.validation if held_out else federation.split.train
    calibrations = {}
    for which in models.algorithm.models_on(models.task):

        def score(_: Sequential, k: int, which: str = which) -> ClientScores:
            model = models.model if which == GLOBAL else models.personal(k)
            return _score(model, models, federation, torch.from_numpy(examples[k]))

        not_empty = [k for k, mine in enumerate(examples) if len(mine)]
        clients = spread.each(score, not_empty, [len(examples[k]) for k in not_empty])
        if all(bool(client.scores.isfinite().all()) for client in clients):
            sizes = [len(client.y) for client in clients]
            # A personal model may have memorised its few training examples: one wrong prediction is added to each.
            per_client = which == PERSONAL and not held_out
            wrong = [1 / ((size if per_client else sum(sizes)) + 2) for size in sizes]
            calibrations[which] = Calibration(fit(clients, wrong), VALIDATION if held_out else TRAINING)
    return calibrations


@torch.no_grad()
def _score(model: Predictor, models: Models, federation: Federation, examples: Tensor) -> ClientScores:
    chunk = federation.batch if models.task.depends_on_batch else MAX_PREDICT_EXAMPLES
    pool = federation.train
    scores = [model(pool.x[part.to(pool.x.device)]).double().cpu() for part in torch.split(examples, chunk)]
    return ClientScores(torch.cat(scores), pool.y.cpu()[examples])
