"""Reads Parquet files as a frame, one column at a time: what :func:`fedrane.data.tabular.read_frame` takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrane.data.arrays import Array
from fedrane.errors import DataError
from fedrane.system import extras, memory

_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls the numbers of rows: they are in the file, and not among the columns of the frame."""
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
        from pyarrow import types

        with _clear_errors(self.frame.path):
            column = self.frame.file.read(columns=[self.name]).column(self.name)
            if types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            values: Array = column.to_numpy()
            return values


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
    from pyarrow import parquet

    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is no file", "", "Check the path")
    with _clear_errors(path):
        file = parquet.ParquetFile(path)
        meta = file.metadata
        stored = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
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
