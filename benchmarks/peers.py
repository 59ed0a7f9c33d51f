"""One FedAvg job in this library and in others, interleaved: samples/s, peak memory, and accuracy.

The job: Fashion-MNIST (noise with a class in it without ``--data-root``), 20 clients, α 0.5, batches of 128, plain SGD,
the ConvNet. Each library gets the same examples for each client, the same network and the same numbers of rounds and
epochs; its report says what it really did, and a report of another job is refused. Each is installed from the package
index into an environment of its own under ``--cache`` and used through its documented interface (``peers/``), with the
threads that it chooses. What cannot be installed or run is listed with the reason. The first round, in which libraries
start processes, compile or record, and the last, after which some evaluate, are not timed; the others count with
gathering and aggregation. On a machine with other work the seconds of the processor say more than those of the wall.

    python benchmarks/peers.py [--data-root DIR] [--epochs 5] [--rounds 4] [--repeats 3] [--torch torch==2.13.0]
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from _harness import arguments, save
from _problems import LRS, dataset, experiment
from rich.console import Console
from rich.table import Table

from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset
from fedrane.training.setup import make_partition, resolve

HERE = Path(__file__).parent / "peers"
sys.path.append(str(HERE))
from _job import Job, Network, parameters, write  # noqa: E402

BASE = "plain loop"
OURS = "FedRANE library"


class Program(NamedTuple):
    adapter: str
    requirement: str = ""
    """What is installed; empty for what runs in this environment."""


PROGRAMS = {
    BASE: Program("plain_loop.py"),
    OURS: Program("with_fedrane.py"),
    "FLUKE": Program("with_fluke.py", "fluke-fl"),
    "Flower": Program("with_flower.py", "flwr[simulation]"),
    "pfl-research": Program("with_pfl.py", "pfl[pytorch]"),
}
ABSENT = {"PFLlib": "pfllib", "FL-bench": "fl-bench"}
"""Libraries that were not on the package index, and the name that they would have there."""


class FailedError(Exception):
    """Why a library has no result."""


# ---- the job


def make_job(examples: Dataset, rounds: int, epochs: int) -> Job:
    """With the clients of our own experiments."""
    e = resolve(experiment("fmnist", "fedavg"), examples, True, False)
    split = partitions.split(make_partition(e, examples), e.seed, e.partition.test, 0.0)
    clients = [torch.from_numpy(np.sort(numbers)) for numbers in split.train]
    torch.manual_seed(0)
    moments = (torch.tensor(each) for each in (examples.mean, examples.std))
    pixels = (torch.from_numpy(each) for each in (examples.x, examples.y, examples.x_test, examples.y_test))
    return Job(rounds, epochs, e.batch, LRS["fedavg"], *pixels, *moments, clients, dict(Network().state_dict()))


def with_classes(noise: Dataset) -> Dataset:
    """Noise in which each class has a bright spot of its own, so that accuracies say something."""
    for x, y in ((noise.x, noise.y), (noise.x_test, noise.y_test)):
        for label in range(len(noise.classes)):
            x[y == label, :, label * 2 : label * 2 + 5, label * 2 : label * 2 + 5] |= 0xC0
    return noise


def same_job(report: Mapping[str, Any], job: Job) -> None:
    """Raise unless this is a report on that job."""
    expected = {
        "sizes": [len(each) for each in job.clients],
        "parameters": parameters(Network()),
        "steps": job.steps,
        "examples": job.examples,
    }
    for name, value in expected.items():
        if report[name] != value:
            raise FailedError(f"another job: {name} {report[name]} instead of {value}")
    if len(report["marks"]) != job.rounds + 1:
        raise FailedError(f"another job: {len(report['marks']) - 1} rounds instead of {job.rounds}")


# ---- programs


def prepare(program: Program, cache: Path, torch_requirement: str) -> Path:
    """The Python that has the library; made on first use."""
    if not program.requirement:
        return Path(sys.executable)
    folder = cache / program.adapter.removesuffix(".py")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    finished = folder / "installed"
    if not finished.exists() or finished.read_text() != torch_requirement:
        _call([sys.executable, "-m", "venv", "--clear", str(folder)])
        _call([str(python), "-m", "pip", "install", "--quiet", torch_requirement, program.requirement])
        finished.write_text(torch_requirement)
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise FailedError(f"not installed: {errors[-1]}")


def on_index(name: str) -> bool:
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


def run(name: str, python: Path, job: Job, cache: Path, threads: int, patience: float) -> dict[str, Any]:
    """One run of the job: the adapter's report, with what was seen from outside."""
    program = PROGRAMS[name]
    file, report, log = (cache / each for each in ("job.npz", "report.json", f"{program.adapter}.log"))
    report.unlink(missing_ok=True)
    own = [] if program.requirement else [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), *own]))}
    environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    load, began, peak = _load(), time.monotonic(), 0.0
    command = [str(python), str(HERE / program.adapter), str(file), str(report)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=cache)  # noqa: S603
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            if time.monotonic() - began > patience:
                process.kill()
                process.wait()
                raise FailedError(f"not ready after {patience:.0f} s; its output is in {log}")
            time.sleep(0.2)
    if process.returncode or not report.exists():
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise FailedError(f"it ended with {process.returncode}: {lines[-1]}")
    found: dict[str, Any] = json.loads(report.read_text())
    same_job(found, job)
    wall, processor = timed(found["marks"])
    found["samples_per_second"] = job.examples / job.rounds / wall
    found["samples_per_cpu_second"] = job.examples / job.rounds / processor
    return found | {"peak_gib": peak / 2**30, "load": [load, _load()]}


