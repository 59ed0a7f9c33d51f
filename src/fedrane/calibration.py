"""Scores to probabilities: one temperature, fitted to examples that stay with their clients.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017: with the temperature T that minimises the negative
log-likelihood, softmax(scores / T) is as sure as the model is right. At an inverse temperature β = 1/T that the server
names, a client sends two sums over its examples, the gradient and the curvature of that likelihood in β:

    Σ E_p[s] − s_y        Σ Var_p[s],        p = softmax(β s),

from which the server makes a Newton step. As in Platt's scaling (1999) a model is counted one wrong answer more than
were seen, so that a model with none gets a finite temperature too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.engines.sequential import MAX_PREDICT_ROWS, Sequential
from fedrane.federation import Federation

if TYPE_CHECKING:
    from fedrane.predictor import Models, Predictor

VALIDATION, TRAINING = "validation", "training"
RANGE = 1e-3, 1e4
"""Of β: a model no better than chance, whose β would be 0 or below it, is given the first."""
ROUNDS, PRECISION = 60, 1e-9
"""At most so many Newton steps, or until one changes β by no more than this part of it."""


class Calibration(NamedTuple):
    """What makes a model's scores probabilities."""

    temperature: float
    examples: str
    """To which it was fitted: ``validation``, or ``training`` where none were set aside."""


class Answered(NamedTuple):
    """A client's examples as a model answers them; all that leaves the client is :meth:`sums`."""

    scores: Tensor
    y: Tensor

    def sums(self, beta: float, wrong: float) -> tuple[float, float]:
        """Gradient and curvature; the chance ``wrong`` that a label misleads is spread over the other classes."""
        others = (self.scores.sum(1) - self._of_label()) / max(1, self.scores.shape[1] - 1)
        p = (beta * self.scores).softmax(1)
        mean = (p * self.scores).sum(1)
        variance = (p * (self.scores - mean[:, None]).square()).sum(1)
        return float((mean - (1 - wrong) * self._of_label() - wrong * others).sum()), float(variance.sum())

    def _of_label(self) -> Tensor:
        return self.scores.gather(1, self.y[:, None])[:, 0]


def fit(clients: Sequence[Answered], wrong: Sequence[float]) -> float:
    """The temperature at which the examples of all clients together are most likely."""
    (low, high), beta = RANGE, 1.0
    for _ in range(ROUNDS):
        gradient, curvature = map(sum, zip(*map(Answered.sums, clients, [beta] * len(clients), wrong), strict=True))
        low, high = (beta, high) if gradient < 0 else (low, beta)
        newton = beta - gradient / curvature if curvature else math.nan
        after = newton if low < newton < high else math.sqrt(low * high)
        if abs(after - beta) <= PRECISION * beta:
            break
        beta = after
    return 1 / beta


def calibrate(models: Models, federation: Federation, engine: object) -> dict[str, Calibration]:
    """A temperature for the global model and one for all personal ones, each where the method has such.

    Examples set aside by ``validation`` are used if there are some, else those of training. Personal models share one
    temperature, since a client alone has too few examples to fit it. Clients are spread over the cores where the
    engine does so.
    """
    spread = engine if isinstance(engine, Sequential) else Sequential(models.algorithm, federation)
    held_out = any(len(rows) for rows in federation.split.validation)
    rows = federation.split.validation if held_out else federation.split.train
    found = {}
    for kind in models.algorithm.answers_on(models.task):

        def answered(_: Sequential, k: int, kind: str = kind) -> Answered:
            model = models.model if kind == GLOBAL else models.personal(k)
            return _answered(model, models, federation, torch.from_numpy(rows[k]))

        some = [k for k, mine in enumerate(rows) if len(mine)]
        clients = spread.each(answered, some, [len(rows[k]) for k in some])
        if all(bool(client.scores.isfinite().all()) for client in clients):
            sizes = [len(client.y) for client in clients]
            # A personal model may know its few training examples by heart: each is counted a wrong answer of its own.
            apart = kind == PERSONAL and not held_out
            wrong = [1 / ((size if apart else sum(sizes)) + 2) for size in sizes]
            found[kind] = Calibration(fit(clients, wrong), VALIDATION if held_out else TRAINING)
    return found


@torch.no_grad()
def _answered(model: Predictor, models: Models, federation: Federation, rows: Tensor) -> Answered:
    chunk = federation.batch if models.algorithm.depends_on_batch(models.task) else MAX_PREDICT_ROWS
    pool = federation.train
    scores = [model(pool.x[some.to(pool.x.device)]).double().cpu() for some in torch.split(rows, chunk)]
    return Answered(torch.cat(scores), pool.y.cpu()[rows])
