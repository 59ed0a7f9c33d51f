"""Bargaining: Newton against the convex-concave sequence in CVXPY, and the server's work on real sizes.

Ratios are of times taken in this one run. CVXPY is a development dependency; without it its rows are left out.
"""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import torch
from _harness import arguments, save, seconds
from rich.console import Console
from rich.table import Table

from fedrane import tree
from fedrane.ops.nash import bargain, gram

RESNET18 = 11_181_642


def sequence_in_cvxpy(matrix: np.ndarray, iterations: int = 20) -> np.ndarray | None:
    """The paper's sequence as its authors' code base solves it: one CVXPY problem, its linear part renewed."""
    try:
        import cvxpy
    except ImportError:
        return None
    clients = len(matrix)
    p, cost = cvxpy.Variable(clients, nonneg=True), cvxpy.Parameter(clients)
    constraints = [-cvxpy.log(p) - cvxpy.log(matrix @ p) <= 0]
    problem = cvxpy.Problem(cvxpy.Minimize(cost @ p), constraints)
    value = np.ones(clients)
    for _ in range(iterations):
        q = matrix @ value
        cost.value = matrix.sum(0) + 1 / value + matrix.T @ (1 / q)
        problem.solve(solver="CLARABEL", warm_start=True)
        if p.value is None:
            raise RuntimeError(f"CVXPY found no solution: {problem.status}")
        done = np.abs(p.value - value).max() < 1e-8
        value = p.value
        if done:
            break
    return value


def solvers() -> list[dict[str, Any]]:
    results = []
    for clients in (20, 100, 1000):
        draws = torch.Generator().manual_seed(0)
        deviations, shared = (torch.randn(4 * clients, n, dtype=torch.float64, generator=draws) for n in (clients, 1))
        deviations = deviations + shared / 2  # clients of one federation agree a little: cosines around 0.2
        deviations = deviations / deviations.norm(dim=0)
        matrix = deviations.T @ deviations
        row: dict[str, Any] = {"clients": clients, "newton_s": seconds(lambda m=matrix: bargain(m))}
        if clients <= 100:
            row["sequential_s"] = seconds(lambda m=matrix: bargain(m, method="sequential"), 1)
            solution = sequence_in_cvxpy(matrix.numpy())
            if solution is not None:
                row["cvxpy_s"] = seconds(lambda m=matrix: sequence_in_cvxpy(m.numpy()), 1)
                row["cvxpy_over_newton"] = row["cvxpy_s"] / row["newton_s"]
                row["cvxpy_gap"] = float(np.abs(solution - bargain(matrix).weights.numpy()).max())
        results.append(row)
    return results


def server(clients: int, parameters: int) -> dict[str, Any]:
    """The Gram matrix and the weighted sum, as one upload tree of that size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = {"w": torch.zeros(parameters, device=device)}
    uploads = {"w": torch.randn(clients, parameters, device=device)}
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64, device=device)
    before = _peak(device)
    timing = {
        "gram_s": seconds(lambda: gram(base, uploads), 3),
        "sum_s": seconds(lambda: tree.move(base, uploads, weights), 3),
    }
    size = tree.nbytes(uploads)
    return {
        "clients": clients,
        "parameters": parameters,
        "device": device,
        **timing,
        "uploads_GB": size / 1e9,
        "extra_peak_GB": (_peak(device) - before) / 1e9,
        "gram_GB_per_s": size / timing["gram_s"] / 1e9,
        "sum_GB_per_s": size / timing["sum_s"] / 1e9,
    }


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parameters", type=int, default=RESNET18)
    parser.add_argument("--clients", type=int, default=100)
    given = parser.parse_args()
    results = {"solvers": solvers(), "server": server(given.clients, given.parameters)}
    console = Console()
    table = Table("clients", "Newton", "sequence", "CVXPY's sequence", "CVXPY / Newton", "largest gap")
    for row in results["solvers"]:
        cells = [f"{1e3 * row[k]:.2f} ms" if k in row else "–" for k in ("newton_s", "sequential_s", "cvxpy_s")]
        ratio = f"{row['cvxpy_over_newton']:.0f}" if "cvxpy_over_newton" in row else "–"
        gap = f"{row['cvxpy_gap']:.0e}" if "cvxpy_gap" in row else "–"
        table.add_row(str(row["clients"]), *cells, ratio, gap)
    console.print(table)
    for key, value in results["server"].items():
        console.print(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
    save("nash", results, given.out)


if __name__ == "__main__":
    main()
