"""What the server and a client send each other.

A request has all that a client must know: the round, its learning rate, which of its uploads was aggregated last, and
what comes down. A reply carries what goes up, and the objective's metrics. Neither holds a parameter that the method
keeps where it is. One that never changes at the server goes to a client once, and by its digest afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedrane.data.sampling import Span, Steps
from fedrane.engines.evaluation import Count, Tally
from fedrane.errors import CheckpointError, ConfigError, DataError, Diverged, FedraneError, FileError
from fedrane.flower.codec import MessageError
from fedrane.flower.roster import MAX_EXAMPLES
from fedrane.ops.ranking import Ranking
from fedrane.ops.regression import Residuals
from fedrane.task import State, Task

TRAIN, EVALUATE, QUERY, DELIVER = "train", "evaluate", "query", "evaluate.deliver"
"""Flower's message types; a client that is delivered a model keeps it."""
PARAMS = "model/params/"
COUNTS, CLASS_COUNTS = ("examples", "hits", "loss", "few", "few_hits"), ("class_examples", "class_hits")
"""The names that a tally's fields have in a message, in the order of its fields; then come those of its ranking."""
MAX_NUMBER = 1e18
"""No honest loss or count is larger."""
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
    epochs: float
    steps: int
    """Local steps of the round; 0 if it has epochs instead."""
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

    @property
    def length(self) -> Span:
        """How long the client trains."""
        return Steps(self.steps) if self.steps else self.epochs

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
        request = cls(**given)  # type: ignore[arg-type]  # checked just now
        if not is_bounded_number(request.epochs) or request.epochs < 0 or request.steps < 0:
            raise MessageError(f"epochs={request.epochs} and steps={request.steps}", "a client trains neither of them")
        return request


class ClientReply(NamedTuple):
    """What a client's training gives, checked."""

    up: State
    metrics: dict[str, float]


def is_bounded_number(value: Any) -> bool:
    """Whether it can be summed up with others of its kind."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER


# ---- texts and refusals of a node, and what it may send


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


def require_only(content: Mapping[str, Any], *names: str) -> None:
    """Refuse a reply that has other records than these, or a record with other fields: they are not looked at."""
    if unknown := content.keys() - {*names}:
        raise MessageError(f"{len(unknown)} entries that were not asked for", f"it may have {', '.join(names)}")


# ---- who a node is


def identity_record(client: int, examples: int) -> RecordDict:
    """All examples of the client: how they are split is agreed."""
    return RecordDict({"identity": ConfigRecord({"client": client, "num_examples": examples})})


def read_identity(node: int, content: RecordDict) -> tuple[int, int]:
    """The node's client and the number of its examples."""
    require_only(content, "identity")
    given = content.config_records.get("identity", ConfigRecord())
    require_only(given, "client", "num_examples")
    client, examples = given.get("client"), given.get("num_examples")
    if (
        type(client) is not int
        or type(examples) is not int
        or not 0 <= client <= MAX_EXAMPLES
        or not 2 <= examples <= MAX_EXAMPLES
    ):
        raise MessageError(
            f"it reports client {client!r} with {examples!r} examples",
            f"whole numbers from 0 and 2 to {MAX_EXAMPLES} were expected",
        )
    return client, examples


# ---- a client's evaluation


def count_record(count: Count, in_detail: bool) -> MetricRecord:
    """``in_detail`` tells more of the client's labels: its classes, or the sums of the numbers to predict."""
    if isinstance(count, Tally):
        return tally_record(count, by_class=in_detail)
    return MetricRecord(dict((count if in_detail else count.without_targets())._asdict()))


def read_count(record: MetricRecord | None, task: Task, declared: int) -> Count | None:
    """What a client counts, of one model on one part of its examples, if it can be true."""
    return read_residuals(record, declared) if task.target else read_tally(record, task.classes, declared)


