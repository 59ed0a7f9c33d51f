"""The bargain by sketches against the exact one, and Newton's method for a hundred thousand clients.

    python benchmarks/sketch.py synthetic newton         synthetic deviations; sketches of K = 100,000 clients
    python benchmarks/sketch.py real --data DATA         deviations of ConvNet on Fashion-MNIST
    python benchmarks/sketch.py accuracy --data DATA     runs of the MLP with both, and its deviations in every round

DATA holds FashionMNIST. Each part goes with its command into results/sketch-cpu.json; the others stay as they are.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from _harness import RESULTS, arguments, machine
from torch import Tensor

import fedrane
from fedrane import Experiment, Partitioning
from fedrane.algorithm import sample_ratio
from fedrane.data import catalogue
from fedrane.methods.fedrane import FedRANE
from fedrane.ops.nash import agree, bargain, gram, groups
from fedrane.ops.sketch import Sketches, sketched
from fedrane.task import Client, State, Task
from fedrane.tree import Tensors

WIDTHS = (256, 1024, 4096)
POWERS = {"equal powers": 0.0, "by samples": 1.0}
SCOPES = ("model", "layer")
ALPHAS = (0.1, 0.5)
Measures = dict[str, dict[str, float]]


def compared(base: Tensors, rows: Tensors, sizes: Tensor, scope: str, seed: int, round: int) -> Measures:
    """The sketched step and the exact one: their cosine, the range of what clients get over what was bargained for, and
    the Gram matrix's relative error in the Frobenius norm."""
    result: Measures = {}
    ratio = sizes.double() / sizes.sum()
    parts = [{name: rows[name] for name in names} for names, _ in groups(rows, scope)]
    grams = [gram(base, part) for part in parts]
    for width in WIDTHS:
        sketches = [sketched(base, part, width, seed, round) for part in parts]
        for name, power in POWERS.items():
            w = ratio**power
            w = w * len(w) / w.sum()
            products, kept = np.zeros(2), []
            for exact, sketch in zip(grams, sketches, strict=True):
                a, b = (agree(known, ratio, w, "average", 1.0, "newton") for known in (exact, sketch))
                length, other = (float(each.weights @ exact @ each.weights) for each in (a, b))
                along = float(a.weights @ exact @ b.weights) * math.sqrt(length / other)  # as long as a, as in a run
                products += [along, length]
                p, used = b.bargain.weights, b.bargain.weights > 0
                kept += ((exact @ p) * p / w)[used].tolist()
            result[f"{scope}, {name}, {width}"] = {
                "cosine": products[0] / products[1],
                "least": min(kept),
                "most": max(kept),
            }
        error = [(s.numbers @ s.numbers.T - g).norm() / g.norm() for g, s in zip(grams, sketches, strict=True)]
        result[f"{scope}, Gram, {width}"] = {"error": float(torch.stack(error).max())}
    return result


def synthetic() -> dict[str, Any]:
    """Clusters around a common direction, lengths spread by e^0.7, d = 20,000; powers by sizes spread by e^1."""
    results = {}
    for clients in (20, 100, 500):
        draws = np.random.Generator(np.random.Philox(clients))
        centres, common = draws.normal(size=(5, 20_000)), draws.normal(size=20_000)
        rows = 0.5 * common + centres[draws.integers(0, 5, clients)] + draws.normal(size=(clients, 20_000))
        rows *= np.exp(0.7 * draws.normal(size=clients))[:, None] / np.linalg.norm(rows, axis=1)[:, None]
        sizes, stack = torch.from_numpy(np.exp(draws.normal(size=clients))), {"w": torch.from_numpy(rows)}
        results[f"K {clients}"] = compared({"w": torch.zeros(20_000)}, stack, sizes, "model", 0, 1)
    return results


