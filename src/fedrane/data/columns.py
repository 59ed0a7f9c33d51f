"""The form of a table: its columns by name, and the numbers that its cells become.

A number is one input. A category is one input per category of the training table, 1 for its own and 0 for the others.
The form is kept with the model, so that later tables become the same inputs, in whatever order their columns are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.errors import DataError, nearest
from fedrane.system import memory

LONGEST_TEXT = 200
"""Characters of a category."""
ABSENT = -1
"""The code of a cell without a value."""
_SHOWN = 10
"""Columns that an error counts one by one."""
_SEARCHED = 10_000
"""Names among which an error looks for a similar one."""


class Coded(NamedTuple):
    """A column of texts."""

    codes: NDArray[np.int32]
    """Of each row; ABSENT where there is no value."""
    texts: tuple[str, ...]
    """That of each code."""


@dataclass(frozen=True)
class Rows:
    """The cells of a table as they were read."""

    where: str
    cells: Mapping[str, NDArray[np.float64] | Coded]
    """By column, in the order of the table: numbers, NaN where there is no value, or texts."""
    places: Sequence[int]
    """Where each row stands, for messages."""
    unit: str
    """What the places count: lines of a file, or rows of a frame."""

    def __len__(self) -> int:
        return len(self.places)

    def at(self, row: int) -> str:
        """The place of a row, for a message."""
        return f"{self.unit} {self.places[row]}"

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column of numbers."""
        values = self.cells[name]
        assert not isinstance(values, Coded)  # noqa: S101 - its reader reads numbers
        return values

    def texts(self, name: str) -> Coded:
        """A column of texts."""
        values = self.cells[name]
        assert isinstance(values, Coded)  # noqa: S101 - its reader reads texts
        return values

    def missing(self, name: str) -> NDArray[np.bool_]:
        """Which rows have no value in a column."""
        values = self.cells[name]
        return values.codes == ABSENT if isinstance(values, Coded) else np.isnan(values)


@dataclass(frozen=True)
class Column:
    """A column that is an input."""

    name: str
    categories: tuple[str, ...] = ()
    """Of texts, in the order of their inputs; none for numbers."""
    fill: float | str | None = None
    """Replaces a missing value; None: a missing value is an error."""

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return len(self.categories) or 1

    def encode(self, rows: Rows, out: NDArray[np.float32]) -> None:
        """Write the column's inputs, which are zero, into ``out`` (rows, width)."""
        missing = rows.missing(self.name)
        if not self.categories:
            values = rows.numbers(self.name)
            out[:, 0] = values if self.fill is None else np.where(missing, self.fill, values)
            return
        codes, texts = rows.texts(self.name)
        index = {text: number for number, text in enumerate(self.categories)}
        number_of = np.array([index.get(text, ABSENT) for text in texts] + [index.get(str(self.fill), ABSENT)])
        place = number_of[np.where(missing, len(texts), codes)]  # a missing one has the code of the fill, the last
        if (place == ABSENT).any():
            row = int(np.argmax(place == ABSENT))
            raise DataError(
                f"{rows.where} has {texts[codes[row]]!r} in column {self.name!r}, {rows.at(row)}",
                f"the categories it was trained on are {', '.join(self.categories)}",
                "Correct or remove such rows, or train with some of them",
            )
        out[np.arange(len(place)), place] = 1


