"""Reads tables with named columns: CSV and Parquet files, and the data frames of pandas and Polars.

A CSV file is read in one pass, and its columns are kept as numbers or as codes of their texts, so that a file needs a
few times its size and no more.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import itertools
import numbers
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedrane.data import parquet
from fedrane.data.columns import (
    ABSENT,
    LONGEST_TEXT,
    Coded,
    Rows,
    Table,
    derive,
    missing_values,
    no_column,
    require_values,
)
from fedrane.data.dataset import CLASSES_ONLY, REGRESSION, Dataset, hold_out_of_clients, moments
from fedrane.errors import ConfigError, DataError, nearest
from fedrane.system import memory
from fedrane.system.files import user_path

PARQUET = ".parquet"
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", PARQUET)
NONE, MEDIAN = "none", "median"
IMPUTE = (NONE, MEDIAN)
BY_DATASET = "dataset"
TASKS = (BY_DATASET, REGRESSION)

_MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null"})
"""Cells without a value, in lower case."""
_BOOLEANS = {"true": 1.0, "false": 0.0}
_DECIMAL_COMMA = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+")
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T].*)?|\d{1,2}:\d{2}(:.*)?", re.DOTALL
)
_SEPARATORS = ",;\t|"
_GZIP = b"\x1f\x8b"
_LONGEST_ROW = 1 << 24
"""In characters. Quoted cells may have several lines, so a row without end need not be a line without end."""
_MANY_CLASSES = 20
"""Of whole numbers: with more, one may want to predict them as numbers."""
_MOST_COLUMNS = 100_000
_CELLS_AT_ONCE = 1 << 18
_PER_CELL = 8 + 3 * 4
"""Bytes: as it is read, and as an input: whole, and split into those for training and those held out."""
_PER_TEXT = 300
_FLOAT32 = float(np.finfo(np.float32).max)


@runtime_checkable
class Frame(Protocol):
    """A data frame, of pandas or Polars for instance: columns by name, each with ``to_numpy``."""

    @property
    def columns(self) -> Any: ...

    @property
    def dtypes(self) -> Any: ...

    def __getitem__(self, name: Any, /) -> Any: ...


def is_table(name: str | Path) -> bool:
    """Whether this is the name of a file that is read as a table."""
    return str(name).lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class TableOptions:
    """How the user wants a table to be read."""

    label: str = ""
    """The column to predict."""
    client: str = ""
    """The column with the client of each row; empty: the data name no clients."""
    drop: str = ""
    """Columns to leave out, separated by commas; a name that has a comma is quoted, as in a CSV file."""
    categories: str = ""
    """Columns of numbers that are categories, a postcode for instance; separated as in ``drop``."""
    impute: str = NONE
    """What replaces missing values: nothing, so that they are an error, or ``median``."""
    task: str = BY_DATASET
    """With ``regression`` the label is a number, else a class."""

    def __post_init__(self) -> None:
        for key, known in (("impute", IMPUTE), ("task", TASKS)):
            if (value := getattr(self, key)) not in known:
                raise ConfigError(f"{key}={value} is not known", remedy=nearest(value, known))

    @property
    def dropped(self) -> list[str]:
        return _listed("drop", self.drop)

    @property
    def kind_of_label(self) -> Kind:
        return Kind.NUMBER if self.task == REGRESSION else Kind.TEXT

    def kinds(self, names: Sequence[str], where: str) -> dict[str, Kind]:
        """How each column of a table is to be read."""
        if not self.label:
            why = "a table needs the name of the column to predict"
            raise ConfigError(f"{where} has no label", why, f"Set label=NAME; its columns are {', '.join(names)}")
        roles: dict[str, str] = {}
        wanted = [("label", [self.label]), ("client", [self.client] if self.client else []), ("drop", self.dropped)]
        kinds = dict.fromkeys(names, Kind.GUESSED)
        for key, columns in [*wanted, ("categories", _listed("categories", self.categories))]:
            for name in columns:
                if name not in kinds:
                    raise no_column(name, names, where, key)
                if roles.setdefault(name, key) != key:
                    raise ConfigError(f"{roles[name]}={name} and {key}={name}", "a column has one use")
                kinds[name] = Kind.SKIPPED if key == "drop" else self.kind_of_label if key == "label" else Kind.TEXT
        if not set(names) - {self.label, self.client, *self.dropped}:
            raise DataError(f"{where} has no column to predict {self.label!r} from", "", "Leave fewer columns out")
        return kinds


TABLE_KEYS = tuple(field.name for field in fields(TableOptions))


class Kind(Enum):
    """How a column is read."""

    SKIPPED = auto()
    NUMBER = auto()
    TEXT = auto()
    GUESSED = auto()
    """Its first value decides; the others must then be of the same kind."""


Choose = Callable[[Sequence[str], str], Mapping[str, Kind]]


def from_csv(path: str | Path, label: str, **more: str) -> Dataset:
    """Read a CSV file whose first line names the columns, or a Parquet file.

    ``more`` are the other fields of :class:`TableOptions`.
    """
    return read_table(path, TableOptions(label, **more))


def from_frame(frame: Frame, label: str, **more: str) -> Dataset:
    """Read a data frame of pandas or Polars; ``more`` are the other fields of :class:`TableOptions`."""
    return read_table(frame, TableOptions(label, **more))


def read_table(source: str | Path | Frame, options: TableOptions, like: Table | None = None) -> Dataset:
    """Read a table; ``like`` is the form of another one, if its inputs are to be the same."""
    also = {options.label: options.kind_of_label} | ({options.client: Kind.TEXT} if options.client else {})
    rows = read_known(source, like, also) if like else _read(source, options.kinds)
    name = "frame" if isinstance(source, Frame) else Path(rows.where).name.partition(".")[0]
    return _dataset(name, rows, options, like)


def read_known(source: str | Path | Frame, table: Table, more: Mapping[str, Kind] = MappingProxyType({})) -> Rows:
    """Read the columns of a table of the same form as another one, and ``more``, for instance its label."""

    def kinds(names: Sequence[str], where: str) -> dict[str, Kind]:
        table.require(names, where, [*more])
        known = {column.name: Kind.TEXT if column.categories else Kind.NUMBER for column in table.columns}
        return {**dict.fromkeys(names, Kind.SKIPPED), **known, **more}

    return _read(source, kinds)


def _read(source: str | Path | Frame, choose: Choose) -> Rows:
    if isinstance(source, Frame):
        return read_frame(source, choose)
    path = user_path(source)
    if not path.name.lower().endswith(PARQUET):
        return read_csv(path, choose)
    with parquet.opened(path) as frame:
        return read_frame(frame, choose, str(path))


def numbers_to_predict(rows: Rows, label: str) -> NDArray[np.float64]:
    """The label of each row as a number."""
    require_values(rows, [label], "Fill them in, or remove those rows: each needs its label")
    return rows.numbers(label)


def labels(rows: Rows, table: Table) -> list[str]:
    """The name of the class of each row."""
    codes, names = _classes(rows, table.label, "label")
    return [names[code] for code in codes]


def _dataset(name: str, rows: Rows, options: TableOptions, like: Table | None) -> Dataset:
    y: NDArray[Any]
    classes: tuple[str, ...] = ()
    if options.task == REGRESSION:
        y = numbers_to_predict(rows, options.label)
    else:
        y, classes = _classes(rows, options.label, "label")
    clients = _classes(rows, options.client, "client")[0] if options.client else None
    strata = y.astype(np.int64) if classes else np.zeros(len(y), np.int64)
    held = hold_out_of_clients(strata, clients, rows.where)
    ignored = [*([options.client] if options.client else []), *options.dropped]
    if like is None:
        _require_few_categories(rows, options, ignored)
    table = like or derive(rows, options.label, ignored, ~held, options.impute == MEDIAN)
    x = table.encode(rows)
    # A mark of a category stays 0 or 1: divided by the deviation of a rare one, it would be a huge number.
    mean, std = moments(x[~held])
    means, deviations = (
        tuple(np.where(table.is_number, values, mark).tolist()) for values, mark in ((mean, 0.0), (std, 1.0))
    )
    filled = missing_values(rows, [column.name for column in table.columns])
    note = f"{rows.where}: missing values are replaced by the median of the training examples: {filled}"
    return Dataset(
        name,
        x[~held],
        y[~held],
        x[held],
        y[held],
        classes,
        means,
        deviations,
        None if clients is None else clients[~held],
        table,
        asdict(options),
        ((note,) if filled else ()) + _maybe_numbers(rows.where, options.label, classes),
    )


def _maybe_numbers(where: str, label: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """A note on classes that may be meant as numbers."""
    if len(classes) <= _MANY_CLASSES or _whole(classes) is None:
        return ()
    return (f"{where}: {label!r} is read as {len(classes)} classes; task={REGRESSION} predicts it as a number",)


def _classes(rows: Rows, name: str, key: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The classes or clients of the rows, numbered in the order of their numbers, or else of their names."""
    require_values(rows, [name], f"Fill them in, or remove those rows: each needs its {key}")
    codes, texts = rows.texts(name)
    if len(texts) > max(2, len(rows) // 2):
        raise DataError(
            f"{rows.where}: column {name!r} has {len(texts)} different values in {len(rows)} rows",
            f"{key}={name} should name the {'class' if key == 'label' else 'client'} of a row, which others share",
            CLASSES_ONLY if key == "label" and all(_number(text) is not None for text in texts) else "",
        )
    whole = _whole(texts)
    measured = [text for text in texts if (_number(text) or 0) % 1]
    if key == "label" and measured:
        raise DataError(
            f"{rows.where}: column {name!r} has {measured[0]}", "labels are classes, not measurements", CLASSES_ONLY
        )
    named = list(texts) if whole is None else [str(number) for number in whole]
    ordered = sorted(set(named), key=None if whole is None else int)
    index = {text: number for number, text in enumerate(ordered)}
    return np.array([index[text] for text in named], np.int64)[codes], tuple(ordered)


def _whole(texts: Iterable[str]) -> list[int] | None:
    """The whole numbers that the texts are; None if one of them is something else."""
    return [int(float(text)) for text in texts] if all(map(_is_whole, texts)) else None


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?(0|[1-9]\d{0,14})(\.0*)?", text) is not None  # 01067 is a name


def _require_few_categories(rows: Rows, options: TableOptions, ignored: Sequence[str]) -> None:
    meant = {options.label, *ignored, *_listed("categories", options.categories)}
    for name, values in rows.cells.items():
        if name not in meant and isinstance(values, Coded) and len(values.texts) > len(rows) // 2:
            raise DataError(
                f"{rows.where}: column {name!r} has {len(values.texts)} different texts in {len(rows)} rows, such as "
                f"{values.texts[0]!r}",
                "it identifies rows rather than describing them",
                f"Leave it out: drop={name}; if they are categories nonetheless, set categories={name}",
            )


def _listed(key: str, text: str) -> list[str]:
    """Names that are separated by commas, quoted as in a CSV file."""
    try:
        rows = list(csv.reader([text], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{key}={text}", f"it cannot be read: {error}", f'Write {key}=one,"the, other"') from error
    return [name.strip() for name in (rows[0] if rows else []) if name.strip()]


# ---- cells


def _number(text: str) -> float | None:
    """The number that a cell is, NaN for none; None if it is something else."""
    if text.lower() in _MISSING:
        return np.nan
    try:
        return None if "_" in text else float(text)  # Python reads 1_000 as a number
    except ValueError:
        return _BOOLEANS.get(text.lower())


class _Reader:
    """Reads the cells of one column, a part at a time."""

    def __init__(self, name: str, kind: Kind, where: str, unit: str) -> None:
        self.name, self.kind, self.where, self.unit = name, kind, where, unit
        self.guessed = kind is Kind.GUESSED
        self.numbers, self.codes = array("d"), array("i")
        self.code_of: dict[str, int] = {}

    def add(self, cells: Sequence[str], places: Sequence[int]) -> None:
        if self.kind is Kind.GUESSED:
            self._guess(cells, places)
        if self.kind is Kind.TEXT:
            self._add_texts(cells, places)
        elif self.kind is not Kind.SKIPPED:
            self._add_numbers(cells, places)

    def result(self) -> NDArray[np.float64] | Coded:
        if self.kind is Kind.TEXT:
            return Coded(np.frombuffer(self.codes, np.int32), tuple(self.code_of))
        return np.frombuffer(self.numbers, np.float64)

    def _guess(self, cells: Sequence[str], places: Sequence[int]) -> None:
        for cell, place in zip(cells, places, strict=True):
            if (text := cell.strip()).lower() in _MISSING:
                continue
            if _number(text) is not None:
                self.kind = Kind.NUMBER
                return
            if _DATE.fullmatch(text):
                raise self._error(text, place, *_no_dates(self.name))
            self.kind = Kind.TEXT
            self.codes = array("i", [ABSENT]) * len(self.numbers)  # so far no cell had a value
            return

    def _add_numbers(self, cells: Sequence[str], places: Sequence[int]) -> None:
        try:
            values = [np.nan] if "_" in "".join(cells) else [float(cell) for cell in cells]
        except ValueError:
            values = []
        if len(values) != len(cells):
            values = [self._as_number(cell.strip(), place) for cell, place in zip(cells, places, strict=True)]
        self.add_values(np.array(values), places)

    def add_values(self, values: NDArray[np.float64], places: Sequence[int]) -> None:
        """Add numbers as they are."""
        if (too_large := np.abs(values) > _FLOAT32).any():
            at = int(np.argmax(too_large))
            why = "a table must contain finite numbers that fit in float32"
            raise self._error(str(values[at]), places[at], why, "Correct or remove such rows")
        self.numbers.frombytes(values.tobytes())

    def _as_number(self, text: str, place: int) -> float:
        value = _number(text)
        if value is None:
            raise self._mixed(text, place, "numbers")
        return value

    def _add_texts(self, cells: Sequence[str], places: Sequence[int]) -> None:
        for cell, place in zip(cells, places, strict=True):
            text = cell.strip()
            code = self.code_of.get(text)
            if code is None:
                code = self._new(text, place)
            self.codes.append(code)

    def _new(self, text: str, place: int) -> int:
        """The code of a text that is seen for the first time."""
        if text.lower() in _MISSING:
            return ABSENT
        if len(text) > LONGEST_TEXT:
            short = f"{text[:40]}…"
            why = f"a category has at most {LONGEST_TEXT} characters, and other texts are not read"
            raise self._error(short, place, why, f"Leave the column out: drop={self.name}")
        if self.guessed and (_number(text) is not None or _DECIMAL_COMMA.fullmatch(text)):
            raise self._mixed(text, place, "texts")
        return self.code_of.setdefault(text, len(self.code_of))

    def _mixed(self, text: str, place: int, others: str) -> DataError:
        if _DECIMAL_COMMA.fullmatch(text):
            remedy = "From Python, pass the frame of pandas.read_csv(path, sep=';', decimal=',') as dataset"
            return self._error(text, place, "numbers have a decimal point", remedy)
        remedy = "Correct it, or leave the cell empty"
        if self.guessed:
            remedy += f"; categories={self.name} reads the whole column as categories"
        return self._error(text, place, f"the column's other cells are {others}" if self.guessed else "", remedy)

    def _error(self, text: str, place: int, why: str, remedy: str) -> DataError:
        column = f"column {self.name!r}" + ("" if why else ", which is a column of numbers")
        return DataError(f"{self.where} has {text!r} in {column}, {self.unit} {place}", why, remedy)


def _no_dates(name: str) -> tuple[str, str]:
    remedy = f"Replace it by a number, the days since an event for instance, or leave it out: drop={name}"
    return "dates and times are not read", remedy


def _require_names(names: Sequence[str], where: str) -> None:
    if len(names) > _MOST_COLUMNS:
        raise DataError(f"{where} has {len(names):,} columns", f"a table has at most {_MOST_COLUMNS:,}")
    seen: set[str] = set()
    for number, name in enumerate(names, 1):
        if not name:
            raise DataError(
                f"{where}: column {number} has no name",
                "columns are known by their names",
                "Name it in the first line; pandas writes its row numbers so, unless you say index=False",
            )
        if name in seen:
            raise DataError(f"{where} has two columns {name!r}", "columns are known by their names", "Rename one")
        seen.add(name)


# ---- files


def read_csv(path: Path, choose: Choose) -> Rows:
    """Read a CSV file: names of the columns, then rows. ``choose`` says how the columns are read."""
    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is no file", "", "Check the path")
    with _opened(path) as (text, position):
        lines = _Lines(text, path)
        skipped, first = next(((n, line) for n, line in enumerate(lines) if line.strip()), (0, ""))
        separator = "\t" if ".tsv" in path.name.lower() else max(_SEPARATORS, key=_outside_quotes(first).count)
        reader = csv.reader(itertools.chain([first], lines), delimiter=separator, skipinitialspace=True, strict=True)
        names = [name.strip() for name in next(reader, [])]
        if not names:
            raise DataError(f"{path} is empty", "its first line should name the columns")
        _require_names(names, str(path))
        kinds = choose(names, str(path))
        columns = [_Reader(name, kinds[name], str(path), "line") for name in names]
        used = [number for number, name in enumerate(names) if kinds[name] is not Kind.SKIPPED]
        places, size, looked = array("q"), path.stat().st_size, 0
        for part, lines_of in _parts(reader, names, lines, skipped):
            cells = list(zip(*part, strict=True))
            for number in used:
                columns[number].add(cells[number], lines_of)
            places.extend(lines_of)
            if len(places) >= 2 * looked:  # now and then: asking the system takes time
                looked, whole = len(places), size / max(position(), 1)
                texts = sum(len(columns[number].code_of) for number in used)
                needed = whole * (_PER_CELL * len(places) * len(used) + _PER_TEXT * texts)
                memory.require(needed, f"the table in {path}", "Use fewer rows, or leave columns out (drop=…)")
    if not places:
        raise DataError(f"{path} has no rows below the names of its columns")
    return Rows(str(path), {names[number]: columns[number].result() for number in used}, places, "line")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[str], Callable[[], int]]]:
    """The text of a file, and how far into it one has read, in bytes."""
    remedy = "Save it as CSV in UTF-8, with the names of the columns in its first line"
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == _GZIP
            binary: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
                yield text, raw.tell
    except UnicodeDecodeError as error:
        byte = f"it has the byte 0x{error.object[error.start]:02x}"
        raise DataError(f"{path} is not text in UTF-8: {byte}", "", remedy) from error
    except csv.Error as error:
        why = "a quotation mark that is not closed, or stands inside a cell, can be the cause"
        raise DataError(f"{path} cannot be read as CSV: {error}", why, remedy) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", "", remedy) from error


class _Lines:
    """The lines of a file, one after the other; an error if a row never ends: it would be held in memory as a whole."""

    def __init__(self, text: IO[str], path: Path) -> None:
        self.text, self.path = text, path
        self.number = 0
        self.row = 0
        """Characters of the row so far; whoever has the whole row sets it to 0."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.text.readline(_LONGEST_ROW - self.row)
        if not line:
            raise StopIteration
        self.number += 1
        self.row += len(line)
        where = f"line {self.number} of {self.path}"
        if self.row >= _LONGEST_ROW:
            why = "a quotation mark that is not closed can be the cause"
            raise DataError(f"the row in {where} is longer than {_LONGEST_ROW:,} characters", why, "Is it CSV?")
        if "\0" in line:
            raise DataError(f"{where} has a zero byte", "text has none", "Save it as CSV in UTF-8")
        return line


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)


def _parts(
    reader: Any, names: Sequence[str], lines: _Lines, skipped: int
) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Rows and their lines, some at a time; ``skipped`` lines came before those of the reader."""
    at_once = max(1, _CELLS_AT_ONCE // len(names))
    rows: list[list[str]] = []
    places: list[int] = []
    lines.row = 0
    for row in reader:
        lines.row = 0
        if not row:
            continue  # an empty line
        if len(row) != len(names):
            where = f"line {skipped + reader.line_num} of {lines.path}"
            raise DataError(
                f"{where} has {len(row)} cells, and its first line {len(names)}",
                "each row has a cell for each column",
                'A cell that contains the separator is quoted: "a, b"',
            )
        rows.append(row)
        places.append(skipped + reader.line_num)
        if len(rows) == at_once:
            yield rows, places
            rows, places = [], []
    if rows:
        yield rows, places


# ---- frames


def read_frame(frame: Frame, choose: Choose, where: str = "the frame") -> Rows:
    """Read a data frame of pandas or Polars, or an open file. ``choose`` says how the columns are read."""
    given = list(frame.columns)
    names = [str(name).strip() for name in given]
    _require_names(names, where)
    if not names:
        raise DataError(f"{where} has no columns")
    kinds = choose(names, where)
    cells: dict[str, NDArray[np.float64] | Coded] = {}
    places: Sequence[int] = range(len(frame[given[0]]))
    if not places:
        raise DataError(f"{where} has no rows")
    for key, name in zip(given, names, strict=True):
        if kinds[name] is Kind.SKIPPED:
            continue
        reader = _Reader(name, kinds[name], where, "row")
        values = frame[key].to_numpy()
        if len(values) != len(places):
            raise DataError(
                f"{where} has {len(values)} cells in column {name!r}, and {len(places)} rows", "it is damaged"
            )
        if values.dtype.kind in "mM":
            raise DataError(f"column {name!r} of {where} has dates or times", *_no_dates(name))
        if values.dtype.kind in "biuf" and kinds[name] is not Kind.TEXT:
            reader.add_values(values.astype(np.float64), places)
        else:
            reader.add([_text(value, name, where) for value in values.tolist()], places)
        cells[name] = reader.result()
    return Rows(where, cells, places, "row")


def _text(value: object, name: str, where: str) -> str:
    """A cell of a frame as it would stand in a CSV file."""
    if value is None:
        return ""
    text = str(value)
    if isinstance(value, (str, numbers.Number, datetime.date, datetime.time)) or text.lower() in _MISSING:
        return text
    raise DataError(
        f"column {name!r} of {where} has a {type(value).__name__}", "cells are numbers or texts", f"drop={name}"
    )
