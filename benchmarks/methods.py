"""Every method: whole rounds of the engine that ``auto`` takes against the method's own eager, sequential rounds.

python benchmarks/methods.py [--data-root DIR] [--dataset fmnist] [--methods NAME,…]
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from _harness import arguments, save
from _problems import MODELS, dataset

from engines import ours
from fedrane.methods import METHODS


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--slow-epochs", type=int, default=1, help="epochs of the eager rounds; the others make 5")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    examples = dataset(options.dataset, options.data_root)
    results: list[dict[str, Any]] = []
    warnings.simplefilter("error")  # a method that could not be stacked must not pass for one that was

    def measure(method: str, rounds: int, **changes: Any) -> dict[str, Any]:
        return ours(options.dataset, examples, device, method, rounds, lr=0.01, **changes)

    measure("fedavg", 1, engine="sequential", epochs=1)  # warm
    for method in options.methods.split(","):
        eager = measure(method, 1, engine="sequential", precision="float32", epochs=options.slow_epochs)
        fast = measure(method, 3, engine="auto")
        row = {"dataset": examples.name, "model": MODELS[options.dataset], "method": method}
        row |= {f"eager_{k}": eager[k] for k in ("samples_per_second", "seconds")} | fast
        row["times_eager"] = fast["samples_per_second"] / eager["samples_per_second"]
        results.append(row)
        print(
            f"{method:15s} eager {eager['samples_per_second']:9,.0f} samples/s   auto "
            f"{fast['samples_per_second']:11,.0f}   {row['times_eager']:6.1f} ×",
            flush=True,
        )
        save("methods", results, options.out)


if __name__ == "__main__":
    main()
