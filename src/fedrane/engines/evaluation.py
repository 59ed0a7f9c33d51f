"""The metrics, and what each accuracy means: which model, on which examples, over which clients.

``global/…``       the global model on the official test set;
``global/local_…`` the global model on the clients' local test sets;
``personal/…``     every client's personal model on its local test set, over all clients, not only the sampled ones.

A method without a global (or personal) model has no such entries: the column is empty.

On a task with two classes there are also F1, and AUROC, AUPRC and the sensitivity at a fixed specificity. These three
rank examples by their scores. Scores of different personal models are not comparable, so each client's examples are
ranked among themselves, and the mean is over the clients that have examples of both classes, weighted by examples.

Where a number is predicted, R² has the place of the accuracy (:mod:`fedrane.ops.regression`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.ops import regression
from fedrane.ops.ranking import Ranking, ranking
from fedrane.ops.regression import R2, Residuals
from fedrane.task import Model, State, Task

Metrics = dict[str, Any]
Examples = NDArray[np.int64]
ACCURACY = "accuracy"
HEADLINES = ACCURACY, R2
"""What rounds and methods are compared by: of classes, and of a number. The higher the better."""
WORST = 0.1
"""The fraction of clients in ``accuracy_worst10``."""


def headline(record: Metrics, whose: str) -> str | None:
    """The key of what a record is compared by; None if that model was not evaluated."""
    return next((key for name in HEADLINES if record.get(key := f"{whose}/{name}") is not None), None)


class Predicted(NamedTuple):
    labels: NDArray[Any]
    """Class numbers; in regression the predictions, standardised."""
    losses: NDArray[np.float64]
    margins: NDArray[np.float64] | None = None
    """With two classes: the score of the second minus that of the first, its log-odds."""

    @classmethod
    def of(cls, columns: Sequence[Tensor]) -> Predicted:
        """What :func:`against` gives."""
        return cls(*(column.cpu().numpy() for column in columns))

    @classmethod
    def nothing(cls, task: Task) -> Predicted:
        return cls.of(against(torch.zeros(0, task.outputs, device=task.device), task.zero_labels(0)))

    def split(self, cuts: NDArray[np.int64]) -> list[Predicted]:
        columns = [np.split(column, cuts) for column in self if column is not None]
        return [Predicted(*parts) for parts in zip(*columns, strict=True)]


def against(scores: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of :class:`Predicted` for scores (…, outputs) of examples with labels ``y``.

    The margin of two classes has the order of their probabilities, and none of the ties of probabilities near 1.
    """
    if y.is_floating_point():
        predicted = scores[..., 0].double()
        return predicted, (predicted - y).square()
    losses = F.cross_entropy(scores.movedim(-1, 1), y, reduction="none").double()
    if scores.shape[-1] != 2:
        return scores.argmax(-1), losses
    first, second = scores.double().unbind(-1)
    return scores.argmax(-1), losses, second - first


class Predicts(Protocol):
    """Gives each client's model, and predicts with models."""

    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model: ...

    def predict(self, model: Model, pool: Pool, examples: Examples) -> Predicted: ...

    def predict_each(self, models: list[Model], pool: Pool, examples: tuple[Examples, ...]) -> list[Predicted]: ...


class Tally(NamedTuple):
    """The counts of one client's predictions: all that the metrics need."""

    examples: int
    hits: int
    loss: float
    """Summed over examples."""
    minority_examples: int = 0
    """Examples of its minority classes."""
    minority_hits: int = 0
    class_examples: tuple[int, ...] = ()
    class_hits: tuple[int, ...] = ()
    ranking: Ranking | None = None
    """With two classes, if there are examples of both."""

    @classmethod
    def of(cls, predicted: Predicted, y: NDArray[np.int64], minority: NDArray[np.bool_], positive: int) -> Tally:
        """Count predictions for examples with labels ``y``; ``minority`` marks the client's minority classes."""
        hit, rare = predicted.labels == y, minority[y]
        by_class = (np.bincount(y[chosen], minlength=len(minority)) for chosen in (slice(None), hit))
        examples, hits = (tuple(counts.tolist()) for counts in by_class)
        loss = float(predicted.losses.sum())
        ranked = None
        if predicted.margins is not None:
            ranked = ranking(predicted.margins if positive else -predicted.margins, y == positive)
        return cls(len(y), int(hit.sum()), loss, int(rare.sum()), int(hit[rare].sum()), examples, hits, ranked)