@dataclass(frozen=True)
class Table:
    """The columns of a table that are inputs, in the order of the inputs, and those that are not."""

    label: str
    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()
    """Columns that a later table may have or leave out: the clients, and those that were dropped."""

    @property
    def width(self) -> int:
        """How many numbers an input has."""
        return sum(column.width for column in self.columns)

    @property
    def is_number(self) -> NDArray[np.bool_]:
        """Which of them are numbers of the table and not marks of a category."""
        return np.repeat([not c.categories for c in self.columns], [c.width for c in self.columns])

    def require(self, names: Sequence[str], where: str, more: Sequence[str]) -> None:
        """Raise unless these are the names of the columns, in any order, and of ``more``, which are no inputs."""
        needed = [*(column.name for column in self.columns), *more]
        there = set(names)
        if absent := [name for name in needed if name not in there]:
            raise no_column(absent[0], names, where)
        known = {*needed, self.label, *self.ignored}
        if more := [name for name in names if name not in known]:
            raise DataError(
                f"{where} has a column {more[0]!r}",
                "the table of the training examples had none",
                "Remove or rename it; its columns are " + ", ".join(needed),
            )

    def encode(self, rows: Rows) -> NDArray[np.float32]:
        """Return the inputs (examples, columns)."""
        require_values(
            rows,
            [column.name for column in self.columns if column.fill is None],
            "Fill them in or remove those rows; a model trained with impute=median would fill them itself",
        )
        memory.require(4 * len(rows) * self.width, f"the inputs of {rows.where}", "Use fewer rows or categories")
        inputs = np.zeros((len(rows), self.width), np.float32)
        begin = 0
        for column in self.columns:
            column.encode(rows, inputs[:, begin : begin + column.width])
            begin += column.width
        return inputs

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """The reverse of ``dataclasses.asdict``; KeyError, TypeError or ValueError if it is not a table's form."""
        columns = tuple(
            Column(str(c["name"]), tuple(map(str, c["categories"])), _fill(c["fill"], bool(c["categories"])))
            for c in values["columns"]
        )
        return cls(str(values["label"]), columns, tuple(map(str, values["ignored"])))


def _fill(value: Any, is_category: bool) -> float | str | None:
    if value is None or is_category:
        return None if value is None else str(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a missing value cannot be replaced by {number}")
    return number


def derive(rows: Rows, label: str, ignored: Sequence[str], training: NDArray[np.bool_], impute: bool) -> Table:
    """Return the form of a table: the categories of all its rows, and what replaces missing values.

    With ``impute`` that is the median of the training rows, or their most frequent category.
    """
    names = [name for name in rows.cells if name != label and name not in ignored]
    for name in names:
        if rows.missing(name)[training].all():
            raise DataError(f"{rows.where}: column {name!r} has no values", "", f"Leave it out: drop={name}")
    if not impute:
        remedy = "Fill them in, remove those rows, leave columns out (drop=…), or set impute=median"
        require_values(rows, names, remedy)
    columns = [_column(rows, name, training, impute) for name in names]
    return Table(label, tuple(columns), tuple(ignored))


def _column(rows: Rows, name: str, training: NDArray[np.bool_], impute: bool) -> Column:
    present = training & ~rows.missing(name)
    values = rows.cells[name]
    if not isinstance(values, Coded):
        return Column(name, (), float(np.median(values[present])) if impute else None)
    counts = np.bincount(values.codes[present], minlength=len(values.texts))
    most = min(range(len(values.texts)), key=lambda code: (-counts[code], values.texts[code]))
    return Column(name, tuple(sorted(values.texts)), values.texts[most] if impute else None)


def missing_values(rows: Rows, names: Iterable[str]) -> str:
    """How many values are missing, by column; empty if none is."""
    counts = {name: count for name in names if (count := int(rows.missing(name).sum()))}
    shown = [f"{count} in {name!r}" for name, count in list(counts.items())[:_SHOWN]]
    more = [f"more in {len(counts) - _SHOWN} other columns"] if len(counts) > _SHOWN else []
    return ", ".join(shown + more)


def require_values(rows: Rows, names: Iterable[str], remedy: str) -> None:
    """Raise if a value is missing in one of these columns."""
    if missing := missing_values(rows, names):
        raise DataError(f"{rows.where} has missing values: {missing}, of {len(rows)} rows", "", remedy)


def no_column(name: str, names: Sequence[str], where: str, key: str = "") -> DataError:
    """The error for a column that a table does not have; ``key`` is the setting that names it."""
    listed = nearest(name, names) if len(names) <= _SEARCHED else f"It has {len(names)}, from {names[0]!r} on"
    return DataError(f"{where} has no column {name!r}" + (f" ({key}={name})" if key else ""), "", listed)
