"""Tables with named columns: CSV files and data frames, what they become, and what is refused."""

import csv
import gzip
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedrane
from fedrane import Experiment, Partitioning
from fedrane.data import TableOptions, from_csv, from_frame, from_npz, load, tabular
from fedrane.data.columns import Column, Table
from fedrane.data.dataset import hold_out
from fedrane.data.readers import read_labelled
from fedrane.errors import ConfigError, DataError, FedraneError, TooLarge
from fedrane.reproduce.tune import TrialData, without_test

ROWS = 40
AGES = [20 + 3 * i % 61 for i in range(ROWS)]
WARDS = [("icu", "day", "surgery")[i % 3] for i in range(ROWS)]
SICK = [("no", "yes")[i * i % 5 % 2] for i in range(ROWS)]
HOSPITALS = [("west", "east")[i % 7 > 2] for i in range(ROWS)]


def frame(**more):
    smoker = [i % 4 == 1 for i in range(ROWS)]
    plain = {"age": AGES, "ward": WARDS, "smoker": smoker, "hospital": HOSPITALS, "sick": SICK}
    return pd.DataFrame(plain | more)


def as_csv(path, data=None, **how):
    (frame() if data is None else data).to_csv(path, index=False, **how)
    return path


def written(tmp_path, *lines, name="t.csv", encoding="utf-8", end="\n"):
    """A table whose first columns are given, followed by enough rows."""
    path = tmp_path / name
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def refused(path, *, error=DataError, **options):
    with pytest.raises(error) as caught:
        from_csv(path, **{"label": "y", **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


SAME = {"label": "sick", "client": "hospital"}


def test_numbers_stay_and_categories_and_truth_values_become_zeros_and_ones(tmp_path):
    data = load(str(as_csv(tmp_path / "my.patients.csv")), table=TableOptions("sick", "hospital"))
    assert (data.name, data.shape, data.classes) == ("my", (5,), ("no", "yes"))
    held = hold_out(data_y := np.array([word == "yes" for word in SICK], np.int64))
    expected = np.array(
        [
            [age, w == "day", w == "icu", w == "surgery", i % 4 == 1]
            for i, (age, w) in enumerate(zip(AGES, WARDS, strict=True))
        ]
    )
    for part, mine, y in ((~held, data.x, data.y), (held, data.x_test, data.y_test)):
        assert (mine == expected[part].astype(np.float32)).all()
        assert (y == data_y[part]).all()
    assert data.client is not None
    assert [("east", "west")[k] for k in data.client] == list(np.array(HOSPITALS)[~held])


def test_a_table_is_normalised_by_its_training_rows_and_marks_of_categories_are_not(tmp_path):
    data = from_csv(as_csv(tmp_path / "t.csv"), label="sick", drop="hospital")
    assert data.mean == pytest.approx((data.x[:, 0].mean(), 0, 0, 0, data.x[:, 4].mean()))
    assert data.std == pytest.approx((data.x[:, 0].std(), 1, 1, 1, data.x[:, 4].std()))


def same(a, b):
    assert (a.x.tolist(), a.x_test.tolist()) == (b.x.tolist(), b.x_test.tolist())
    assert (a.y.tolist(), a.y_test.tolist()) == (b.y.tolist(), b.y_test.tolist())
    assert (a.classes, a.mean, a.std, a.table) == (b.classes, b.mean, b.std, b.table)
    assert (a.client is None) == (b.client is None)
    assert a.client is None or a.client.tolist() == b.client.tolist()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("t.csv", {"encoding": "utf-8-sig"}),
        ("t.csv", {"sep": ";"}),
        ("t.csv", {"sep": "\t"}),
        ("t.csv", {"sep": "|"}),
        ("t.TSV", {"sep": "\t"}),
        ("t.csv", {"lineterminator": "\r\n"}),
        ("t.csv", {"lineterminator": "\r"}),
        ("t.csv", {"lineterminator": "\n\n"}),
        ("t.csv", {"quoting": csv.QUOTE_ALL}),
        ("t.csv.gz", {}),
        ("t.tsv.gz", {"sep": "\t"}),
    ],
)
def test_files_of_every_common_form_are_the_same_table(tmp_path, name, how):
    plain = from_csv(as_csv(tmp_path / "plain.csv"), **SAME)
    same(from_csv(as_csv(tmp_path / name, **how), **SAME), plain)


