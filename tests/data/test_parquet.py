"""Parquet files: the same tables as CSV files and frames of the same cells."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrane
from contained import used_or_refused
from fedrane import Experiment
from fedrane.data import Dataset, from_csv, load
from fedrane.data.readers import read_labelled
from fedrane.data.tabular import TableOptions
from fedrane.errors import ConfigError, DataError, FedraneError
from fedrane.training.predictor import read_named_inputs

ROWS = 40
PLAIN: dict[str, list[Any]] = {
    "age": [20 + 3 * i % 61 for i in range(ROWS)],
    "ward": [("icu", "day", "surgery")[i % 3] for i in range(ROWS)],
    "smoker": [i % 4 == 1 for i in range(ROWS)],
    "weight": [60.5 + i % 7 for i in range(ROWS)],
    "hospital": [("west", "east")[i % 7 > 2] for i in range(ROWS)],
    "sick": [("no", "yes")[i * i % 5 % 2] for i in range(ROWS)],
}
SAME = {"label": "sick", "client": "hospital"}


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"t\.parquet needs the extra 'parquet'.*pip install 'fedrane\[parquet\]'"):
        load("t.parquet", table=TableOptions("y"))


@pytest.fixture
def pa() -> Any:
    return pytest.importorskip("pyarrow")


def as_parquet(pa: Any, path: Path, **changes: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(pa.table({**PLAIN, **changes}), path)
    return path


def as_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def same(one: Dataset, other: Dataset) -> bool:
    pairs = [(one.x, other.x), (one.y, other.y), (one.x_test, other.x_test), (one.client, other.client)]
    assert all(np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    assert (one.table, one.classes, one.mean) == (other.table, other.classes, other.mean)
    return True


def test_a_parquet_file_is_the_same_table_as_a_csv_file(pa: Any, tmp_path: Path) -> None:
    csv = from_csv(as_csv(tmp_path / "t.csv", PLAIN), **SAME)
    path = as_parquet(pa, tmp_path / "t.parquet")
    assert same(from_csv(path, **SAME), csv)
    assert same(load(str(path), table=TableOptions(**SAME)), csv)
    strange = {
        "age": pa.array(PLAIN["age"], pa.int8()),
        "ward": pa.array(PLAIN["ward"]).dictionary_encode(),
        "hospital": pa.chunked_array([PLAIN["hospital"][:9], PLAIN["hospital"][9:]], pa.large_string()),
    }
    assert same(from_csv(as_parquet(pa, tmp_path / "s.parquet", **strange), **SAME), csv)


def test_missing_values_are_those_of_a_csv_file(pa: Any, tmp_path: Path) -> None:
    holes = {name: [None, *PLAIN[name][1:7], None, *PLAIN[name][8:]] for name in ("age", "ward", "smoker", "weight")}
    path = as_parquet(pa, tmp_path / "t.parquet", **holes)
    with pytest.raises(DataError, match=r"t\.parquet has missing values: 2 in 'age', 2 in 'ward', 2 in 'smoker'"):
        from_csv(path, **SAME)
    filled = from_csv(as_csv(tmp_path / "t.csv", {**PLAIN, **holes}), **SAME, impute="median")
    assert same(from_csv(path, **SAME, impute="median"), filled)


def test_row_numbers_that_pandas_has_written_are_no_column(pa: Any, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(PLAIN).iloc[::-1].query("age > 21")
    frame.to_parquet(tmp_path / "t.parquet")
    table = from_csv(tmp_path / "t.parquet", **SAME).table
    assert table is not None
    assert [column.name for column in table.columns] == ["age", "ward", "smoker", "weight"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([datetime.date(2024, 1, 1)] * ROWS, "column 'age' of .*t.parquet has dates or times.*drop=age"),
        ([[1, 2]] * ROWS, "column 'age' of .*t.parquet has list<.*>.*drop=age"),
        ([{"years": 40}] * ROWS, "column 'age' of .*t.parquet has struct<.*drop=age"),
        ([b"a"] * ROWS, "column 'age' of .*t.parquet has a bytes"),
        ([1e300] * ROWS, "t.parquet has '1e.300' in column 'age', row 0"),
    ],
)
def test_cells_that_are_no_numbers_or_texts_are_one_clear_error(
    pa: Any, tmp_path: Path, column: list[Any], message: str
) -> None:
    path = as_parquet(pa, tmp_path / "t.parquet", age=column)
    with pytest.raises(DataError, match=message):
        from_csv(path, **SAME)
    assert from_csv(path, **SAME, drop="age").shape == (5,)  # a column that is left out is not read


def test_a_file_that_cannot_be_read_is_one_clear_error(pa: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(DataError, match="does not exist"):
        from_csv(path, **SAME)
    whole = as_parquet(pa, path).read_bytes()
    for content in (b"", b"PAR1", whole[:-9], whole[:200] + bytes(200) + whole[400:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.parquet cannot be read as Parquet") as caught:
            from_csv(path, **SAME)
        assert "\n" not in str(caught.value)


def test_the_memory_for_a_file_is_compared_before_it_is_read(
    pa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_parquet(pa, tmp_path / "t.parquet")
    monkeypatch.setenv("FEDRANE_MEMORY", "0.000001")
    with pytest.raises(DataError, match=r"the table in .*t\.parquet needs about"):
        from_csv(path, **SAME)


def test_a_long_text_that_stands_for_every_row_is_not_repeated(pa: Any, tmp_path: Path) -> None:
    size = 40_000_000
    for once, message in (
        (pa.array(["z" * size]), f"column 'ward' of .*t.parquet has a text of {size:,} characters.*drop=ward"),
        (pa.array([b"z" * size], pa.binary(size)), "column 'ward' of .*t.parquet has fixed_size_binary.*drop=ward"),
    ):
        rows = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), once)
        path = as_parquet(pa, tmp_path / "t.parquet", ward=rows)
        assert path.stat().st_size < size / 10
        with pytest.raises(DataError, match=message):
            from_csv(path, **SAME)
        assert used_or_refused(tmp_path, lambda path=path: from_csv(path, **SAME)) is None
        assert from_csv(path, **SAME, drop="ward").shape == (3,)


def test_a_run_a_prediction_and_a_client_take_it(pa: Any, tmp_path: Path) -> None:
    path = as_parquet(pa, tmp_path / "t.parquet")
    words = [f"dataset={path}", *(f"{key}={name}" for key, name in SAME.items()), "rounds=1", "batch=8", "device=cpu"]
    result = fedrane.run(words, tmp_path / "run")
    assert result.population == 2
    assert len(list(read_named_inputs(path, fedrane.load(tmp_path / "run").inputs, 0))) == ROWS
    table = load(str(path), table=TableOptions(**SAME)).table
    x, y = read_labelled(path, ["no", "yes"], table=table)
    assert (len(x), int(y.sum())) == (ROWS, PLAIN["sick"].count("yes"))
    with pytest.raises(FedraneError, match="label"):
        fedrane.run(Experiment(dataset=str(path)))
