"""The cosine between the server's step and each client's deviation, over rounds: how evenly a step serves the clients.

Runs methods on one dataset with one seed and prints, from ``--from-round`` on, the mean over rounds of the cosines'
standard deviation and minimum over clients, with the accuracies and whether the bargain ever needed a ridge.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _harness import arguments, save
from rich.console import Console
from rich.table import Table

from fedrane import Experiment, run


def measure(words: list[str], method: str, first: int, folder: Path) -> dict[str, Any]:
    result = run(Experiment.from_words([f"method={method}", *words]), folder / method)
    late = [r["cosine"] for r in result.history if r["round"] >= first and "cosine" in r]
    last = result.history[-1]
    row: dict[str, Any] = {
        "method": method,
        "rounds": last["round"],
        "cosine_std": statistics.fmean(statistics.pstdev(c) for c in late),
        "cosine_min": statistics.fmean(min(c) for c in late),
        "ridges": sum(1 for r in result.history if r.get("gne/ridge")),
        "worst_residual": max((r.get("gne/residual", 0.0) for r in result.history), default=0.0),
        "samples_per_second": result.summary["samples_per_second"],
    }
    for key in ("global/accuracy", "personal/accuracy", "global/minority_accuracy", "personal/minority_accuracy"):
        row[key] = last.get(key)
        row[f"{key}/best"] = max((r[key] for r in result.history if r.get(key) is not None), default=None)
    for name in ("cd", "degree", "rank", "homophily", "change"):
        if f"clients/{name}" in last:
            row[name] = statistics.fmean(last[f"clients/{name}"])
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--methods", default="fedavg,fedrane-wo-lra,fedrane-wo-gne,fedrane")
    parser.add_argument("--from-round", type=int, default=5)
    parser.add_argument("--name", default="consistency")
    parser.add_argument("words", nargs="*", help="key=value words of the experiment")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods.split(","):
            results.append(measure(given.words, method, given.from_round, Path(folder)))
            console.print_json(json.dumps(results[-1]))
            save(given.name, results, given.out)  # after each, in case the process is stopped
    table = Table("method", "global", "personal", "cosine std", "cosine min", "ridges", "samples/s")
    for row in results:
        shown = [f"{100 * row[k]:.2f}" if row[k] is not None else "–" for k in ("global/accuracy", "personal/accuracy")]
        cells = [f"{row['cosine_std']:.4f}", f"{row['cosine_min']:.4f}", str(row["ridges"])]
        table.add_row(row["method"], *shown, *cells, f"{row['samples_per_second']:,.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
