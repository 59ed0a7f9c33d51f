"""t-SNE of a model's features on test examples. The features are the inputs of the model's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrane.algorithm import Algorithm
from fedrane.data.dataset import Dataset
from fedrane.data.streams import permutation
from fedrane.errors import DataError
from fedrane.report.runs import Run
from fedrane.system.threads import limited
from fedrane.task import Task
from fedrane.training.predictor import Models
from fedrane.training.run_folder import Folder
from fedrane.training.saved import read_models
from fedrane.training.setup import as_dataset

SAMPLES = 2000
"""Test examples in a plot, as in the paper."""
PERPLEXITY = 30.0
MIN_EXAMPLES = 4
"""t-SNE needs neighbours."""
MAX_FEATURE = 1e9
"""Larger features are scaled down: squared distances would overflow float32. t-SNE does not depend on the scale."""
CHUNK = 500
"""Examples per forward pass, where predictions do not depend on the batch."""


class Points(NamedTuple):
    """Test examples in the plane."""

    round: int
    positions: NDArray[np.float64]
    labels: NDArray[np.int64]


def points(run: Run, samples: int = SAMPLES, data_root: str = "", trust_code: bool = False) -> Points:
    """t-SNE of a run's global model, on the same test examples for every run on a dataset.

    It is an error if the run has no global model, or if its dataset is not on this machine.
    """
    models = read_models(Folder(run.path), clients=False, trust_code=trust_code)
    predictor = models.model
    settings = models.experiment
    dataset = as_dataset(settings.replace(data_root=data_root or settings.data_root), None)
    if (dataset.shape, dataset.classes) != (models.inputs.shape, models.inputs.classes):
        raise DataError(f"{settings.dataset} is not the dataset that {run.path} was trained on", "its examples differ")
    examples = sample(len(dataset.y_test), samples)
    inputs = features(models, predictor, dataset, examples)
    if not np.isfinite(inputs).all():
        raise DataError(f"the features of {run.path} are not finite", "its model predicts nothing")
    return Points(models.round, embed(inputs), dataset.y_test[examples])


def features(
    models: Models, predictor: nn.Module, dataset: Dataset, examples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The features of these test examples."""
    return head_inputs(
        models.task,
        models.algorithm,
        models.experiment.batch,
        examples,
        lambda some: predictor(torch.from_numpy(dataset.x_test[some])),
    )


def sample(count: int, samples: int = SAMPLES) -> NDArray[np.int64]:
    """Which of ``count`` test examples are in the plot: the same for every run on a dataset."""
    return np.sort(permutation(count, 0, "t-SNE")[:samples])


@torch.no_grad()
def head_inputs(
    task: Task,
    algorithm: Algorithm,
    batch: int,
    examples: NDArray[np.int64],
    predict: Callable[[NDArray[np.int64]], object],
) -> NDArray[np.float64]:
    """The inputs of the head while the model predicts, with whatever the method does to them before the head."""
    chunk = batch if task.depends_on_batch else CHUNK
    inputs: list[Tensor] = []
    hook = task.parts["head"].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        with limited(1):
            for begin in range(0, len(examples), chunk):
                predict(examples[begin : begin + chunk])
    finally:
        hook.remove()
    together: NDArray[np.float64] = torch.cat([z.flatten(1) for z in inputs]).double().cpu().numpy()
    if len(together) != len(examples):
        raise DataError("the model's head is not called once for each example", "its features are not known")
    return together


def embed(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Positions in the plane, with mean 0 and standard deviation 1."""
    from sklearn.manifold import TSNE  # slow to import

    if len(features) < MIN_EXAMPLES:
        raise DataError(f"t-SNE needs {MIN_EXAMPLES} examples", f"there are {len(features)}")
    largest = np.abs(features).max()
    if np.ptp(features, axis=0).max() <= 1e-6 * largest:  # sklearn divides by their spread, and crashes
        raise DataError("the model gives all examples the same features", "t-SNE has nothing to separate")
    if largest > MAX_FEATURE:
        features = features / largest
    if features.shape[1] == 1:
        features = np.hstack([features, np.zeros_like(features)])
    perplexity = min(PERPLEXITY, max(1.0, (len(features) - 1) / 3))
    with limited(1):  # the plot must not depend on the number of cores
        positions = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    middle, spread = positions.mean(0), positions.std()
    return ((positions - middle) / (spread or 1.0)).astype(np.float64)  # type: ignore[no-any-return]