def test_a_frame_is_the_same_table_as_its_file(tmp_path):
    data = from_csv(as_csv(tmp_path / "t.csv"), **SAME)
    same(from_frame(frame(), **SAME), data)
    strange = frame().astype({"age": "Int64", "ward": "category", "smoker": "boolean", "sick": object})
    same(from_frame(strange, **SAME), data)


def test_a_frame_and_an_npz_file_of_the_same_numbers_are_the_same_dataset(tmp_path):
    x, y = np.random.default_rng(3).normal(size=(30, 4)), np.arange(30) % 3 + 8
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.arange(30) % 2)
    numbers = pd.DataFrame(x, columns=list("abcd")).assign(y=y.astype(float), client=np.arange(30) % 2)
    a, b = from_npz(tmp_path / "a.npz"), from_frame(numbers, label="y", client="client")
    assert (a.x == b.x).all()
    assert (a.x_test == b.x_test).all()
    assert (a.y.tolist(), a.classes, a.mean, a.std) == (b.y.tolist(), b.classes, b.mean, b.std)
    assert a.classes == ("8", "9", "10")
    assert (a.client == b.client).all()


def test_codes_are_categories_on_request(tmp_path):
    codes = frame(code=[f"{i % 3:02}" for i in range(ROWS)])
    path = as_csv(tmp_path / "t.csv", codes)
    assert from_csv(path, **SAME).shape == (6,)
    data = from_csv(path, **SAME, categories="code, smoker")
    assert data.table.columns[-1] == Column("code", ("00", "01", "02"))
    assert data.table.columns[-2] == Column("smoker", ("False", "True"))


def test_names_with_commas_are_quoted(tmp_path):
    path = as_csv(tmp_path / "t.csv", frame(**{"a, b": range(ROWS)}))
    assert from_csv(path, **SAME, drop='"a, b",age').shape == (4,)
    assert "it cannot be read" in refused(path, **SAME, drop='"a', error=ConfigError)


# ---- missing values


def with_holes():
    data = frame(weight=[float(i) for i in range(ROWS)])
    data.loc[[3, 4, 30], "weight"] = np.nan
    data.loc[5, "ward"] = None
    return data


@pytest.mark.parametrize("absent", ["", "NA", "n/a", "?", "NaN", "null", "<NA>", "  "])
def test_missing_values_are_counted_or_imputed_from_training_rows(tmp_path, absent):
    path = as_csv(tmp_path / "t.csv", with_holes(), na_rep=absent)
    for refusal in (refused(path, **SAME), _refused_frame(with_holes())):
        assert "has missing values: 1 in 'ward', 3 in 'weight', of 40 rows" in refusal
        assert "impute=median" in refusal
    data = from_csv(path, **SAME, impute="median")
    same(from_frame(with_holes(), **SAME, impute="median"), data)
    held = hold_out(np.array([word == "yes" for word in SICK], np.int64))
    weights, wards = np.array(with_holes()["weight"]), np.array(WARDS)
    median = float(np.nanmedian(weights[~held]))
    assert median != np.nanmedian(weights)
    known = ~held & (np.arange(ROWS) != 5)
    most = max(sorted(set(WARDS)), key=lambda ward: (wards[known] == ward).sum())
    assert [column.fill for column in data.table.columns[1:]] == [most, data.table.columns[2].fill, median]
    assert np.concatenate([data.x, data.x_test])[:, -1].tolist() == pytest.approx(
        np.where(np.isnan(weights), median, weights)[np.r_[np.flatnonzero(~held), np.flatnonzero(held)]].tolist()
    )
    assert "1 in 'ward', 3 in 'weight'" in data.notes[0]


def _refused_frame(data):
    with pytest.raises(DataError) as caught:
        from_frame(data, **SAME)
    return str(caught.value)


