"""Arithmetic on trees of tensors. A tree is a tensor, or a dict or a named tuple of trees.

Models, uploads, momenta and control variates are all trees, so they share these functions. All functions are pure.

>>> import torch
>>> tree = {"a": torch.ones(2), "b": {"c": torch.zeros(3)}}
>>> sorted(flatten(tree))
['a', 'b/c']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedrane.ops.reduction import Partial, Term

Tensors = dict[str, Tensor]
T = TypeVar("T")
SEPARATOR = "/"
BLOCK_SIZE = 1 << 24
"""Elements processed at a time, so that a stack of models is never copied at once."""
CPU_BLOCK_SIZE = 1 << 18
"""The same on a CPU, where a block must fit into the cache."""
MAX_FLOAT32_SUM = 1 << 14
"""How many numbers may be summed in their own dtype: the result agrees with float64 to six digits."""


def map(f: Callable[..., Tensor], tree: T, *rest: T) -> T:
    """Apply ``f`` to corresponding leaves of trees with the same structure."""
    if isinstance(tree, Tensor):
        return f(tree, *rest)  # type: ignore[return-value]
    if isinstance(tree, dict):
        others: Any = rest
        mapped: Any = {name: map(f, value, *(other[name] for other in others)) for name, value in tree.items()}
        return mapped  # type: ignore[no-any-return]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map(f, *parts) for parts in zip(tree, *rest, strict=True)))
    raise TypeError(f"a tree holds tensors, dicts and named tuples, not {type(tree).__name__}")


def _walk(tree: Any, prefix: str, items: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Append the paths and leaves of ``tree`` to ``items``, and return it."""
    if isinstance(tree, Tensor):
        items.append((prefix, tree))
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if SEPARATOR in str(name):
                raise TypeError(f"the name {name!r} contains {SEPARATOR!r}, the separator of paths")
            _walk(value, f"{prefix}{SEPARATOR}{name}" if prefix else str(name), items)
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, value in zip(tree._fields, tree, strict=True):
            _walk(value, f"{prefix}{SEPARATOR}{name}" if prefix else name, items)
    else:
        raise TypeError(f"a tree holds tensors, dicts and named tuples, not {type(tree).__name__} at {prefix!r}")
    return items


def flatten(tree: Any) -> Tensors:
    """All leaves, by path."""
    return dict(_walk(tree, "", []))


def nest(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of :func:`flatten`, except that named tuples become dicts."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split(SEPARATOR)
        node = root
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return root


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in _walk(tree, "", [])]


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(tree))


def finite(tree: Any) -> bool:
    """Whether all numbers are finite; with one synchronisation if they are."""
    floats = [leaf for leaf in leaves(tree) if leaf.is_floating_point()]
    # Finite sums have finite terms; other sums may just have overflowed.
    return _all_finite([leaf.sum() for leaf in floats]) or _all_finite(floats)


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    checks = [torch.isfinite(tensor).all() for tensor in tensors]
    return not checks or bool(torch.stack(checks).all())


def finite_rows(stacked: Any) -> list[bool]:
    """For each tree of a stack, whether all its numbers are finite."""
    sums = [torch.isfinite(leaf.flatten(1).sum(1) if leaf.dim() > 1 else leaf) for leaf in leaves(stacked)]
    if sums and bool(torch.stack(sums).all()):  # finite sums have finite terms; other sums may just have overflowed
        return [True] * len(sums[0])
    checks = [torch.isfinite(leaf).flatten(1).all(1) for leaf in leaves(stacked) if leaf.dim() > 1]
    checks += [torch.isfinite(leaf) for leaf in leaves(stacked) if leaf.dim() == 1]
    return torch.stack(checks).all(0).tolist() if checks else []


def equal(a: Any, b: Any) -> bool:
    """Whether paths and bytes are the same (NaN equals NaN)."""
    a, b = flatten(a), flatten(b)
    return a.keys() == b.keys() and all(_same(a[path], b[path]) for path in a)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or not a.numel():
        return a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def stack(trees: Sequence[T]) -> T:
    """One tree whose leaves have one row for each of the trees, which share their structure."""
    return map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def columns(trees: Sequence[Any]) -> dict[str, list[Tensor]]:
    """For each path, the list of all trees' leaves there. The trees share their structure."""
    return dict(zip(flatten(trees[0]), _columns(trees), strict=True))


def _columns(trees: Sequence[Any]) -> Iterator[list[Tensor]]:
    first = trees[0]
    cls = Tensor if isinstance(first, Tensor) else type(first)
    same_type = all(isinstance(tree, cls) for tree in trees)
    if not same_type or (isinstance(first, dict) and any(tree.keys() != first.keys() for tree in trees)):
        raise ValueError("the trees differ in structure")
    if isinstance(first, Tensor):
        yield list(trees)
        return
    parts = ([tree[name] for tree in trees] for name in first) if isinstance(first, dict) else zip(*trees, strict=True)
    for part in parts:
        yield from _columns(part)


