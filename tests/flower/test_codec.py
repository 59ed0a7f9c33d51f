"""Records hold trees to the last bit, and nothing else is let in."""

from __future__ import annotations

import tracemalloc
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from flwr.app import Array
from hypothesis import given

from asserts import same_bytes
from fedrane import Model, State, tree
from fedrane.flower.codec import Encoder, Layout, MessageError, decode, digest, schema, sent_bytes

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool]


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(shape, generator=draws)).to(dtype)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_what_is_encoded_comes_back_to_the_last_bit(parts: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = {f"p{i}": some(dtype, tuple(shape), i) for i, (dtype, shape) in enumerate(parts)}
    back = decode(Encoder().record(tensors), schema(tensors))
    same_bytes(back, tensors)
    assert list(back) == list(tensors)


def test_a_state_comes_back_with_its_order_and_its_empty_parts() -> None:
    state = State(Model({"b.w": some(torch.float32, (2, 3)), "a.w": some(torch.float32, (2,))}, {}), {"x": {}, "y": {}})
    layout = Layout.from_text(Layout.of(state).to_text())
    back = layout.state(decode(Encoder().record(tree.flatten(state)), layout.schema))
    same_bytes(back, state)
    assert list(back.model.params) == ["b.w", "a.w"]
    assert back.extra == {"x": {}, "y": {}}


def test_strided_tensors_are_sent_as_they_read() -> None:
    tensors = {"t": some(torch.float32, (3, 4)).T, "o": some(torch.float32, (8,))[::2]}
    same_bytes(decode(Encoder().record(tensors), schema(tensors)), tree.map(torch.Tensor.contiguous, tensors))


def test_bf16_is_half_the_bytes_and_nearest() -> None:
    tensors = {"w": some(torch.float32, (50, 3)), "n": torch.arange(5)}
    record = Encoder(bf16=True).record(tensors)
    back = decode(record, schema(tensors), bf16=True)
    same_bytes(back["w"], tensors["w"].bfloat16().float())
    same_bytes(back["n"], tensors["n"])
    assert sent_bytes(tensors, bf16=True) == 2 * 150 + 8 * 5
    assert len(record["w"].data) < 2 * 150 + 256


def test_what_is_exact_is_not_shortened() -> None:
    tensors = {"w": some(torch.float32, (5,)), "frozen": some(torch.float32, (5,), 1)}
    exact = frozenset({"frozen"})
    back = decode(Encoder(bf16=True).record(tensors, exact), schema(tensors), True, exact)
    same_bytes(back["frozen"], tensors["frozen"])
    assert not tree.equal(back["w"], tensors["w"])


def test_one_tensor_for_many_clients_is_made_into_bytes_once() -> None:
    encoder, tensors = Encoder(), {"w": some(torch.float32, (5,))}
    assert encoder.record(tensors)["w"] is encoder.record(tensors)["w"]


GOOD = {"w": some(torch.float32, (4, 3)), "b": some(torch.float32, (3,))}


def changed(**arrays: Any) -> dict[str, Array]:
    """The good record with some arrays replaced, or taken away."""
    record = dict(Encoder().record(GOOD)) | arrays
    return {name: array for name, array in record.items() if array is not None}


def lying(array: Array, **changes: Any) -> Array:
    return Array(**{**{f: getattr(array, f) for f in FIELDS}, **changes})


FIELDS = ("dtype", "shape", "stype", "data")
NAN, INFINITE = (np.full((4, 3), value, np.float32) for value in (np.nan, -np.inf))
GOOD_W = Encoder().record(GOOD)["w"]
BAD = {
    "missing": changed(b=None),
    "extra": changed(c=Array(np.zeros(1, np.float32))),
    "nan": changed(w=Array(NAN)),
    "infinite": changed(w=Array(INFINITE)),
    "shape": changed(w=Array(np.zeros((3, 4), np.float32))),
    "type": changed(w=Array(np.zeros((4, 3), np.float64))),
    "large": changed(w=Array(np.zeros((400, 3), np.float32))),
    "large but declared small": changed(w=lying(Array(np.zeros((400, 3), np.float32)), shape=(4, 3))),
    "another shape in the header": changed(w=lying(Array(np.zeros((3, 4), np.float32)), shape=(4, 3))),
    "cut": changed(w=lying(GOOD_W, data=GOOD_W.data[:-1])),
    "longer": changed(w=lying(GOOD_W, data=GOOD_W.data + b"\0")),
    "no array": changed(w=lying(GOOD_W, data=b"x" * len(GOOD_W.data))),
    "pickled": changed(w=lying(GOOD_W, data=GOOD_W.data.replace(b"<f4", b"|O "))),
    "other serialisation": changed(w=lying(GOOD_W, stype="pickle")),
    "columns first": changed(w=Array(np.asfortranarray(np.ones((4, 3), np.float32)))),
    "nothing": {},
}


@pytest.mark.parametrize("record", BAD.values(), ids=BAD)
def test_anything_else_is_refused(record: dict[str, Array]) -> None:
    with pytest.raises(MessageError):
        decode(record, schema(GOOD))


HEADERS = [
    "(" * 4000,
    "[" * 90,
    "{'descr': " + "-" * 3000,
    "1_" * 50,
    chr(0),
    chr(39) * 3,
    "lambda: 0",
    "f'{1}'",
    "9" * 5000,
    "",
]


@pytest.mark.parametrize("text", HEADERS, ids=lambda text: text[:8])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0), (9, 9)])
def test_whatever_a_header_raises_it_is_a_refusal(text: str, version: tuple[int, int]) -> None:
    """NumPy parses it as Python: brackets that are never closed raise tokenize.TokenError, for instance."""
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    header = b"\x93NUMPY" + bytes(version) + length + text.encode()
    array = lying(GOOD_W, data=header + bytes(48), shape=(4, 3))
    with pytest.raises(MessageError):
        decode(changed(w=array), schema(GOOD))


def test_a_giant_is_refused_before_memory_is_taken_for_it() -> None:
    """A header of a few bytes that claims a terabyte."""
    header = GOOD_W.data[:128].replace(b"(4, 3), }", b"(99999999, 3333), }"[:19])
    bomb = changed(w=lying(GOOD_W, data=header + GOOD_W.data[128:]))
    tracemalloc.start()
    with pytest.raises(MessageError):
        decode(bomb, schema(GOOD))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


def test_digests_of_other_types_and_shapes_differ() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(4, dtype=torch.int32)]
    assert len({digest(zero) for zero in zeros}) == 4
    assert digest(GOOD["w"].T.contiguous().T) == digest(GOOD["w"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"leaves": {"a": ["float32", ["x"]]}, "empty": [], "constant": {}}',
        '{"leaves": {"a": ["float32", [Infinity]]}, "empty": [], "constant": {}}',
        '{"leaves": [], "empty": [], "constant": {}}',
        '{"leaves": {}, "empty": [], "constant": []}',
        "[" * 100_000,
    ],
)
def test_a_broken_layout_is_refused(text: str) -> None:
    with pytest.raises(MessageError):
        Layout.from_text(text)


def test_a_layout_of_unknown_types_or_without_a_model_is_refused() -> None:
    with pytest.raises(MessageError):
        _ = Layout({"a": ("object", [1])}, [], {}).schema
    with pytest.raises(MessageError):
        Layout({"a": ("float32", [1])}, [], {}).state({"a": torch.zeros(1)})
