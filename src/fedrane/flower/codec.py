"""Trees of tensors to Flower's records and back; what arrives is checked against what was expected before it is used.

An array travels as Flower's own ``Array`` of NumPy's format, so that Flower's tools can read it. It is never handed to
``numpy.load``: the header, the number of bytes and the expected shape are compared first. Only then is memory taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import Tensor

from fedrane import tree
from fedrane.errors import FedraneError
from fedrane.task import State
from fedrane.training.run_folder import as_state, empty_dicts, refill
from fedrane.tree import Tensors

BF16_STORAGE = "uint16"
"""The NumPy type that holds the bits of bfloat16, which NumPy does not have."""
STYPE = "numpy.ndarray"
MAX_HEADER_BYTES = 4096
"""No header of a plain array has more."""


class MessageError(FedraneError):
    """A message that is not as expected: nothing of it is used."""


class Leaf(NamedTuple):
    """What one array must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Schema = dict[str, Leaf]


def schema(tensors: Tensors) -> Schema:
    """Of tensors by their paths."""
    return {path: Leaf(tuple(leaf.shape), leaf.dtype) for path, leaf in tensors.items()}


def digest(tensor: Tensor) -> str:
    """A short name for a tensor's exact bytes."""
    content = tensor.detach().cpu().contiguous()
    name = hashlib.blake2b(f"{content.dtype} {tuple(content.shape)} ".encode(), digest_size=16)
    name.update(content.numpy().tobytes())
    return name.hexdigest()


def as_bf16(dtype: torch.dtype, bf16: bool) -> bool:
    """Whether a tensor of this type is sent as bfloat16: only floating-point numbers are."""
    return bf16 and dtype.is_floating_point


@dataclass
class Encoder:
    """Makes records; a tensor that goes to many clients is turned into bytes once."""

    bf16: bool = False
    """Send floating-point numbers as bfloat16."""
    _cache: dict[tuple[int, bool], tuple[Tensor, Array]] = field(default_factory=dict)

    def record(self, tensors: Tensors, exact: frozenset[str] = frozenset()) -> ArrayRecord:
        """The arrays of these paths; those in ``exact`` are never rounded."""
        record = ArrayRecord()
        for path, leaf in tensors.items():  # set one by one, arrays are shared and not copied
            record[path] = self._array(leaf, path in exact)
        return record

    def _array(self, leaf: Tensor, exact: bool) -> Array:
        packed = self._cache.get((id(leaf), exact))
        if packed is None:  # the tensor is held as well: the id of a freed one could be reused
            packed = self._cache[id(leaf), exact] = leaf, _pack(leaf, self.bf16 and not exact)
        return packed[1]


def _pack(leaf: Tensor, bf16: bool) -> Array:
    content = leaf.detach().cpu()
    if as_bf16(leaf.dtype, bf16):
        content = content.to(torch.bfloat16).view(torch.int16)
        return Array(np.ascontiguousarray(content.numpy()).view(np.uint16).reshape(tuple(leaf.shape)))
    return Array(np.ascontiguousarray(content.numpy()).reshape(tuple(leaf.shape)))


def sent_bytes(tensors: Tensors, bf16: bool, exact: frozenset[str] = frozenset()) -> int:
    """The bytes of the arrays, without Flower's wrapping."""
    return sum(
        leaf.numel() * (2 if as_bf16(leaf.dtype, bf16 and path not in exact) else leaf.element_size())
        for path, leaf in tensors.items()
    )


def decode(
    record: Mapping[str, Array], expected: Schema, bf16: bool = False, exact: frozenset[str] = frozenset()
) -> Tensors:
    """The tensors of a record that holds exactly what is expected: names, shapes, types, sizes, finite numbers."""
    missing, extra = expected.keys() - record.keys(), record.keys() - expected.keys()
    if missing or extra:
        difference = f"{_some(missing)} missing" if missing else f"{_some(extra)} not asked for"
        raise MessageError(f"arrays: {difference}", f"{len(expected)} were expected and {len(record)} came")
    for path, leaf in expected.items():  # all of them before the first byte is copied
        _check(path, record[path], leaf, as_bf16(leaf.dtype, bf16 and path not in exact))
    return {
        path: _unpack(path, record[path], leaf, as_bf16(leaf.dtype, bf16 and path not in exact))
        for path, leaf in expected.items()
    }


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")


