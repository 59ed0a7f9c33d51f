"""FLUKE's FedAVG on its own data loaders, all evaluation off."""

from __future__ import annotations

import importlib
import re
from typing import Any

import _job
import torch


def declare_missing_operators() -> None:
    """FLUKE imports torchvision, which fails where it is built for CUDA and torch is not. Nothing here calls them."""
    for _ in range(100):
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            name = re.search(r"torchvision::\w+", str(error))
            if not name:
                raise
            torch.library.define(name[0], "(Tensor x) -> Tensor")
        else:
            return


declare_missing_operators()
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402


class Rounds(FederationObserver):
    def __init__(self) -> None:
        super().__init__()
        self.clock = _job.Clock()

    def end_round(self, round: int) -> None:
        self.clock()


def run(job: _job.Job, path: str) -> dict[str, Any]:
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(*job.client(k), num_labels=10, batch_size=job.batch, shuffle=True, skip_singleton=False)
        for k in range(len(job.clients))
    ]
    container = DummyDataContainer(loaders, [None] * len(loaders), None, 10)
    client = DDict(
        batch_size=job.batch,
        local_epochs=job.epochs,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=job.lr),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1),
    )
    settings = DDict(client=client, server=DDict(weighted=True), model=job.network())
    algorithm = FedAVG(len(loaders), DataSplitter(container), settings)
    rounds = Rounds()
    algorithm.set_callbacks([rounds])
    rounds.clock()
    algorithm.run(job.rounds, 1.0)
    network = algorithm.server.model
    done = {"sizes": [each.n_examples for each in algorithm.clients], "parameters": _job.parameters(network)}
    return {"marks": rounds.clock.marks, **done, **_job.done, "accuracy": _job.accuracy(network, job)}


if __name__ == "__main__":
    _job.main(run, "fluke-fl")
