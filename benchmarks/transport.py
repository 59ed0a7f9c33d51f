"""The effect of bf16 messages on the accuracy: digits, float32 and bf16, the same seeds."""

from __future__ import annotations

from typing import Any

from _harness import arguments, save
from rich.console import Console
from rich.table import Table

import fedrane
from fedrane import Experiment, engines

METHODS = ("fedavg", "scaffold", "fedrane")


def measure(method: str, seed: int) -> dict[str, Any]:
    """The last round's global accuracy, as a number of test examples, and the bytes of all rounds."""
    settings = {"dataset": "digits", "model": "mlp", "clients": 10, "rounds": 30, "epochs": 1, "batch": 64}
    settings |= {"partition": {"alpha": 0.3}, "device": "cpu", "eval_every": 30, "seed": seed, "method": method}
    exact = fedrane.run(Experiment.from_dict(settings))
    with engines.opened("flower-bf16", exact.federation):
        bf16 = fedrane.run(exact.experiment.replace(engine="flower-bf16"))
    examples = len(exact.federation.test)
    hits = [round(result.history[-1]["global/accuracy"] * examples) for result in (exact, bf16)]
    sent = [sum(result.summary[key] for key in ("bytes_up", "bytes_down")) for result in (exact, bf16)]
    return {"method": method, "seed": seed, "test_examples": examples, "exact_hits": hits[0], "bf16_hits": hits[1]} | {
        "exact_bytes": sent[0],
        "bf16_bytes": sent[1],
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    table = Table("method", "seed", "exact", "bf16", "bytes, bf16 / exact")
    results = []
    for method in METHODS:
        for seed in range(given.seeds):
            row = measure(method, seed)
            results.append(row)
            shares = (f"{row[name] / row['test_examples']:.2%}" for name in ("exact_hits", "bf16_hits"))
            table.add_row(method, str(seed), *shares, f"{row['bf16_bytes'] / row['exact_bytes']:.3f}")
    Console().print(table)
    save("transport", results, given.out)


if __name__ == "__main__":
    main()
