"""Which client holds which training rows, and which of its own rows it trains, validates and tests on."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrane.data.streams import generator, permutation
from fedrane.errors import ConfigError, DataError, nearest
from fedrane.files import write_atomically

Rows = NDArray[np.int64]
_TWO_ROWS = "a client needs one row to train on and one to test on"


@dataclass(frozen=True, eq=False)
class Partition:
    """The training rows of each client, sorted; each row of the dataset belongs to exactly one client."""

    clients: tuple[Rows, ...]

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError("a partition without clients", "somebody has to hold the rows")
        rows = np.sort(np.concatenate(self.clients))
        if not np.array_equal(rows, np.arange(len(rows))):
            raise DataError(
                f"a partition of {len(rows)} rows in which some row is missing or stands twice",
                f"each of the rows 0 … {len(rows) - 1} belongs to exactly one client",
            )

    @property
    def sizes(self) -> Rows:
        """How many rows each client holds."""
        return np.array([len(rows) for rows in self.clients], dtype=np.int64)

    def counts(self, y: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
        """How many rows of each class each client holds: (clients, classes)."""
        return np.stack([np.bincount(y[rows], minlength=classes) for rows in self.clients])


@dataclass(frozen=True, eq=False)
class Split:
    """Each client's rows by use, sorted; the three parts of a client have no row in common and are all it holds."""

    train: tuple[Rows, ...]
    validation: tuple[Rows, ...]
    test: tuple[Rows, ...]


@dataclass(frozen=True)
class Partitioning:
    """How the rows are spread over the clients."""

    kind: str = "auto"
    """``auto`` is natural where the data come with their clients, else dirichlet."""
    alpha: float = 0.5
    """Of the Dirichlet distribution: the smaller, the more the clients differ."""
    shards: int = 2
    """Shards of each client, for kind=shards."""
    minimum: int = 10
    """The fewest rows a client may hold."""
    test: float = 0.25
    """The share of its rows that a client keeps for its test."""
    file: str = ""
    """A saved partition to use again; it then stands for all other settings but ``test``."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"partition.kind={self.kind}", "no such partition", nearest(self.kind, KINDS))
        if not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"partition.alpha={self.alpha}",
                "the Dirichlet distribution needs a positive, finite parameter",
                "Use 0.1 for strong skew, 0.5 for moderate, or partition.kind=iid for none",
            )
        if self.shards < 1:
            raise ConfigError(
                f"partition.shards={self.shards}", "each client gets one shard or more", "Use partition.shards=2"
            )
        if self.minimum < 2:
            raise ConfigError(
                f"partition.minimum={self.minimum}",
                _TWO_ROWS,
                "Use partition.minimum=2 or more",
            )
        _check_test_share(self.test)

    def resolved(self, natural: bool) -> Partitioning:
        """With ``auto`` replaced by what it comes to on data with or without clients of their own."""
        return replace(self, kind="natural" if natural else "dirichlet") if self.kind == "auto" else self


def _check_test_share(test: float) -> None:
    if not 0 < test < 1:
        raise ConfigError(
            f"partition.test={test}",
            "it is the share of its rows that a client keeps for its test, between 0 and 1",
            "Use partition.test=0.25",
        )


def partition(
    y: NDArray[np.int64],
    classes: int,
    clients: int,
    how: Partitioning,
    seed: int,
    natural: NDArray[np.int64] | None = None,
) -> Partition:
    """Spread the rows labelled ``y`` over the clients; ``natural`` is the data's own client of each row.

    With kind=natural or a file the data decide how many clients there are, and ``clients`` may be 0.
    """
    how = how.resolved(natural is not None)
    if how.file:
        found = load(how.file, rows=len(y))
        _check_clients(len(found.clients), clients, f"The partition in {how.file}")
        return found
    if how.kind == "natural":
        return _natural(natural, clients)
    if clients < 1:
        raise DataError(
            f"clients={clients} with partition.kind={how.kind}",
            "only natural partitions and saved ones know their number of clients",
            "Give the number of clients, such as clients=20",
        )
    if clients * how.minimum > len(y):
        raise DataError(
            f"{len(y)} rows for {clients} clients",
            f"each needs at least {how.minimum} (partition.minimum)",
            _room(len(y), clients, how.minimum),
        )
    if how.kind in ("iid", "quantity"):  # blind to labels: to them, all rows are of one class
        y, classes = np.zeros_like(y), 1
    counts = _COUNTS[how.kind](np.bincount(y, minlength=classes), clients, how, seed)
    return _deal(_repair(counts, how.minimum), y, seed)


def _room(rows: int, clients: int, minimum: int) -> str:
    remedies = []
    if rows >= minimum:
        remedies.append(f"clients={rows // minimum} or fewer")
    if rows >= 2 * clients:
        remedies.append(f"partition.minimum={rows // clients} or less")
    return f"Use {' or '.join(remedies)}" if remedies else "Use fewer clients and a smaller partition.minimum"


def _check_clients(found: int, wanted: int, who: str) -> None:
    if wanted not in (0, found):
        raise DataError(
            f"{who} has {found} clients, but clients={wanted}",
            "its rows belong to their owners",
            f"Use clients={found}",
        )


def _natural(client: NDArray[np.int64] | None, clients: int) -> Partition:
    """The data's own clients, in the order of their numbers; none is repaired, since rows belong to their owners."""
    if client is None:
        raise DataError(
            "partition.kind=natural, but this dataset names no clients",
            "only data that come with their clients have a natural partition",
            "Use another kind, such as partition.kind=dirichlet",
        )
    names, owner, sizes = np.unique(client, return_inverse=True, return_counts=True)
    _check_clients(len(names), clients, "The dataset")
    small = np.flatnonzero(sizes < 2)
    if len(small):
        more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
        raise DataError(
            f"client {names[small[0]]}{more} has only 1 row",
            _TWO_ROWS,
            "Remove it from the data, or use another partition.kind",
        )
    return _of_owners(owner, len(names))


