"""Work on tensors that stay where they are, done again without the Python that led to it.

What a CUDA graph is on a GPU: the first time the operations are written down with the memory they read and write, and
from then on they alone are repeated, into the same memory. Views need no repeating, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 1 << 28
"""Bytes that a recording may keep: where a step needs more, Python is little of it."""
ASKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Recording:
    """Work that is recorded when it is first done; where that cannot be, it is done anew each time."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.calls: list[Callable[[], object]] | None = None

    def replay(self) -> None:
        if self.calls is None:
            recorder = _Recorder()
            with _Questions(recorder), recorder:
                self.work()
            self.calls = recorder.calls
        elif self.calls:
            for call in self.calls:
                call()
        else:
            self.work()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.given_up = False
        self.kept = 0

    def give_up(self) -> None:
        self.calls, self.given_up = [], True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if _depends_on_data(func, args):
            self.give_up()
        if self.given_up:
            return found
        inputs = {_memory(value) for value in _tensors((args, kwargs))}
        results = _tensors(found)
        fresh = [value for value in results if _memory(value) not in inputs]
        self.kept += sum(value.nbytes for value in fresh)
        if self.kept > MOST:
            self.give_up()
        elif fresh:
            self.calls.append(_into(func, args, kwargs, results))
        elif func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
        return found


class _Questions(TorchFunctionMode):
    """Numbers that leave the tensors unseen by the recorder: what is made of them is not written down."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASKS:
            self.recorder.give_up()
        return func(*args, **(kwargs or {}))


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """What comes out, or its shape, is Python's to see, which is not asked when the operation is repeated."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Callable[[], object]:
    """The operation once more, its results in the memory of the first ones."""
    variant, names = _with_out(func)
    if variant and len(names) == len(results):  # one that is not asked for is None
        return partial(variant, *args, **kwargs, **dict(zip(names, results, strict=True)))

    def again() -> None:
        for to, value in zip(results, _tensors(func(*args, **kwargs)), strict=True):
            to.copy_(value)

    return again


@cache
def _with_out(func: Any) -> tuple[Any, list[str]]:
    """The same operation given where to write, and the names by which it is."""
    same = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        outs = [a.name for a in other._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and others == same:
            return other, outs
    return None, []
