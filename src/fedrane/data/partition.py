"""The partition of the training examples over the clients, and each client's train, validation and test split."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.data import arrays, class_counts
from fedrane.data.streams import generator, permutation
from fedrane.errors import ConfigError, DataError, nearest
from fedrane.system.files import write_atomically

Examples = NDArray[np.int64]
_LONGEST_META = 1 << 20
"""Bytes of what a saved partition contains about its origin."""
CONSECUTIVE = "consecutive"
WITHOUT_LABELS = "iid", "quantity", CONSECUTIVE, "natural"
"""Those for which the labels do not matter, so that these may be numbers to predict."""
_TWO_EXAMPLES = "a client needs at least one example to train on and one to test on"


@dataclass(frozen=True, eq=False)
class Partition:
    """The indices of each client's training examples, sorted; each example belongs to exactly one client."""

    clients: tuple[Examples, ...]

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError("a partition without clients", "it needs at least one")
        examples = np.sort(np.concatenate(self.clients))
        if not np.array_equal(examples, np.arange(len(examples))):
            raise DataError(
                f"a partition of {len(examples)} examples in which one is missing or occurs twice",
                f"each of the examples 0 … {len(examples) - 1} must belong to exactly one client",
            )

    @property
    def sizes(self) -> Examples:
        """The number of examples of each client."""
        return np.array([len(examples) for examples in self.clients], dtype=np.int64)

    def counts(self, y: NDArray[Any], classes: int) -> NDArray[np.int64]:
        """Return the number of examples of each client and class: (clients, classes); one column without classes."""
        return class_counts.of_examples(self.clients, y, classes)


@dataclass(frozen=True, eq=False)
class Split:
    """The indices of each client's train, validation and test examples, sorted; the three parts are disjoint."""

    train: tuple[Examples, ...]
    validation: tuple[Examples, ...]
    test: tuple[Examples, ...]