def timed(marks: list[tuple[float, float]]) -> tuple[float, float]:
    """The median seconds of the rounds but the first and the last, of the wall and of the processor."""
    rounds = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in itertools.pairwise(marks)]
    wall, processor = zip(*(rounds[1:-1] or rounds[-1:]), strict=True)
    return median(wall), median(processor)


def memory(process: int) -> float:
    """Bytes of a process and all that it has started, shared ones counted once; 0 where the system does not say."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    waiting, total = [process], 0.0
    while waiting:
        waiting += children.get(one := waiting.pop(), [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _load() -> float:
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0


# ---- results


def summary(runs: Mapping[str, list[dict[str, Any]]], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row for each program that has run, by medians; then those without a result, and why."""
    speeds = {name: median(each["samples_per_second"] for each in done) for name, done in runs.items() if done}
    best = max((speed for name, speed in speeds.items() if PROGRAMS[name].requirement), default=0.0)
    rows = []
    for name, speed in speeds.items():
        done = runs[name]
        row = {"program": name, "versions": done[-1]["versions"], "threads": done[-1]["threads"]}
        row |= {"samples_per_second": speed, "all": [each["samples_per_second"] for each in done]}
        row["over_plain"] = speed / speeds[BASE] if BASE in speeds else 0.0
        row["over_best_peer"] = speed / best if best else 0.0
        others = ("samples_per_cpu_second", "peak_gib", "accuracy")
        row |= {key: median(each[key] for each in done) for key in others}
        rows.append(row | {"load": [each["load"] for each in done]})
    return rows + [{"program": name, "reason": reason} for name, reason in reasons.items()]


def show(rows: list[dict[str, Any]]) -> None:
    names = ("samples/s", "/ plain loop", "/ best peer", "samples per CPU second")
    table = Table("", "version", *names, "threads", "memory", "accuracy")
    for row in rows:
        if "reason" in row:
            print(f"{row['program']}: no result, {row['reason']}")
            continue
        cells = f"{row['samples_per_second']:,.0f}", f"{row['over_plain']:.2f}", f"{row['over_best_peer']:.2f}"
        rest = f"{row['samples_per_cpu_second']:,.0f}", str(row["threads"]), f"{row['peak_gib']:.2f} GiB"
        version = next(iter(row["versions"].values()))
        table.add_row(row["program"], version, *cells, *rest, f"{100 * row['accuracy']:.1f} %")
    Console(width=140).print(table)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="Fashion-MNIST; without it, noise of its shape")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="which of them, separated by commas")
    parser.add_argument("--cache", type=Path, default=Path("build/peers"), help="where their environments are kept")
    parser.add_argument("--torch", default="torch", help="which torch they get, for instance torch==2.13.0")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="of which the first and the last are not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--examples", type=int, help="of the training set, for a trial; all, if not given")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS for all; 0: as each library chooses")
    parser.add_argument("--patience", type=float, default=3600, help="seconds for one run")
    options = parser.parse_args()
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    examples = dataset("fmnist", options.data_root)
    examples = examples if options.data_root else with_classes(examples)
    examples = replace(examples, x=examples.x[: options.examples], y=examples.y[: options.examples])
    job = make_job(examples, options.rounds, options.epochs)
    write(cache / "job.npz", job)
    pythons: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for name in options.programs.split(","):
        try:
            pythons[name] = prepare(PROGRAMS[name], cache, options.torch)
        except FailedError as failed:
            reasons[name] = str(failed)
    for name, package in ABSENT.items():
        reasons[name] = "no adapter yet" if on_index(package) else f"no package {package} on the index"
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    settings = {"dataset": examples.name, "clients": len(job.clients), "batch": job.batch, "lr": job.lr}
    settings |= {
        "epochs": job.epochs,
        "rounds": job.rounds,
        "examples": job.examples,
        "parameters": parameters(Network()),
    }
    settings |= {"threads": options.threads or "as each library chooses"}
    for _ in range(options.repeats):
        for name in runs:
            if name in reasons:
                continue
            try:
                runs[name].append(run(name, pythons[name], job, cache, options.threads, options.patience))
            except FailedError as failed:
                reasons[name] = str(failed)
            print(
                name, *(f"{each['samples_per_second']:,.0f}" for each in runs[name]), reasons.get(name, ""), flush=True
            )
            save("peers", {"job": settings, "rows": summary(runs, reasons)}, options.out)
    show(summary(runs, reasons))


if __name__ == "__main__":
    main()
