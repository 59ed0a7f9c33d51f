"""pfl-research's FederatedAveraging in its simulation, weighted by examples.

Its in-memory datasets give batches in a fixed order, so a client's examples are shuffled once a round.
"""

from __future__ import annotations

from typing import Any

import _job
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F


class Network(_job.Network):
    """With the two methods that the library asks for."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}


class Rounds(TrainingProcessCallback):
    def __init__(self) -> None:
        self.clock = _job.Clock()

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.clock()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock()
        return False, Metrics()


def run(job: _job.Job, path: str) -> dict[str, Any]:
    network = Network()
    network.load_state_dict(job.start)
    clients = [job.client(k) for k in range(len(job.clients))]

    def dataset(k: int) -> PyTorchTensorDataset:
        x, y = clients[k]
        order = torch.randperm(len(y))
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(k))

    sampler = get_user_sampler("minimize_reuse", list(range(len(clients))))
    backend = SimulatedBackend(FederatedDataset(dataset, sampler), None, postprocessors=[WeightByDatapoints()])
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    # The first round, which is not timed, is always evaluated.
    settings = NNAlgorithmParams(
        central_num_iterations=job.rounds,
        evaluation_frequency=job.rounds + 1,
        train_cohort_size=len(clients),
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_batch_size=job.batch, local_num_epochs=job.epochs, local_learning_rate=job.lr, local_max_grad_norm=None
    )
    rounds, evaluation = Rounds(), NNEvalHyperParams(local_batch_size=1000)
    FederatedAveraging().run(settings, backend, model, local, evaluation, callbacks=[rounds])
    done = {"sizes": [len(dataset(k)) for k in range(len(clients))], "parameters": _job.parameters(network)}
    return {"marks": rounds.clock.marks, **done, **_job.done, "accuracy": _job.accuracy(network, job)}


if __name__ == "__main__":
    _job.main(run, "pfl")
