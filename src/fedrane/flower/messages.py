"""What the server and a client send each other.

A request has all that a client must know: the round, its learning rate, which of its uploads was aggregated last, and
what comes down. A reply carries what goes up, and the objective's metrics. Neither holds a parameter that the method
keeps where it is. One that never changes at the server goes to a client once, and by its digest afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_type_hints

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedrane.engines.evaluation import Tally
from fedrane.errors import CheckpointError, ConfigError, DataError, Diverged, FedraneError, FileError
from fedrane.flower.codec import MessageError
from fedrane.task import State

TRAIN, EVALUATE, QUERY, DELIVER = "train", "evaluate", "query", "evaluate.deliver"
"""Flower's message types; a client that is delivered a model keeps it."""
PARAMS = "model/params/"
COUNTS, CLASS_COUNTS = ("examples", "hits", "loss", "few", "few_hits"), ("class_examples", "class_hits")
"""The names that a tally's fields have in a message, in the order of its fields."""
MAX_EXAMPLES = 10**9
"""More than any one client has: a larger number is a mistake or made up."""


MAX_TEXT = 300
"""Characters of a node's text that are logged and recorded."""
ERROR_CODES: dict[type[Exception], str] = {
    DataError: "data",
    ConfigError: "configuration",
    CheckpointError: "state",
    FileError: "file",
    Diverged: "diverged",
    Exception: "defect",
}
"""What the server learns of a client's errors, unless the node's configuration has error-texts=true."""


class ClientRequest(NamedTuple):
    """What the server sends a client beside the arrays."""

    key: str
    """Of the experiment: a client keeps one state for each."""
    server_start: int
    """How often the server has been started on it."""
    method_file: str
    """Where a simulation's node finds the method; empty where the round decides it."""
    client: int
    population: int
    round: int
    lr: float
    epochs: int
    batch: int
    aggregated: int
    """The round whose upload was aggregated last."""
    oldest: int
    """The earliest round that a resumed server may go back to."""
    bf16: bool
    layout: str
    first_state: str
    """The layout of what a client cannot derive of its first state by itself."""
    global_model: str
    """The layout of the global model, if it is requested; what was received is not repeated."""

    def record(self) -> ConfigRecord:
        return ConfigRecord(self._asdict())

    @classmethod
    def read(cls, content: RecordDict) -> ClientRequest:
        given = content.config_records.get("request", ConfigRecord())
        wanted = get_type_hints(cls)
        if given.keys() != wanted.keys():
            raise MessageError(
                "a message of another version", f"it has {', '.join(given)}", "Install one version everywhere"
            )
        for name, expected in wanted.items():
            if type(given[name]) is not expected:
                raise MessageError(f"{name} is {given[name]!r}", f"it is of type {expected.__name__}")
        return cls(**given)  # type: ignore[arg-type]  # checked just now


class ClientReply(NamedTuple):
    """What a client's training gives, checked."""

    up: State
    metrics: dict[str, float]


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- what a node says, and what it may send


def bounded_text(text: str) -> str:
    """A node's text as it may stand in a log: of limited length, without control characters."""
    shown = text[:MAX_TEXT] + ("…" if len(text) > MAX_TEXT else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def refusal_record(error: Exception, detailed: bool) -> RecordDict:
    """What a client replies instead: a message's fault as it is, of anything else the kind only.

    Other errors may name the client's files, labels or examples.
    """
    if isinstance(error, MessageError) or detailed:
        kind = "" if isinstance(error, FedraneError) else f"{type(error).__name__}: "
        return RecordDict({"refused": ConfigRecord({"why": bounded_text(f"{kind}{error}")})})
    code = next(code for cls, code in ERROR_CODES.items() if isinstance(error, cls))
    return RecordDict({"refused": ConfigRecord({"why": f"error '{code}': the node's own log says more"})})


def require_only(content: RecordDict, *names: str) -> None:
    """Refuse a reply that has other records than these: they are not looked at."""
    if unknown := content.keys() - {*names}:
        raise MessageError(f"{len(unknown)} records that were not asked for", f"it may have {', '.join(names)}")


# ---- who a node is


def identity_record(client: int, examples: int) -> RecordDict:
    return RecordDict({"identity": ConfigRecord({"client": client, "num_examples": examples})})


def read_identity(node: int, content: RecordDict) -> tuple[int, int]:
    """The node's client and the number of its training examples."""
    require_only(content, "identity")
    given = content.config_records.get("identity", ConfigRecord())
    client, examples = given.get("client"), given.get("num_examples")
    if (
        type(client) is not int
        or type(examples) is not int
        or not 0 <= client < MAX_EXAMPLES
        or not 0 < examples < MAX_EXAMPLES
    ):
        raise MessageError(
            f"it reports client {client!r} with {examples!r} examples", "both are whole numbers, from 0 and 1"
        )
    return client, examples


# ---- a client's evaluation


def tally_record(tally: Tally, by_class: bool) -> MetricRecord:
    names = (*COUNTS, *CLASS_COUNTS) if by_class else COUNTS
    values: dict[str, Any] = dict(zip(names, tally, strict=False))
    return MetricRecord({name: list(v) if isinstance(v, tuple) else v for name, v in values.items()})


def read_tally(record: MetricRecord | None, classes: int) -> Tally | None:
    """A client's counts, of one model on one part of its examples, if they can be true."""
    if record is None:
        return None
    values: dict[str, Any] = dict(record)
    numbers: dict[str, Any] = {name: values.get(name) for name in COUNTS}
    if not all(is_finite_number(n) and 0 <= n < MAX_EXAMPLES**2 for n in numbers.values()):
        raise MessageError(f"counts {numbers}", "they are finite and not negative")
    examples, hits, loss, minority_examples, minority_hits = numbers.values()
    whole = all(n == int(n) for name, n in numbers.items() if name != "loss")
    if not (
        whole and 0 < examples < MAX_EXAMPLES and hits <= examples and minority_hits <= minority_examples <= examples
    ):
        raise MessageError(f"counts {numbers}", "they are whole, and a part is not larger than the total")
    by_class = [_class_counts(values.get(name, []), classes) for name in CLASS_COUNTS]
    of, right = by_class
    if len(of) != len(right) or any(h > n for n, h in zip(of, right, strict=True)):
        raise MessageError(f"counts of {len(of)} and {len(right)} classes", "no class has more hits than examples")
    if of and (sum(of) != examples or sum(right) != hits):
        raise MessageError("counts by class", f"they sum up to {examples} examples and {hits} hits")
    return Tally(int(examples), int(hits), float(loss), int(minority_examples), int(minority_hits), of, right)


def _class_counts(given: Any, classes: int) -> tuple[int, ...]:
    """None, or one for each class."""
    if not isinstance(given, list) or len(given) not in (0, classes):
        raise MessageError("counts by class", f"a list of {classes} was expected")
    if not all(is_finite_number(n) and n == int(n) and 0 <= n < MAX_EXAMPLES for n in given):
        raise MessageError("counts by class", "they are whole numbers from 0")
    return tuple(int(n) for n in given)