@dataclass(frozen=True)
class Partitioning:
    """How the examples are distributed over the clients."""

    kind: str = "auto"
    """``natural`` keeps the clients that the data name; ``dirichlet`` splits each class by Dir(alpha),
    ``dirichlet-capped`` up to an equal share per client; ``shards`` cuts examples sorted by class; ``pathological``
    gives each client exactly ``partition.classes`` classes; ``quantity`` skews only the clients' sizes,
    ``dirichlet-quantity`` sizes and labels, each by its own α, ``iid`` nothing; ``consecutive`` cuts the examples, in
    their order, into equal parts. ``auto`` is natural if the data name their clients, consecutive for a text, iid
    where a number is predicted, else dirichlet."""
    alpha: float = 0.5
    """α, the parameter of the Dirichlet distribution: the smaller, the more the clients differ."""
    shards: int = 2
    """Shards per client, for kind=shards."""
    classes: int = 2
    """Classes per client, for kind=pathological."""
    size_alpha: float = 0.5
    """The parameter of the Dirichlet distribution of the clients' sizes, for kind=dirichlet-quantity."""
    minimum: int = 10
    """The minimum number of examples of a client."""
    test: float = 0.25
    """The fraction of each client's examples that is kept for its local test set."""
    file: str = ""
    """A saved partition to reuse; it replaces the other ``partition`` keys except ``test``."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"partition.kind={self.kind}", "no such partition", nearest(self.kind, KINDS))
        for key, alpha in (("alpha", self.alpha), ("size_alpha", self.size_alpha)):
            if not 0 < alpha < math.inf:
                raise ConfigError(
                    f"partition.{key}={alpha}",
                    "the Dirichlet distribution needs a positive, finite parameter",
                    "Use 0.1 for strong skew, 0.5 for moderate, or partition.kind=iid for none",
                )
        for key, count, unit in (("shards", self.shards, "shard"), ("classes", self.classes, "class")):
            if count < 1:
                raise ConfigError(
                    f"partition.{key}={count}", f"each client gets one {unit} or more", f"Use partition.{key}=2"
                )
        if self.minimum < 2:
            raise ConfigError(
                f"partition.minimum={self.minimum}",
                _TWO_EXAMPLES,
                "Use partition.minimum=2 or more",
            )
        _check_test_share(self.test)

    def resolved(self, natural: bool, text: bool = False, regression: bool = False) -> Partitioning:
        """Replace ``auto``: ``natural`` is whether the data name their clients."""
        automatic = "natural" if natural else CONSECUTIVE if text else "iid" if regression else "dirichlet"
        return replace(self, kind=automatic) if self.kind == "auto" else self


def _check_test_share(test: float) -> None:
    if not 0 < test < 1:
        raise ConfigError(
            f"partition.test={test}",
            "it is the fraction of each client's examples kept for its local test set, between 0 and 1",
            "Use partition.test=0.25",
        )


def partition(
    y: NDArray[Any],
    classes: int,
    clients: int,
    how: Partitioning,
    seed: int,
    natural: NDArray[np.int64] | None = None,
) -> Partition:
    """Distribute the examples with labels ``y`` over the clients; ``natural`` is the client the data name for each.

    With kind=natural or a file, the data decide the number of clients, and ``clients`` may be 0. So may ``classes``,
    if the labels are numbers to predict.
    """
    how = how.resolved(natural is not None, regression=not classes)
    if how.file:
        saved = load(how.file, examples=len(y))
        _check_clients(len(saved.clients), clients, f"The partition in {how.file}")
        return saved
    if how.kind == "natural":
        return _natural(natural, clients)
    if not classes and how.kind not in WITHOUT_LABELS:
        raise DataError(
            f"partition.kind={how.kind} where a number is predicted",
            "it spreads the examples of each class over the clients, and there are no classes",
            f"Use partition.kind={' or '.join(WITHOUT_LABELS)}, or a file",
        )
    if clients < 1:
        raise DataError(
            f"clients={clients} with partition.kind={how.kind}",
            "only natural and saved partitions know their number of clients",
            "Give the number of clients, for instance clients=20",
        )
    if clients * how.minimum > len(y):
        raise DataError(
            f"{len(y)} examples for {clients} clients",
            f"each needs at least {how.minimum} (partition.minimum)",
            _room(len(y), clients, how.minimum),
        )
    if how.kind == CONSECUTIVE:
        return Partition(tuple(np.array_split(np.arange(len(y), dtype=np.int64), clients)))
    if how.kind in ("iid", "quantity"):  # these ignore labels: treat all examples as one class
        y, classes = np.zeros(len(y), np.int64), 1
    counts = _COUNTS[how.kind](np.bincount(y, minlength=classes), clients, how, seed)
    return _deal(_repair(counts, how.minimum), y, seed)


def _room(examples: int, clients: int, minimum: int) -> str:
    remedies = []
    if examples >= minimum:
        remedies.append(f"clients={examples // minimum} or fewer")
    if examples >= 2 * clients:
        remedies.append(f"partition.minimum={examples // clients} or less")
    return f"Use {' or '.join(remedies)}" if remedies else "Use fewer clients and a smaller partition.minimum"


def _check_clients(given: int, wanted: int, who: str) -> None:
    if wanted not in (0, given):
        raise DataError(
            f"{who} has {given} clients, but clients={wanted}",
            "the clients of such a partition are fixed",
            f"Use clients={given}",
        )


def _natural(client: NDArray[np.int64] | None, clients: int) -> Partition:
    """Return the partition by the clients that the data name; small ones are kept, since their data are theirs."""
    if client is None:
        raise DataError(
            "partition.kind=natural, but this dataset names no clients",
            "only data that name their clients have a natural partition",
            "Use another one, for instance partition.kind=dirichlet",
        )
    names, owner, sizes = np.unique(client, return_inverse=True, return_counts=True)
    _check_clients(len(names), clients, "The dataset")
    small = np.flatnonzero(sizes < 2)
    if len(small):
        more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
        raise DataError(
            f"client {names[small[0]]}{more} has only 1 example",
            _TWO_EXAMPLES,
            "Remove it from the data, or use another partition.kind",
        )
    return _of_owners(owner, len(names))


def _of_owners(owner: NDArray[np.int64], clients: int) -> Partition:
    examples = np.argsort(owner, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return Partition(tuple(np.split(examples, ends[:-1])))


# The functions below decide only how many examples of each class (``per_class``) each client gets, as a matrix of
# clients × classes. Which examples these are is drawn afterwards, by the same code for all of them.


def _iid(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """Return sizes that differ by at most one example."""
    ends = np.arange(clients + 1) * int(per_class.sum()) // clients
    return np.diff(ends)[:, None]


def _dirichlet(
    per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int, capped: bool = False
) -> NDArray[np.int64]:
    """Split each class in proportions drawn from Dir(α); if ``capped``, only over clients below N / K examples."""
    counts = np.zeros((clients, len(per_class)), dtype=np.int64)
    for label, examples in enumerate(per_class):
        # While examples are left, some client has fewer than the mean, so not all clients are full.
        full = counts.sum(axis=1) * clients >= per_class.sum() if capped and examples else np.zeros(clients, dtype=bool)
        # Rounded to nearest: rounding down would give the last client half an example more of every class.
        cuts = np.rint(_cumulative_shares(how.alpha, full, seed, label) * examples).astype(np.int64)
        counts[:, label] = np.diff(cuts, prepend=0)
    return counts


def _cumulative_shares(alpha: float, full: NDArray[np.bool_], seed: int, label: int) -> NDArray[np.float64]:
    """Return the cumulative sum of a draw of Dir(α), with 0 for full clients; it ends at exactly 1.

    Dirichlet shares are normalised gamma variates, which all underflow to 0 when α is small. Their logarithms do not:
    Gamma(α) is Gamma(α + 1) · U^(1/α), and the largest is scaled to 1 before the division by α.
    """
    alpha = min(alpha, 1e18)  # above this, shares differ by less than one example, and α · log would overflow
    draw = generator(seed, "partition shares", label)
    logs = np.log1p(-draw.random(len(full))) + alpha * np.log(draw.standard_gamma(alpha + 1, len(full)))
    logs[full] = -np.inf
    with np.errstate(over="ignore"):  # to −∞, a share of 0
        total = np.cumsum(np.exp((logs - logs.max()) / alpha))
    return np.asarray(total / total[-1])


def _shards(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """Sort the examples by label, cut them into equal shards and deal these at random (McMahan et al. 2017)."""
    examples, shards = int(per_class.sum()), clients * how.shards
    if shards > examples:
        raise DataError(
            f"{shards} shards ({clients} clients × partition.shards={how.shards}) of {examples} examples",
            "each shard needs at least one example",
            f"Use partition.shards={examples // clients} or less",
        )
    label = np.repeat(np.arange(len(per_class)), per_class)
    owner = permutation(shards, seed, "partition shards")[np.arange(examples) * shards // examples] // how.shards
    cells = np.bincount(owner * len(per_class) + label, minlength=clients * len(per_class))
    return cells.reshape(clients, len(per_class))


def _pathological(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """Give each client exactly ``partition.classes`` classes."""
    return class_counts.of_classes(per_class, clients, how.classes, how.minimum, seed)


def _dirichlet_quantity(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """Draw sizes as kind=quantity does with the parameter ``size_alpha``, and within them classes by Dir(α)."""
    total = per_class.sum(keepdims=True)
    sizes = _repair(_dirichlet(total, clients, replace(how, alpha=how.size_alpha), seed), how.minimum)
    return class_counts.of_sizes(per_class, sizes[:, 0], how.alpha, seed)


_COUNTS: dict[str, Callable[[NDArray[np.int64], int, Partitioning, int], NDArray[np.int64]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-capped": partial(_dirichlet, capped=True),
    "shards": _shards,
    "pathological": _pathological,
    "quantity": _dirichlet,
    "dirichlet-quantity": _dirichlet_quantity,
}
KINDS = ("auto", "natural", *_COUNTS, CONSECUTIVE)


def _repair(counts: NDArray[np.int64], minimum: int) -> NDArray[np.int64]:
    """Raise every client to ``minimum`` examples, taken one by one from the client that is then the largest.

    The largest clients give from their largest class, and the examples are passed on class by class, so that a client
    without examples gets few classes: the label skew stays.
    """
    sizes = counts.sum(axis=1)
    missing = np.maximum(minimum - sizes, 0)
    taken = np.zeros_like(counts)
    gifts = _skim(sizes, int(missing.sum()))
    for giver in np.flatnonzero(gifts):
        taken[giver] = _skim(counts[giver], int(gifts[giver]))
    repaired = counts - taken
    takers = np.repeat(np.arange(len(counts)), missing)
    labels = np.repeat(np.arange(counts.shape[1]), taken.sum(axis=0))
    np.add.at(repaired, (takers, labels), 1)
    return repaired


def _skim(heights: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Return how much each gives if ``total`` units are taken one by one, always from the highest."""
    low, high = 0, int(heights.max())
    while low < high:  # the lowest level above which there is no more than the total
        level = (low + high) // 2
        if np.maximum(heights - level, 0).sum() <= total:
            high = level
        else:
            low = level + 1
    taken = np.maximum(heights - low, 0)
    taken[np.flatnonzero(heights >= low)[: total - int(taken.sum())]] += 1
    return taken


