"""A finished run's test rows, where t-SNE places the features of its global model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedrane.data.dataset import Dataset
from fedrane.errors import DataError
from fedrane.features import SAMPLES, embed, sample, seen_by_head
from fedrane.folder import Folder
from fedrane.predictor import Models
from fedrane.report.runs import Run
from fedrane.training.saved import read_models
from fedrane.training.setup import as_dataset


class Points(NamedTuple):
    """Test rows in the plane."""

    round: int
    places: NDArray[np.float64]
    labels: NDArray[np.int64]


def points(run: Run, samples: int = SAMPLES, data_root: str = "", trust_code: bool = False) -> Points:
    """Of the same test rows for every run on a dataset; fails where the run has no global model, or no dataset here."""
    models = read_models(Folder(run.path), clients=False, trust_code=trust_code)
    predictor = models.model
    settings = models.experiment
    dataset = as_dataset(settings.replace(data_root=data_root or settings.data_root), None)
    if (dataset.shape, dataset.classes) != (models.inputs.shape, models.inputs.classes):
        raise DataError(f"{settings.dataset} is not the dataset that {run.path} was trained on", "its rows differ")
    rows = sample(len(dataset.y_test), samples)
    found = features(models, predictor, dataset, rows)
    if not np.isfinite(found).all():
        raise DataError(f"the features of {run.path} are not finite", "its model answers nothing")
    return Points(models.round, embed(found), dataset.y_test[rows])


def features(models: Models, predictor: nn.Module, dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the head is given when the model answers for those test rows."""
    return seen_by_head(
        models.task,
        models.algorithm,
        models.experiment.batch,
        rows,
        lambda some: predictor(torch.from_numpy(dataset.x_test[some])),
    )
