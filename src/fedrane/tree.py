"""Arithmetic on trees of tensors: a tensor, or a dict or a named tuple of trees.

Everything that is kept or travels is such a tree, so one set of functions serves models, control variates, momenta and
uploads alike. All functions are pure.

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

Tensors = dict[str, Tensor]
T = TypeVar("T")
SEPARATOR = "/"
BLOCK = 1 << 24
"""Elements taken at a time where a whole stack of models would be copied."""
CACHED = 1 << 18
"""The same on a CPU, where what is larger than a cache is slow, and memory new from the system far slower."""
SUMMED = 1 << 14
"""Numbers of which a sum in their own kind is as good as one in float64 to six digits."""


def map(f: Callable[..., Tensor], tree: T, *rest: T) -> T:
    """Apply ``f`` to corresponding leaves of trees of one shape."""
    if isinstance(tree, Tensor):
        return f(tree, *rest)  # type: ignore[return-value]
    if isinstance(tree, dict):
        others: Any = rest
        mapped: Any = {name: map(f, value, *(other[name] for other in others)) for name, value in tree.items()}
        return mapped  # type: ignore[no-any-return]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map(f, *parts) for parts in zip(tree, *rest, strict=True)))
    raise TypeError(f"a tree holds tensors, dicts and named tuples, not {type(tree).__name__}")


def _walk(tree: Any, prefix: str, found: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Paths and leaves, put to those found before."""
    if isinstance(tree, Tensor):
        found.append((prefix, tree))
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if SEPARATOR in str(name):
                raise TypeError(f"{name!r} holds {SEPARATOR!r}, which parts the names of a path")
            _walk(value, f"{prefix}{SEPARATOR}{name}" if prefix else str(name), found)
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, value in zip(tree._fields, tree, strict=True):
            _walk(value, f"{prefix}{SEPARATOR}{name}" if prefix else name, found)
    else:
        raise TypeError(f"a tree holds tensors, dicts and named tuples, not {type(tree).__name__} at {prefix!r}")
    return found


def flatten(tree: Any) -> Tensors:
    """All leaves by their path."""
    return dict(_walk(tree, "", []))


