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


def _walk(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if not isinstance(tree, dict):
        raise TypeError(f"a tree holds tensors, dicts and named tuples, not {type(tree).__name__} at {prefix!r}")
    for name, value in tree.items():
        if SEPARATOR in str(name):
            raise TypeError(f"{name!r} holds {SEPARATOR!r}, which parts the names of a path")
        yield from _walk(value, f"{prefix}{SEPARATOR}{name}" if prefix else str(name))


def flatten(tree: Any) -> Tensors:
    """All leaves by their path."""
    return dict(_walk(tree, ""))


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
    return [leaf for _, leaf in _walk(tree, "")]


def nbytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def finite(tree: Any) -> bool:
    checks = [torch.isfinite(leaf).all() for leaf in leaves(tree) if leaf.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())


def finite_rows(stacked: Any) -> list[bool]:
    """Of each row of a stack of trees, whether all its numbers are finite."""
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
    pairs = zip(leaves(a), leaves(b), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()


def norm(tree: Any) -> Tensor:
    return dot(tree, tree).sqrt()


def pick(tensors: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Tensors:
    """The tensors whose name is wanted."""
    return {name: value for name, value in tensors.items() if wanted(name)}


def blocks(base: Tensors, rows: Tensors) -> Iterator[tuple[Tensor, Tensor, tuple[str, slice]]]:
    """Stacked rows and their base as matrix and vector, in pieces small beside the whole, each with its place."""
    for name, stacked in rows.items():
        flat, origin = stacked.flatten(1), base[name].flatten()
        width = max(1, BLOCK // max(1, len(flat)))
        for begin in range(0, flat.shape[1], width):
            piece = slice(begin, begin + width)
            yield flat[:, piece], origin[piece], (name, piece)


def move(base: Tensors, rows: Tensors, weights: Tensor) -> Tensors:
    """``base + Σ_k weights_k (rows_k − base)`` for every name in ``rows``; what is not in ``rows`` stays.

    Written through the deviations, so that rows equal to the base leave it as it is to the last bit. A row of weight
    zero is not multiplied but left out: it may hold anything, NaN included.
    """
    used = weights.nonzero().flatten()
    if not len(used):
        return dict(base)
    moved = dict(base) | {name: base[name].flatten().clone() for name in rows}
    for part, origin, (name, piece) in blocks(base, rows):
        deviations = (part if len(used) == len(part) else part[used]) - origin
        moved[name][piece] += weights[used].to(deviations.dtype) @ deviations
    return moved | {name: moved[name].reshape(base[name].shape) for name in rows}


def cosines(step: Tensors, base: Tensors, rows: Tensors) -> list[float]:
    """The cosine between a step and each row's deviation from the base, accumulated in float64; 0 beside a zero."""
    if not rows:
        return []
    parts = []
    for stacked, origin, (name, piece) in blocks(base, rows):
        direction = step[name].flatten()[piece].double()
        deviations = (stacked - origin).double()
        parts.append(
            torch.stack(
                [deviations @ direction, deviations.square().sum(1), direction.square().sum().expand(len(stacked))]
            )
        )
    dots, squares, length = torch.stack(parts).sum(0).tolist()
    pairs = zip(dots, squares, length, strict=True)
    return [d / math.sqrt(s * n) if s * n > 0 else 0.0 for d, s, n in pairs]
