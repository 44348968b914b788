"""Parquet, Lance and tables in memory give their rows as dicts, however they are cut."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.aids import check_seeks, opened, rows_from, rows_of, send
from dovetail.control.payload import SourceSinkError
from dovetail.data.readers import parquet
from dovetail.data.sources import open_source, source, source_changes
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SIZES = st.lists(st.integers(1, 9), max_size=20)
SEEKS = st.lists(st.tuples(st.integers(0, 60), st.lists(st.booleans(), max_size=12)), max_size=4)
AWKWARD = pa.table(
    {
        "id": pa.array(range(40), pa.int64()),
        "text": pa.array([None if row % 7 == 0 else f"ü\n{row}" for row in range(40)]),
        "kind": pa.array(["a", None, "b", "a"] * 10).dictionary_encode(),
        "when": pa.array([datetime.datetime(2026, 1, 1, 0, 0, row) for row in range(40)], pa.timestamp("us")),
        "nested": pa.array([{"xs": [1, None, row], "deep": {"y": None}} if row % 3 else None for row in range(40)]),
        "raw": pa.array([b"\0\xff" * row for row in range(40)]),
        "a name, with\nspaces": pa.array([float(row) for row in range(40)]),
    }
)


def in_groups(path: Path, table: pa.Table, groups: list[int]) -> None:
    with pq.ParquetWriter(path, table.schema) as writer:
        at = 0
        for rows in groups:
            writer.write_table(table.slice(at, rows), row_group_size=max(1, rows))
            at += rows
        writer.write_table(table.slice(at), row_group_size=11)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 4)
@given(groups=st.lists(st.integers(0, 12), max_size=5), sizes=SIZES, seeks=SEEKS)
def test_parquet_by_row_group(tmp_path: Path, groups: list[int], sizes: list[int], seeks: Any) -> None:
    (tmp_path / "p").mkdir(exist_ok=True)
    in_groups(tmp_path / "p" / "a b.parquet", AWKWARD, groups)
    in_groups(tmp_path / "p" / "ü\n.parquet", AWKWARD.slice(0, 3), [])
    expected = AWKWARD.to_pylist() + AWKWARD.slice(0, 3).to_pylist()
    assert rows_of(tmp_path / "p", sizes) == expected
    assert opened(tmp_path / "p").total == 43
    check_seeks(tmp_path / "p", sizes, seeks)


def test_parquet_columns_and_nothing(tmp_path: Path) -> None:
    pq.write_table(AWKWARD, tmp_path / "a.parquet")
    assert rows_of(source(tmp_path / "a.parquet", columns=["id", "kind"])) == AWKWARD.select(["id", "kind"]).to_pylist()
    pq.write_table(AWKWARD.slice(0, 0), tmp_path / "empty.parquet")
    assert rows_of(tmp_path / "empty.parquet") == []
    pq.write_table(pa.table({"a": [1, 2]}).select([]), tmp_path / "bare.parquet")
    assert rows_of(tmp_path / "bare.parquet") == [{}] * pq.read_metadata(tmp_path / "bare.parquet").num_rows


def test_a_row_group_is_unpacked_once_and_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 100)
    table = pa.table({"n": range(10_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5000)
    begun = 0
    goto = parquet._OpenParquetFile._goto

    def counted(self: Any, row: int) -> None:
        nonlocal begun
        begun += 1
        goto(self, row)

    monkeypatch.setattr(parquet._OpenParquetFile, "_goto", counted)
    cursor = opened(tmp_path / "a.parquet")
    splits: list[Any] = list(iter(lambda: cursor.take(300), None))
    mine = splits[::2]  # another worker has the others
    assert [row["n"] for split in mine for row in split.read()] == [
        row for split in mine for row in range(split.start, split.start + split.items)
    ]
    assert begun <= 2
    assert [row["n"] for row in splits[1].read()] == list(range(300, 600))  # back again


def test_parquet_that_is_not_or_changes(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no")
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path)
    assert caught.value.codes == ("DT346", "DT346")
    pq.write_table(AWKWARD, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="did you mean 'text'"):
        opened(source(tmp_path / "a.parquet", columns=["txet"]))
    split = opened(tmp_path / "a.parquet").take(10)
    assert split is not None
    pq.write_table(AWKWARD.slice(3), tmp_path / "a.parquet")
    with pytest.raises(SourceSinkError, match="changed while it was read"):
        split.read()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceSinkError, match="it is gone"):
        split.read()


def test_lance_by_fragment_without_deleted_rows(tmp_path: Path) -> None:
    import lance  # here and below: not by every process that only looks for tests

    table = AWKWARD.drop_columns(["kind"])
    path = tmp_path / "t b.lance"
    lance.write_dataset(table, path, max_rows_per_file=7)
    lance.dataset(path).delete("id % 5 = 0 OR id < 9")
    expected = [row for row in table.to_pylist() if row["id"] % 5 and row["id"] >= 9]
    assert rows_of(path, [1, 2, 3, 100]) == expected
    assert opened(path).total == len(expected)
    assert rows_of(source(path, columns=["raw", "id"], limit=4)) == [
        {"raw": row["raw"], "id": row["id"]} for row in expected[:4]
    ]
    check_seeks(path, [1, 5, 2], [(at, [True] * at) for at in range(0, 34, 3)])


def test_lance_stays_at_its_version(tmp_path: Path) -> None:
    import lance

    path = tmp_path / "t.lance"
    lance.write_dataset(pa.table({"n": [1, 2, 3]}), path)
    cursor = opened(path)
    lance.write_dataset(pa.table({"n": [4]}), path, mode="append")
    assert [row["n"] for row in rows_from(cursor)] == [1, 2, 3]
    before = cursor.fingerprint()
    assert source_changes(before, opened(path).fingerprint()) == [
        "rows was 3 and is 4 now",
        f"the table {path} was read at version 1 and is at version 2 now",
    ]
    resumed = open_source(path, before=before)
    assert resumed is not None
    assert source_changes(before, resumed.fingerprint()) == []
    with pytest.raises(ConfigError, match="not a Lance table"):
        opened(tmp_path / "none.lance")
    with pytest.raises(ConfigError, match="no column 'm'"):
        opened(source(path, columns=["m"]))


def test_arrow_sends_only_the_rows_it_shows() -> None:
    big = pa.table({"n": range(100_000), "text": [f"text {row}" for row in range(100_000)]})
    cursor = opened(big)
    cursor.seek(50_000, {})
    split = cursor.take(10)
    assert split is not None
    assert len(memoryview(split.packed)) < 3000  # type: ignore[attr-defined]
    assert send(split)[0].read() == big.slice(50_000, 10).to_pylist()
    assert rows_of(AWKWARD, [1, 7]) == AWKWARD.to_pylist()
    assert rows_of(AWKWARD.to_batches()[0]) == AWKWARD.to_pylist()
    assert rows_of(AWKWARD.slice(0, 0)) == []
    assert rows_of(AWKWARD.select([])) == AWKWARD.select([]).to_pylist()
    check_seeks(AWKWARD, [3, 4], [(at, []) for at in range(0, 43, 6)])


def test_pandas() -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "n": range(30),
            "text": [None if row % 4 == 0 else f"ü{row}" for row in range(30)],
            "any": [[row, {"a": None}] for row in range(30)],
            "when": pd.date_range("2026-01-01", periods=30),
            "maybe": pd.array([None, 1, 2] * 10, dtype="Int64"),
        },
        index=[5] * 30,
    )
    assert str(rows_of(frame, [1, 4])) == str(frame.to_dict("records"))
    assert rows_of(frame.iloc[:0]) == []
    big = opened(pd.DataFrame({"n": range(100_000), "text": ["abc"] * 100_000})).take(10)
    assert big is not None
    assert send(big)[1] < 5000
    with pytest.raises(ConfigError, match="duplicate column names: a"):
        opened(pd.DataFrame([[1, 2]], columns=["a", "a"]))


def test_polars() -> None:
    import polars as pl

    frame = pl.DataFrame({"n": range(30), "text": [None, "a", "ü"] * 10, "nested": [[1, None], [], None] * 10})
    assert rows_of(frame, [1, 4]) == frame.to_dicts()
    assert rows_of(frame.lazy().filter(pl.col("n") > 20)) == frame.to_dicts()[21:]
    assert rows_of(frame.clear()) == []
    check_seeks(frame, [3, 4], [(at, []) for at in range(0, 33, 6)])


def test_hugging_face_datasets(tmp_path: Path) -> None:
    import datasets
    import numpy as np

    data = datasets.Dataset.from_dict(
        {
            "n": list(range(30)),
            "text": [None, "a", "ü"] * 10,
            "nested": [[{"x": 1}], [], None] * 10,
            "c": [0, 1, 0] * 10,
        },
    )
    data = data.cast_column("c", datasets.ClassLabel(names=["no", "yes"]))
    assert rows_of(data, [1, 7]) == list(data)
    assert rows_of(data.select([5, 3, 29, 0])) == [data[5], data[3], data[29], data[0]]
    assert rows_of(data.shuffle(seed=1).filter(lambda row: row["n"] % 2 == 0), [2]) == list(
        data.shuffle(seed=1).filter(lambda row: row["n"] % 2 == 0)
    )
    data.save_to_disk(str(tmp_path / "d"))
    assert rows_of(datasets.load_from_disk(str(tmp_path / "d")), [4]) == list(data)
    arrays = data.select_columns(["n", "c"]).with_format("numpy", columns=["n"])
    found = rows_of(arrays, [3])
    assert [type(row["n"]) for row in found[:2]] == [np.int64, np.int64]
    assert found == list(arrays)
    turned = data.with_transform(lambda batch: {"m": [n * 2 for n in batch["n"]]})
    assert rows_of(turned, [4]) == [{"m": n * 2} for n in range(30)]
    with pytest.raises(ConfigError, match="select one of them") as caught:
        opened(datasets.DatasetDict({"train": data}))
    assert caught.value.problems[0].fix_texts == ("source['train']",)


def test_what_is_no_table_is_left_to_others() -> None:
    import numpy as np
    import pandas as pd

    for value in ([1, 2], iter("abc"), {1, 2}, np.arange(3), pd.Series([1]), object(), None):
        assert open_source(value) is None


def test_large_rows_come_in_small_splits(tmp_path: Path) -> None:
    import lance
    import pandas as pd
    import polars as pl

    table = pa.table({"raw": [bytes(1 << 20)] * 70})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    lance.write_dataset(table, tmp_path / "a.lance", data_storage_version="2.0")
    frames = [table, table.to_pandas(), pl.from_arrow(table), tmp_path / "a.parquet"]
    assert isinstance(frames[1], pd.DataFrame)
    for value in frames:
        split = opened(value).take(8192)
        assert split is not None
        assert 25 <= split.items <= 33, value
    assert len(rows_of(tmp_path / "a.lance", then=8192)) == 70