def nest(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The dicts that :func:`flatten` made one level of (named tuples come back as dicts)."""
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
    checks = [torch.isfinite(leaf).all() for leaf in leaves(tree) if leaf.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())


def finite_rows(stacked: Any) -> list[bool]:
    """Of each row of a stack of trees, whether all its numbers are finite."""
    sums = [torch.isfinite(leaf.flatten(1).sum(1) if leaf.dim() > 1 else leaf) for leaf in leaves(stacked)]
    if sums and bool(torch.stack(sums).all()):  # so is each number; a sum that is not may have grown too large
        return [True] * len(sums[0])
    checks = [torch.isfinite(leaf).flatten(1).all(1) for leaf in leaves(stacked) if leaf.dim() > 1]
    checks += [torch.isfinite(leaf) for leaf in leaves(stacked) if leaf.dim() == 1]
    return torch.stack(checks).all(0).tolist() if checks else []


def equal(a: Any, b: Any) -> bool:
    """The same paths and the same bytes (NaN equals NaN)."""
    a, b = flatten(a), flatten(b)
    return a.keys() == b.keys() and all(_same(a[path], b[path]) for path in a)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or not a.numel():
        return a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def stack(trees: Sequence[T]) -> T:
    """Trees of one shape as one tree whose leaves have a row for each."""
    return map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def columns(trees: Sequence[Any]) -> dict[str, list[Tensor]]:
    """The leaves of trees of one shape, by their path: those of all trees side by side."""
    return dict(zip(flatten(trees[0]), _side_by_side(trees), strict=True))


def _side_by_side(trees: Sequence[Any]) -> Iterator[list[Tensor]]:
    first = trees[0]
    kind = Tensor if isinstance(first, Tensor) else type(first)
    alike = all(isinstance(tree, kind) for tree in trees)
    if not alike or (isinstance(first, dict) and any(tree.keys() != first.keys() for tree in trees)):
        raise ValueError("the trees differ in shape")
    if isinstance(first, Tensor):
        yield list(trees)
        return
    parts = ([tree[name] for tree in trees] for name in first) if isinstance(first, dict) else zip(*trees, strict=True)
    for part in parts:
        yield from _side_by_side(part)


def unstack(tree: T, many: int) -> list[T]:
    """The trees that :func:`stack` put together."""
    return [row(tree, index) for index in range(many)] if leaves(tree) else [tree] * many


def row(tree: T, index: int) -> T:
    """One of the trees that :func:`stack` put together."""
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
    """The inner product of two trees of one shape."""
    products = [(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return torch.stack(products).sum() if products else torch.zeros(())


def norm(tree: Any) -> Tensor:
    return dot(tree, tree).sqrt()


def pick(tensors: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Tensors:
    """The tensors whose name is wanted."""
    return {name: value for name, value in tensors.items() if wanted(name)}


def blocks(base: Tensors, rows: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Stacked rows and their base as matrix and vector, in pieces of some columns each, small beside the whole."""
    for name, stacked in rows.items():
        flat, origin = stacked.flatten(1), base[name].flatten()
        width = max(1, BLOCK // max(1, len(flat)))
        for begin in range(0, flat.shape[1], width):
            piece = slice(begin, begin + width)
            yield flat[:, piece], origin[piece]


def deviations(base: Tensor, stacked: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """``stacked − base`` as a matrix, in pieces of some rows each, with their place; one lies where the last did."""
    flat, origin = stacked.detach().flatten(1), base.detach().flatten()
    most = CACHED if stacked.device.type == "cpu" else BLOCK
    many = max(1, min(most // max(1, flat.shape[1]), len(flat)))
    room = flat.new_empty((many, flat.shape[1]), dtype=torch.promote_types(flat.dtype, origin.dtype))
    for begin in range(0, len(flat), many):
        rows = flat[begin : begin + many]
        yield torch.sub(rows, origin, out=room[: len(rows)]), slice(begin, begin + many)


def move(base: Tensors, rows: Tensors, weights: Tensor) -> Tensors:
    """``base + Σ_k weights_k (rows_k − base)`` for every name in ``rows``; what is not in ``rows`` stays.

    Written through the deviations, so that rows equal to the base leave it as it is to the last bit. A row of weight
    zero may hold anything, NaN included.
    """
    used = weights != 0
    many = int(used.sum())
    if not many:
        return dict(base)
    moved = dict(base)
    for name, stacked in rows.items():
        total = base[name].flatten().clone()
        for part, piece in deviations(base[name], stacked):
            if many < len(weights):
                part = torch.where(used[piece, None], part, 0)
            total += weights[piece].to(part.dtype) @ part
        moved[name] = total.reshape(base[name].shape)
    return moved


def as_saved(leaf: Tensor) -> Tensor:
    """Laid out in memory as it comes back from a checkpoint or a process, strides of sides of one included: the order
    of sums and the library's choice of a convolution depend on them. One that lies so already is given back itself."""
    saved = leaf.contiguous().flatten().view(leaf.shape)
    return leaf if leaf.stride() == saved.stride() else saved


def cosines(step: Tensors, base: Tensors, rows: Tensors) -> list[float]:
    """The cosine between a step and each row's deviation from the base; 0 beside a zero."""
    if not rows:
        return []

    def products(short: bool) -> list[list[float]]:
        each = [_products(step[name], base[name], stacked, short) for name, stacked in rows.items()]
        found: list[list[float]] = torch.stack(each).sum(0).tolist()
        return found

    on_cpu = next(iter(rows.values())).device.type == "cpu"
    dots, squares, length = products(short=on_cpu)
    if on_cpu and not all(1e-30 < square < 1e30 for square in (*squares, length[0])):  # float32's range
        dots, squares, length = products(short=False)
    pairs = zip(dots, squares, length, strict=True)
    return [d / math.sqrt(s * n) if s * n > 0 else 0.0 for d, s, n in pairs]


def _products(step: Tensor, base: Tensor, stacked: Tensor, short: bool) -> Tensor:
    """Of each row's deviation with the step, with itself, and of the step with itself, summed in float64; in short,
    stretches are summed in the numbers' own kind, which on a CPU takes a quarter of the time."""
    wide = step.flatten().double()
    stretch, direction = (SUMMED, step.flatten()) if short else (max(1, len(wide)), wide)
    parts = []
    for part, _ in deviations(base, stacked):
        pairs = zip(torch.split(part, stretch, 1), torch.split(direction, stretch), strict=True)
        sums = [_with_both(some.to(along.dtype), along) for some, along in pairs]
        parts.append(torch.stack(sums).sum(0, dtype=wide.dtype))
    return torch.cat([torch.cat(parts, 1), wide.square().sum().expand(1, len(stacked))])


def _with_both(rows: Tensor, direction: Tensor) -> Tensor:
    return torch.stack([rows @ direction, torch.linalg.vector_norm(rows, dim=1).square()])
