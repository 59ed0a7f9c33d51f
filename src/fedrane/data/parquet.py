"""Reads Parquet files as a frame, one column at a time: what :func:`fedrane.data.tabular.read_frame` takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrane.data.arrays import Array
from fedrane.data.columns import LONGEST_TEXT
from fedrane.errors import DataError
from fedrane.system import extras, memory

_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls the numbers of rows: they are in the file, and not among the columns of the frame."""
_AT_ONCE = 1 << 20
"""Rows."""
_PER_CELL = 8 + 3 * 4
"""Bytes: as it is read, and as an input, as in a CSV file."""


@dataclass(frozen=True, eq=False)
class ParquetColumn:
    """A column of an open file."""

    frame: ParquetFrame
    name: str

    def __len__(self) -> int:
        return int(self.frame.file.metadata.num_rows)

    def to_numpy(self) -> Array:
        """Read it; texts, and numbers among which values are missing, as pandas has them."""
        from pyarrow import BaseExtensionType, chunked_array, types

        what, kind = f"column {self.name!r} of {self.frame.path}", self.frame.file.schema_arrow.field(self.name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        # Refused unread: a cell that takes a few bytes in the file may take gigabytes in memory.
        if types.is_nested(kind) or types.is_fixed_size_binary(kind) or isinstance(kind, BaseExtensionType):
            raise DataError(f"{what} has {kind}", "cells are numbers or texts", f"drop={self.name}")
        with _clear_errors(self.frame.path):
            column = chunked_array(self._parts())
            if not types.is_dictionary(column.type):
                values: Array = column.to_numpy()
                return values
            texts = [np.array([*part.dictionary.to_pylist(), None], object) for part in column.chunks]
        if (longest := max((len(text) for some in texts for text in some[:-1]), default=0)) > LONGEST_TEXT:
            why = f"a category has at most {LONGEST_TEXT}, and other texts are not read"
            raise DataError(f"{what} has a text of {longest:,} characters", why, f"drop={self.name}")
        with _clear_errors(self.frame.path):
            codes = [part.indices.fill_null(len(part.dictionary)).to_numpy() for part in column.chunks]
            return np.concatenate([some[code] for some, code in zip(texts, codes, strict=True)])

    def _parts(self) -> Iterator[Any]:
        """Its cells, some at a time: columns may have more than the rows for which the memory was compared."""
        rows = 0
        for batch in self.frame.file.iter_batches(_AT_ONCE, columns=[self.name]):
            rows += len(batch)
            if rows > len(self):
                raise ValueError(f"column {self.name!r} has more cells than the file has rows")
            yield batch.column(0)


@dataclass(frozen=True, eq=False)
class ParquetFrame:
    """An open file."""

    path: Path
    file: Any

    @property
    def columns(self) -> list[str]:
        return [name for name in self.file.schema_arrow.names if not _INDEX.fullmatch(name)]

    @property
    def dtypes(self) -> list[str]:
        return [str(self.file.schema_arrow.field(name).type) for name in self.columns]

    def __getitem__(self, name: str) -> ParquetColumn:
        return ParquetColumn(self, name)


@contextmanager
def opened(path: Path) -> Iterator[ParquetFrame]:
    """Open a file; its metadata are compared with the memory that is available."""
    extras.require("parquet", str(path), "pyarrow.parquet")
    from pyarrow import parquet, types

    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is no file", "", "Check the path")
    with _clear_errors(path):
        file = parquet.ParquetFile(path)
        meta = file.metadata
        stored = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
        # Of texts, each different one once: a file may hold a long one, and millions of rows with its number.
        flat = [field.name for field in file.schema_arrow if not types.is_nested(field.type)]
        file = parquet.ParquetFile(path, metadata=meta, read_dictionary=flat)
    with file:
        needed = stored + _PER_CELL * meta.num_rows * meta.num_columns
        memory.require(needed, f"the table in {path}", "Use fewer rows, or leave columns out (drop=…)")
        yield ParquetFrame(path, file)


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on broken bytes, decoders raise almost anything
        reason = str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read as Parquet: {reason}", "", "Write it again") from error
