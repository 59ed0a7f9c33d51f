"""CPU time of one recorded step of a full batch, methods interleaved: what a method costs beside FedAvg on a CPU.

One thread, ConvNet, 128 images of 28 × 28, float32, as a thread of ``engine=threaded`` replays it. It is the thread's
own time, and of all repeats the tenth part that was fastest, because other work on a machine can only add to it. The
largest parts of each step are timed one by one.

    python benchmarks/steps.py [--methods fedavg,fedrane] [--repeats 60]
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from _harness import arguments, save
from _problems import dataset, experiment
from rich.console import Console
from rich.table import Table

from fedrane.data.dataset import Dataset
from fedrane.engines.replay import Recording
from fedrane.runner import run

PARTS = 8


def recorded(method: str, examples: Dataset) -> list[Callable[[], object]]:
    """The operations of a step."""
    made: list[Recording] = []
    usual = Recording.__init__

    def remembered(self: Recording, *args: Any) -> None:
        usual(self, *args)
        made.append(self)

    settings = {"rounds": 1, "epochs": 1, "clients": 2, "engine": "threaded", "precision": "float32", "threads": 1}
    with patch.object(Recording, "__init__", remembered):
        run(experiment("fmnist", method, **settings), dataset=examples)
    return max((recording.calls or [] for recording in made), key=len)


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    began = time.thread_time()
    for call in calls:
        call()
    return time.thread_time() - began


def fast(values: Iterable[float]) -> float:
    """The time below which a tenth of them lies."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10]


def name(call: Any) -> str:
    """Of its operator; the few without an output variant are functions of the recording."""
    return call.func.name().removeprefix("aten::").partition(".")[0] if hasattr(call, "func") else "copied results"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--methods", default="fedavg,fedrane", help="the first is what the others are compared with")
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    noise = dataset("fmnist", None)
    noise = replace(noise, x=noise.x[:3000], y=noise.y[:3000])
    steps = {method: recorded(method, noise) for method in options.methods.split(",")}
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {method: [] for method in steps}
    for number in range(options.repeats + 3):  # the first few warm up
        for method, calls in steps.items():
            seconds(calls)  # as in a run, the step before was of the same method
            spent = seconds(calls)
            taken[method] += [spent] if number >= 3 else []
    first = fast(taken[next(iter(steps))])
    results = []
    table = Table("method", "operations", "ms of CPU", "share of the first's speed", "largest parts, ms")
    for method, calls in steps.items():
        parts: Counter[str] = Counter()
        passes = [[seconds([call]) for call in calls] for _ in range(9)]  # in order: memory is used again within a step
        for call, each in zip(calls, zip(*passes, strict=True), strict=True):
            parts[name(call)] += round(1e3 * fast(each), 3)
        row = {"method": method, "operations": len(calls), "milliseconds": 1e3 * fast(taken[method])}
        row |= {
            "share": first / fast(taken[method]),
            "parts": {part: round(each, 3) for part, each in parts.most_common(PARTS)},
        }
        results.append(row | {"load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0})
        largest = ", ".join(f"{part} {each:.2f}" for part, each in parts.most_common(PARTS))
        table.add_row(method, str(len(calls)), f"{row['milliseconds']:.2f}", f"{row['share']:.3f}", largest)
    Console(width=150).print(table)
    save("steps", results, options.out)


if __name__ == "__main__":
    main()
