"""Comparisons that report what differs."""

from __future__ import annotations

from typing import Any

from fedrane import tree
from fedrane.training.run_folder import TIMINGS


def same_bytes(a: Any, b: Any) -> None:
    x, y = tree.flatten(a), tree.flatten(b)
    assert x.keys() == y.keys(), f"different names: {sorted(x.keys() ^ y.keys())}"
    different = [path for path in x if not tree.equal(x[path], y[path])]
    assert not different, f"different bytes: {different}"


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    x, y = tree.flatten(a), tree.flatten(b)
    assert x.keys() == y.keys(), f"different names: {sorted(x.keys() ^ y.keys())}"
    gaps = {path: float((x[path] - y[path]).abs().max()) for path in x if x[path].numel()}
    worst = max(gaps, key=lambda path: gaps[path])
    assert gaps[worst] <= tolerance, f"{worst} differs by {gaps[worst]:.2e}"


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records]