def _deal(counts: NDArray[np.int64], y: NDArray[np.int64], seed: int) -> Partition:
    """Give each client its number of examples of each class, drawn at random."""
    order = permutation(len(y), seed, "partition rows")
    order = order[np.argsort(y[order], kind="stable")]
    clients, classes = counts.shape
    owner = np.empty(len(y), dtype=np.int64)
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return _of_owners(owner, clients)


def split(partition: Partition, seed: int, test: float = 0.25, validation: float = 0.0, ordered: bool = False) -> Split:
    """Split each client's examples at random into train, validation (a fraction of the non-test ones) and test.

    Every client keeps at least one example to train on and one to test on. The test set does not depend on
    ``validation``, so runs with and without validation are tested on the same examples. ``ordered`` examples, the
    windows of a text, are not mixed: the last ones are for testing, those before them for validation. Otherwise nearly
    every test window would overlap with windows that were trained on.
    """
    _check_test_share(test)
    if not 0 <= validation < 1:
        raise ConfigError(
            f"validation={validation}",
            "it is the fraction of each client's training examples that is held out, from 0 to less than 1",
            "Use 0 for none, or 0.2",
        )
    parts = [
        split_client(examples, client, seed, test, validation, ordered)
        for client, examples in enumerate(partition.clients)
    ]
    return Split(*zip(*parts, strict=True))