def read_residuals(record: MetricRecord | None, declared: int) -> Residuals | None:
    """A client's sums, if there can be such examples; it has declared how many."""
    if record is None and not declared:
        return None
    if record is None:
        raise MessageError("no sums", f"of {declared} examples")
    require_only(record, *Residuals._fields)
    numbers: dict[str, Any] = {name: record.get(name) for name in Residuals._fields}
    if not all(map(is_bounded_number, numbers.values())):
        raise MessageError(f"sums {numbers}", f"they are numbers up to {MAX_NUMBER:g}")
    examples, targets, squares, absolute, loss = map(float, numbers.values())
    if examples != declared or not declared:
        raise MessageError(f"sums over {examples:g} examples", f"by what it reported when it joined, it has {declared}")
    room = 1 + 1e-6  # they were rounded
    if (
        min(squares, absolute, loss) < 0
        or targets**2 > room * examples * squares
        or absolute**2 > room * examples * loss
    ):
        raise MessageError(f"sums {numbers}", "there are no numbers with such sums and sums of squares")
    return Residuals(declared, targets, squares, absolute, loss)


def tally_record(tally: Tally, by_class: bool) -> MetricRecord:
    """A ranking goes with the counts by class only: an AUROC of 11/12 is of one example beside twelve, or three beside
    four."""
    names = (*COUNTS, *CLASS_COUNTS) if by_class else COUNTS
    values: dict[str, Any] = dict(zip(names, tally, strict=False))
    values |= tally.ranking._asdict() if by_class and tally.ranking else {}
    return MetricRecord({name: list(v) if isinstance(v, tuple) else v for name, v in values.items()})


def read_tally(record: MetricRecord | None, classes: int, declared: int) -> Tally | None:
    """A client's counts, of one model on one part of its examples, if they can be true; it has declared how many."""
    if record is None and not declared:
        return None
    if record is None:
        raise MessageError("no counts", f"of {declared} examples")
    require_only(record, *COUNTS, *CLASS_COUNTS, *Ranking._fields)
    values: dict[str, Any] = dict(record)
    numbers: dict[str, Any] = {name: values.get(name) for name in COUNTS}
    if not all(is_bounded_number(n) and n >= 0 for n in numbers.values()):
        raise MessageError(f"counts {numbers}", f"they are from 0 to {MAX_NUMBER:g}")
    examples, hits, loss, minority_examples, minority_hits = numbers.values()
    whole = all(n == int(n) for name, n in numbers.items() if name != "loss")
    others, other_hits = examples - minority_examples, hits - minority_hits
    if not (whole and minority_hits <= minority_examples and 0 <= other_hits <= others):
        raise MessageError(f"counts {numbers}", "they are whole, and a part is not larger than the total")
    if examples != declared or not declared:
        raise MessageError(
            f"counts of {int(examples)} examples", f"by what it reported when it joined, it has {declared}"
        )
    by_class = [_class_counts(values.get(name, []), classes) for name in CLASS_COUNTS]
    of, right = by_class
    if len(of) != len(right) or any(h > n for n, h in zip(of, right, strict=True)):
        raise MessageError(f"counts of {len(of)} and {len(right)} classes", "no class has more hits than examples")
    if of and (sum(of) != examples or sum(right) != hits):
        raise MessageError("counts by class", f"they sum up to {examples} examples and {hits} hits")
    counts = int(examples), int(hits), float(loss), int(minority_examples), int(minority_hits)
    return Tally(*counts, of, right, _ranking(values, of))


def _ranking(values: Mapping[str, Any], examples: Sequence[int]) -> Ranking | None:
    """Of a client that reports its examples of each of two classes, and has both; of no other."""
    given = {name: values[name] for name in Ranking._fields if name in values}
    expected = Ranking._fields if len(examples) == 2 and all(examples) else ()
    if given.keys() != {*expected} or not all(is_bounded_number(n) and 0 <= n <= 1 for n in given.values()):
        raise MessageError(
            f"measures of two classes {given}", f"they are from 0 to 1, and here {', '.join(expected) or 'none'}"
        )
    return Ranking(**given) if given else None


def _class_counts(given: Any, classes: int) -> tuple[int, ...]:
    """None, or one for each class."""
    if not isinstance(given, list) or len(given) not in (0, classes):
        raise MessageError("counts by class", f"a list of {classes} was expected")
    if not all(is_bounded_number(n) and n == int(n) and 0 <= n <= MAX_EXAMPLES for n in given):
        raise MessageError("counts by class", "they are whole numbers from 0")
    return tuple(int(n) for n in given)
