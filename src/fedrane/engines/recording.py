"""Work on tensors that stay where they are, done again without the Python that led to it.

What a CUDA graph is on a GPU: the first time the operations are written down with the memory they read and write, and
from then on they alone are repeated, into the same memory. Views need no repeating, and nothing is allocated.
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

MOST = 1 << 28
"""Bytes that a recording may keep: where a step needs more, Python is little of it."""
ASKS = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__),
}
LISTS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""They read the numbers of what is in a list."""
NEVER = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),  # Python may see them
    torch.Tag.nondeterministic_seeded,  # a generator goes on from replay to replay
}
ATEN = torch.ops.aten
TURNS = {
    *(ATEN.t_, ATEN.transpose_, ATEN.swapaxes_, ATEN.swapdims_, ATEN.squeeze_, ATEN.unsqueeze_),
    *(ATEN.as_strided_, ATEN.detach_),
}
"""Operations that change how a tensor looks at its memory, and nothing else."""
FILLS = {ATEN.zeros_like, ATEN.ones_like, ATEN.full_like, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full}
"""Operations that take no more than the shape of what they are given."""
NOT_INTO = {ATEN.native_batch_norm.out}
"""Given where to write, these are wrong: this one takes what is there for a mean, if its input has gaps (2.13)."""


class Recording:
    """Work that is recorded when it is first done; where that cannot be, it is done anew each time.

    ``lasting`` is the memory that the work may leave changed. Whatever else it writes to must be made by it: what only
    Python makes, as a constant, would be found as the last time left it.
    """

    def __init__(self, work: Callable[[], object], lasting: Sequence[Tensor]) -> None:
        self.work, self.lasting = work, lasting
        self.calls: list[Callable[[], object]] | None = None

    @property
    def given_up(self) -> bool:
        return self.calls == []

    def replay(self) -> None:
        if self.calls is None:
            lasting = {memory(value) for value in self.lasting}
            recorder = _Recorder(lasting)
            with _NumbersAsked(recorder), recorder:
                self.work()
            self.calls = [call.again() for call in _packed(_shortened(recorder.calls), lasting)]
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
    given: list[Tensor]
    made: list[Tensor]

    def again(self) -> Callable[[], object]:
        """The operation once more, its results in the memory of the first ones."""
        if not self.made:
            return partial(self.func, *self.args, **self.kwargs)
        if self.func is ATEN._to_copy.default:
            return partial(ATEN.copy_.default, self.made[0], self.args[0])
        variant, names = _with_out(self.func)
        if variant and len(names) == len(self.made):  # a result that is not asked for is None
            return partial(variant, *self.args, **self.kwargs, **dict(zip(names, self.made, strict=True)))

        def copied() -> None:
            for to, value in zip(self.made, tensors(self.func(*self.args, **self.kwargs)), strict=True):
                to.copy_(value)

        return copied

    def touches(self, value: Tensor) -> bool:
        return any(memory(other) == memory(value) for other in (*self.given, *self.made))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, lasting: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.ours = set(lasting)  # memory that may be written to, with what the calls make
        self.given_up = False
        self.kept = 0

    def give_up(self) -> None:
        self.calls, self.given_up = [], True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # As they are now, since they may be turned in place later, and without the gradients a hook asks for.
        now_args, now_kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        found = func(*args, **kwargs)
        if not all(map(_plain, tensors((args, kwargs, found)))):
            self.give_up()
        if self.given_up or func.overloadpacket in TURNS:
            return found
        given = [] if func.overloadpacket in FILLS else tensors((now_args, now_kwargs))
        results = [value.detach() for value in tensors(found)]
        old = {memory(value) for value in given}
        fresh = sum(value.nbytes for value in results if memory(value) not in old)
        self.kept += fresh
        foreign = any(memory(value) not in self.ours for value in _written(func, args, kwargs) if value.numel())
        if _is_another_each_time(func, args) or self.kept > MOST or foreign:
            self.give_up()
        elif fresh or func._schema.is_mutable:
            self.calls.append(_Call(func, now_args, now_kwargs, given, results if fresh else []))
            self.ours |= {memory(value) for value in results if fresh}
        return found


class _NumbersAsked(TorchFunctionMode):
    """Numbers that leave the tensors unseen by the recorder: what is made of them is not written down."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        listed = [value for value in (*args, *(kwargs or {}).values()) if not isinstance(value, Tensor)]
        if func in ASKS or (func in LISTS and tensors(listed)):
            self.recorder.give_up()
        return func(*args, **(kwargs or {}))


def _is_another_each_time(func: Any, args: tuple[Any, ...]) -> bool:
    """What comes out, or its shape, is Python's to see, which is not asked when it is repeated; or it is chance."""
    if func is ATEN.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
    return torch.Tag.inplace_view in func.tags or not NEVER.isdisjoint(func.tags)


def _plain(value: Tensor) -> bool:
    """Whether its memory holds its numbers, all of them and as they are."""
    return value.layout == torch.strided and not (value.is_conj() or value.is_neg())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if func is ATEN.native_batch_norm.default:  # which does not say so: in training, its running statistics
        return tensors(args[3:5]) if args[5] else []
    if not func._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tensors([given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write])