def _of_owners(owner: NDArray[np.int64], clients: int) -> Partition:
    rows = np.argsort(owner, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return Partition(tuple(np.split(rows, ends[:-1])))


# The kinds below decide only how many rows of each class (``per_class``) each client gets, a matrix of clients ×
# classes; which rows these are is drawn afterwards. So one repair and one deal serve all of them.


def _iid(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """Sizes that differ by one row at most."""
    ends = np.arange(clients + 1) * int(per_class.sum()) // clients
    return np.diff(ends)[:, None]


def _dirichlet(
    per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int, capped: bool = False
) -> NDArray[np.int64]:
    """Each class is cut in proportions drawn from Dir(α); where capped, by the clients not yet at their N / K rows."""
    counts = np.zeros((clients, len(per_class)), dtype=np.int64)
    for label, rows in enumerate(per_class):
        # While rows are left, some client holds less than the mean: somebody is always open.
        full = counts.sum(axis=1) * clients >= per_class.sum() if capped and rows else np.zeros(clients, dtype=bool)
        # Rounded to the nearest row: rounded down, the last client would gain half a row of every class.
        cuts = np.rint(_cumulative_shares(how.alpha, full, seed, label) * rows).astype(np.int64)
        counts[:, label] = np.diff(cuts, prepend=0)
    return counts


def _cumulative_shares(alpha: float, full: NDArray[np.bool_], seed: int, label: int) -> NDArray[np.float64]:
    """A draw of Dir(α), without the clients that are full, summed up to exactly 1.

    Dirichlet shares are normalised gamma variates, which all underflow to 0 when α is small. Their logarithms do not:
    Gamma(α) is Gamma(α + 1) · U^(1/α), and the largest is brought to 1 before the division by α.
    """
    alpha = min(alpha, 1e18)  # beyond, shares differ by less than a row, and α · log would overflow
    draw = generator(seed, "partition shares", label)
    logs = np.log1p(-draw.random(len(full))) + alpha * np.log(draw.standard_gamma(alpha + 1, len(full)))
    logs[full] = -np.inf
    with np.errstate(over="ignore"):  # to −∞, a share of 0
        total = np.cumsum(np.exp((logs - logs.max()) / alpha))
    return np.asarray(total / total[-1])


def _shards(per_class: NDArray[np.int64], clients: int, how: Partitioning, seed: int) -> NDArray[np.int64]:
    """The rows, sorted by label, are cut into equal shards, dealt at random (McMahan et al. 2017)."""
    rows, shards = int(per_class.sum()), clients * how.shards
    if shards > rows:
        raise DataError(
            f"{shards} shards ({clients} clients × partition.shards={how.shards}) of {rows} rows",
            "a shard holds one row or more",
            f"Use partition.shards={rows // clients} or less",
        )
    label = np.repeat(np.arange(len(per_class)), per_class)
    owner = permutation(shards, seed, "partition shards")[np.arange(rows) * shards // rows] // how.shards
    cells = np.bincount(owner * len(per_class) + label, minlength=clients * len(per_class))
    return cells.reshape(clients, len(per_class))


_COUNTS: dict[str, Callable[[NDArray[np.int64], int, Partitioning, int], NDArray[np.int64]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-capped": partial(_dirichlet, capped=True),
    "shards": _shards,
    "quantity": _dirichlet,
}
KINDS = ("auto", "natural", *_COUNTS)


def _repair(counts: NDArray[np.int64], minimum: int) -> NDArray[np.int64]:
    """Bring every client to ``minimum`` rows, taken one after the other from whoever is then the largest.

    The largest give of their most numerous class, and the rows are handed on class by class, so that a client without
    rows gets few classes: the skew stays.
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
    """How much each gives when ``total`` units are taken one by one, always from the highest."""
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
    """Give each client its number of rows of each class, drawn at random."""
    order = permutation(len(y), seed, "partition rows")
    order = order[np.argsort(y[order], kind="stable")]
    clients, classes = counts.shape
    owner = np.empty(len(y), dtype=np.int64)
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return _of_owners(owner, clients)


def split(partition: Partition, seed: int, test: float = 0.25, validation: float = 0.0) -> Split:
    """Cut each client's rows at random into training, validation (a share of what is not test) and test rows.

    Every client keeps a row to train on and one to test on. The test rows are the same whatever ``validation`` is, so
    that a choice made on validation rows is measured on the rows of every other run.
    """
    _check_test_share(test)
    if not 0 <= validation < 1:
        raise ConfigError(
            f"validation={validation}",
            "it is the share of a client's training rows that are held out, from 0 to less than 1",
            "Use 0 for none, or 0.2",
        )
    parts = [split_client(rows, client, seed, test, validation) for client, rows in enumerate(partition.clients)]
    return Split(*zip(*parts, strict=True))


def split_client(rows: Rows, client: int, seed: int, test: float, validation: float) -> tuple[Rows, Rows, Rows]:
    """One client's training, validation and test rows; it needs to know of no other."""
    if len(rows) < 2:
        raise DataError(
            f"client {client} holds {len(rows)} row(s)",
            _TWO_ROWS,
            "Make the partition again with partition.minimum=2 or more, or remove the client",
        )
    # With three rows or more, two stay outside the test: whether one of them validates must not change the test.
    tested = min(max(round(test * len(rows)), 1), max(len(rows) - 2, 1))
    kept = len(rows) - tested
    held = min(max(round(validation * kept), 1), kept - 1) if validation else 0
    mixed = rows[permutation(len(rows), seed, "split", client)]
    return np.sort(mixed[tested + held :]), np.sort(mixed[tested : tested + held]), np.sort(mixed[:tested])


def save(partition: Partition, path: str | os.PathLike[str], **meta: str | int | float) -> None:
    """Write a partition, with a note of what it was made from; a file at ``path`` is replaced whole or not at all."""
    path = Path(path)
    stream = io.BytesIO()
    np.savez_compressed(
        stream,
        rows=np.concatenate(partition.clients),
        offsets=np.concatenate([[0], np.cumsum(partition.sizes)]),
        meta=np.array(json.dumps(meta)),
    )
    write_atomically(path, stream.getvalue())


def load(path: str | os.PathLike[str], rows: int) -> Partition:
    """Read a saved partition of a dataset of ``rows`` rows."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"no partition can be read from {path}: {error}",
            remedy="Check partition.file, or leave it empty to draw a new partition",
        ) from error
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            flat, offsets, meta = file["rows"], file["offsets"], json.loads(str(file["meta"]))
        made_of = ", ".join(f"{name}={value}" for name, value in meta.items())
        whole = flat.dtype == offsets.dtype == np.int64 and offsets[0] == 0 and offsets[-1] == len(flat)
        if not whole or (np.diff(offsets) < 0).any():
            raise ValueError("its offsets do not fit its rows")
        found = Partition(tuple(np.sort(piece) for piece in np.split(flat, offsets[1:-1])))
    except Exception as error:  # of broken bytes, the readers of zip, arrays and JSON raise nearly anything
        raise DataError(
            f"{path} is not a partition, or is corrupt: {error}",
            "it needs the arrays rows, offsets and meta, with each row exactly once",
            "Make it again, or leave partition.file empty to draw a new partition",
        ) from error
    if len(flat) != rows:
        raise DataError(
            f"the partition in {path} is of {len(flat)} rows" + (f" ({made_of})" if made_of else ""),
            f"this dataset has {rows}: the file belongs to another one",
            "Use the dataset it was made from, or leave partition.file empty to draw a new partition",
        )
    return found
