"""The loop that most libraries have, as ``benchmarks/engines.py`` measures it, with ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import _job
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from engines import plain_round


def run(job: _job.Job, path: str) -> dict[str, Any]:
    clients = [TensorDataset(*job.client(k)) for k in range(len(job.clients))]
    network, clock = job.network(), _job.Clock()

    def batches(k: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(job.epochs):
            yield from DataLoader(clients[k], job.batch, shuffle=True)

    sizes = [len(client) for client in clients]
    clock()
    for _ in range(job.rounds):
        plain_round(network, batches, sizes, torch.device("cpu"), job.lr, least=1)
        clock()
    done = {"sizes": sizes, "parameters": _job.parameters(network), **_job.done}
    return {"marks": clock.marks, **done, "accuracy": _job.accuracy(network, job)}


if __name__ == "__main__":
    _job.main(run)