Count = Tally | Residuals
"""What a client counts: of classes, or of a number."""


def evaluate(
    engine: Predicts,
    federation: Federation,
    algorithm: Algorithm,
    server: State,
    client_states: Mapping[int, State],
    round: int,
) -> Metrics:
    """Compute all metrics of the models that the method has, over all clients."""
    task, everyone = federation.task, range(federation.population)
    metrics: Metrics = {}
    held_out: dict[str, list[Any]] = {}
    if GLOBAL in algorithm.models_on(task):
        model = algorithm.global_model(task, server)
        metrics |= official(engine, federation, model)
        tested, held_out[GLOBAL] = tally_predictions(engine, federation, [model] * federation.population)
        metrics |= over_clients(task, "global/local_", tested)
    if PERSONAL in algorithm.models_on(task):
        models = [engine.personal(server, client_states.get(k), k, round) for k in everyone]
        tested, held_out[PERSONAL] = tally_predictions(engine, federation, models)
        metrics |= overall(task, PERSONAL, tested) | over_clients(task, "personal/", tested)
    return metrics | validation(task, held_out)


def official(engine: Predicts, federation: Federation, model: Model) -> Metrics:
    """Evaluate the global model on the official test set."""
    task, y = federation.task, _labels(federation.test)
    predicted = engine.predict(model, federation.test, np.arange(len(y)))
    count = _count(task, predicted, y, np.zeros(task.classes, np.bool_))
    metrics = overall(task, GLOBAL, [count])
    return metrics | (two_classes("global/", [count], task.positive) if isinstance(count, Tally) else {})


def _count(task: Task, predicted: Predicted, y: NDArray[Any], minority: NDArray[np.bool_]) -> Count:
    if task.target:
        return Residuals.of(predicted.labels, y)
    return Tally.of(predicted, y, minority, task.positive)


def tally_predictions(engine: Predicts, federation: Federation, models: list[Model]) -> tuple[list[Count], list[Count]]:
    """Return the tallies of each client's model on its local test set and on its validation set."""
    together, split = not federation.task.depends_on_batch, federation.split
    tested, held = (
        _tallies(engine, federation, models, examples, together) for examples in (split.test, split.validation)
    )
    return tested, held


def _tallies(
    engine: Predicts, federation: Federation, models: list[Model], examples: tuple[Examples, ...], together: bool
) -> list[Count]:
    y, minority = _labels(federation.train), minority_classes(federation.labels)
    if not any(len(r) for r in examples):
        return []
    predicted = _by_client(engine, models, federation.train, examples, together)
    each = zip(predicted, examples, minority, strict=True)
    return [_count(federation.task, p, y[r], rare) for p, r, rare in each]


def _labels(pool: Pool) -> NDArray[Any]:
    return pool.y.cpu().numpy()


def _by_client(
    engine: Predicts, models: list[Model], pool: Pool, examples: tuple[Examples, ...], together: bool
) -> list[Predicted]:
    """Predict each client's examples with its model; in one batch if all share it and batches do not matter."""
    if together and all(model is models[0] for model in models):
        predicted = engine.predict(models[0], pool, np.concatenate(examples))
        return predicted.split(np.cumsum([len(r) for r in examples])[:-1])
    return engine.predict_each(models, pool, examples)


