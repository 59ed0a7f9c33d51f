"""Rounds of FedAvg in one and in two workers of Ray on this machine, one thread each.

python benchmarks/cluster.py [--data-root DIR] [--rounds N]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
from _harness import arguments, save
from _problems import MODELS, dataset

import fedrane
from fedrane import Experiment, Partitioning


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4, help="after the first; the median is taken")
    options = parser.parse_args()
    examples = dataset("fmnist", options.data_root)
    results: list[dict[str, Any]] = []
    for engine, workers in (("threaded", 1), ("ray", 1), ("ray", 2)):
        experiment = Experiment(
            dataset="fmnist",
            model=MODELS["fmnist"],
            clients=options.clients,
            rounds=1 + options.rounds,
            epochs=options.epochs,
            eval_every=1 + options.rounds,
            engine=engine,
            threads=workers,
            device="cpu",
            precision="float32",
            partition=Partitioning(alpha=0.5),
        )
        result = fedrane.run(experiment, dataset=examples, progress=False, calibrate=False)
        seconds = sorted(record["seconds"] for record in result.history[1:])[options.rounds // 2]
        checksum = sum(float(value.double().sum()) for value in result.server.model.params.values())
        results.append({"engine": engine, "workers": workers, "seconds": seconds, "sum": checksum})
        first = results[min(1, len(results) - 1)]["seconds"]
        print(f"{engine:9s} {workers} worker(s)  {seconds:7.2f} s per round  {first / seconds:5.2f} ×  {checksum!r}")
        save("cluster", results, options.out)
    assert len({row["sum"] for row in results}) == 1, "the results differ"
    print(f"ray {ray.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