def test_a_run_reports_what_was_imputed():
    said = []

    class Listener(fedrane.Callback):
        def message(self, text):
            said.append(text)

    e = Experiment(label="sick", client="hospital", impute="median", rounds=1, epochs=1)
    fedrane.run(e, dataset=with_holes(), callbacks=[Listener()])
    assert [text for text in said if "3 in 'weight'" in text]


@pytest.mark.parametrize("key", ["label", "client"])
def test_a_row_without_its_label_or_client_is_refused(tmp_path, key):
    data = frame()
    data.loc[7, SAME[key]] = None
    message = refused(as_csv(tmp_path / "t.csv", data), **SAME, impute="median")
    assert f"1 in '{SAME[key]}'" in message
    assert f"each needs its {key}" in message


def test_a_column_without_values_is_refused(tmp_path):
    path = as_csv(tmp_path / "t.csv", frame(empty=None))
    assert "column 'empty' has no values. Leave it out: drop=empty" in refused(path, **SAME, impute="median")


# ---- later tables


@pytest.fixture(scope="module")
def trained():
    e = Experiment(label="sick", client="hospital", rounds=2, epochs=1, lr=0.01, seed=1)
    return fedrane.run(e, dataset=frame())


def test_later_tables_are_read_by_the_names_of_their_columns(trained, tmp_path):
    data = frame()
    expected = trained.model.predict(data)
    assert set(expected) <= {"no", "yes"}
    mixed = data[["smoker", "ward", "age"]]
    assert trained.model.predict(mixed) == expected
    assert trained.model(mixed).argmax(1).tolist() == [trained.inputs.classes.index(name) for name in expected]
    assert trained.model.predict_proba(mixed).sum(1).tolist() == pytest.approx([1] * ROWS)
    few = data[data["ward"] != "day"]
    assert trained.model.predict(few) == list(np.array(expected)[data["ward"] != "day"])
    x = from_csv(as_csv(tmp_path / "t.csv"), **SAME).x
    read = trained.inputs.table.encode(tabular.read_known(as_csv(tmp_path / "t.csv", mixed), trained.inputs.table))
    assert {tuple(row) for row in x.tolist()} <= {tuple(row) for row in read.tolist()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.drop(columns="age"), "has no column 'age'. Known: ward"),
        (lambda data: data.rename(columns={"ward": "wards"}), "Did you mean 'wards'"),
        (lambda data: data.assign(height=1), "has a column 'height': the table of the training examples had none"),
        (
            lambda data: data.assign(ward="moon"),
            "'moon' in column 'ward', row 0: the categories it was trained on are day",
        ),
        (lambda data: data.assign(age="old"), "'old' in column 'age', which is a column of numbers, row 0"),
        (lambda data: data.assign(age=np.nan), "missing values: 40 in 'age', of 40 rows"),
        (lambda data: data.assign(age=np.inf), "inf"),
        (lambda data: data[:0], "has no rows"),
    ],
)
def test_a_later_table_of_another_form_is_refused(trained, change, message):
    with pytest.raises(DataError) as caught:
        trained.model.predict(change(frame()))
    assert message in str(caught.value)


def test_a_model_that_imputes_does_so_later():
    e = Experiment(label="sick", client="hospital", impute="median", rounds=1, epochs=1)
    result = fedrane.run(e, dataset=with_holes())
    fills = {column.name: column.fill for column in result.inputs.table.columns}
    filled = with_holes().fillna({"ward": fills["ward"], "weight": fills["weight"]})
    assert (result.model(with_holes()) == result.model(filled)).all()
    holes = filled.assign(age=[None if i == 2 else age for i, age in enumerate(AGES)])  # it had none in training
    assert (
        result.model(holes)
        == result.model(filled.assign(age=[fills["age"] if i == 2 else a for i, a in enumerate(AGES)]))
    ).all()


def test_the_form_is_in_the_folder_and_comes_back(tmp_path):
    as_csv(tmp_path / "t.csv", with_holes())
    e = Experiment(dataset=str(tmp_path / "t.csv"), **SAME, impute="median", rounds=1, epochs=1)
    result = fedrane.run(e, tmp_path / "run")
    loaded = fedrane.load(tmp_path / "run")
    assert loaded.inputs == result.inputs
    assert loaded.model.predict(with_holes()) == result.model.predict(with_holes())
    again = Experiment.from_toml(tmp_path / "run" / "config.toml")
    assert again.table_options == e.table_options
    assert fedrane.resume(tmp_path / "run", rounds=2).round == 2


