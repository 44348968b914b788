"""Reading rows of a table, and commits of finished files during changes by others."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.backfill.lance_client import normalize_uri
from dovetail.backfill.lance_table import Fragment, LanceTable, NewDataFile
from dovetail.backfill.store import TableStore
from dovetail.errors import ConfigError, RunError
from runtime.aids import Script

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, EACH = 20, 5


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    if request.param == "disk":
        return str(tmp_path / "some table.lance"), {}
    bucket = request.getfixturevalue("bucket")
    return f"{bucket.uri}/some folder/t.lance", bucket.storage


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "t.lance")


def create_table(uri: str, storage: dict[str, str] | None = None, **settings: Any) -> LanceTable:
    """Rows 0 to 19 in four fragments; `id` and `A b`."""
    rows = pa.table({"id": list(range(ROWS)), "A b": [f"row {at}" for at in range(ROWS)]})
    lance.write_dataset(rows, uri, max_rows_per_file=EACH, storage_options=storage or None, **settings)
    return LanceTable(uri, storage)


def files_of(_: LanceTable, fragment: Fragment) -> str:
    """Names of the data files of the columns `id` and `A b`, like the real function."""
    return "+".join(file.path for file in fragment.files if {0, 1} & set(file.fields))


def write_file(table: LanceTable, fragment: int, values: list[Any], name: str, column: str = "u") -> NewDataFile:
    schema = pa.schema([table.schema.field(column)])
    batch = pa.record_batch([pa.array(values, schema.field(0).type)], schema=schema)
    size = table.write(name, schema, [batch])
    found = next(one for one in table.fragments() if one.id == fragment)
    return NewDataFile(fragment, name, (table.field_ids()[column],), files_of(table, found), size)


def values(table: LanceTable, column: str = "u") -> list[Any]:
    return list(table.newest().dataset.to_table(columns=[column])[column].to_pylist())


def test_a_column_is_added_filled_and_dropped(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place)
    added = table.add_columns([pa.field("u", pa.string())])
    assert (table.version, added.version) == (1, 2)
    assert added.schema.names == ["id", "A b", "u"]
    assert added.field_ids() == {"id": 0, "A b": 1, "u": 2}
    assert [len(fragment.files) for fragment in added.fragments()] == [1, 1, 1, 1]
    files = [write_file(added, at, [f"{at}"] * EACH, f"dt-{at}.lance") for at in (2, 0)]
    assert all(file.size_bytes > 0 for file in files)
    assert values(table) == [None] * ROWS
    done = added.commit(files, files_of)
    assert (done.version, done.fragments, done.changed_fragments) == (3, (2, 0), ())
    assert values(table) == ["0"] * 5 + [None] * 5 + ["2"] * 5 + [None] * 5
    newest = table.newest()
    assert newest.fragments()[2].files[1].path == "dt-2.lance"
    assert newest.fragments()[2].files[1].fields == (2,)
    assert newest.fragments()[2].files[1].size_bytes == files[0].size_bytes
    found, alive = newest.read(2, ["u", "id"], 1, 3)
    assert (found.to_pydict(), alive.to_pylist()) == ({"u": ["2", "2"], "id": [11, 12]}, [True, True])
    assert newest.drop_columns(["u"]).schema.names == ["id", "A b"]
    assert added.schema.names == ["id", "A b", "u"], "a version does not change"


def test_a_concurrent_compaction_is_reported_and_other_fragments_are_committed(
    place: tuple[str, dict[str, str]],
) -> None:
    table = create_table(*place).add_columns([pa.field("u", pa.string())])
    files = [write_file(table, at, [f"{at}"] * EACH, f"dt-{at}.lance") for at in (1, 3)]
    dataset = lance.dataset(place[0], storage_options=place[1] or None)
    dataset.delete("id = 16")  # of fragment 3: it is alone worth compacting now, and is compacted alone
    dataset.optimize.compact_files(target_rows_per_fragment=EACH, materialize_deletions_threshold=0.01)
    assert [fragment.id for fragment in table.newest().fragments()] == [0, 1, 2, 4]
    done = table.commit(files, files_of)
    assert (done.fragments, done.changed_fragments) == ((1,), (3,))
    assert values(table) == [None] * 5 + ["1"] * 5 + [None] * 9


def test_append_delete_and_update_meanwhile_do_no_harm(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place).add_columns([pa.field("u", pa.string())])
    files = [write_file(table, at, [f"{at}.{row}" for row in range(EACH)], f"dt-{at}.lance") for at in range(4)]
    dataset = lance.dataset(place[0], storage_options=place[1] or None)
    dataset.update({"A b": "'new'"}, where="id = 3")
    dataset.delete("id = 7")
    dataset.insert(pa.table({"id": [100], "A b": ["x"], "u": pa.array([None], pa.string())}))
    done = table.commit(files, files_of)
    assert (done.fragments, done.changed_fragments) == ((0, 1, 2, 3), ())
    found = table.newest().dataset.to_table(columns=["id", "u"]).to_pydict()
    by_id = dict(zip(found["id"], found["u"], strict=True))
    expected = {at: f"{at // EACH}.{at % EACH}" for at in range(ROWS)}
    expected.pop(7)
    assert by_id == {**expected, 3: None, 100: None}, "the row that was updated moved to a fragment of its own"


def test_constant_commits_of_others_only_delay_a_commit(uri: str) -> None:
    """Updates of the same fragment conflict with a commit: the conflict is real, and the retry is."""
    table = create_table(uri).add_columns([pa.field("u", pa.string())])
    file = write_file(table, 0, ["x"] * EACH, "dt-0.lance")
    asked = 0

    def meanwhile(newest: LanceTable, fragment: Fragment) -> str:
        nonlocal asked
        asked += 1
        if asked <= 3:
            lance.dataset(uri).update({"A b": f"'{asked}'"}, where=f"id = {asked}")
        return files_of(newest, fragment)

    done = table.commit([file], meanwhile)
    assert (done.fragments, done.changed_fragments, asked) == ((0,), (), 4)
    assert values(table).count("x") == 2, "3 of 5 rows moved to other fragments"


def test_changed_inputs_are_reported(uri: str) -> None:
    table = create_table(uri).add_columns([pa.field("u", pa.string())])
    file = write_file(table, 0, ["x"] * EACH, "dt-0.lance")
    other = write_file(table, 0, ["other"] * EACH, "other.lance", "A b")
    assert table.commit([other], files_of).fragments == (0,)
    done = table.commit([file], files_of)
    assert (done.fragments, done.changed_fragments, done.version) == ((), (0,), table.newest().version)
    assert values(table, "A b")[:6] == ["other"] * 5 + ["row 5"]
    first = table.newest().fragments()[0]
    assert [(one.path == "other.lance", one.fields) for one in first.files] == [(False, (0,)), (True, (1,))]


def test_a_fragment_that_vanished_is_reported(uri: str) -> None:
    table = create_table(uri).add_columns([pa.field("u", pa.string())])
    files = [write_file(table, at, ["x"] * EACH, f"dt-{at}.lance") for at in (0, 1)]
    lance.dataset(uri).delete("id < 5")
    assert [one.id for one in table.newest().fragments()] == [1, 2, 3]
    done = table.commit(files, files_of)
    assert (done.fragments, done.changed_fragments) == ((1,), (0,))


@pytest.mark.parametrize("again", [None, ("u", pa.int64()), ("v", pa.string())])
def test_a_column_that_was_dropped_meanwhile_is_an_error(uri: str, again: tuple[str, Any] | None) -> None:
    """Lance gives its id to the next column that is added."""
    table = create_table(uri).add_columns([pa.field("u", pa.string())])
    file = write_file(table, 0, ["x"] * EACH, "dt-0.lance")
    table.drop_columns(["u"])
    if again:
        assert table.add_columns([pa.field(*again)]).field_ids()[again[0]] == 2
    with pytest.raises(RunError, match="dropped") as caught:
        table.commit([file], files_of)
    assert caught.value.codes == ("DT433",)
    assert table.newest().dataset.count_rows("id >= 0") == ROWS


def test_a_file_that_was_cleaned_up_is_computed_again(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place).add_columns([pa.field("u", pa.string())])
    files = [write_file(table, at, ["x"] * EACH, f"dt-{at}.lance") for at in (0, 1)]
    lance.dataset(place[0], storage_options=place[1] or None).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True
    )
    files.append(write_file(table.newest(), 2, ["y"] * EACH, "dt-2.lance"))
    done = table.commit(files, files_of)
    assert (done.fragments, done.changed_fragments) == ((2,), (0, 1))
    assert values(table) == [None] * 10 + ["y"] * 5 + [None] * 5


def test_a_commit_that_never_succeeds_is_reported(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.backfill.lance_table.MAX_COMMIT_ATTEMPTS", 2)
    table = create_table(uri).add_columns([pa.field("u", pa.string())])
    file = write_file(table, 0, ["x"] * EACH, "dt-0.lance")

    rows = iter(range(EACH))

    def meanwhile(newest: LanceTable, fragment: Fragment) -> str:
        lance.dataset(uri).update({"A b": "'again'"}, where=f"id = {next(rows)}")
        return files_of(newest, fragment)

    with pytest.raises(RunError, match="cannot commit 1 files, 2 times") as caught:
        table.commit([file], meanwhile)
    assert caught.value.codes == ("DT433",)


def test_several_that_commit_at_the_same_moment_all_get_through(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place).add_columns([pa.field("u", pa.string()), pa.field("v", pa.string())])
    start = threading.Barrier(4)
    results: list[Any] = []

    def fill(column: str, fragments: tuple[int, ...]) -> None:
        files = [write_file(table, at, [column] * EACH, f"{column}-{at}.lance", column) for at in fragments]
        start.wait()
        results.extend(table.commit([file], files_of) for file in files)

    parts = [(column, fragments) for column in "uv" for fragments in ((0, 2), (1, 3))]
    threads = [threading.Thread(target=fill, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(len(one.fragments) == 1 and not one.changed_fragments for one in results)
    assert values(table, "u") == ["u"] * ROWS
    assert values(table, "v") == ["v"] * ROWS


@pytest.mark.parametrize("stable", [False, True])
def test_rows_are_read_where_they_lie_whatever_was_deleted(uri: str, stable: bool) -> None:
    create_table(uri, enable_stable_row_ids=stable)
    dataset = lance.dataset(uri)
    dataset.delete("id in (1, 3, 9)")
    dataset.add_columns({"twice": "id * 2"})  # a second file per fragment
    dataset.delete("id >= 10 and id < 15")
    table = LanceTable(uri)
    assert [(one.id, one.rows, one.deleted, len(one.files)) for one in table.fragments()] == [
        (0, 5, 2, 2),
        (1, 5, 1, 2),
        (3, 5, 0, 2),
    ]
    for fragment in table.fragments():
        for start in range(EACH + 2):
            for stop in range(start, EACH + 3):
                found, alive = table.read(fragment.id, ["twice", "A b"], start, stop)
                rows = range(start, min(stop, EACH)) if start < EACH else range(0)
                ids = [fragment.id * EACH + row for row in rows]
                there = [id_ not in (1, 3, 9) for id_ in ids]
                assert alive.to_pylist() == there
                assert found.column_names == ["twice", "A b"]
                kept = found.filter(alive).to_pydict()
                living = [id_ for id_, is_there in zip(ids, there, strict=True) if is_there]
                assert kept == {"twice": [2 * id_ for id_ in living], "A b": [f"row {id_}" for id_ in living]}
    assert table.matching_offsets(0, "id > 0").to_pylist() == [2, 4]
    assert table.matching_offsets(3, "twice <> 32 and `A b` <> 'row 19'").to_pylist() == [0, 2, 3]
    assert table.matching_offsets(1, "id > 1000").to_pylist() == []
    assert table.matching_offsets(1, "id > 5").type == pa.uint32()
    with pytest.raises(RunError, match="no fragment 2"):
        table.read(2, ["id"], 0, 1)


def test_rows_match_by_an_index_too(uri: str) -> None:
    create_table(uri, enable_stable_row_ids=True)
    dataset = lance.dataset(uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.delete("id = 6")
    assert LanceTable(uri).matching_offsets(1, "id in (9, 5, 6)").to_pylist() == [0, 4]


def test_offsets_are_in_order_with_an_index_over_shuffled_values_too(uri: str) -> None:
    ids = [(at * 7) % 1000 for at in range(1000)]
    dataset = lance.write_dataset(pa.table({"id": ids}), uri)
    dataset.create_scalar_index("id", "BTREE")
    expected = [at for at, id_ in enumerate(ids) if id_ < 300]
    assert LanceTable(uri).matching_offsets(0, "id < 300").to_pylist() == expected


KINDS: dict[str, tuple[Any, list[Any]]] = {
    "large_string": (pa.large_string(), ["a", None, "", "ü", "x" * 1000]),
    "binary": (pa.binary(), [b"", None, b"\x00\xff", b"a", b"b"]),
    "fixed_size_list": (pa.list_(pa.float32(), 3), [[1.0, 2.0, 3.0], None, [0.0, 0.5, 1.0], [4.0, 5.0, 6.0], None]),
    "list": (pa.list_(pa.string()), [[], None, ["a", None], ["b"], []]),
    "struct": (
        pa.struct([("x", pa.int32()), ("y", pa.list_(pa.struct([("z", pa.string())])))]),
        [{"x": 1, "y": [{"z": "a"}]}, None, {"x": None, "y": None}, {"x": 2, "y": []}, {"x": 3, "y": [{"z": None}]}],
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", None, "b", "a", "a"]),
    "bool": (pa.bool_(), [True, None, False, True, True]),
    "timestamp": (pa.timestamp("us", "UTC"), [None] * 5),
    "decimal": (pa.decimal128(10, 2), [None] * 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_kind_are_added_filled_and_read(kind: str, uri: str) -> None:
    of, data = KINDS[kind]
    table = create_table(uri).add_columns([pa.field("My column", of), pa.field("n", pa.int64())])
    ids = table.field_ids()
    schema = pa.schema([table.schema.field("My column"), table.schema.field("n")])
    batch = pa.record_batch([pa.array(data, of), pa.array(range(EACH), pa.int64())], schema=schema)
    size = table.write("dt-1.lance", schema, [batch.slice(0, 2), batch.slice(2)])
    inputs = files_of(table, table.fragments()[1])
    done = table.commit([NewDataFile(1, "dt-1.lance", (ids["My column"], ids["n"]), inputs, size)], files_of)
    assert done.fragments == (1,)
    newest = table.newest()
    assert newest.fragments()[1].files[-1].fields == tuple(sorted((ids["My column"], ids["n"])))
    found, _ = newest.read(1, ["n", "My column"], 1, 5)
    assert found.to_pydict() == {"n": [1, 2, 3, 4], "My column": data[1:]}
    assert newest.read(0, ["My column"], 0, 9)[0]["My column"].to_pylist() == [None] * EACH
    again = NewDataFile(1, "dt-1b.lance", (ids["My column"],), inputs)
    newest.write("dt-1b.lance", pa.schema([schema.field(0)]), [batch.select([0]).take(pa.array([4, 3, 2, 1, 0]))])
    assert newest.commit([again], files_of).fragments == (1,)
    assert table.newest().read(1, ["My column"], 0, 5)[0]["My column"].to_pylist() == data[::-1]
    assert [file.fields for file in table.newest().fragments()[1].files] == [(0, 1), (ids["n"],), (ids["My column"],)]


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_tables_of_older_formats_are_filled(version: str, uri: str) -> None:
    of = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))])
    table = create_table(uri, data_storage_version=version).add_columns([pa.field("s", of)])
    data = [{"x": at, "y": [str(at)]} for at in range(EACH)]
    assert table.commit([write_file(table, 0, data, "dt-0.lance", "s")], files_of).fragments == (0,)
    assert table.newest().read(0, ["s"], 0, 5)[0]["s"].to_pylist() == data
    assert table.newest().fragments()[0].files[-1].fields == (table.field_ids()["s"],)


def test_a_writer_that_fails_leaves_nothing(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place).add_columns([pa.field("u", pa.string())])
    schema = pa.schema([table.schema.field("u")])

    def broken() -> Iterator[Any]:
        yield pa.record_batch([pa.array(["x" * 1000] * 20_000)], schema=schema)
        raise ZeroDivisionError

    before = _data(*place)
    with pytest.raises(ZeroDivisionError):
        table.write("dt-0.lance", schema, broken())
    with pytest.raises(Exception, match=r"(?i)type|schema|expected"):
        table.write("dt-1.lance", schema, [pa.record_batch([pa.array([1])], names=["u"])])
    assert _data(*place) == before


def _data(uri: str, storage: dict[str, str]) -> list[str]:
    if not storage:
        return sorted(path.name for path in Path(f"{uri}/data").iterdir())
    from lance.file import LanceFileSession

    return sorted(LanceFileSession(f"{uri}/data", storage).list())


KILLED = """
import os
import pyarrow as pa
from dovetail.backfill.lance_table import LanceTable
table = LanceTable(os.environ["TABLE"])
schema = pa.schema([table.schema.field("u")])
def batches():
    for at in range(3):
        yield pa.record_batch([pa.array([os.urandom(200_000).hex() for _ in range(20)])], schema=schema)
    os.kill(os.getpid(), 9)
