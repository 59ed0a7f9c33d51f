"""The features that a global model gives its head, laid out in the plane by t-SNE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrane.algorithm import GLOBAL
from fedrane.data.dataset import Dataset
from fedrane.data.streams import permutation
from fedrane.errors import DataError
from fedrane.folder import Folder
from fedrane.predictor import Models
from fedrane.report.runs import Run
from fedrane.run import as_dataset, read_models

SAMPLES = 2000
PERPLEXITY = 30.0
CHUNK = 500
"""Rows at a time, where answers do not depend on it."""


class Points(NamedTuple):
    """Test rows in the plane."""

    round: int
    places: NDArray[np.float64]
    labels: NDArray[np.int64]


def points(run: Run, samples: int = SAMPLES, data_root: str = "") -> Points:
    """Of the same test rows for every run on a dataset; fails where the run has no global model, or no dataset here."""
    models = read_models(Folder(run.path), clients=False)
    predictor = models.model
    settings = models.experiment
    dataset = as_dataset(settings.replace(data_root=data_root or settings.data_root), None)
    if (dataset.shape, dataset.classes) != (models.inputs.shape, models.inputs.classes):
        raise DataError(f"{settings.dataset} is not the dataset that {run.path} was trained on", "its rows differ")
    rows = np.sort(permutation(len(dataset.y_test), 0, "t-SNE")[:samples])
    found = features(models, predictor, dataset, rows)
    if not np.isfinite(found).all():
        raise DataError(f"the features of {run.path} are not finite", "its model answers nothing")
    return Points(models.round, embed(found), dataset.y_test[rows])


@torch.no_grad()
def features(models: Models, predictor: nn.Module, dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the head is given while the model answers: on the sphere, for instance, where the method puts it there."""
    chunk = models.experiment.batch if models.algorithm.depends_on_batch(models.task) else CHUNK
    with _watching(models.task.parts["head"]) as seen:
        for begin in range(0, len(rows), chunk):
            predictor(torch.from_numpy(dataset.x_test[rows[begin : begin + chunk]]))
    together: NDArray[np.float64] = torch.cat([z.flatten(1) for z in seen]).double().numpy()
    if len(together) != len(rows):
        raise DataError("the model's head is not asked once for each row", f"{GLOBAL} features cannot be told")
    return together


@contextmanager
def _watching(head: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def embed(features: NDArray[np.float64]) -> NDArray[np.float64]:
    from sklearn.manifold import TSNE  # slow to import

    perplexity = min(PERPLEXITY, max(1.0, (len(features) - 1) / 3))
    placed = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    middle, spread = placed.mean(0), placed.std()
    return ((placed - middle) / (spread or 1.0)).astype(np.float64)  # type: ignore[no-any-return]
