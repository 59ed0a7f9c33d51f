"""Record the operations of a step on a CPU and repeat them without the Python that led to them.

What a CUDA graph is on a GPU. The first time, the operations are written down with the memory they read and write; from
then on they alone are repeated, into the same memory. Views need no repeating, and nothing is allocated.

Only operators that have been shown to repeat correctly are recorded (:data:`fedrane.engines.operators.REPLAYABLE`).
Work with any other is done plainly each time, and :attr:`Recording.refused` is why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedrane.engines.operators import REPLAYABLE

MAX_RECORDED_BYTES = 1 << 28
"""Memory that a recording may keep: where a step needs more, Python is a small part of it."""
VALUE_READS = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__),
}
"""Functions that hand values to Python."""
LIST_CONVERSIONS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that read the values of tensors in a list."""
ATEN = torch.ops.aten
VIEW_CHANGES = {ATEN.t_, ATEN.transpose_, ATEN.squeeze_, ATEN.unsqueeze_, ATEN.detach_}
"""Operators that change how a tensor views its memory, and nothing else."""
SHAPE_ONLY = {ATEN.zeros_like, ATEN.ones_like, ATEN.full_like, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full}
"""Operators that take no more than the shape of their input."""
BROKEN_OUT_VARIANTS = {ATEN.native_batch_norm.out}
"""Wrong if given an output: this one takes what is there for a mean, if its input is not contiguous (2.13)."""


class Recording:
    """Work that is recorded when it is first done; where that is refused, it is done plainly each time.

    ``buffers`` is the memory that the work may leave changed. All else that it writes to must be made by it: a constant
    made by Python would be as the last replay left it.
    """

    def __init__(self, work: Callable[[], object], buffers: Sequence[Tensor]) -> None:
        self.work, self.buffers = work, buffers
        self.calls: list[Callable[[], object]] | None = None
        self.refused = ""
        """Why the work is not replayed, for the user; empty if it is, or if replaying would gain nothing."""

    @property
    def plain(self) -> bool:
        """Whether the work is done plainly each time."""
        return self.calls == []

    def replay(self) -> None:
        if self.calls is None:
            buffers = {storage(value) for value in self.buffers}
            recorder = _Recorder(buffers)
            with _ValueReads(recorder), recorder:
                self.work()
            self.refused = recorder.refused
            self.calls = [call.repeat() for call in _reuse_memory(_without_copies(recorder.calls), buffers)]
        elif self.calls:
            for call in self.calls:
                call()
        else:
            self.work()


class _Call(NamedTuple):
    """An operation, the tensors it was given, and those it made."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]

    def repeat(self) -> Callable[[], object]:
        """The operation once more, its results in the memory of the first ones."""
        if not self.outputs:
            return partial(self.func, *self.args, **self.kwargs)
        if self.func is ATEN._to_copy.default:
            return partial(ATEN.copy_.default, self.outputs[0], self.args[0])
        variant, names = _out_variant(self.func)
        if variant and len(names) == len(self.outputs):  # a result that is not needed is None
            return partial(variant, *self.args, **self.kwargs, **dict(zip(names, self.outputs, strict=True)))

        def copied() -> None:
            for to, value in zip(self.outputs, tensors(self.func(*self.args, **self.kwargs)), strict=True):
                to.copy_(value)

        return copied

    def touches(self, value: Tensor) -> bool:
        return any(storage(other) == storage(value) for other in (*self.inputs, *self.outputs))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, buffers: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.writable = set(buffers)  # with what the calls make
        self.given_up = False
        self.refused = ""
        self.bytes = 0

    def give_up(self, reason: str) -> None:
        if not self.given_up:
            self.calls, self.given_up, self.refused = [], True, reason

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # As they are now, since they may be transposed in place later, and without the gradients a hook asks for.
        now_args, now_kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        result = func(*args, **kwargs)
        if reason := _refusal(func, args, tensors((args, kwargs, result))):
            self.give_up(reason)
        if self.given_up or func.overloadpacket in VIEW_CHANGES:
            return result
        inputs = [] if func.overloadpacket in SHAPE_ONLY else tensors((now_args, now_kwargs))
        outputs = [value.detach() for value in tensors(result)]
        old = {storage(value) for value in inputs}
        fresh = sum(value.nbytes for value in outputs if storage(value) not in old)
        self.bytes += fresh
        if any(storage(value) not in self.writable for value in _written(func, args, kwargs) if value.numel()):
            self.give_up(f"{func.name()} writes to memory that the step did not make")
        elif self.bytes > MAX_RECORDED_BYTES:
            self.give_up("")
        elif fresh or func._schema.is_mutable:
            self.calls.append(_Call(func, now_args, now_kwargs, inputs, outputs if fresh else []))
            self.writable |= {storage(value) for value in outputs if fresh}
        return result


class _ValueReads(TorchFunctionMode):
    """Values that leave the tensors unseen by the recorder: what Python makes of them is not written down."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        listed = [value for value in (*args, *(kwargs or {}).values()) if not isinstance(value, Tensor)]
        if func in VALUE_READS or (func in LIST_CONVERSIONS and tensors(listed)):
            self.recorder.give_up("Python reads values of tensors")
        return func(*args, **(kwargs or {}))


def _refusal(func: Any, args: tuple[Any, ...], touched: list[Tensor]) -> str:
    """Why this call cannot be repeated; empty if it can."""
    if func.name() not in REPLAYABLE:
        return f"{func.name()} is not known to repeat correctly"
    if func is ATEN.index.Tensor and any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1])):
        return "the shape of what a mask selects depends on values"
    if not all(map(_plain, touched)):
        return "a tensor is conjugated, negated or sparse"
    return ""