def newton(clients: int = 100_000, width: int = 512) -> dict[str, Any]:
    """Sketches of clusters around a common direction: seconds of Newton's method, equal powers and spread by e^1."""
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(20, width, generator=draws) + torch.randn(width, generator=draws)
    which = torch.randint(0, 20, (clients,), generator=draws)
    numbers = (centres[which] + torch.randn(clients, width, generator=draws)).double()
    numbers *= torch.exp(0.7 * torch.randn(clients, 1, generator=draws))
    sketches, spread = Sketches(numbers, numbers.norm(dim=1)), torch.exp(torch.randn(clients, generator=draws)).double()
    results: dict[str, Any] = {"clients": clients, "width": width}
    for name, w in (("equal powers", None), ("by samples", spread / spread.mean())):
        start, busy = time.perf_counter(), time.process_time()
        made = bargain(sketches, w)
        results[name] = {
            "seconds": time.perf_counter() - start,
            "seconds of CPU": time.process_time() - busy,
            "iterations": made.iterations,
            "residual": made.residual,
            "ridge": made.ridge,
            "promised": 1e-11 * max(1.0, 1.0 if w is None else float(w.max())),
        }
    results["peak_GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return results


@dataclass(frozen=True)
class Watched(FedRANE):
    """FedRANE, which also records how near a sketched step would have been."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        after, record = super().aggregate(task, server, ups, cohort)
        sizes, round = sample_ratio(cohort), int(cohort.round[0])
        for scope in SCOPES:
            found = compared(server.model.params, ups.model.params, sizes, scope, task.seed, round)
            record |= {f"{key}/{of}": value for key, values in found.items() for of, value in values.items()}
        return after, record


def trained(given: Any, method: Any, model: str, alpha: float, seed: int, rounds: int) -> list[dict[str, Any]]:
    whole = catalogue.load("fmnist", given.data)
    data = replace(whole, x=whole.x[: given.examples], y=whole.y[: given.examples])
    e = Experiment(method=method, model=model, clients=20, partition=Partitioning(alpha=alpha), seed=seed)
    e = e.replace(
        lr=0.3, batch=given.batch, epochs=given.epochs, rounds=rounds, threads=given.threads, engine="stacked"
    )
    start = time.perf_counter()
    history = fedrane.run(e, dataset=data, progress=False, calibrate=False).history
    print(f"{model}, α {alpha}, seed {seed}, {method.gram}: {time.perf_counter() - start:.0f} s", flush=True)
    return history


def over_rounds(history: list[dict[str, Any]]) -> Measures:
    """Mean and least cosine, and the range of utilities, over the rounds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in history:
        for key, value in record.items():
            if key.startswith(tuple(f"{scope}, " for scope in SCOPES)):
                name, _, of = key.rpartition("/")
                found[name][of].append(value)
    return {name: _summary(values) for name, values in found.items()}


def _summary(values: dict[str, list[float]]) -> dict[str, float]:
    if "error" in values:
        return {"mean error": float(np.mean(values["error"])), "most": max(values["error"])}
    low, high = np.percentile(values["least"], 50), np.percentile(values["most"], 50)
    return {
        "mean cosine": float(np.mean(values["cosine"])),
        "least cosine": min(values["cosine"]),
        "median of the least": float(low),
        "median of the most": float(high),
        "least": min(values["least"]),
        "most": max(values["most"]),
    }


def real(given: Any) -> dict[str, Any]:
    return {f"α {a}": over_rounds(trained(given, Watched(), "convnet", a, 0, given.rounds)) for a in ALPHAS}


def accuracy(given: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for alpha in ALPHAS:
        rows: dict[str, Any] = {"exact": [], "sketch 1024": [], "deviations": []}
        for seed in given.seeds:
            exact = trained(given, Watched(), "mlp", alpha, seed, given.rounds)
            sketch = trained(given, FedRANE(gram="sketch", sketch=1024), "mlp", alpha, seed, given.rounds)
            rows["deviations"].append(over_rounds(exact))
            for name, history in (("exact", exact), ("sketch 1024", sketch)):
                rows[name].append([record["global/accuracy"] for record in history if "global/accuracy" in record])
        results[f"α {alpha}"] = rows
    return results


PARTS = {"synthetic": synthetic, "newton": newton}
TRAINED = {"real": real, "accuracy": accuracy}


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *TRAINED])
    parser.add_argument("--data")
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    command = " ".join(["python", *sys.argv]).replace(str(given.data), "DATA")
    file = (given.out or RESULTS) / "sketch-cpu.json"
    for part in given.parts:
        results = PARTS[part]() if part in PARTS else TRAINED[part](given)
        content = json.loads(file.read_text()) if file.exists() else {}
        content[part] = {"command": command, "machine": machine(), "results": results}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(json.dumps(results, indent=1, ensure_ascii=False) if part != "accuracy" else "done", flush=True)


if __name__ == "__main__":
    main()
