"""Digests by which a run's files show that they were edited, are damaged, or belong to another run.

A record holds the digest of its other entries and of what came ``before`` it: the run's id, or the digest of the record
in front of it. So a changed, missing or doubled line of a file of records is noticed, and a file of another run too.
They detect accidents: whoever wants to can compute them again.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedrane.config.settings import dotted
from fedrane.errors import CheckpointError
from fedrane.experiment import ELSEWHERE, Experiment

DIGEST = "digest"
LENGTH = 16
"""Hex digits of a digest."""
UNRECORDED = ELSEWHERE | {"rounds", "dataset"}
"""Settings that may be others when a run goes on: the sessions know the rounds, and the data has its own digest."""

Values = Mapping[str, Any]


def of(values: Values, before: str = "") -> str:
    """Return the digest of values that JSON can hold, in their order."""
    return hashlib.sha256(f"{before}\n{json.dumps(values)}".encode()).hexdigest()[:LENGTH]


def add(records: Iterable[Values], before: str) -> list[dict[str, Any]]:
    """Return records with their digests."""
    made = []
    for record in records:
        before = of(record, before)
        made.append({**record, DIGEST: before})
    return made


def check(record: Values, before: str, where: str) -> dict[str, Any]:
    """Return a record without its digest; an error if that is missing or another."""
    values = {key: value for key, value in record.items() if key != DIGEST}
    if record.get(DIGEST) != of(values, before):
        raise CheckpointError(
            f"{where} is not as it was written",
            "its digest is not that of its content: it was edited, is damaged or belongs to another run",
            "Put it back as it was",
        )
    return values


def of_tensor(value: Tensor) -> int:
    """Return the CRC-32 of a tensor's type, shape and bytes: a third of the time of SHA-256."""
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(data.data, zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode()))


def identity(experiment: Experiment, inputs: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the metadata that identify a run: its settings, the digests of its inputs, and the id made of these.

    Runs of one experiment have one id, and so the same bytes.
    """
    settings = {key: value for key, value in dotted(experiment.to_dict()).items() if key not in UNRECORDED}
    known = {"settings": settings, **inputs}
    return {"id": of(known), **known}