def test_a_model_without_named_columns_takes_no_table(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 2)
    result = fedrane.run(Experiment(dataset=str(tmp_path / "a.npz"), clients=2, rounds=1, epochs=1))
    with pytest.raises(DataError, match="columns without names"):
        result.model(frame())


@pytest.mark.parametrize(
    "damage",
    [
        {"columns": [{"name": "a", "categories": [], "fill": float("nan")}]},
        {"columns": [{"name": "a", "categories": []}]},
        {"columns": None},
        {"ignored": None},
    ],
)
def test_a_form_that_is_damaged_is_refused(damage):
    form = json.loads(json.dumps(asdict(Table("y", (Column("a"), Column("b", ("u", "v"), "u")), ("c",)))))
    assert Table.from_dict(form) == Table("y", (Column("a"), Column("b", ("u", "v"), "u")), ("c",))
    with pytest.raises((KeyError, TypeError, ValueError)):
        Table.from_dict(form | damage)


def test_a_client_of_a_federation_reads_its_own_table(tmp_path):
    whole = from_frame(frame(), **SAME)
    mine = frame()[frame()["ward"] == "icu"][["sick", "smoker", "ward", "age"]]  # one ward only, in another order
    x, y = read_labelled(as_csv(tmp_path / "mine.csv", mine), whole.classes, table=whole.table)
    assert x[:, 1:4].tolist() == [[0, 1, 0]] * len(mine)
    assert [whole.classes[label] for label in y] == list(mine["sick"])
    with pytest.raises(DataError, match="has no column 'sick'"):
        read_labelled(as_csv(tmp_path / "mine.csv", mine.drop(columns="sick")), whole.classes, table=whole.table)
    with pytest.raises(DataError, match="label 'maybe'"):
        read_labelled(as_csv(tmp_path / "mine.csv", mine.assign(sick="maybe")), whole.classes, table=whole.table)
    with pytest.raises(DataError, match="named columns"):
        read_labelled(tmp_path / "mine.csv", whole.classes)


def test_a_table_like_another_has_its_form():
    whole = from_frame(frame(), **SAME)
    few = frame()[frame()["ward"] != "day"]
    like = tabular.read_table(few, TableOptions("sick", "hospital"), whole.table)
    assert like.table == whole.table
    assert from_frame(few, **SAME).table != whole.table
    assert not like.x[:, 1].any()


# ---- columns that are refused

NUMBERS = [f"{i},{i % 3}" for i in range(1, 21)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,y", *NUMBERS, "old,1"], "'old' in column 'a', line 22: the column's other cells are numbers"),
        (["a,y", "old,1", *NUMBERS], "'1' in column 'a', line 3: the column's other cells are texts"),
        (["a;y", *(f"{i},5;1" for i in range(9))], "numbers have a decimal point"),
        (["a;y", "7;1", *(f"1.{i}00,5;1" for i in range(9))], "numbers have a decimal point"),
        (["a,y", *(f"2024-01-{i:02},{i % 2}" for i in range(1, 20))], "dates and times are not read"),
        (["a,y", *(f"1.2.2024 08:00,{i % 2}" for i in range(1, 20))], "drop=a"),
        (["a,y", *(f"08:{i:02},{i % 2}" for i in range(1, 20))], "dates and times are not read"),
        (
            ["a,y", *(f"p{i},{i % 2}" for i in range(20))],
            "it identifies rows rather than describing them. Leave it out: drop=a",
        ),
        (["a,y", *(f"{'free text ' * 30}{i % 2},{i % 2}" for i in range(20))], "a category has at most 200 characters"),
        (["a,y", "inf,1", *NUMBERS], "inf' in column 'a', line 2: a table must contain finite numbers"),
        (["a,y", "1e39,1", *NUMBERS], "fit in float32"),
        (["a,y", "1_000,1", *NUMBERS], "the column's other cells are texts"),
        (["a,y", *(f"{i},{i / 7}" for i in range(20))], "column 'y' has 20 different values in 20 rows"),
        (["a,y", *(f"{i},{i / 7}" for i in range(20))], "Numbers are predicted from a table, with task=regression"),
        (
            ["a,y", *(f"{i},{i % 3 / 7}" for i in range(20))],
            "labels are classes, not measurements. Numbers are",
        ),
        (["a,y", *(f"{i},p{i}" for i in range(20))], "name the class of a row, which others share."),
        (["y", *(f"{i % 2}" for i in range(20))], "no column to predict 'y' from"),
    ],
)
def test_columns_that_are_neither_numbers_nor_categories_are_refused(tmp_path, lines, message):
    assert message in refused(written(tmp_path, *lines))


