"""All kinds of sinks: every row once, in order where requested."""

from __future__ import annotations

import datetime
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from data.sink_aids import TYPES, as_csv, bytes_of, opened, rows_of, tear, through_log, writers, written
from dovetail.control.payload import SourceSinkError, UnwritableItemError
from dovetail.data import sinks

ROWS = [{"id": at, "text": f'row {at} ü\n"q" ,\t☃\r', "half": at / 2, "none": None} for at in range(200)]


def expected(kind: str, rows: list[dict[str, Any]]) -> list[Any]:
    return as_csv(rows) if kind[:3] in ("csv", "tsv") else rows


def by_id(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: int(row["id"]))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_come_back_once_each_and_in_order(kind: str, tmp_path: Path) -> None:
    target = opened(tmp_path / f"some name ü.{kind}", ordered=True)
    pieces = written(target, list(range(200)), ROWS)
    tear(target)
    assert target.finish(pieces) == [str(tmp_path / f"some name ü.{kind}")]
    assert rows_of(tmp_path / f"some name ü.{kind}") == expected(kind, ROWS)
    target.discard()
    assert [path.name for path in tmp_path.iterdir()] == [f"some name ü.{kind}"]


@pytest.mark.parametrize("kind", TYPES)
def test_without_order_rows_come_as_pieces_do(kind: str, tmp_path: Path) -> None:
    target = opened(tmp_path / f"x.{kind}")
    pieces = written(target, list(range(200)), ROWS)
    assert all((piece.first, piece.last, piece.keys) == ([], [], None) for piece in pieces)
    tear(target)
    target.sync({piece.part for piece in pieces})
    target.finish(pieces[::-1])
    found = rows_of(tmp_path / f"x.{kind}")
    assert found != expected(kind, ROWS)
    assert by_id(found) == expected(kind, ROWS)


@pytest.mark.parametrize("kind", TYPES)
def test_no_rows_at_all(kind: str, tmp_path: Path) -> None:
    target = opened(tmp_path / f"x.{kind}")
    target.finish([])
    assert rows_of(tmp_path / f"x.{kind}") == []
    if kind[:3] in ("csv", "tsv", "par", "lan"):
        target = opened(tmp_path / f"y.{kind}", columns=["a", "b"])
        target.finish([])
        assert rows_of(tmp_path / f"y.{kind}") == []
        if kind == "csv":
            assert (tmp_path / "y.csv").read_text() == "a,b\n"


