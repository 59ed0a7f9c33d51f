"""How a round's cost grows with the number of clients at fixed total data, and with the size of the network.

python benchmarks/scale.py [--data-root DIR] [--clients 10,20,50,100,500] [--models mlp,resnet18]
python benchmarks/scale.py --cohorts 100,1000,10000 [--engine threaded] [--threads 2]

The second measures the memory of large cohorts on a CPU: FedAvg, a dozen examples for each client, an MLP of 1.6 MiB,
each row in a process of its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import arguments, save
from _problems import MODELS, dataset
from torch import nn

import fedrane
from engines import measured, ours
from fedrane import tree
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Partitioning
from fedrane.models import build

EXAMPLES = 12
"""Of each client in a large cohort."""


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 512), nn.ReLU(), nn.Linear(512, classes))


def cohort(clients: int, engine: str, threads: int) -> dict[str, Any]:
    """One round in which all of them train."""
    draws, count = np.random.Generator(np.random.Philox(0)), EXAMPLES * clients
    y = np.arange(count + 100) % 10
    x = draws.integers(0, 255, (len(y), 1, 28, 28), dtype=np.uint8)
    noise = Dataset("noise", x[:count], y[:count], x[count:], y[count:], tuple("abcdefghij"), (0.5,), (0.5,))
    settings: dict[str, Any] = {"clients": clients, "rounds": 1, "epochs": 1, "batch": 16, "model_head": "3"}
    settings |= {"engine": engine, "threads": threads, "device": "cpu", "partition": Partitioning("iid", minimum=2)}
    before = peak()
    result = fedrane.run(fedrane.Experiment(method="fedavg", **settings), dataset=noise, model=mlp, progress=False)
    return {
        "clients": clients,
        "engine": engine,
        "threads": threads,
        "seconds": round(result.history[0]["seconds"], 2),
        "peak_mib": round(peak()),
        "before_mib": round(before),
        "uploads_mib": round(clients * tree.nbytes(result.server.model) / 2**20),
        "summed_as_they_come": "cosine" not in result.history[0],
    }


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def cohorts(counts: list[int], engine: str, threads: int, out: Path | None) -> None:
    results = []
    for count in counts:
        command = f"import scale, json; print(json.dumps(scale.cohort({count}, {engine!r}, {threads})))"
        done = subprocess.run(  # noqa: S603 - this file
            [sys.executable, "-c", command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1], flush=True)
        save("cohorts", results, out)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--datasets", default="fmnist,cifar10")
    parser.add_argument("--clients", default="10,20,50,100,500")
    parser.add_argument("--models", default="", help="other networks than the dataset's default, at 20 clients")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="after the first; the middle one is taken")
    parser.add_argument("--cohorts", default="", help="clients of a round, whose peak memory is measured on a CPU")
    parser.add_argument("--engine", default="threaded", help="for --cohorts")
    parser.add_argument("--threads", type=int, default=2, help="for --cohorts")
    options = parser.parse_args()
    if options.cohorts:
        cohorts(list(map(int, options.cohorts.split(","))), options.engine, options.threads, options.out)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: list[dict[str, Any]] = []

    def measure(name: str, **changes: Any) -> None:
        examples = dataset(name, options.data_root)
        row = measured(
            lambda: ours(name, examples, device, "fedavg", options.rounds, epochs=options.epochs, **changes), device
        )
        row = {"dataset": examples.name, "model": MODELS[name], **changes, **row}
        parts = build(row["model"], examples.x.shape[1:], len(examples.classes))
        row["parameters"] = sum(p.numel() for part in parts for p in part.parameters())
        results.append(row)
        print(
            f"{examples.name:8s} {row['model']:14s} {row['parameters'] / 1e6:7.2f} M parameters  "
            f"K {row['clients']:4d}  {row['seconds']:8.3f} s per round "
            f"{row['samples_per_second']:11,.0f} samples/s  peak {row.get('peak_gib', 0):5.1f} GiB",
            flush=True,
        )
        save("scale", results, options.out)

    for name in options.datasets.split(","):
        for clients in map(int, options.clients.split(",")):
            measure(name, clients=clients)
        for model in filter(None, options.models.split(",")):
            measure(name, clients=20, model=model)


if __name__ == "__main__":
    main()
