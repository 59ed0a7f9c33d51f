"""Relational mining of 20 batches of 128: Newton–Schulz against ``eigh``, ratios taken in this one run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from _harness import arguments, save, seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedrane.ops import graph


def by_eigh(matrix: Tensor, mask: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12).rsqrt()[..., None, :]) @ vectors.mT


def measure(batches: int, examples: int, width: int, alternations: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    z = torch.randn(batches, examples, width, generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones(batches, examples, dtype=torch.bool, device=device)

    def mine() -> graph.Relations:
        return graph.relations(z, mask, 0.1, alternations)

    ours, relations = seconds(mine), mine()
    with mock.patch.object(graph, "inverse_root", by_eigh):
        theirs, expected = seconds(mine, 3), mine()
    error = float((relations.adjacency - expected.adjacency).norm() / expected.adjacency.norm())
    row = {"batches": batches, "examples": examples, "alternations": alternations, "device": device, "ours_s": ours}
    row |= {"eigh_s": theirs, "eigh_over_ours": theirs / ours, "relative_difference": error}
    if device == "cuda":
        torch.backends.cuda.preferred_linalg_library("cusolver")  # MAGMA's batched routines cannot be captured
        mine()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            mine()
        row["captured_s"] = seconds(captured.replay)
        row["eigh_over_captured"] = theirs / row["captured_s"]
    return row


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    results = [measure(20, 128, 64, n) for n in (1, 5)] + [measure(1, 128, 64, 5)]
    table = Table("batches", "alternations", "Newton–Schulz", "eigh", "eigh / ours", "captured", "difference")
    for row in results:
        captured = f"{1e3 * row['captured_s']:.2f} ms" if "captured_s" in row else "–"
        table.add_row(
            f"{row['batches']} × {row['examples']}",
            str(row["alternations"]),
            f"{1e3 * row['ours_s']:.2f} ms",
            f"{1e3 * row['eigh_s']:.2f} ms",
            f"{row['eigh_over_ours']:.1f}",
            captured,
            f"{row['relative_difference']:.0e}",
        )
    Console().print(table)
    save("graph", results, given.out)


if __name__ == "__main__":
    main()
