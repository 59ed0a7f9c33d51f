"""Clients side by side end where clients one after another end."""

from __future__ import annotations

from typing import Any

import pytest

from asserts import close, untimed
from fedrane import conformance
from fedrane.methods import METHODS
from fedrane.run import Result

MEASURES = ("accuracy", "loss", "bytes", "rows")


def both(method: Any, normalised: bool = True, **changes: Any) -> tuple[Result, Result]:
    one, many = (
        conformance.trained(method, normalised, engine=engine, **changes) for engine in ("sequential", "stacked")
    )
    return one, many


@pytest.mark.parametrize("norm", ["shared", "batch", "local"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_where_the_sequential_engine_ends(name: str, norm: str) -> None:
    entry = METHODS[name]
    one, many = both(
        entry.kind(**entry.preset), norm=norm, rounds=3, participation=0.6, dropout=0.2, momentum=0.5, weight_decay=0.01
    )
    close(conformance.states(one), conformance.states(many), 1e-12)
    for a, b in zip(untimed(one.history), untimed(many.history), strict=True):
        for key in a.keys() - {"gne/iterations"}:
            assert a[key] == pytest.approx(b[key], abs=1e-9), key
