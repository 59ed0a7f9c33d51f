"""The record of a finished cell: the numbers that tables and figures are computed from."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane._version import __version__
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config.settings import Settings
from fedrane.engines.evaluation import Metrics, headline
from fedrane.errors import Diverged, FedraneError
from fedrane.ops.regression import R2
from fedrane.report.tsne import embed, head_inputs, sample
from fedrane.reproduce.results import DONE, FAILED, Record
from fedrane.training import timing
from fedrane.training.result import Result, best_of, evaluated

FIGURES = (
    "accuracy",
    "balanced_accuracy",
    "minority_accuracy",
    "accuracy_mean",
    "accuracy_worst10",
    "local_accuracy",
    R2,
)
GRAIN = 1000
"""t-SNE positions are recorded to a thousandth of the plot's width."""


def finished(settings: Settings, result: Result, keeps: Sequence[str], wall: float | None, asked: str) -> Record:
    """The record of a finished run.

    ``wall`` is how long it took, None if it was interrupted. ``asked`` is the experiment's engine, maybe ``auto``.
    """
    history, e = result.history, result.experiment
    within = sum(r["seconds"] + r["eval_seconds"] for r in history)
    record: Record = {
        **_about(settings, DONE, e.device, e.engine),
        "engine_asked": asked,
        "threads": e.threads,
        "seconds": round(within, 3),
        "train_seconds": round(sum(r["seconds"] for r in history), 3),
        "warmup_seconds": round(timing.warmup(history, e.rounds), 3),
        "eval_seconds": round(sum(r["eval_seconds"] for r in history), 3),
        "other_seconds": None if wall is None else round(max(wall - within, 0.0), 3),
        "rounds": len(history),
        "evaluations": sum(1 for r in history if headline(r, GLOBAL) or headline(r, PERSONAL)),
        "examples": sum(r.get("train/examples", 0) for r in history),
        "bytes_up": sum(r.get("bytes_up", 0) for r in history),
        "bytes_down": sum(r.get("bytes_down", 0) for r in history),
    }
    for model in (GLOBAL, PERSONAL):
        measured = evaluated(history, model)
        if measured:
            best = best_of(measured, model)
            record[model] = {"best": _figures(model, best), "last": _figures(model, measured[-1])}
            record[model]["curve"] = [round(r[headline(r, model) or ""], 4) for r in measured]
    if cosines := [r["cosine"] for r in history if r.get("cosine")]:
        spread = statistics.fmean(statistics.pstdev(_numbers(c)) for c in cosines)
        least = statistics.fmean(min(_numbers(c)) for c in cosines)
        record["cosine"] = {"spread": round(spread, 5), "least": round(least, 5)}
    record["kept"], problems = {}, {}
    for name in keeps:
        try:
            record["kept"][name] = KEPT[name](result)
        except Exception as error:  # noqa: BLE001 - the run is kept even if a figure's extra data fail
            record["kept"][name] = None
            problems[name] = reason_of(error)
    return record | ({"problems": problems} if problems else {})


def failed(settings: Settings, error: Exception, device: str, engine: str) -> Record:
    """The record of a run that failed."""
    word = "diverged" if isinstance(error, Diverged) else "failed"
    return {**_about(settings, FAILED, device, engine), "word": word, "reason": reason_of(error)}


def reason_of(error: Exception) -> str:
    """The error in one line, with its notes."""
    reason = " ".join(str(error).split())[:500] + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return reason if isinstance(error, FedraneError) else f"{type(error).__name__}: {reason}"


def _about(settings: Settings, status: str, device: str, engine: str) -> Record:
    return {
        "status": status,
        "method": settings["method.name"],
        "seed": settings["seed"],
        "settings": settings,
        "version": __version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "engine": engine,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: str) -> str:
    """The hardware that decides the speed."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _figures(model: str, record: Metrics) -> Metrics:
    values = {name: record.get(f"{model}/{name}") for name in FIGURES}
    figures: Metrics = {"round": record["round"]} | {k: round(v, 5) for k, v in values.items() if v is not None}
    if recall := record.get(f"{model}/recall"):
        figures["recall"] = [None if r is None else round(r, 4) for r in recall]
    return figures


# ---- extra data of some figures


def cosines(history: Sequence[Metrics], population: int) -> dict[str, Any]:
    """The cosines of each round by client number; None where a client did not take part."""
    rounds = [r for r in history if r.get("cosine")]
    table = []
    for r in rounds:
        line: list[float | None] = [None] * population
        for client, value in zip(r["cohort"], r["cosine"], strict=True):
            line[client] = None if value is None else round(value, 3)
        table.append(line)
    return {"rounds": [r["round"] for r in rounds], "cosines": table}


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None] or [0.0]


def _tsne(result: Result) -> dict[str, Any] | None:
    """t-SNE of test examples, the same for every method; None without a global model."""
    if GLOBAL not in result.algorithm.models_on(result.task):
        return None
    from sklearn.metrics import silhouette_score  # slow to import

    test = result.federation.test
    examples = sample(len(test))
    inputs = features(result, examples)
    labels = test.y.cpu().numpy()[examples]
    distinct = len(np.unique(labels))
    positions = embed(inputs)
    low, high = positions.min(0), positions.max(0)
    grid = np.rint((positions - low) / np.maximum(high - low, 1e-9).max() * GRAIN).astype(int)
    return {
        "x": grid[:, 0].tolist(),
        "y": grid[:, 1].tolist(),
        "labels": labels.tolist(),
        "classes": list(result.inputs.classes),
        "separation": round(float(silhouette_score(inputs, labels)), 4) if 1 < distinct < len(labels) else None,
    }


def features(result: Result, examples: NDArray[np.int64]) -> NDArray[np.float64]:
    """The features of these test examples in the global model."""
    task, algorithm, federation = result.task, result.algorithm, result.federation
    model = algorithm.global_model(task, result.server)

    def predict(some: NDArray[np.int64]) -> Tensor:
        x, y = federation.test.take(some)
        return algorithm.predict(task, model, x, torch.ones(len(y), dtype=torch.bool, device=y.device))

    return head_inputs(task, algorithm, federation.batch, examples, predict)


COSINES = "cosines"
KEPT: dict[str, Callable[[Result], Any]] = {COSINES: lambda r: cosines(r.history, r.population), "tsne": _tsne}