table.write("dt-0.lance", schema, batches())
"""


@pytest.mark.processes
def test_a_writer_that_is_killed_leaves_nothing_under_the_name(uri: str, tmp_path: Path) -> None:
    create_table(uri).add_columns([pa.field("u", pa.string())])
    with Script(tmp_path, KILLED, warm=True, TABLE=uri) as script:
        assert script.ended() == -9
    assert not (Path(uri) / "data" / "dt-0.lance").exists()


def test_cleaning_up_and_compacting_leave_our_files_alone(place: tuple[str, dict[str, str]]) -> None:
    uri, storage = place
    table = create_table(uri, storage).add_columns([pa.field("u", pa.string())])
    store = TableStore(uri, storage)
    names = ["c-u/parts/abc/0-def/p.0.5.100", "c-u/lease/1.asks", "columns/u.json", "x.lance", "_versions/1.manifest"]
    for name in names:
        store.put(name, b"ours")
    file = write_file(table, 0, ["x"] * EACH, "dt-0.lance")
    dataset = lance.dataset(uri, storage_options=storage or None)
    dataset.delete("id < 2")
    dataset.optimize.compact_files(materialize_deletions_threshold=0.01, target_rows_per_fragment=EACH)
    dataset.cleanup_old_versions(older_than=timedelta(0))
    assert "dt-0.lance" in _data(uri, storage), "it is not part of any version yet, and new"
    dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert file.name not in _data(uri, storage)
    assert [store.get(name) for name in names] == [b"ours"] * len(names)
    assert LanceTable(uri, storage).dataset.count_rows() == ROWS - 2


def test_the_newest_version_is_never_an_old_one(uri: str) -> None:
    table = create_table(uri)
    for rows in range(3):
        lance.dataset(uri).insert(pa.table({"id": [rows], "A b": ["x"]}))
        assert LanceTable(uri).version == table.newest().version == rows + 2
        assert len(table.newest().fragments()) == 5 + rows
    assert len(table.fragments()) == 4
    lance.write_dataset(pa.table({"id": [1]}), uri, mode="overwrite")
    assert table.newest().schema.names == ["id"]


def test_it_pickles_as_its_address(place: tuple[str, dict[str, str]]) -> None:
    table = create_table(*place)
    table.add_columns([pa.field("u", pa.string())])
    pickled = pickle.dumps(table)
    assert len(pickled) < 600
    again = pickle.loads(pickled)
    assert (again.version, again.schema, again.fragments()) == (1, table.schema, table.fragments())
    assert again.dataset is pickle.loads(pickled).dataset, "a version is opened once per process"
    assert "aws" not in repr(table)


def test_addresses_mean_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create_table("t.lance/")
    assert LanceTable("t.lance/").uri == LanceTable(f"file://{tmp_path}/t.lance").uri == str(tmp_path / "t.lance")
    assert normalize_uri("s3://bucket/a b/") == "s3://bucket/a b"


def test_an_address_that_is_not_a_table_is_reported_with_a_fix(tmp_path: Path, bucket: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened.*not found") as caught:
        LanceTable(str(tmp_path / "nothing"))
    assert caught.value.codes == ("DT430",)
    assert ".rs:" not in str(caught.value)
    assert "_versions/" in str(caught.value)
    create_table(str(tmp_path / "clips.lance"))
    with pytest.raises(ConfigError, match=r"not found \(did you mean 'clips\.lance'\?\)") as caught:
        LanceTable(str(tmp_path / "clip.lance"))
    LanceTable(caught.value.problems[0].fix_texts[0])
    with pytest.raises(ConfigError, match="storage_options") as caught:
        LanceTable(f"{bucket.uri}/nothing", bucket.storage)
    assert caught.value.codes == ("DT430",)
    assert "aws_secret_access_key': 'test" not in str(caught.value)
    create_table(str(tmp_path / "t.lance"))
    with pytest.raises(ConfigError, match="version 99, cannot be opened"):
        LanceTable(str(tmp_path / "t.lance"), version=99)


def test_a_failed_add_or_drop_lists_the_existing_columns(uri: str) -> None:
    table = create_table(uri)
    with pytest.raises(ConfigError, match=r"cannot add 'id': .*already exists") as caught:
        table.add_columns([pa.field("id", pa.int64())])
    assert caught.value.codes == ("DT433",)
    assert "'id', 'A b'" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot drop 'nothing'"):
        table.drop_columns(["nothing"])
    with pytest.raises(ConfigError, match=r"cannot add 'a\.b'"):
        table.add_columns([pa.field("a.b", pa.string())])
    assert table.newest().version == 1


@pytest.mark.parametrize(
    ("where", "expected_message"),
    [
        ("nothing > 1", "No field named nothing"),
        ("id >", "Expected: an expression"),
        ("id + 1", "does not return a boolean"),
        ("A b = 'x'", "No field named"),
        ("upper(id) = 'X'", "upper"),
        ("id = 'x'", "could not convert"),
        ("", "expression"),
    ],
)
def test_an_invalid_condition_is_reported_in_one_line(uri: str, where: str, expected_message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_table(uri).check_where(where)
    (problem,) = caught.value.problems
    assert problem.code == "DT432"
    assert expected_message in problem.message
    assert "\n" not in problem.message
    assert ".rs:" not in problem.message


def test_good_conditions_pass_and_name_their_columns(uri: str) -> None:
    table = create_table(uri).add_columns(
        [pa.field("s", pa.struct([("x", pa.int32())])), pa.field("width", pa.int32())]
    )
    named = {
        "id > 1": ("id",),
        "`A b` like 'row%' and s.x is null": ("A b", "s"),
        "width is not null": ("width",),
        "true": (),
        "(id=1)or(width<3)": ("id", "width"),
        "`A b` = 'id'": ("id", "A b"),  # one too many does no harm
    }
    for where, columns in named.items():
        table.check_where(where)
        assert table.columns_mentioned(where) == columns


@pytest.mark.processes
def test_without_pylance_the_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lance'] = None\n"
        "from dovetail.backfill.lance_table import LanceTable\n"
        "from dovetail.errors import ConfigError\n"
        "assert 'pyarrow' not in sys.modules\n"
        f"try: LanceTable({str(tmp_path)!r})\n"
        "except ConfigError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "error[DT431]" in shown
    assert "pip install 'dovetail-ml[lance]'" in shown


@pytest.mark.processes
def test_commits_are_silent(uri: str) -> None:
    code = (
        "import sys, pyarrow as pa\n"
        "from dovetail.backfill.lance_table import LanceTable, NewDataFile\n"
        "table = LanceTable(sys.argv[1])\n"
        "schema = pa.schema([table.schema.field('u')])\n"
        "table.write('dt.lance', schema, [pa.record_batch([pa.array(['x'] * 5)], schema=schema)])\n"
        "print(table.commit([NewDataFile(0, 'dt.lance', (2,), '')], lambda *_: '').fragments)"
    )
    create_table(uri).add_columns([pa.field("u", pa.string())])
    ended = subprocess.run([sys.executable, "-c", code, uri], check=True, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("(0,)\n", "")
