"""What travels in a federation, changed in any way: a message or one reply is refused, and nothing else is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import fedrane
from contained import examples, used_or_refused
from damage import as_json, damaged, replaced, words
from fedrane import tree
from fedrane.flower import codec
from fedrane.flower.messages import MAX_TEXT, read_identity, read_tally
from flower_grids import looped, small

pytestmark = pytest.mark.slow

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats()
entries = numbers | st.booleans() | words.map(lambda text: text.encode(errors="replace").decode())
metrics = numbers | st.lists(st.floats(), max_size=11) | st.lists(st.integers(0, 2**62), max_size=11)


@st.composite
def arrays(draw: st.DrawFn, given: Array) -> Array:
    """The array with other bytes, or that says something else of itself."""
    dtype = draw(st.sampled_from([given.dtype, given.dtype, "float64", "object", "", "uint16"]))
    shape = draw(st.sampled_from([given.shape, given.shape, (), (1 << 40,), (0,), (-1, 1)]))
    stype = draw(st.sampled_from([given.stype, given.stype, "pickle", ""]))
    data = given.data
    if draw(st.booleans()):
        data = draw(damaged(data[:128])) + data[128:]
    return Array(dtype, shape, stype, draw(damaged(data)))


@st.composite
def records(draw: st.DrawFn, content: RecordDict) -> RecordDict:
    """The content with one record changed, lost, or of another type, or with another one beside."""
    content = copy.deepcopy(content)
    name = draw(st.sampled_from([*content.keys()])) if content else "new"
    how = draw(st.sampled_from(["change", "change", "change", "lose", "type", "add"]))
    record = content.get(name)
    if how == "lose" and content:
        del content[name]
    elif how == "add":
        content[draw(st.text(max_size=9)) or "x"] = ConfigRecord({"blob": draw(st.binary(max_size=99))})
    elif how == "type":
        content[name] = draw(st.sampled_from([ConfigRecord({}), MetricRecord({}), ArrayRecord()]))
    elif isinstance(record, ArrayRecord) and record:
        path = draw(st.sampled_from([*record.keys()]))
        if draw(st.integers(0, 5)) == 0:
            del record[path]
        else:
            record[path] = draw(arrays(record[path]))
    elif isinstance(record, ConfigRecord | MetricRecord):
        key = draw(st.sampled_from([*record.keys(), "more"]))
        value = record.get(key)
        if isinstance(value, str) and value.startswith("{") and draw(st.booleans()):
            record[key] = as_json(draw(replaced(json.loads(value))))
        elif draw(st.integers(0, 5)) == 0 and key in record:
            del record[key]
        else:
            record[key] = draw(entries if isinstance(record, ConfigRecord) else metrics)
    return content


def tampering(data: st.DataObject, only: Callable[[Message], bool]) -> Callable[[Message], Message]:
    """Changes each message of client 1."""

    def change(message: Message) -> Message:
        if not message.has_error() and only(message):
            message.content = data.draw(records(message.content))
        return message

    return change


def replies_of_1(message: Message) -> bool:
    return message.metadata.src_node_id == 1007


def requests_to_1(message: Message) -> bool:
    return message.metadata.dst_node_id == 1007 and "request" in message.content


THREE = small(clients=3, rounds=2, participation=1.0, batch=512, engine="flower")
METHODS = ("fedavg", "scaffold", "apple", "fedbabu")


@examples(8)
@given(data=st.data(), method=st.sampled_from(METHODS))
@pytest.mark.parametrize("which", ["replies", "requests"])
def test_a_federation(which: str, method: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of one client everything is changed: the others go on, and the model stays finite."""
    folder = tmp_path_factory.mktemp("federation")
    hooks = {"up": tampering(data, replies_of_1)} if which == "replies" else {"down": tampering(data, requests_to_1)}
    with looped(folder, nodes=3, **hooks):
        result = used_or_refused(folder, lambda: fedrane.run(THREE.replace(method=method)), unpickles=True)
    if result is not None:
        assert tree.finite(result.server)
        for record in result.history:
            assert set(record["cohort"]) >= {0, 2}
            for why in record.get("refused", {}).values():
                assert why.isprintable()
                assert len(why) <= 10 * MAX_TEXT  # an escaped character is up to ten


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "c": torch.tensor(3), "d": torch.zeros(0, 2)}


@examples(150)
@given(data=st.data(), bf16=st.booleans())
def test_arrays(data: st.DataObject, bf16: bool, tmp_path: Path) -> None:
    sent = RecordDict({"up": codec.Encoder(bf16).record(TENSORS)})
    changed = data.draw(records(sent))
    expected = codec.schema(TENSORS)
    given = changed.array_records.get("up", ArrayRecord())
    read = used_or_refused(tmp_path, lambda: codec.decode(given, expected, bf16))
    if read is not None:
        assert codec.schema(read) == expected
        assert tree.finite(read)


def layout_text() -> str:
    return codec.Layout.of_leaves(TENSORS)._replace(empty=["e"], constant={"c": "0"}).to_text()


@examples(150)
@given(data=st.data())
def test_layouts(data: st.DataObject, tmp_path: Path) -> None:
    text = data.draw(st.one_of(replaced(json.loads(layout_text())).map(as_json), words, st.just("[" * 99_999)))

    def read() -> Any:
        layout = codec.Layout.from_text(text)
        layout.schema  # noqa: B018 - it is checked there
        return layout.state(TENSORS)

    used_or_refused(tmp_path, read)


COUNTS = {
    "examples": 5,
    "hits": 2,
    "loss": 1.5,
    "few": 2,
    "few_hits": 1,
    "class_examples": [3, 2],
    "class_hits": [1, 1],
}


@examples(150)
@given(data=st.data())
def test_counts_and_identities(data: st.DataObject, tmp_path: Path) -> None:
    changed = data.draw(records(RecordDict({"it": MetricRecord(dict(COUNTS))})))
    tally = used_or_refused(tmp_path, lambda: read_tally(changed.metric_records.get("it"), 2, 5))
    assert tally is None or 0 <= tally.hits <= tally.examples
    who = data.draw(records(RecordDict({"identity": ConfigRecord({"client": 1, "num_examples": 9})})))
    used_or_refused(tmp_path, lambda: read_identity(7, who))
