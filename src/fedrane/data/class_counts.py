"""How many examples of each class every client has, or gets, where a promise decides and not one draw per class.

All functions return a matrix of clients × classes, ``of_classes`` and ``of_sizes`` one with the given sums; which
examples these are is drawn elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.data.streams import generator, permutation, uniform
from fedrane.errors import DataError

Counts = NDArray[np.int64]
_FITTING_STEPS = 200
"""Alternate scalings of rows and columns; what is then still missing is moved in whole examples."""
_SMALLEST = -46.0
"""The logarithm of the smallest weight of a class, relative to a client's largest: it must not become 0."""


def of_examples(clients: Sequence[NDArray[np.int64]], y: NDArray[Any], classes: int) -> Counts:
    """Count the clients' examples with labels ``y``; without classes, all of a client's in one column."""
    if not classes:
        return np.array([[len(examples)] for examples in clients], dtype=np.int64)
    return np.stack([np.bincount(y[examples], minlength=classes) for examples in clients])


def of_classes(per_class: Counts, clients: int, classes: int, minimum: int, seed: int) -> Counts:
    """Give each client exactly ``classes`` classes; a class is shared equally by the clients that have it.

    The number of clients of a class is as proportional to its examples as whole numbers allow, so that sizes are even.
    """
    present = np.flatnonzero(per_class)
    _check_classes(len(present), clients, classes)
    holders = _holders(per_class[present], clients, clients * classes, seed)
    small = int(np.argmin(per_class[present] - holders))
    if per_class[present][small] < holders[small]:
        raise DataError(
            f"class {present[small]} has {per_class[present][small]} examples for {holders[small]} clients",
            f"with {clients} clients and partition.classes={classes}, so many need one of it",
            "Use fewer clients or a smaller partition.classes",
        )
    owned = _assigned(holders, clients, classes, seed)
    counts = np.zeros((clients, len(per_class)), dtype=np.int64)
    for label, mine, number in zip(present, owned.T, holders, strict=True):
        counts[mine, label] = np.diff(np.arange(number + 1) * per_class[label] // number)
    sizes = counts.sum(axis=1)
    if sizes.min() < minimum:
        remedy = f"partition.minimum={sizes.min()} or less, or " if sizes.min() > 1 else ""
        raise DataError(
            f"client {int(np.argmin(sizes))} would have {sizes.min()} examples of its {classes} classes",
            f"each client needs at least {minimum} (partition.minimum)",
            f"Use {remedy}fewer clients",
        )
    return counts


def _check_classes(present: int, clients: int, classes: int) -> None:
    if classes > present:
        raise DataError(
            f"partition.classes={classes}",
            f"the training examples are of {present} classes",
            f"Use partition.classes={present} or less",
        )
    if clients * classes < present:
        enough, more = -(-present // classes), -(-present // clients)
        raise DataError(
            f"{clients} clients with {classes} of {present} classes each",
            "each class needs a client: no example is left out",
            f"Use clients={enough} or more, or partition.classes={more} or more",
        )


def _holders(examples: Counts, clients: int, slots: int, seed: int) -> Counts:
    """Return how many clients have each class: one more again and again for the class with most examples per client."""
    order = permutation(len(examples), seed, "partition holders")  # decides between equal classes
    shares = examples[order, None] / np.arange(2, clients + 1)  # if the class had 2, 3, … of the clients
    taken = np.argsort(-shares, axis=None, kind="stable")[: slots - len(examples)]
    holders = np.ones(len(examples), dtype=np.int64)
    holders[order] += np.bincount(taken // max(1, clients - 1), minlength=len(examples))
    return holders


def _assigned(holders: Counts, clients: int, classes: int, seed: int) -> NDArray[np.bool_]:
    """Draw the classes of each client, all different, such that every class gets its number of clients."""
    left = holders.copy()
    owned = np.zeros((clients, len(holders)), dtype=np.bool_)
    for turn, client in enumerate(permutation(clients, seed, "partition turns")):
        with np.errstate(
            divide="ignore", invalid="ignore"
        ):  # where none is left, infinity, or 0 / 0, which is last too
            key = -np.log1p(-uniform(len(left), seed, "partition classes", turn)) / left  # likelier with more left
        # A class that all remaining clients must have comes first; then there are always enough others for the rest.
        key[left == clients - turn] = -1.0
        chosen = np.argsort(key, kind="stable")[:classes]
        owned[client, chosen] = True
        left[chosen] -= 1
    return owned


def of_sizes(per_class: Counts, sizes: Counts, alpha: float, seed: int) -> Counts:
    """Draw each client's mixture of classes from a symmetric Dir(α), and fit all to the sizes and the class totals.

    Rows and columns of the mixtures are scaled in turn until both sums are right (iterative proportional fitting), and
    the numbers are rounded such that both sums are exact.
    """
    present = np.flatnonzero(per_class)
    totals = per_class[present]
    fitted = _fitted(_weights(len(sizes), len(present), alpha, seed), totals, sizes)
    cells = np.floor(fitted).astype(np.int64)
    rank = np.argsort(np.argsort(cells - fitted, axis=1, kind="stable"), axis=1, kind="stable")
    cells += rank < (sizes - cells.sum(axis=1))[:, None]
    while (excess := cells.sum(axis=0) - totals).any():
        over, under = int(np.argmax(excess)), int(np.argmin(excess))
        needed = int(min(excess[over], -excess[under]))
        # Those give first whose cells were rounded furthest from what they should be, and each as much as the others.
        away = (cells - fitted)[:, over] - (cells - fitted)[:, under]
        givers = np.argsort(np.where(cells[:, over] > 0, -away, np.inf), kind="stable")
        givers = givers[: min(needed, np.count_nonzero(cells[:, over]))]
        moved = np.minimum(cells[givers, over], max(1, needed // len(givers)))
        cells[givers, over] -= moved
        cells[givers, under] += moved
    counts = np.zeros((len(sizes), len(per_class)), dtype=np.int64)
    counts[:, present] = cells
    return counts


def _weights(clients: int, classes: int, alpha: float, seed: int) -> NDArray[np.float64]:
    """Return Dirichlet variates up to a factor per client, through their logarithms: with a small α all underflow."""
    alpha = min(max(alpha, 1e-12), 1e18)
    draw, shape = generator(seed, "partition mixtures"), (clients, classes)
    logs = np.log1p(-draw.random(shape)) + alpha * np.log(draw.standard_gamma(alpha + 1, shape))
    return np.asarray(np.exp(np.maximum((logs - logs.max(axis=1, keepdims=True)) / alpha, _SMALLEST)))


def _fitted(weights: NDArray[np.float64], per_class: Counts, sizes: Counts) -> NDArray[np.float64]:
    """Scale columns and rows in turn; the rows' sums are right in the end."""
    fitted: NDArray[np.float64] = weights * (sizes / weights.sum(axis=1))[:, None]
    for _ in range(_FITTING_STEPS):
        fitted *= per_class / fitted.sum(axis=0)
        fitted *= (sizes / fitted.sum(axis=1))[:, None]
        if np.abs(fitted.sum(axis=0) - per_class).max() < 0.5:
            break
    return fitted