@pytest.mark.parametrize("kind", TYPES)
def test_the_end_can_be_repeated_and_replaces_what_was_there(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    first = opened(path, "r1", ordered=True)
    first.finish(written(first, [0, 1], ROWS[:2]))
    first.discard()
    target = opened(path, "r2", ordered=True)
    pieces = written(target, list(range(50)), ROWS[:50])
    assert rows_of(path) == expected(kind, ROWS[:2])
    for _ in range(3):
        target.finish(pieces)
        assert rows_of(path) == expected(kind, ROWS[:50])
    target.discard()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", TYPES)
def test_append_puts_old_rows_first_and_can_be_repeated(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    first = opened(path, "r1", ordered=True, exists="append")
    assert set(json.loads(json.dumps(first.base())).values()) == {None}
    first.finish(written(first, list(range(30)), ROWS[:30]))
    first.discard()
    target = opened(path, "r2", ordered=True, exists="append")
    base = json.loads(json.dumps(target.base()))
    pieces = written(target, list(range(30, 50)), ROWS[30:50])
    target.finish(pieces)
    target.close()
    again = sinks.open_sink(sinks.sink(path, ordered=True, exists="append"), "r2", tmp_path)
    again.set_base(base)
    again.prepare(resumed=True)
    assert again.which_exist(pieces) == [True] * len(pieces)
    again.finish(pieces)
    assert rows_of(path) == expected(kind, ROWS[:50])


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "lance"])
def test_append_with_other_columns(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    first = opened(path, "r1", ordered=True)
    first.finish(written(first, [0, 1], [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]))
    target = opened(path, "r2", exists="append", ordered=True)
    pieces = written(target, [0, 1], [{"c": "new", "a": 3}, {"a": 4}])
    for _ in range(2):
        target.finish(pieces)
        rows: list[dict[str, Any]] = [
            {"a": 1, "b": "x", "c": None},
            {"a": 2, "b": "y", "c": None},
            {"a": 3, "b": None, "c": "new"},
            {"a": 4, "b": None, "c": None},
        ]
        assert rows_of(path) == expected(kind, rows)


def test_append_to_files_that_others_wrote(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}')
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a\r\nb"')
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.csv").write_bytes(b"")
    for name in ("a.jsonl", "b.csv", "c.jsonl", "d.csv"):
        target = opened(tmp_path / name, exists="append")
        target.finish(written(target, [0], [{"id": 2, "text": "z"}]))
    assert rows_of(tmp_path / "a.jsonl") == [{"id": 1}, {"id": 2, "text": "z"}]
    assert (tmp_path / "b.csv").read_bytes() == b'\xef\xbb\xbfid,text\r\n1,"a\r\nb"\n2,z\n'
    assert rows_of(tmp_path / "c.jsonl") == [{"id": 2, "text": "z"}]
    assert rows_of(tmp_path / "d.csv") == [{"id": "2", "text": "z"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_append_refuses_a_file_that_changed_meanwhile(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    first = opened(path, "r1")
    first.finish(written(first, [0], [{"id": 1}]))
    target = opened(path, "r2", exists="append")
    pieces = written(target, [0], [{"id": 2}])
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(SourceSinkError, match="changed by another process") as caught:
        target.finish(pieces)
    assert caught.value.code == "DT357"


# --- JSONL


def test_jsonl_is_what_a_plain_loop_writes(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"a": 1, "b": [1.5, None, True, {"ü": '☃ \u2028 \x00 \\ " /'}], 5: "five", None: 1, 1.5: 2, True: 3},
        "text",
        7,
        None,
        float("nan"),
        float("-inf"),
        [],
        {},
        {"big": 2**80, "tuple": (1, 2)},
    ]
    target = opened(tmp_path / "x.jsonl")
    target.finish(written(target, list(range(len(rows))), rows, count=1))
    plain = {json.dumps(row, ensure_ascii=False) for row in rows}
    assert set((tmp_path / "x.jsonl").read_text().split("\n")) == plain | {""}


def test_jsonl_half_a_surrogate_pair(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl")
    target.finish(written(target, [0], [{"a\udc80": "ü\ud800"}]))
    assert (tmp_path / "x.jsonl").read_bytes() == '{"a\\udc80": "ü\\ud800"}\n'.encode()
    assert rows_of(tmp_path / "x.jsonl") == [{"a\udc80": "ü\ud800"}]


def test_jsonl_numpy_and_dates(tmp_path: Path) -> None:
    import numpy as np

    row = {
        "i": np.int32(3),
        "f": np.float32(1.5),
        "b": np.bool_(True),
        "a": np.array([[1, 2], [3, 4]]),
        "s": np.str_("x"),
        "t": datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "d": datetime.date(2024, 1, 2),
        "n": np.datetime64("2024-01-02"),
    }
    target = opened(tmp_path / "x.jsonl")
    target.finish(written(target, [0], [row]))
    found = {"i": 3, "f": 1.5, "b": True, "a": [[1, 2], [3, 4]], "s": "x"}
    times = {"t": "2024-01-02T03:04:00+00:00", "d": "2024-01-02", "n": "2024-01-02"}
    assert rows_of(tmp_path / "x.jsonl") == [found | times]


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"x": b"bytes"}, "TypeError: not JSON serializable: bytes: decode it"),
        ({"x": {1, 2}}, "set: convert it to a sorted list"),
        ({"x": object()}, "TypeError: not JSON serializable: object"),
        ({(1, 2): 3}, "TypeError: keys must be"),
        (circle(), "ValueError: Circular"),
    ],
)
def test_jsonl_values_without_a_json_form_fail_and_the_rest_is_written(bad: Any, reason: str, tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl", ordered=True)
    (writer,) = writers(target, 1)
    with pytest.raises(UnwritableItemError) as caught:
        writer.write([9, 4, (2, 0)], [{"a": 1}, bad, {"a": 3}])
    assert caught.value.index == 1
    assert reason in caught.value.error_text
    assert pickle.loads(pickle.dumps(caught.value)).index == 1
    piece = writer.write([9, (2, 0)], [{"a": 1}, {"a": 3}])
    target.finish(through_log([piece]))
    assert rows_of(tmp_path / "x.jsonl") == [{"a": 3}, {"a": 1}]


def test_a_single_part_is_not_copied_and_its_end_can_still_be_repeated(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl", ordered=True)
    (writer,) = writers(target, 1)
    pieces = [writer.write(range(at, at + 10), ROWS[at : at + 10]) for at in range(0, 100, 10)]
    writer.end()
    for _ in range(2):
        target.finish(through_log(pieces))
        assert (tmp_path / "x.jsonl").stat().st_ino == (target.parts / "w0").stat().st_ino
    tear(target)  # the final file is that file: never again appended to in a real run
    target.discard()


# --- CSV


def test_csv_values(tmp_path: Path) -> None:
    import numpy as np

    rows = [
        {"t": 'a"b', "n": None, "b": True, "f": 1.5, "j": {"ü": [1]}, "l": [1, "x"], "np": np.int64(4)},
        {"t": "", "later": "\r", "d": datetime.date(2024, 1, 2), "np": np.array([1, 2])},
    ]
    target = opened(tmp_path / "x.csv")
    (writer,) = writers(target, 1)
    target.finish(through_log([writer.write(range(2), rows)]))
    assert (tmp_path / "x.csv").read_bytes().decode() == (
        't,n,b,f,j,l,np,later,d\n"a""b",,True,1.5,"{""ü"": [1]}","[1, ""x""]",4,,\n,,,,,,"[1, 2]","\r",2024-01-02\n'
    )


@pytest.mark.parametrize("kind", ["csv", "parquet", "lance"])
@pytest.mark.parametrize(
    ("bad", "reason"), [(5, "a row of a table must be a dict, not int"), ({3: 1}, "a column name must be a str")]
)
def test_tables_take_only_dicts(kind: str, bad: Any, reason: str, tmp_path: Path) -> None:
    target = opened(tmp_path / f"x.{kind}")
    (writer,) = writers(target, 1)
    with pytest.raises(UnwritableItemError) as caught:
        writer.write([0, 1], [{"a": 1}, bad])
    assert (caught.value.index, reason in caught.value.error_text) == (1, True)


@pytest.mark.parametrize("value", [b"x", {1}, object(), "\ud800"])
def test_csv_what_has_no_form(value: Any, tmp_path: Path) -> None:
    target = opened(tmp_path / "x.csv")
    (writer,) = writers(target, 1)
    with pytest.raises(UnwritableItemError) as caught:
        writer.write([0, 1], [{"a": 1}, {"b": value}])
    assert caught.value.index == 1
    assert "column 'b'" in caught.value.error_text


def test_csv_long_values_survive_a_change_of_columns(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.csv", ordered=True)
    (writer,) = writers(target, 1)
    rows = [{"a": "y\n" * 300_000}, {"b": "z"}, {}, {"a": '"\n"', "b": "x"}]
    pieces = [writer.write([0, 3], [rows[0], rows[3]]), writer.write([1], [rows[1]]), writer.write([2], [rows[2]])]
    target.finish(through_log(pieces))
    assert rows_of(tmp_path / "x.csv") == [{"a": row.get("a", ""), "b": row.get("b", "")} for row in rows]


@pytest.mark.parametrize("kind", ["csv", "parquet", "lance"])
def test_columns_choose_and_order(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    target = opened(path, columns=["b", "a", "z"], ordered=True)
    target.finish(written(target, [0, 1], [{"a": 1, "b": "x", "c": object()}, {"a": 2, "q": 1}]))
    rows: list[dict[str, Any]] = [{"b": "x", "a": 1, "z": None}, {"b": None, "a": 2, "z": None}]
    assert rows_of(path) == expected(kind, rows)
    assert list(rows_of(path)[0]) == ["b", "a", "z"]


# --- Parquet and Lance


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_tables_bring_types_together(kind: str, tmp_path: Path) -> None:
    import numpy as np

    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 6)
    rows: list[dict[str, Any]] = [
        {"id": 0, "n": None, "x": 1, "s": {"p": 1}, "l": [], "b": b"\x00", "t": when, "np": np.array([1.0, 2.0])},
        {"id": 1, "n": "now text", "x": 2.5, "s": {"q": "new"}, "l": ["z"], "np": [3.0]},
        {"id": 2, "l": [None, "y"], "late": [{"deep": [1]}, {"deep": None}], "np": None},
        {"id": 3, "s": None, "late": [], "x": np.float32(2)},
    ]
    target = opened(tmp_path / f"x.{kind}", ordered=True)
    (writer,) = writers(target, 1)
    target.finish(through_log([writer.write([at], [row]) for at, row in enumerate(rows)]))
    found = rows_of(tmp_path / f"x.{kind}")
    nothing = dict.fromkeys(["id", "n", "x", "s", "l", "b", "t", "np", "late"])
    assert list(found[0]) == list(nothing)
    assert found == [
        nothing | {"id": 0, "x": 1.0, "s": {"p": 1, "q": None}, "l": [], "b": b"\x00", "t": when, "np": [1.0, 2.0]},
        nothing | {"id": 1, "n": "now text", "x": 2.5, "s": {"p": None, "q": "new"}, "l": ["z"], "np": [3.0]},
        nothing | {"id": 2, "l": [None, "y"], "late": [{"deep": [1]}, {"deep": None}]},
        nothing | {"id": 3, "x": 2.0, "late": []},
    ]


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_tables_with_odd_rows(kind: str, tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / f"x.{kind}"
    target = opened(path, ordered=True)
    rows = [{"id": 0, "m": np.array([[1, 2]])}, {}, {"id": 1, "e": {}}, {"id": 2, "le": [{}]}]
    (writer,) = writers(target, 1)
    target.finish(through_log([writer.write([at], [row]) for at, row in enumerate(rows)]))
    found = rows_of(path)
    assert [row["id"] for row in found] == [0, None, 1, 2]
    assert found[0]["m"] == [[1, 2]]
    assert found[0]["e"] is None
    assert found[2]["e"] is not None
    target = opened(tmp_path / f"y.{kind}", ordered=True)
    target.finish(written(target, [0, 1], [{}, {}]))
    assert len(rows_of(tmp_path / f"y.{kind}")) == 2


@pytest.mark.parametrize("value", [object(), {"x": object()}, 2**70, "\ud800", {1: 2}])
def test_tables_what_has_no_form(value: Any, tmp_path: Path) -> None:
    target = opened(tmp_path / "x.parquet")
    (writer,) = writers(target, 1)
    with pytest.raises(UnwritableItemError) as caught:
        writer.write([0, 1, 2], [{"b": None}, {"a": 1}, {"b": value}])
    assert caught.value.index == 2
    assert "column 'b'" in caught.value.error_text


def test_a_row_with_another_type_than_its_column_is_named(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.parquet")
    (writer,) = writers(target, 1)
    with pytest.raises(UnwritableItemError, match="column 'n' is string here and was int64 before") as caught:
        writer.write([0, 1, 2], [{"n": 1}, {"n": "n/a"}, {"n": 2}])
    assert caught.value.index == 1
    piece = writer.write([0], [{"n": 1}])
    with pytest.raises(UnwritableItemError, match="column 'n' is string here and was int64 before") as caught:
        writer.write([1, 2], [{"n": None}, {"n": "n/a"}])
    assert caught.value.index == 1
    target.finish([piece])
    assert rows_of(tmp_path / "x.parquet") == [{"n": 1}]


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_workers_that_disagree_about_a_type(kind: str, tmp_path: Path) -> None:
    target = opened(tmp_path / f"x.{kind}")
    one, other = writers(target, 2)
    pieces = through_log([one.write([0], [{"n": 1}]), other.write([1], [{"n": "a"}])])
    with pytest.raises(SourceSinkError, match="column 'n' is int64 in some rows and string in others") as caught:
        target.finish(pieces)
    assert caught.value.code == "DT356"
    assert not (tmp_path / f"x.{kind}").exists()
    assert target.which_exist(pieces) == [True, True]


def test_parquet_groups_and_compression(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for name, used in (("zstd", "ZSTD"), ("snappy", "SNAPPY"), ("none", "UNCOMPRESSED")):
        target = opened(tmp_path / f"{name}.parquet", compression=name)
        target.finish(written(target, list(range(100)), ROWS[:100]))
        meta = pq.ParquetFile(tmp_path / f"{name}.parquet").metadata
        assert (meta.num_row_groups, meta.row_group(0).column(0).compression) == (1, used)


# --- shards


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "lance"])
def test_shards(kind: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    rows = [{"id": at, "text": chance.randbytes(300).hex()} for at in range(600)]
    folder = tmp_path / "out"
    target = opened(folder / f"x.{kind}", "r1", shard_size="100KB", ordered=True)
    pieces = written(target, list(range(600)), rows)
    names = target.finish(pieces)
    assert target.finish(pieces) == names
    target.discard()
    assert len(names) > (1 if kind == "parquet" else 3)
    assert names == [str(folder / f"x-{at:05d}.{kind}") for at in range(len(names))]
    assert sorted(str(path) for path in folder.iterdir()) == names
    assert [row for name in names for row in rows_of(name)] == expected(kind, rows)
    sizes = [len(bytes_of(Path(name))) for name in names]
    assert max(sizes) <= (100 << 10) * (2 if kind == "parquet" else 1)
    assert min(sizes[:-1]) > 90 << 10
    few = opened(folder / f"x.{kind}", "r2", shard_size="100KB", ordered=True, exists="append")
    assert few.base() == {"shards": len(names)}
    some = written(few, [0, 1], rows[:2])
    for _ in range(2):
        assert few.finish(some) == [str(folder / f"x-{len(names):05d}.{kind}")]
    few.discard()
    assert len(list(folder.iterdir())) == len(names) + 1
    (folder / "x-1.txt").touch()
    (folder / f"xx-00000.{kind}").touch()
    few = opened(folder / f"x.{kind}", "r3", shard_size="100KB")
    assert few.finish(written(few, [0, 1], rows[:2])) == names[:1]
    few.discard()
    assert sorted(path.name for path in folder.iterdir()) == sorted(["x-1.txt", f"x-00000.{kind}", f"xx-00000.{kind}"])


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_larger_than_a_shard(kind: str, tmp_path: Path) -> None:
    rows = [{"t": "x" * size} for size in (10, 5000, 10, 10, 3000, 3000)]
    target = opened(tmp_path / f"x.{kind}", shard_size="1KB", ordered=True)
    (writer,) = writers(target, 1)
    names = target.finish([writer.write(range(6), rows)])
    assert [[len(row["t"]) for row in rows_of(name)] for name in names] == [[10], [5000], [10, 10], [3000], [3000]]


def test_lance_data_files_get_the_size_of_shards(tmp_path: Path) -> None:
    import lance

    target = opened(tmp_path / "x.lance", shard_size="1MB")
    chance = random.Random(3)
    (writer,) = writers(target, 1)
    pieces = [writer.write([at], [{"b": chance.randbytes(200_000)}]) for at in range(100)]
    assert target.finish(pieces) == [str(tmp_path / "x.lance")]
    assert len(lance.dataset(str(tmp_path / "x.lance")).get_fragments()) > 2
