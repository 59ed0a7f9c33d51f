"""How a round's cost grows with the number of clients at fixed total data, and with the size of the network.

python benchmarks/scale.py [--data-root DIR] [--clients 10,20,50,100,500] [--models mlp,resnet18]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _harness import arguments, save
from _problems import MODELS, dataset

from engines import measured, ours
from fedrane.models import build


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--datasets", default="fmnist,cifar10")
    parser.add_argument("--clients", default="10,20,50,100,500")
    parser.add_argument("--models", default="", help="other networks than the dataset's default, at 20 clients")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="after the first; the middle one is taken")
    options = parser.parse_args()
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