def split_sizes(count: int, test: float, validation: float) -> tuple[int, int, int]:
    """How many of a client's examples are for training, validation and testing."""
    # With three or more examples, two are not for testing: using one for validation must not change the test set.
    tested = min(max(round(test * count), 1), max(count - 2, 1))
    kept = count - tested
    held = min(max(round(validation * kept), 1), kept - 1) if validation else 0
    return kept - held, held, tested


def split_client(
    examples: Examples, client: int, seed: int, test: float, validation: float, ordered: bool = False
) -> tuple[Examples, Examples, Examples]:
    """Return one client's train, validation and test examples; this depends on no other client."""
    if len(examples) < 2:
        raise DataError(
            f"client {client} has {len(examples)} example(s)",
            _TWO_EXAMPLES,
            "Create the partition again with partition.minimum=2 or more, or remove the client",
        )
    _, held, tested = split_sizes(len(examples), test, validation)
    mixed = np.sort(examples)[::-1] if ordered else examples[permutation(len(examples), seed, "split", client)]
    return np.sort(mixed[tested + held :]), np.sort(mixed[tested : tested + held]), np.sort(mixed[:tested])


def save(partition: Partition, path: str | os.PathLike[str], **meta: str | int | float) -> None:
    """Write a partition atomically, with ``meta``: what it was made from."""
    path = Path(path)
    stream = io.BytesIO()
    np.savez_compressed(
        stream,
        examples=np.concatenate(partition.clients),
        offsets=np.concatenate([[0], np.cumsum(partition.sizes)]),
        meta=np.array(json.dumps(meta)),
    )
    write_atomically(path, stream.getvalue())


def load(path: str | os.PathLike[str], examples: int) -> Partition:
    """Read a saved partition of a dataset of ``examples`` examples."""
    path = Path(path)
    try:
        held = _saved_examples(arrays.headers(path))
        meta = json.loads(str(arrays.read(path, ["meta"])["meta"]))
        made_of = ", ".join(f"{name}={value}" for name, value in meta.items())
        # Of another dataset's partition no more is read: its size may be anything.
        saved = _partition(**arrays.read(path, ["examples", "offsets"])) if held == examples else None
    except OSError as error:
        raise DataError(
            f"no partition can be read from {path}: {error}",
            remedy="Check partition.file, or leave it empty to draw a new partition",
        ) from error
    except Exception as error:  # arrays or a description that are not those of a partition
        raise DataError(
            f"{path} is not a partition, or is corrupt: {error}",
            "it needs the arrays examples, offsets and meta, with each example exactly once",
            "Create it again, or leave partition.file empty to draw a new partition",
        ) from error
    if saved is None:
        raise DataError(
            f"the partition in {path} is for {held} examples" + (f" ({made_of})" if made_of else ""),
            f"this dataset has {examples}: the file belongs to another one",
            "Use the dataset it was made from, or leave partition.file empty to draw a new partition",
        )
    return saved


def _saved_examples(headers: Mapping[str, arrays.Header]) -> int:
    """How many examples a saved partition is of; ValueError if its arrays are not those of a partition."""
    flat, offsets, meta = (headers[name] for name in ("examples", "offsets", "meta"))
    if not flat.dtype == offsets.dtype == np.int64 or not len(flat.shape) == len(offsets.shape) == 1:
        raise ValueError("its examples and offsets are not lists of whole numbers")
    if not 2 <= offsets.elements <= flat.elements + 1 or meta.size > _LONGEST_META:
        raise ValueError("its offsets do not match its examples, or its description is too long")
    return flat.elements


def _partition(examples: Examples, offsets: NDArray[np.int64]) -> Partition:
    if offsets[0] != 0 or offsets[-1] != len(examples) or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not match its examples")
    return Partition(tuple(np.sort(piece) for piece in np.split(examples, offsets[1:-1])))
