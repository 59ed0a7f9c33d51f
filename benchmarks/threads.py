"""How training on a CPU grows with its cores: clients in threads and in processes, and independent runs.

The engines ``threaded`` and ``processes`` train one client per core. Independent runs, each with one thread, are the
upper bound: none waits for another. Their samples per second are added up, while an engine's round also waits for its
slowest client.

    python benchmarks/threads.py [--data-root DIR] [--methods fedavg] [--epochs 1] [--cores 1,2,4,8,16] [--engines-only]

Where there is a GPU it must be hidden (CUDA_VISIBLE_DEVICES=): a process that uses a GPU is not forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _harness import arguments, save
from _problems import dataset

from engines import ours

CPU = torch.device("cpu")


class Case(NamedTuple):
    dataset: str
    root: Path | None
    method: str
    epochs: int
    precision: str


def engine(case: Case, cores: int, name: str) -> float:
    """Samples per second of that engine."""
    torch.set_num_threads(cores)
    examples = dataset(case.dataset, case.root)
    settings = {"engine": name, "precision": case.precision, "epochs": case.epochs}
    return float(ours(case.dataset, examples, CPU, case.method, 1, **settings)["samples_per_second"])


def independent(case: Case, number: int) -> float:
    """Samples per second of ``number`` independent runs at once, each with one thread."""
    command = [sys.executable, __file__, "--alone", "--datasets", case.dataset, "--precisions", case.precision]
    command += ["--methods", case.method, "--epochs", str(case.epochs)]
    command += ["--data-root", str(case.root)] if case.root else []
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this file
        for _ in range(number)
    ]
    return sum(float(process.communicate()[0].splitlines()[-1]) for process in started)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--datasets", default="fmnist")
    parser.add_argument("--cores", default=f"1,{os.cpu_count()}")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--engines-only", action="store_true", help="without the runs that share nothing")
    parser.add_argument("--alone", action="store_true", help="one run with one thread, its speed alone printed")
    options = parser.parse_args()
    lists = (getattr(options, name).split(",") for name in ("datasets", "methods", "precisions"))
    cases = [
        Case(name, options.data_root, method, options.epochs, precision) for name, method, precision in product(*lists)
    ]
    if options.alone:
        print(engine(cases[0], 1, "threaded"))
        return
    results: list[dict[str, Any]] = []
    for case, cores in product(cases, map(int, options.cores.split(","))):
        speeds = {name: engine(case, cores, name) for name in ("threaded", "processes")}
        speeds |= {} if options.engines_only else {"independent": independent(case, cores)}
        what = case._asdict()
        del what["root"]
        results.append(what | {"cores": cores} | speeds)
        shown = ", ".join(f"{what} {value:9,.0f}" for what, value in speeds.items())
        print(
            f"{case.dataset} {case.method:8s} E {case.epochs} {case.precision:8s} {cores:3d} cores, samples/s: {shown}",
            flush=True,
        )
        save(f"threads-{os.cpu_count()}-cores", results, options.out)


if __name__ == "__main__":
    main()
