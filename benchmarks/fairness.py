"""Who is the fairest: accuracies of the global model over the clients, for the methods with a fair server.

    python benchmarks/fairness.py --data DATA --seeds 0 1 2      the table of docs/methods/fairness.md

Every method has three tries on a seed of its own, and keeps the one with the best global accuracy on validation
examples: FedAvg tries learning rates, the others FedAvg's with three values of their own number. FedRANE's other loss
needs another learning rate, so that is its number. Then each runs with the seeds. Finished runs are in --out, and are
not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedrane
from fedrane import Experiment, Partitioning
from fedrane.data import catalogue
from fedrane.data.dataset import Dataset

TUNING_SEED = 9
BARGAIN = {"lra": False, "head": "linear", "loss": "ce"}
RIVALS: dict[str, tuple[str, dict[str, Any], str, tuple[Any, ...]]] = {
    "FedAvg": ("fedavg", {}, "lr", (0.03, 0.1, 0.3)),
    "the bargain alone": ("fedrane", BARGAIN, "power", (0.0, 0.5, 1.0)),
    "FedRANE w/o LRA": ("fedrane-wo-lra", {}, "lr", (0.3, 1.0, 3.0)),
    "q-FFL": ("q-ffl", {}, "power", (0.1, 1.0, 5.0)),
    "AFL": ("afl", {}, "mixture_lr", (0.001, 0.01, 0.1)),
    "FedMGDA+": ("fedmgda", {}, "global_lr", (0.3, 1.0, 3.0)),
    "FedFV": ("fedfv", {}, "kept", (0.0, 0.1, 0.5)),
}
MEASURES = ("accuracy", "accuracy_mean", "accuracy_worst10", "accuracy_std")


def run(data: Dataset, rounds: int, name: str, value: Any, lr: float, seed: int) -> dict[str, Any]:
    method, fields, number, _ = RIVALS[name]
    settings = {"lr": value} if number == "lr" else {"lr": lr, f"method.{number}": value}
    settings |= {f"method.{field}": each for field, each in fields.items()}
    words = [f"{key}={str(each).lower()}" for key, each in settings.items()]
    e = Experiment.from_words([f"method={method}", *words, "model=mlp", "batch=32", "epochs=1", "threads=1"])
    e = e.replace(clients=20, rounds=rounds, eval_every=rounds, seed=seed, validation=0.2, engine="sequential")
    e = e.replace(partition=Partitioning(alpha=0.1))
    start = time.process_time()
    last = fedrane.run(e, dataset=data, progress=False).history[-1]
    record = {each: last[f"global/local_{each}"] for each in MEASURES}
    clients = sorted(each for each in last["global/local_clients"] if each is not None)
    record |= {"validation": last["validation/global_accuracy"], "clients": clients}
    return record | {"name": name, "value": value, "lr": lr, "seed": seed, "seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("fairness.jsonl"))
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    whole = catalogue.load("fmnist", args.data)
    train, test = slice(args.examples), slice(1000)
    data = replace(whole, x=whole.x[train], y=whole.y[train], x_test=whole.x_test[test], y_test=whole.y_test[test])
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = [json.loads(line) for line in lines]

    def result(name: str, value: Any, lr: float, seed: int) -> dict[str, Any]:
        for each in done:
            if (each["name"], each["value"], each["lr"], each["seed"]) == (name, value, lr, seed):
                return dict(each)
        record = run(data, args.rounds, name, value, lr, seed)
        print({key: each for key, each in record.items() if key != "clients"}, flush=True)
        done.append(record)
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def best(name: str, lr: float) -> Any:
        tries = [result(name, value, lr, TUNING_SEED) for value in RIVALS[name][3]]
        return max(tries, key=lambda each: each["validation"])["value"]

    lr = best("FedAvg", 0.0)
    chosen = {name: best(name, 0.0 if name == "FedAvg" else lr) for name in RIVALS}
    runs = {name: [] for name in RIVALS}  # type: dict[str, list[dict[str, Any]]]
    for seed in args.seeds:
        for name in RIVALS:
            runs[name].append(result(name, chosen[name], 0.0 if name == "FedAvg" else lr, seed))
    print(f"| method | chosen | {' | '.join(MEASURES)} |")
    for name, each in runs.items():
        cells = [[100 * record[measure] for record in each] for measure in MEASURES]
        numbers = " | ".join(f"{np.mean(cell):.1f} ± {np.std(cell):.1f}" for cell in cells)
        print(f"| {name} | {RIVALS[name][2]} {chosen[name]} | {numbers} |")


if __name__ == "__main__":
    main()