def test_what_was_refused_can_be_dropped_or_meant(tmp_path):
    lines = ["a,id,day,zip,y", *(f"{i},p{i},2024-01-{i % 9 + 10},{i % 3 + 10},{i % 2}" for i in range(40))]
    assert from_csv(written(tmp_path, *lines), label="y", drop="id,day", categories="zip").shape == (4,)
    assert from_csv(written(tmp_path, *lines), label="y", drop="day", categories="id").shape == (42,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"label": ""},
            "has no label: a table needs the name of the column to predict. Set label=NAME; its columns are a, b, y",
        ),
        ({"label": "Y"}, "has no column 'Y' (label=Y)"),
        ({"client": "clint"}, "has no column 'clint' (client=clint)"),
        ({"drop": "a,c"}, "has no column 'c' (drop=c)"),
        ({"categories": "c"}, "has no column 'c' (categories=c)"),
        ({"client": "y"}, "label=y and client=y: a column has one use"),
        ({"drop": "y"}, "label=y and drop=y"),
        ({"impute": "mean"}, "impute=mean is not known. Did you mean 'median'"),
        ({"client": "a"}, "client=a should name the client of a row"),
    ],
)
def test_options_that_do_not_fit_the_table_are_refused(tmp_path, options, message):
    path = written(tmp_path, "a,b,y", *(f"{i},{i * i},{i % 2}" for i in range(20)))
    assert message in refused(path, error=FedraneError, **options)


# ---- files that are refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a,y\n", "has no rows"),
        (b"a,y\n1,2,3\n", "line 2 of"),
        (b"\n\na,y\n1,2\n1\n", "line 5 of"),
        (b"a,a,y\n1,1,2\n", "has two columns 'a'"),
        (b",a,y\n1,1,2\n", "column 1 has no name"),
        (b'a,y\n1,"2\n', "cannot be read as CSV"),
        (b'a,y\n"1"2,3\n', "cannot be read as CSV"),
        (b"a,y\n1,\0\n", "line 2 of"),
        ("ä,y\n1,2\n".encode("latin-1"), "not text in UTF-8: it has the byte 0xe4"),
        ("a,y\n1,2\n".encode("utf-16"), "not text in UTF-8"),
        (b"\x1f\x8b torn", "cannot be read"),
        (gzip.compress(b"a,y\n1,2\n" * 9, mtime=0)[:-9], "cannot be read"),
        (b"PK\x03\x04\x00\x00", "zero byte"),
        (b"a,y\n1," + b"x" * 200_000 + b"\n", "field larger than field limit"),
        (b"\x1b[31mred,y\n1,2\n", "no column 'label'"),
    ],
)
def test_a_file_that_is_no_table_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    shown = refused(path, label="label" if b"\x1b" in content else "y")
    assert message in shown
    assert "t.csv" in shown
    assert shown.isprintable()