def _plain(value: Tensor) -> bool:
    """Whether its memory holds its numbers, all of them and as they are."""
    return value.layout == torch.strided and not (value.is_conj() or value.is_neg())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if func is ATEN.native_batch_norm.default:  # its schema hides it: in training, the running statistics
        return tensors(args[3:5]) if args[5] else []
    if not func._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tensors([given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write])


def _without_copies(calls: list[_Call]) -> list[_Call]:
    """Without constants, and with results written at once to where they would be copied."""
    calls = _without_constants(calls)
    for at, call in enumerate(calls):
        if call.func is ATEN._foreach_copy_.default:
            pairs = list(zip(*call.args[:2], strict=True))
            left = [pair for pair in pairs if not _write_directly(calls, at, *pair)]
            to, values = ([pair[side] for pair in left] for side in (0, 1))
            calls[at] = call._replace(args=(to, values), inputs=[*to, *values])
    return [call for call in calls if call.outputs or call.inputs]


def _without_constants(calls: list[_Call]) -> list[_Call]:
    """Without what is the same each time: results of no tensors, or of such results alone."""
    written = {storage(value) for call in calls for value in _written(call.func, call.args, call.kwargs)}
    constants: set[int] = set()
    left = []
    for call in calls:
        made = {storage(value) for value in call.outputs}
        if made and not made & written and all(storage(value) in constants for value in call.inputs):
            constants |= made
        else:
            left.append(call)
    return left


def _write_directly(calls: list[_Call], at: int, to: Tensor, value: Tensor) -> bool:
    """Have this value written where it is copied to at last, if nobody can see a difference.

    Nobody else reads the value or, from then on, what was there before; and the operation that makes it is elementwise,
    so that it may overwrite what it reads.
    """
    users = [number for number, call in enumerate(calls) if number != at and call.touches(value)]
    if len(users) != 1 or users[0] > at:
        return False
    maker = calls[users[0]]
    made = len(maker.outputs) == 1 and view(maker.outputs[0]) == view(value) and _out_variant(maker.func)[0]
    elementwise = torch.Tag.pointwise in maker.func.tags and _layout(value) == _layout(to)
    same = all(view(other) == view(to) for other in maker.inputs if storage(other) == storage(to))
    copied = [storage(other) for other in calls[at].args[1]]
    copied_too = storage(to) in copied or copied.count(storage(value)) > 1
    if not (made and elementwise and same) or copied_too or any(c.touches(to) for c in calls[users[0] + 1 : at]):
        return False
    calls[users[0]] = maker._replace(outputs=[to])
    return True


def _reuse_memory(calls: list[_Call], buffers: set[int]) -> list[_Call]:
    """With results in memory that nothing needs any more, which is likely still in a cache."""
    last = {storage(value): at for at, call in enumerate(calls) for value in (*call.inputs, *call.outputs)}
    moved: dict[int, torch.UntypedStorage] = {}
    free: list[torch.UntypedStorage] = []

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or storage(value) not in moved:
            return value
        return value.new_empty(0).set_(moved[storage(value)], value.storage_offset(), value.shape, value.stride())

    packed = []
    for at, call in enumerate(calls):
        inputs = {storage(value) for value in call.inputs}
        ending = {key for key in inputs & moved.keys() if last[key] == at}
        new = [value for value in call.outputs if storage(value) not in moved.keys() | buffers | inputs]
        over = _overwritable(call, ending) if new else None
        for value in new:
            moved[storage(value)] = _take(free, value) if over is None else moved[over]
        packed.append(_Call(*pytree.tree_map(move, tuple(call))))
        ending |= {storage(value) for value in call.outputs if last[storage(value)] == at} & moved.keys()
        free += [moved[key] for key in ending - {over}]
    return packed


def _take(free: list[torch.UntypedStorage], value: Tensor) -> torch.UntypedStorage:
    """The last of the free that fits without much waste, else new: a hook may have kept the first time's."""
    size = value.untyped_storage().nbytes()
    for number in reversed(range(len(free))):
        if size <= free[number].nbytes() <= 2 * size:
            return free.pop(number)
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _overwritable(call: _Call, ending: set[int]) -> int | None:
    """Memory that is read here for the last time, and elementwise, so that the result may be put there."""
    if len(call.outputs) != 1 or torch.Tag.pointwise not in call.func.tags or not _out_variant(call.func)[0]:
        return None

    def offset(value: Tensor) -> tuple[Any, ...]:
        return value.storage_offset(), *_layout(value)

    for key in ending:
        ways = {offset(value) for value in call.inputs if storage(value) == key}
        if ways == {offset(call.outputs[0])}:
            return key
    return None


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride()


def view(value: Tensor) -> tuple[Any, ...]:
    """Two tensors with equal views are the same numbers, read alike."""
    return storage(value), value.storage_offset(), *_layout(value)


def overwrite(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Copy as if at once: a value that is in one of the buffers is read before that buffer is overwritten."""
    taken = {storage(buffer) for buffer in buffers}
    safe = [
        value.clone() if storage(value) in taken and view(value) != view(buffer) else value
        for value, buffer in zip(values, buffers, strict=True)
    ]
    if buffers:
        torch._foreach_copy_(buffers, safe)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage(value: Tensor) -> int:
    """What a tensor shares with its views."""
    return value.untyped_storage().data_ptr()


@cache
def _out_variant(func: Any) -> tuple[Any, list[str]]:
    """The same operation with outputs given, and the names of these."""
    same = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        outs = [a.name for a in other._schema.arguments if a.is_out and str(a.type) == "Tensor"]
        others = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and others == same and other not in BROKEN_OUT_VARIANTS:
            return other, outs
    return None, []
