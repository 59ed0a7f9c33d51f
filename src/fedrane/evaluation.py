"""One contract for what an accuracy means: whose model, on whose rows, over which clients.

``global/…``      the global model on the official test set;
``global/local_…`` the global model on the clients' own test rows;
``personal/…``    every client's own model on its own test rows, over all clients, not the sampled ones.

A method without a global (or personal) model has no such entries: an empty column, not one filled with something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.engines import Engine, Predicted
from fedrane.federation import Federation, Pool
from fedrane.task import Model, State

Metrics = dict[str, Any]
Rows = NDArray[np.int64]
WORST = 0.1
"""The share of clients that ``accuracy_worst10`` looks at."""


def evaluate(
    engine: Engine, federation: Federation, algorithm: Algorithm, server: State, owns: Mapping[int, State], round: int
) -> Metrics:
    """All measures the method's answers allow, for all clients."""
    task, split = federation.task, federation.split
    answers = algorithm.answers_on(task)
    together = not algorithm.depends_on_batch(task)
    metrics: Metrics = {}
    held_out: dict[str, list[NDArray[np.bool_]]] = {}
    if GLOBAL in answers:
        model = algorithm.global_model(task, server)
        everything = np.arange(len(federation.test))
        answered = engine.predict(model, federation.test, everything)
        metrics |= _overall("global", answered, _labels(federation.test), task.classes)
        local = _by_client(engine, [model] * federation.population, federation.train, split.test, together)
        metrics |= _over_clients("global/local_", federation, local)
        held_out["global"] = _hits(federation, engine, [model] * federation.population, together)
    if PERSONAL in answers:
        models = [engine.personal(server, owns.get(k), k, round) for k in range(federation.population)]
        own = _by_client(engine, models, federation.train, split.test, together)
        y = _labels(federation.train)[np.concatenate(split.test)]
        pooled = Predicted(np.concatenate([p.labels for p in own]), np.concatenate([p.losses for p in own]))
        metrics |= _overall("personal", pooled, y, task.classes) | _over_clients("personal/", federation, own)
        held_out["personal"] = _hits(federation, engine, models, together)
    return metrics | _validation(held_out)


def _labels(pool: Pool) -> NDArray[np.int64]:
    return pool.y.cpu().numpy()


def _by_client(
    engine: Engine, models: list[Model], pool: Pool, rows: tuple[Rows, ...], together: bool
) -> list[Predicted]:
    """Each client's rows answered by its model; where all have one, in one go if answers do not depend on it."""
    if together and all(model is models[0] for model in models):
        answered = engine.predict(models[0], pool, np.concatenate(rows))
        cuts = np.cumsum([len(r) for r in rows])[:-1]
        parts = zip(np.split(answered.labels, cuts), np.split(answered.losses, cuts), strict=True)
        return [Predicted(labels, losses) for labels, losses in parts]
    return engine.predict_each(models, pool, rows)


def _overall(whose: str, predicted: Predicted, y: NDArray[np.int64], classes: int) -> Metrics:
    hit = predicted.labels == y
    recall = [float(hit[y == c].mean()) if (y == c).any() else None for c in range(classes)]
    return {
        f"{whose}/accuracy": float(hit.mean()),
        f"{whose}/loss": float(predicted.losses.mean()),
        f"{whose}/balanced_accuracy": float(np.mean([r for r in recall if r is not None])),
        f"{whose}/recall": recall,
    }


def _over_clients(prefix: str, federation: Federation, predicted: list[Predicted]) -> Metrics:
    """Over the clients' own test rows: together, client by client, and over each client's minority classes."""
    y = _labels(federation.train)
    few = minority_classes(federation.labels)
    hits = [p.labels == y[rows] for p, rows in zip(predicted, federation.split.test, strict=True)]
    each = np.array([hit.mean() for hit in hits])
    rare = np.concatenate([hit[few[k][y[federation.split.test[k]]]] for k, hit in enumerate(hits)])
    worst = np.sort(each)[: math.ceil(WORST * len(each))]
    metrics: Metrics = {
        f"{prefix}accuracy": float(np.concatenate(hits).mean()),
        f"{prefix}accuracy_mean": float(each.mean()),
        f"{prefix}accuracy_std": float(each.std()),
        f"{prefix}accuracy_worst10": float(worst.mean()),
        f"{prefix}clients": each.tolist(),
    }
    if len(rare):
        metrics[f"{prefix.removesuffix('local_')}minority_accuracy"] = float(rare.mean())
    return metrics


def minority_classes(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each client (row): the classes it has, with fewer than half its mean class count."""
    present = labels > 0
    mean = labels.sum(1, keepdims=True) / np.maximum(present.sum(1, keepdims=True), 1)
    minority: NDArray[np.bool_] = present & (labels < mean / 2)
    return minority


def _hits(federation: Federation, engine: Engine, models: list[Model], together: bool) -> list[NDArray[np.bool_]]:
    rows = federation.split.validation
    if not any(len(r) for r in rows):
        return []
    y = _labels(federation.train)
    predicted = _by_client(engine, models, federation.train, rows, together)
    return [p.labels == y[r] for p, r in zip(predicted, rows, strict=True)]


def _validation(held_out: dict[str, list[NDArray[np.bool_]]]) -> Metrics:
    """On rows set aside from training, to stop or to tune by; ``accuracy`` is the mean over the method's answers."""
    each = {whose: float(np.concatenate(hits).mean()) for whose, hits in held_out.items() if hits}
    metrics: Metrics = {f"validation/{whose}_accuracy": value for whose, value in each.items()}
    return metrics | ({"validation/accuracy": float(np.mean(list(each.values())))} if each else {})