def test_a_file_that_is_not_there_and_other_formats(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.csv")
    (tmp_path / "d.csv").mkdir()
    assert "is no file" in refused(tmp_path / "d.csv")
    (tmp_path / "t.feather").write_bytes(b"FEA1")
    with pytest.raises(DataError, match=r"read are \.csv, .*\.parquet, .*From Python, a frame is one too"):
        load(str(tmp_path / "t.feather"))


def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_LONGEST_ROW", 1000)
    path = written(tmp_path, "a,y", "1," + "2" * 5000)
    assert "line 2 of" in (message := refused(path))
    assert "longer than 1,000 characters" in message


@pytest.mark.parametrize("begin", ['a,y\n1,"\n', '"a\n'])
def test_a_row_of_short_lines_without_end_is_not_read_to_its_end(tmp_path, monkeypatch, begin):
    """Each line closes a quoted cell and opens another: packed they are nothing, and as one row many gigabytes."""
    monkeypatch.setattr(tabular, "_LONGEST_ROW", 10_000)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(begin.encode() + b'","\n' * 100_000))
    message = refused(path)
    assert "longer than 10,000 characters" in message
    assert int(re.search(r"line (\d+) of", message)[1]) < 10_000


def test_rows_together_may_be_longer_than_a_row(tmp_path, monkeypatch):
    """A bound for each row, its lines in quotes, and the empty lines before it."""
    monkeypatch.setattr(tabular, "_LONGEST_ROW", 40)
    path = written(tmp_path, "a,b,y", *['1,"two', 'lines",0', "", "2,two,1"] * 20)
    assert len(from_csv(path, label="y").y) > 20


def test_more_columns_than_a_model_can_have(tmp_path):
    path = written(tmp_path, ",".join(f"c{i}" for i in range(100_001)), "1")
    assert "has 100,001 columns" in refused(path)


def test_a_large_table_is_refused_after_its_first_part(tmp_path, monkeypatch):
    path = written(tmp_path, "a,b,y", *(f"{i},{i},{i % 2}" for i in range(200_000)))
    monkeypatch.setenv("FEDRANE_MEMORY", "0.01")
    read = []
    monkeypatch.setattr(tabular.memory, "require", lambda needed, *_: read.append(needed))
    from_csv(path, label="y")
    whole = tabular._PER_CELL * 3 * 200_000
    assert 0.5 * whole < read[0] < 2 * whole  # from its first part, how much it will be
    monkeypatch.undo()
    monkeypatch.setenv("FEDRANE_MEMORY", "0.01")
    with pytest.raises(TooLarge, match=r"the table in .*t\.csv needs about"):
        from_csv(path, label="y")


def test_the_inputs_of_many_categories_are_compared_with_the_memory(tmp_path, monkeypatch):
    path = written(tmp_path, "a,y", *(f"c{i % 3000},{i % 2}" for i in range(9000)))
    monkeypatch.setenv("FEDRANE_MEMORY", "0.05")
    with pytest.raises(TooLarge, match="the inputs of"):
        from_csv(path, label="y")


# ---- whatever a table holds

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.text('abc,;"\n\r\t 01.\ufeff?', max_size=200).map(lambda text: text.encode()),
    st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=12).map(
        lambda rows: "\n".join(",".join(row) for row in [["a", "b", "y"], *rows]).encode()
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GARBAGE, st.sampled_from(["none", "median"]))
def test_any_bytes_are_a_table_or_one_clear_error(tmp_path: Path, content: bytes, impute: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    try:
        data = from_csv(path, label="y", impute=impute)
    except FedraneError as error:
        shown = str(error)
    else:
        shown = data.name
        assert np.isfinite(data.x).all()
        assert data.x.shape[1] == len(data.mean)
    assert shown.isprintable()


VALUES = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(VALUES, st.sampled_from(["it's", 'the "best"', "a, b", "x\ny", "é"])), min_size=20, max_size=30),
    st.sampled_from(",;\t|"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_is_written_is_read(tmp_path: Path, rows, separator: str, end: str) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator=end)
    writer.writerows([("number", "text", "y"), *((*row, i % 2) for i, row in enumerate(rows))])
    path = tmp_path / "t.csv"
    path.write_bytes(text.getvalue().encode())
    data = from_csv(path, label="y")
    held = hold_out(np.arange(len(rows)) % 2)
    read = np.empty((len(rows), data.shape[0]), np.float32)
    read[~held], read[held] = data.x, data.x_test
    assert read[:, 0].tolist() == np.array([number for number, _ in rows], np.float32).tolist()
    categories = data.table.columns[1].categories
    assert [categories[i] for i in read[:, 1:].argmax(1)] == [text for _, text in rows]
    assert (read[:, 1:].sum(1) == 1).all()


