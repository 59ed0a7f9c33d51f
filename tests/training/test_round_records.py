"""A line of the metrics may come from anyone: what cannot be the record of a round is found before it is used."""

from __future__ import annotations

from typing import Any

import pytest

import fedrane
from fedrane.methods import METHODS
from fedrane.training.round_records import problem
from problems import quick, slow_except

RECORD: dict[str, Any] = {
    "round": 3,
    "cohort": [0, 2],
    "lost": [1],
    "refused": {"1": "no reply"},
    "cosine": [0.5, None],
    "global/accuracy": 0.5,
    "personal/clients": [0.1, 0.2, 0.3],
    "warmup": True,
}


@pytest.mark.parametrize("name", slow_except(["fedavg", "fedrane"], METHODS))
def test_every_method_s_records_are_records(name: str) -> None:
    result = fedrane.run(quick(method=name, rounds=2, batch=256))
    assert [problem(record, result.population) for record in result.history] == [""] * len(result.history)
    assert not problem(RECORD, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"round": True},
        {"round": 0},
        {"round": 10**400},
        {"cohort": 3},
        {"cohort": [0, 0]},
        {"cohort": [0, 3]},
        {"lost": [-1]},
        {"refused": {"1": 2}},
        {"cosine": [0.5]},
        {"cosine": 0.5},
        {"global/accuracy": "high"},
        {"global/accuracy": [0.5]},
        {"global/auroc": "high"},
        {"global/local_f1": [0.5]},
        {"personal/clients_with_both_classes": "all"},
        {"personal/clients": [0.1]},
        {"personal/clients": {"a": "b"}},
        {"seconds": True},
        {"seconds": {}},
        {"gne/residual": [[1]]},
        {"train/loss": 10**400},
    ],
    ids=repr,
)
def test_what_cannot_be_is_found(change: dict[str, Any]) -> None:
    assert problem(RECORD | change, 3)
    assert problem([RECORD])
