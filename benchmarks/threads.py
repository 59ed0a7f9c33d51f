"""How training on a CPU grows with its cores: clients in threads, beside as many processes that share nothing.

The threaded engine trains a client a thread. Processes that know nothing of each other, each the same engine with one
thread, are what processes could reach at best: no model travels between them. Their samples a second are added up.

    python benchmarks/threads.py [--data-root DIR] [--datasets fmnist] [--threads 1,2,4,8,16]
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


def threads(name: str, root: Path | None, precision: str, number: int) -> float:
    """Samples a second of the threaded engine."""
    torch.set_num_threads(number)
    return rate(name, root, precision)


def processes(name: str, root: Path | None, precision: str, number: int) -> float:
    """Samples a second of so many runs at once, each with one thread."""
    command = [sys.executable, __file__, "--alone", "--datasets", name, "--precisions", precision]
    command += ["--data-root", str(root)] if root else []
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this file
        for _ in range(number)
    ]
    return sum(float(process.communicate()[0].splitlines()[-1]) for process in started)


def rate(name: str, root: Path | None, precision: str) -> float:
    row = ours(name, dataset(name, root), CPU, "fedavg", 1, engine="threaded", precision=precision, epochs=1)
    return float(row["samples_per_second"])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--datasets", default="fmnist")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--alone", action="store_true", help="one run with one thread, its speed alone printed")
    options = parser.parse_args()
    if options.alone:
        torch.set_num_threads(1)
        print(rate(options.datasets, options.data_root, options.precisions))
        return
    results: list[dict[str, Any]] = []
    for name in options.datasets.split(","):
        for precision in options.precisions.split(","):
            for number in map(int, options.threads.split(",")):
                of = name, options.data_root, precision, number
                row = {"dataset": name, "precision": precision, "number": number}
                results.append(row | {"threads": threads(*of), "processes": processes(*of)})
                row = results[-1]
                grown = " ".join(f"{what} {row[what]:9,.0f} samples/s" for what in ("threads", "processes"))
                ratio = row["threads"] / row["processes"]
                print(f"{name} {precision:8s} {number:3d}: {grown}, {ratio:.2f} of it", flush=True)
                save(f"threads-{os.cpu_count()}-cores", results, options.out)


if __name__ == "__main__":
    main()
