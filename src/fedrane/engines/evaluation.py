"""The metrics, and what each accuracy means: which model, on which examples, over which clients.

``global/…``       the global model on the official test set;
``global/local_…`` the global model on the clients' local test sets;
``personal/…``     every client's personal model on its local test set, over all clients, not only the sampled ones.

A method without a global (or personal) model has no such entries: the column is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.task import Model, State

Metrics = dict[str, Any]
Examples = NDArray[np.int64]
WORST = 0.1
"""The fraction of clients in ``accuracy_worst10``."""


class Predicted(NamedTuple):
    labels: NDArray[np.int64]
    losses: NDArray[np.float64]


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

    @classmethod
    def of(cls, predicted: Predicted, y: NDArray[np.int64], minority: NDArray[np.bool_]) -> Tally:
        """Count predictions for examples with labels ``y``; ``minority`` marks the client's minority classes."""
        hit, rare = predicted.labels == y, minority[y]
        by_class = (np.bincount(y[chosen], minlength=len(minority)) for chosen in (slice(None), hit))
        examples, hits = (tuple(counts.tolist()) for counts in by_class)
        loss = float(predicted.losses.sum())
        return cls(len(y), int(hit.sum()), loss, int(rare.sum()), int(hit[rare].sum()), examples, hits)


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
    held_out: dict[str, list[Tally]] = {}
    if GLOBAL in algorithm.models_on(task):
        model = algorithm.global_model(task, server)
        metrics |= official(engine, federation, model)
        tested, held_out[GLOBAL] = tally_predictions(engine, federation, [model] * federation.population)
        metrics |= over_clients("global/local_", tested)
    if PERSONAL in algorithm.models_on(task):
        models = [engine.personal(server, client_states.get(k), k, round) for k in everyone]
        tested, held_out[PERSONAL] = tally_predictions(engine, federation, models)
        metrics |= overall(PERSONAL, tested) | over_clients("personal/", tested)
    return metrics | validation(held_out)


def official(engine: Predicts, federation: Federation, model: Model) -> Metrics:
    """Evaluate the global model on the official test set."""
    predicted = engine.predict(model, federation.test, np.arange(len(federation.test)))
    no_minority = np.zeros(federation.task.classes, np.bool_)
    return overall(GLOBAL, [Tally.of(predicted, _labels(federation.test), no_minority)])


def tally_predictions(engine: Predicts, federation: Federation, models: list[Model]) -> tuple[list[Tally], list[Tally]]:
    """Return the tallies of each client's model on its local test set and on its validation set."""
    together, split = not federation.task.depends_on_batch, federation.split
    tested, held = (
        _tallies(engine, federation, models, examples, together) for examples in (split.test, split.validation)
    )
    return tested, held


def _tallies(
    engine: Predicts, federation: Federation, models: list[Model], examples: tuple[Examples, ...], together: bool
) -> list[Tally]:
    y, minority = _labels(federation.train), minority_classes(federation.labels)
    if not any(len(r) for r in examples):
        return []
    predicted = _by_client(engine, models, federation.train, examples, together)
    return [Tally.of(p, y[r], minority[k]) for k, (p, r) in enumerate(zip(predicted, examples, strict=True))]


def _labels(pool: Pool) -> NDArray[np.int64]:
    return pool.y.cpu().numpy()


def _by_client(
    engine: Predicts, models: list[Model], pool: Pool, examples: tuple[Examples, ...], together: bool
) -> list[Predicted]:
    """Predict each client's examples with its model; in one batch if all share it and batches do not matter."""
    if together and all(model is models[0] for model in models):
        predicted = engine.predict(models[0], pool, np.concatenate(examples))
        cuts = np.cumsum([len(r) for r in examples])[:-1]
        parts = zip(np.split(predicted.labels, cuts), np.split(predicted.losses, cuts), strict=True)
        return [Predicted(labels, losses) for labels, losses in parts]
    return engine.predict_each(models, pool, examples)


def overall(whose: str, tallies: Sequence[Tally]) -> Metrics:
    """Return metrics over all examples together, with the recall of each class if classes were counted."""
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


def over_clients(prefix: str, tallies: Sequence[Tally]) -> Metrics:
    """Return metrics on the local test sets: over all examples, over clients, and over minority classes."""
    each = np.array([t.hits / t.examples for t in tallies])
    worst = np.sort(each)[: math.ceil(WORST * len(each))]
    metrics: Metrics = {
        f"{prefix}accuracy": sum(t.hits for t in tallies) / sum(t.examples for t in tallies),
        f"{prefix}accuracy_mean": float(each.mean()),
        f"{prefix}accuracy_std": float(each.std()),
        f"{prefix}accuracy_worst10": float(worst.mean()),
        f"{prefix}clients": each.tolist(),
    }
    examples, hits = sum(t.minority_examples for t in tallies), sum(t.minority_hits for t in tallies)
    if examples:
        metrics[f"{prefix.removesuffix('local_')}minority_accuracy"] = hits / examples
    return metrics


def minority_classes(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark each client's minority classes: those present with fewer than half its mean class count."""
    present = labels > 0
    mean = labels.sum(1, keepdims=True) / np.maximum(present.sum(1, keepdims=True), 1)
    minority: NDArray[np.bool_] = present & (labels < mean / 2)
    return minority


def validation(held_out: Mapping[str, Sequence[Tally]]) -> Metrics:
    """Return accuracies on the validation sets, for early stopping or tuning; ``accuracy`` is their mean."""
    each = {
        w: sum(t.hits for t in tallies) / sum(t.examples for t in tallies) for w, tallies in held_out.items() if tallies
    }
    metrics: Metrics = {f"validation/{whose}_accuracy": value for whose, value in each.items()}
    return metrics | ({"validation/accuracy": float(np.mean(list(each.values())))} if each else {})
