"""The form of a round's record: a line of ``metrics.jsonl`` may come from anyone."""

from __future__ import annotations

import re
from typing import Any

from fedrane.ops.ranking import Ranking

_NUMBER = re.compile(
    r"(eval_)?seconds|samples_per_second|bytes_(up|down)|train/(loss|examples)|\w+/(local_|balanced_|minority_)?accuracy\w*"
    rf"|\w+/(local_)?(r2\w*|{'|'.join(('rmse', 'mae', 'f1', 'clients_with_both_classes', *Ranking._fields))})"
)
"""Keys whose values are added up or compared."""
_OF_COHORT = re.compile(r"cosine|gne/weights|clients/.*")
"""Keys with a value for each client of the cohort."""
_OF_ALL = ("global/local_clients", "personal/clients")
"""Keys with a value for each client that was evaluated."""
_CLIENTS = ("cohort", "lost", "unevaluated")
_LARGEST = 1 << 53
"""Up to which a float holds all whole numbers."""


def problem(record: Any, population: int = _LARGEST) -> str:
    """What is wrong with the record of a round of a run with so many clients; empty if nothing is."""
    if not isinstance(record, dict) or not _is_whole(record.get("round")) or record["round"] < 1:
        return "is not the record of a round"
    clients = {name: record.get(name, []) for name in _CLIENTS}
    for name, who in clients.items():
        if not isinstance(who, list) or not all(_is_whole(k) and k < population for k in who) or len({*who}) < len(who):
            return f"has {name} that are not clients"
    numbers = dict.fromkeys(_OF_ALL, population - len(clients["unevaluated"])) if population < _LARGEST else {}
    for key, value in record.items():
        number = len(clients["cohort"]) if _OF_COHORT.fullmatch(key) else numbers.get(key)
        if value is not None and not _fits(key, value, number):
            return f"has a {key} that cannot be"
    return ""


def _fits(key: str, value: Any, number: int | None) -> bool:
    """Whether a key may have this value; ``number`` is how many it has if there is one for each client."""
    if _NUMBER.fullmatch(key):
        return _is_number(value)
    if number is not None or isinstance(value, list):
        parts = value if isinstance(value, list) else [""]
        return number in (None, len(parts)) and all(part is None or _is_number(part) for part in parts)
    if isinstance(value, dict):  # the reasons why clients were left out
        return all(isinstance(text, str) for text in value.values())
    return isinstance(value, str | bool) or _is_number(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)
