"""How far the estimate of ``fedrane reproduce --dry-run`` is from what cells then take, on digits, one by one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import arguments, save
from rich.console import Console
from rich.table import Table

from fedrane.reproduce.estimate import Speeds
from fedrane.reproduce.results import ResultStore
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import Selection, cells, targets


def measure(method: str, rounds: int) -> dict[str, Any]:
    (target,) = targets("table-gfl")
    wanted = cells(target, Selection(("digits",), (0.1, 0.5), (method,), (0,), (f"rounds={rounds}",)))
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(wanted, ResultStore(Path(folder) / "results"), Path(folder) / "cells")
        speeds = Speeds(sweep, Path(folder) / "speeds.json", budget=60)
        predicted = sum(speeds.seconds(cell) or 0.0 for cell in wanted)
        began = time.perf_counter()
        sweep.go()
        taken = time.perf_counter() - began
    return {"method": method, "cells": len(wanted), "rounds": rounds, "predicted_s": predicted, "taken_s": taken}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--methods", default="fedavg,fedprox,fedrane-wo-lra,fedrane")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    results = [measure(method, given.rounds) for method in given.methods.split(",")]
    table = Table("method", "predicted", "taken", "taken / predicted")
    for row in results:
        ratio = row["taken_s"] / row["predicted_s"]
        table.add_row(row["method"], f"{row['predicted_s']:.1f} s", f"{row['taken_s']:.1f} s", f"{ratio:.2f}")
    Console().print(table)
    save("estimate", results, given.out)


if __name__ == "__main__":
    main()
