"""How training on a CPU grows with its cores: clients in threads and in processes, beside runs that share nothing.

The engines ``threaded`` and ``processes`` train a client a core. Runs that know nothing of each other, each of one
thread, are what any of it could reach at best: none waits for another. Their samples a second are added up, while an
engine's round also waits for its longest client.

    python benchmarks/threads.py [--data-root DIR] [--datasets fmnist] [--cores 1,2,4,8,16] [--engines-only]

Where there is a GPU it must be hidden (CUDA_VISIBLE_DEVICES=): processes are not forked beside one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _harness import arguments, save
from _problems import dataset

from engines import ours

CPU = torch.device("cpu")


def engine(name: str, root: Path | None, precision: str, cores: int, kind: str) -> float:
    """Samples a second of that engine."""
    torch.set_num_threads(cores)
    row = ours(name, dataset(name, root), CPU, "fedavg", 1, engine=kind, precision=precision, epochs=1)
    return float(row["samples_per_second"])


def apart(name: str, root: Path | None, precision: str, number: int) -> float:
    """Samples a second of so many runs at once, each with one thread."""
    command = [sys.executable, __file__, "--alone", "--datasets", name, "--precisions", precision]
    command += ["--data-root", str(root)] if root else []
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
    parser.add_argument("--engines-only", action="store_true", help="without the runs that share nothing")
    parser.add_argument("--alone", action="store_true", help="one run with one thread, its speed alone printed")
    options = parser.parse_args()
    if options.alone:
        print(engine(options.datasets, options.data_root, options.precisions, 1, "threaded"))
        return
    results: list[dict[str, Any]] = []
    for name in options.datasets.split(","):
        for precision in options.precisions.split(","):
            for cores in map(int, options.cores.split(",")):
                of = name, options.data_root, precision, cores
                found = {kind: engine(*of, kind) for kind in ("threaded", "processes")}
                found |= {} if options.engines_only else {"apart": apart(*of)}
                results.append({"dataset": name, "precision": precision, "cores": cores} | found)
                told = ", ".join(f"{what} {value:9,.0f}" for what, value in found.items())
                print(f"{name} {precision:8s} {cores:3d} cores, samples/s: {told}", flush=True)
                save(f"threads-{os.cpu_count()}-cores", results, options.out)


if __name__ == "__main__":
    main()
