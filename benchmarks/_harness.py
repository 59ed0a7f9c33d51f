"""What the benchmarks share: timing, where a result came from, and saving it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median over repeats after one warm-up, the device having finished."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return sorted(once() for _ in range(repeats))[repeats // 2]


def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return {"gpu": gpu, "cpu": platform.machine(), "threads": threads, "torch": torch.__version__}


def save(name: str, results: Any, out: Path | None) -> None:
    """As JSON, with the command that made it."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    where = "gpu" if torch.cuda.is_available() else "cpu"
    command = " ".join(["python", *sys.argv])
    content = {"command": command, "machine": machine(), "results": results}
    (folder / f"{name}-{where}.json").write_text(json.dumps(content, indent=1) + "\n")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="a folder for the JSON, other than benchmarks/results")
    return parser