def _numpy_name(dtype: torch.dtype, bf16: bool) -> str:
    return BF16_STORAGE if bf16 else str(dtype).removeprefix("torch.")


def _check(path: str, array: Array, leaf: Leaf, bf16: bool) -> None:
    name = _numpy_name(leaf.dtype, bf16)
    if array.stype != STYPE or array.dtype != name or tuple(array.shape) != leaf.shape:
        raise MessageError(
            f"{path} is {array.dtype} {tuple(array.shape)} ({array.stype})", f"{name} {leaf.shape} was expected"
        )
    size = math.prod(leaf.shape) * np.dtype(name).itemsize
    if not size < len(array.data) <= size + MAX_HEADER_BYTES:
        raise MessageError(f"{path} has {len(array.data)} bytes", f"{size} and a header were expected")


def _unpack(path: str, array: Array, leaf: Leaf, bf16: bool) -> Tensor:
    stream = io.BytesIO(array.data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, columns_first, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # NumPy parses the header as Python, which fails in many ways
        raise MessageError(f"{path} is not an array of NumPy's: {error}") from error
    name = _numpy_name(leaf.dtype, bf16)
    rest = len(array.data) - stream.tell()
    complete = rest == math.prod(leaf.shape) * np.dtype(name).itemsize
    if shape != leaf.shape or (columns_first and len(shape) > 1) or dtype != np.dtype(name) or not complete:
        raise MessageError(f"{path} has {dtype} {shape} in its header", f"{name} {leaf.shape} was expected")
    values = np.frombuffer(array.data, np.dtype(name), offset=stream.tell()).reshape(leaf.shape).copy()
    tensor = torch.from_numpy(values)
    if bf16:
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).to(leaf.dtype)
    # NaN spreads into both ends; this is many times faster than testing each number.
    if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, torch.stack(tensor.aminmax()))):
        raise MessageError(f"{path} holds numbers that are not finite")
    return tensor


# ---- complete states: what a record of arrays cannot hold goes beside it as text


class Layout(NamedTuple):
    """How the arrays of a message make a state."""

    leaves: dict[str, tuple[str, list[int]]]
    """Type and shape of every path, in order."""
    empty: list[str]
    """Dicts that hold nothing."""
    constant: dict[str, str]
    """Paths that never change at the server, by the digest of their bytes: to be kept, and perhaps not sent again."""

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> Layout:
        try:
            parsed = json.loads(text)
            leaves = {
                str(path): (str(dtype), [int(n) for n in shape]) for path, (dtype, shape) in parsed["leaves"].items()
            }
            constant = {str(path): str(name) for path, name in parsed["constant"].items()}
            return cls(leaves, [str(path) for path in parsed["empty"]], constant)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise MessageError(f"a layout that cannot be read: {error}") from error

    @property
    def schema(self) -> Schema:
        types = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.int64, torch.bool)}
        for path, (dtype, _) in self.leaves.items():
            if dtype not in types:
                raise MessageError(f"{path} is of {dtype}", f"states hold {', '.join(types)}")
        return {path: Leaf(tuple(shape), types[dtype]) for path, (dtype, shape) in self.leaves.items()}

    @classmethod
    def of(cls, state: State, constant: Mapping[str, str] | None = None) -> Layout:
        return cls.of_leaves(tree.flatten(state))._replace(
            empty=sorted(empty_dicts(state)), constant=dict(constant or {})
        )

    @classmethod
    def of_leaves(cls, tensors: Tensors) -> Layout:
        """Of a part of a state."""
        types = {path: str(leaf.dtype).removeprefix("torch.") for path, leaf in tensors.items()}
        return cls({path: (types[path], list(leaf.shape)) for path, leaf in tensors.items()}, [], {})

    def state(self, tensors: Tensors) -> State:
        """The state of these tensors, in the order in which it was at the other end."""
        try:
            return as_state(refill({path: tensors[path] for path in self.leaves}, self.empty))
        except (KeyError, TypeError) as error:
            raise MessageError("a message without a model, its statistics or what a method adds", str(error)) from error
