"""What short arithmetic costs in accuracy: FedAvg and FedRANE in float32 and bf16, seed by seed.

python benchmarks/precision.py [--data-root DIR] [--dataset fmnist] [--rounds 30] [--seeds 0,1,2]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _harness import arguments, save
from _problems import dataset, experiment

from fedrane.runner import run


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--methods", default="fedavg,fedrane")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = dataset(options.dataset, options.data_root)
    results: list[dict[str, Any]] = []
    for method in options.methods.split(","):
        for seed in map(int, options.seeds.split(",")):
            for precision in options.precisions.split(","):
                e = experiment(options.dataset, method, device=device, precision=precision, seed=seed)
                last = run(e.replace(rounds=options.rounds), dataset=examples).history[-1]
                row: dict[str, Any] = {"dataset": examples.name, "method": method, "seed": seed, "precision": precision}
                row |= {key: value for key, value in last.items() if key.endswith("/accuracy") or key == "round"}
                results.append(row)
                print(*(f"{key} {value}" for key, value in row.items()), flush=True)
                save("precision", results, options.out)


if __name__ == "__main__":
    main()