# ---- in an experiment


def test_a_frame_gets_the_options_of_the_experiment_and_other_datasets_do_not(tmp_path):
    e = Experiment(label="sick", client="hospital", rounds=1, epochs=1)
    result = fedrane.run(e, dataset=frame())
    assert result.population == 2
    own = from_frame(frame(), **SAME)
    assert fedrane.run(e, dataset=own).history[0]["train/loss"] == result.history[0]["train/loss"]
    for passed, options in ((own, {"label": "ward"}), (load("digits"), {"drop": "id"}), (None, {"client": "10"})):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* would have no effect"):
            fedrane.run(Experiment(**options, rounds=1), dataset=passed)
    with pytest.raises(ConfigError, match="has no label"):
        fedrane.run(Experiment(rounds=1), dataset=frame())


def test_a_frame_goes_with_words_and_with_a_file(tmp_path):
    """What was handed over is known before settings without effect are looked for."""
    words = ["label=sick", "client=hospital", "rounds=1", "epochs=1"]
    plain = fedrane.run(Experiment(label="sick", client="hospital", rounds=1, epochs=1), dataset=frame())
    (tmp_path / "e.toml").write_text('label = "sick"\nclient = "hospital"\nrounds = 1\nepochs = 1\n')
    for asked in (words, tmp_path / "e.toml"):
        result = fedrane.run(asked, dataset=frame())
        assert result.history[0]["train/loss"] == plain.history[0]["train/loss"]


def test_the_options_that_a_dataset_was_read_with_are_recorded_and_no_others_are_accepted():
    e = Experiment(label="sick", client="hospital", rounds=1, epochs=1)
    own = from_frame(frame(), **SAME, drop="age")
    assert fedrane.run(Experiment(rounds=1, epochs=1), dataset=own).experiment.drop == "age"
    for other in ({"drop": "ward"}, {"impute": "median"}, {"categories": "ward"}):
        with pytest.raises(ConfigError, match="the dataset that was passed was read with"):
            fedrane.run(e.replace(**other), dataset=own)


def test_each_trial_of_tuning_has_the_table_that_it_asks_for(tmp_path, monkeypatch):
    as_csv(tmp_path / "t.csv")
    e = Experiment(dataset=str(tmp_path / "t.csv"), label="sick", client="hospital", rounds=1)
    cells = [SimpleNamespace(key=drop) for drop in ("", "age")]
    wanted = [e.replace(drop=cell.key, partition=Partitioning(kind="natural")) for cell in cells]
    data = TrialData([SimpleNamespace(cells=cells, wanted=wanted)], 0.3)
    whole, without = (data(cell).table.columns for cell in cells)
    assert {column.name for column in whole} - {column.name for column in without} == {"age"}


def test_trials_of_tuning_are_of_the_same_table():
    """So they run with the options of the table, which they no longer need."""
    e = Experiment(**SAME, rounds=1, epochs=1, partition=Partitioning(kind="natural"))
    trial = without_test(from_frame(frame(), **SAME), e, 0.3)
    assert len(trial.y) < ROWS
    assert trial.table
    assert fedrane.run(e, dataset=trial).inputs.table == trial.table


@pytest.mark.parametrize("name", ["breast-cancer", "wine"])
def test_the_tables_of_scikit_learn_are_built_in(name):
    from sklearn import datasets

    whole = getattr(datasets, f"load_{name.replace('-', '_')}")(as_frame=True)
    data, same_rows = load(name), from_frame(whole.frame, label="target")
    assert (data.x == same_rows.x).all()
    assert (data.y_test == same_rows.y_test).all()
    assert (data.mean, data.std) == (same_rows.mean, same_rows.std)
    assert data.table.columns == same_rows.table.columns
    assert data.classes == tuple(whole.target_names)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedrane", marks=pytest.mark.slow)])
def test_methods_learn_a_built_in_table(method):
    e = Experiment(method=method, dataset="breast-cancer", clients=3, rounds=5, epochs=1, batch=32, lr=0.05)
    assert fedrane.run(e, calibrate=False).summary["global/last"]["global/accuracy"] > 0.9