def unstack(tree: T, count: int) -> list[T]:
    """The trees of a stack."""
    return [row(tree, index) for index in range(count)] if leaves(tree) else [tree] * count


def row(tree: T, index: int) -> T:
    """One tree of a stack."""
    return map(lambda leaf: leaf[index], tree)


def add(a: T, b: T) -> T:
    return map(torch.add, a, b)


def sub(a: T, b: T) -> T:
    return map(torch.sub, a, b)


def scale(tree: T, factor: float | Tensor) -> T:
    return map(lambda leaf: leaf * factor, tree)


def zeros_like(tree: T) -> T:
    return map(torch.zeros_like, tree)


def dot(a: Any, b: Any) -> Tensor:
    """The inner product of two trees with the same structure."""
    products = [(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return torch.stack(products).sum() if products else torch.zeros(())


def norm(tree: Any) -> Tensor:
    return dot(tree, tree).sqrt()


def pick(tensors: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Tensors:
    """The tensors whose names are wanted."""
    return {name: value for name, value in tensors.items() if wanted(name)}


def blocks(base: Tensors, rows: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Stacked rows and their base as matrices and vectors, in blocks of columns."""
    for name, stacked in rows.items():
        flat, origin = stacked.flatten(1), base[name].flatten()
        width = max(1, BLOCK_SIZE // max(1, len(flat)))
        for begin in range(0, flat.shape[1], width):
            piece = slice(begin, begin + width)
            yield flat[:, piece], origin[piece]


def deviations(base: Tensor, stacked: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """``stacked − base`` as a matrix, in blocks of rows, each with its position. All blocks share one buffer."""
    flat, origin = stacked.detach().flatten(1), base.detach().flatten()
    block_size = CPU_BLOCK_SIZE if stacked.device.type == "cpu" else BLOCK_SIZE
    height = max(1, min(block_size // max(1, flat.shape[1]), len(flat)))
    buffer = flat.new_empty((height, flat.shape[1]), dtype=torch.promote_types(flat.dtype, origin.dtype))
    for begin in range(0, len(flat), height):
        block = flat[begin : begin + height]
        yield torch.sub(block, origin, out=buffer[: len(block)]), slice(begin, begin + height)


def move(base: Tensors, rows: Tensors, weights: Tensor) -> Tensors:
    """``base + Σ_k weights_k (rows_k − base)`` for every name in ``rows``; the other tensors stay.

    Computed from the deviations, so that rows equal to the base leave it unchanged to the last bit, and added up in a
    fixed order (:mod:`fedrane.ops.reduction`). A row of weight zero may hold any value, including NaN.
    """
    return Partial.of({"": Term(rows, weights, base)}).totals(len(weights))[""].added(base)


def as_saved(leaf: Tensor) -> Tensor:
    """The tensor with the memory layout it has after loading from a checkpoint or another process, including the
    strides of dimensions of size one. The order of sums and the choice of a convolution depend on the layout. A tensor
    that has it already is returned itself."""
    saved = leaf.contiguous().flatten().view(leaf.shape)
    return leaf if leaf.stride() == saved.stride() else saved


def cosines(step: Tensors, base: Tensors, rows: Tensors) -> list[float]:
    """The cosine between a step and each row's deviation from the base; 0 if one of them is zero."""
    if not rows:
        return []

    def products(fast: bool) -> list[list[float]]:
        each = [_products(step[name], base[name], stacked, fast) for name, stacked in rows.items()]
        sums: list[list[float]] = torch.stack(each).sum(0).tolist()
        return sums

    on_cpu = next(iter(rows.values())).device.type == "cpu"
    dots, squares, length = products(fast=on_cpu)
    if on_cpu and not all(1e-30 < square < 1e30 for square in (*squares, length[0])):  # float32's range
        dots, squares, length = products(fast=False)
    pairs = zip(dots, squares, length, strict=True)
    return [d / math.sqrt(s * n) if s * n > 0 else 0.0 for d, s, n in pairs]


def _products(step: Tensor, base: Tensor, stacked: Tensor, fast: bool) -> Tensor:
    """The inner products deviation · step and deviation · deviation of each row, and step · step, in float64.

    ``fast`` sums short chunks in the tensors' own dtype, which takes a quarter of the time on a CPU.
    """
    step64 = step.flatten().double()
    chunk, direction = (MAX_FLOAT32_SUM, step.flatten()) if fast else (max(1, len(step64)), step64)
    parts = []
    for part, _ in deviations(base, stacked):
        pairs = zip(torch.split(part, chunk, 1), torch.split(direction, chunk), strict=True)
        sums = [_dot_and_square(some.to(along.dtype), along) for some, along in pairs]
        parts.append(torch.stack(sums).sum(0, dtype=step64.dtype))
    return torch.cat([torch.cat(parts, 1), step64.square().sum().expand(1, len(stacked))])


def _dot_and_square(rows: Tensor, direction: Tensor) -> Tensor:
    return torch.stack([rows @ direction, torch.linalg.vector_norm(rows, dim=1).square()])