def _shortened(calls: list[_Call]) -> list[_Call]:
    """Without constants, and with results put at once where they would be copied to."""
    written = {memory(value) for call in calls for value in _written(call.func, call.args, call.kwargs)}
    calls = [call for call in calls if call.given or any(memory(value) in written for value in call.made)]
    for at, call in enumerate(calls):
        if call.func is ATEN._foreach_copy_.default:
            pairs = list(zip(*call.args[:2], strict=True))
            left = [pair for pair in pairs if not _put_at_once(calls, at, *pair)]
            to, values = ([pair[side] for pair in left] for side in (0, 1))
            calls[at] = call._replace(args=(to, values), given=[*to, *values])
    return [call for call in calls if call.made or call.given]


def _put_at_once(calls: list[_Call], at: int, to: Tensor, value: Tensor) -> bool:
    """Have this value written where it is copied to at last, if nobody can see a difference.

    Nobody else reads the value or, from then on, what was there before; and the operation that makes it goes element
    by element, so that it may write over what it reads.
    """
    users = [number for number, call in enumerate(calls) if number != at and call.touches(value)]
    if len(users) != 1 or users[0] > at:
        return False
    maker = calls[users[0]]
    made = len(maker.made) == 1 and where(maker.made[0]) == where(value) and _with_out(maker.func)[0]
    by_element = torch.Tag.pointwise in maker.func.tags and _layout(value) == _layout(to)
    same = all(where(other) == where(to) for other in maker.given if memory(other) == memory(to))
    copied = [memory(other) for other in calls[at].args[1]]
    copied_too = memory(to) in copied or copied.count(memory(value)) > 1
    if not (made and by_element and same) or copied_too or any(c.touches(to) for c in calls[users[0] + 1 : at]):
        return False
    calls[users[0]] = maker._replace(made=[to])
    return True


def _packed(calls: list[_Call], lasting: set[int]) -> list[_Call]:
    """With results in memory that nothing needs any more, which is likely in a cache still."""
    last = {memory(value): at for at, call in enumerate(calls) for value in (*call.given, *call.made)}
    places: dict[int, torch.UntypedStorage] = {}
    free: list[torch.UntypedStorage] = []

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or memory(value) not in places:
            return value
        return value.new_empty(0).set_(places[memory(value)], value.storage_offset(), value.shape, value.stride())

    packed = []
    for at, call in enumerate(calls):
        given = {memory(value) for value in call.given}
        ending = {key for key in given & places.keys() if last[key] == at}
        new = [value for value in call.made if memory(value) not in places.keys() | lasting | given]
        over = _overwritten(call, ending) if new else None
        for value in new:
            places[memory(value)] = _taken(free, value) if over is None else places[over]
        packed.append(_Call(*pytree.tree_map(moved, tuple(call))))
        ending |= {memory(value) for value in call.made if last[memory(value)] == at} & places.keys()
        free += [places[key] for key in ending - {over}]
    return packed


def _taken(free: list[torch.UntypedStorage], value: Tensor) -> torch.UntypedStorage:
    """The last of the free that has room without much waste, else new: a hook may have kept the first time's."""
    size = value.untyped_storage().nbytes()
    for number in reversed(range(len(free))):
        if size <= free[number].nbytes() <= 2 * size:
            return free.pop(number)
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _overwritten(call: _Call, ending: set[int]) -> int | None:
    """Memory that is read here for the last time, and element by element, so that the result may be put there."""
    if len(call.made) != 1 or torch.Tag.pointwise not in call.func.tags or not _with_out(call.func)[0]:
        return None

    def place(value: Tensor) -> tuple[Any, ...]:
        return value.storage_offset(), *_layout(value)

    for key in ending:
        ways = {place(value) for value in call.given if memory(value) == key}
        if ways == {place(call.made[0])}:
            return key
    return None


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride()


def where(value: Tensor) -> tuple[Any, ...]:
    """Two tensors of the same are the same numbers, read alike."""
    return memory(value), value.storage_offset(), *_layout(value)


def overwrite(buffers: list[Tensor], values: list[Tensor]) -> None:
    """As if at once: what lies in a buffer itself, as an old value handed on does, is read before it is overwritten."""
    taken = {memory(buffer) for buffer in buffers}
    apart = [
        value.clone() if memory(value) in taken and where(value) != where(buffer) else value
        for value, buffer in zip(values, buffers, strict=True)
    ]
    if buffers:
        torch._foreach_copy_(buffers, apart)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory(value: Tensor) -> int:
    """What a tensor shares with its views."""
    return value.untyped_storage().data_ptr()


@cache
def _with_out(func: Any) -> tuple[Any, list[str]]:
    """The same operation given where to write, and the names by which it is."""
    same = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        outs = [a.name for a in other._schema.arguments if a.is_out and str(a.type) == "Tensor"]
        others = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and others == same and other not in NOT_INTO:
            return other, outs
    return None, []