def overall(task: Task, whose: str, tallies: Sequence[Any]) -> Metrics:
    """Return metrics over all examples together, with the recall of each class if classes were counted."""
    if task.target:
        return {**regression.overall(f"{whose}/", tallies, task.target)}
    examples = sum(t.examples for t in tallies)
    metrics: Metrics = {
        f"{whose}/accuracy": sum(t.hits for t in tallies) / examples,
        f"{whose}/loss": sum(t.loss for t in tallies) / examples,
    }
    if all(t.class_examples for t in tallies):
        counts = zip(
            *(np.sum([getattr(t, name) for t in tallies], 0) for name in ("class_examples", "class_hits")), strict=True
        )
        recall = [float(hits / examples) if examples else None for examples, hits in counts]
        metrics[f"{whose}/balanced_accuracy"] = float(np.mean([r for r in recall if r is not None]))
        metrics[f"{whose}/recall"] = recall
    return metrics


def two_classes(prefix: str, tallies: Sequence[Tally], positive: int) -> Metrics:
    """Return F1 over all examples together, and the means of the rankings; nothing if there are not two classes."""
    if not all(len(t.class_examples) == 2 for t in tallies):
        return {}
    true_positives = sum(t.class_hits[positive] for t in tallies)
    errors = sum(t.examples - t.hits for t in tallies)
    metrics: Metrics = (
        {f"{prefix}f1": 2 * true_positives / (2 * true_positives + errors)} if true_positives or errors else {}
    )
    ranked = [(t.ranking, t.examples) for t in tallies if t.ranking]
    if ranked:
        values, weights = zip(*ranked, strict=True)
        means = np.average(values, axis=0, weights=weights).tolist()
        metrics |= {f"{prefix}{name}": mean for name, mean in zip(Ranking._fields, means, strict=True)}
    return metrics


def over_clients(task: Task, prefix: str, tallies: Sequence[Any]) -> Metrics:
    """Return metrics on the local test sets: over all examples, over clients, over minorities, and of two classes."""
    if task.target:
        metrics: Metrics = {**regression.overall(prefix, tallies, task.target)}
        return metrics | _spread(prefix, R2, regression.scores(tallies))
    metrics = {f"{prefix}accuracy": sum(t.hits for t in tallies) / sum(t.examples for t in tallies)}
    metrics |= _spread(prefix, ACCURACY, np.array([t.hits / t.examples for t in tallies]))
    examples, hits = sum(t.minority_examples for t in tallies), sum(t.minority_hits for t in tallies)
    if examples:
        metrics[f"{prefix.removesuffix('local_')}minority_accuracy"] = hits / examples
    if two := two_classes(prefix, tallies, task.positive):
        metrics |= two | {f"{prefix}clients_with_both_classes": sum(t.ranking is not None for t in tallies)}
    return metrics


def _spread(prefix: str, name: str, each: NDArray[np.float64]) -> Metrics:
    """Return how a measure differs between clients."""
    worst = np.sort(each)[: math.ceil(WORST * len(each))]
    return {
        f"{prefix}{name}_mean": float(each.mean()),
        f"{prefix}{name}_std": float(each.std()),
        f"{prefix}{name}_worst10": float(worst.mean()),
        f"{prefix}clients": each.tolist(),
    }


def minority_classes(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark each client's minority classes: those present with fewer than half its mean class count."""
    present = labels > 0
    mean = labels.sum(1, keepdims=True) / np.maximum(present.sum(1, keepdims=True), 1)
    minority: NDArray[np.bool_] = present & (labels < mean / 2)
    return minority


def validation(task: Task, held_out: Mapping[str, Sequence[Any]]) -> Metrics:
    """Return accuracies on the validation sets, for early stopping or tuning; ``accuracy`` is their mean."""
    name = R2 if task.target else ACCURACY
    each = {whose: overall(task, whose, counts)[f"{whose}/{name}"] for whose, counts in held_out.items() if counts}
    metrics: Metrics = {f"validation/{whose}_{name}": value for whose, value in each.items()}
    return metrics | ({f"validation/{name}": float(np.mean(list(each.values())))} if each else {})
