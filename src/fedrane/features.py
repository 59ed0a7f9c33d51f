"""The features that a model gives its head, and where t-SNE places them in the plane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane.algorithm import Algorithm
from fedrane.data.streams import permutation
from fedrane.errors import DataError
from fedrane.task import Task
from fedrane.threads import limited

SAMPLES = 2000
"""Test rows in a picture, as in the paper."""
PERPLEXITY = 30.0
FEWEST = 4
"""Rows that can be placed by who is near whom."""
LARGE = 1e9
"""Beyond it squares of distances come near to the largest float32; who is near whom hangs on no scale."""
CHUNK = 500
"""Rows at a time, where answers do not depend on it."""


def sample(many: int, samples: int = SAMPLES) -> NDArray[np.int64]:
    """Which of so many test rows are in the picture: the same for every run on a dataset."""
    return np.sort(permutation(many, 0, "t-SNE")[:samples])


@torch.no_grad()
def seen_by_head(
    task: Task, algorithm: Algorithm, batch: int, rows: NDArray[np.int64], answer: Callable[[NDArray[np.int64]], object]
) -> NDArray[np.float64]:
    """What the head is given while the model answers: on the sphere, for instance, where the method puts it there."""
    chunk = batch if algorithm.depends_on_batch(task) else CHUNK
    seen: list[Tensor] = []
    watch = task.parts["head"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        with limited(1):
            for begin in range(0, len(rows), chunk):
                answer(rows[begin : begin + chunk])
    finally:
        watch.remove()
    together: NDArray[np.float64] = torch.cat([z.flatten(1) for z in seen]).double().cpu().numpy()
    if len(together) != len(rows):
        raise DataError("the model's head is not asked once for each row", "its features cannot be told")
    return together


def embed(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places in the plane, about 0 and of deviation 1."""
    from sklearn.manifold import TSNE  # slow to import

    if len(features) < FEWEST:
        raise DataError(f"t-SNE needs {FEWEST} rows", f"there are {len(features)}")
    largest = np.abs(features).max()
    if np.ptp(features, axis=0).max() <= 1e-6 * largest:  # sklearn divides by their spread, and crashes
        raise DataError("the model gives all rows the same features", "t-SNE has nothing to tell apart")
    if largest > LARGE:
        features = features / largest
    if features.shape[1] == 1:
        features = np.hstack([features, np.zeros_like(features)])
    perplexity = min(PERPLEXITY, max(1.0, (len(features) - 1) / 3))
    with limited(1):  # a picture does not depend on the machine's cores
        placed = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    middle, spread = placed.mean(0), placed.std()
    return ((placed - middle) / (spread or 1.0)).astype(np.float64)  # type: ignore[no-any-return]
