"""Dropping columns with their records, also if the column or the table was removed before."""

from __future__ import annotations

from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import HALF, Calls, by_id, column, create_table, driver, rows_from, twice  # noqa: E402
from dovetail.backfill.records import read_column, write_column  # noqa: E402
from dovetail.backfill.store import TableStore  # noqa: E402
from dovetail.errors import ConfigError  # noqa: E402
from waiting import until  # noqa: E402


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return create_table(tmp_path, 20, 10)


def kept_of(uri: str, name: str) -> list[str]:
    """Files and folders beside the table."""
    root = Path(uri) / "_dovetail"
    return sorted(str(path.relative_to(root)) for path in (*root.glob(f"c-{name}"), *root.glob(f"columns/c-{name}.*")))


def fixes(error: ConfigError) -> list[str]:
    return [fix for problem in error.problems for fix in problem.fix_texts]


# --- several columns at once


def test_a_column_that_is_no_longer_filled_with_others_is_dropped_alone(uri: str) -> None:
    table = dt.table(uri)
    table.backfill(["a", "b"], fns.pair, cluster=HALF)
    table.backfill(["a", "c"], fns.pair, cluster=HALF)
    with pytest.raises(ConfigError, match="'b' was never filled"):
        table.errors("b")
    table.drop("b")
    assert table.schema.names == ["id", "text", "a", "c"]
    assert kept_of(uri, "b") == []
    assert table.backfill("a", cluster=HALF).rows == 0
    assert column(uri, "c") == [f"high {row}" for row in range(20)]


def test_a_column_whose_partner_is_filled_with_others_now_is_dropped_alone(uri: str) -> None:
    table = dt.table(uri)
    table.backfill(["a", "b"], fns.pair, cluster=HALF)
    table.drop(["a", "b"])
    table.add_column(["a", "b"], fns.pair)
    store = TableStore(uri)
    record = read_column(store, "a")
    assert record is not None
    record.columns = ["b", "c"]
    write_column(store, record)
    table.drop("a")
    assert table.schema.names == ["id", "text", "b"]
    assert kept_of(uri, "a") == []
    assert kept_of(uri, "b") == ["columns/c-b.json"]


def test_columns_that_are_filled_together_are_dropped_together(uri: str) -> None:
    table = dt.table(uri)
    table.backfill(["a", "b"], fns.pair, cluster=HALF)
    for one in "ab":
        with pytest.raises(ConfigError, match="a, b are filled together") as caught:
            table.drop(one)
        assert fixes(caught.value) == ["name all of them, or none: a, b"]
    table.drop(["a", "b"])
    assert table.schema.names == ["id", "text"]
    assert kept_of(uri, "a") == kept_of(uri, "b") == []


@pytest.mark.parametrize(("gone", "other"), ["ba", "ab"])
def test_one_of_several_columns_may_already_be_dropped(gone: str, other: str, uri: str) -> None:
    table = dt.table(uri)
    table.backfill(["a", "b"], fns.pair, cluster=HALF)
    lance.dataset(uri).drop_columns([gone])
    with pytest.raises(ConfigError, match="a, b are filled together") as caught:
        table.drop(gone)
    assert fixes(caught.value) == [f"name all of them, or none: {other}"]
    table.drop(other)
    assert table.schema.names == ["id", "text"]
    assert kept_of(uri, "a") == kept_of(uri, "b") == []


# --- columns that Dovetail did not create


def test_a_column_that_dovetail_did_not_create_is_not_dropped(uri: str) -> None:
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    with pytest.raises(ConfigError, match="column 'text' was not created by Dovetail") as caught:
        table.drop(["n", "text"])
    assert caught.value.codes == ("DT450",)
    assert caught.value.problems[0].evidence == ("it has 20 rows of type string",)
    assert fixes(caught.value) == ["table.history()  # lists the columns that Dovetail filled"]
    assert table.schema.names == ["id", "text", "n"]
    (dropped,) = table.drop("text", force=True)
    assert (dropped.name, dropped.type, dropped.rows, dropped.created) == ("text", "string", 20, False)
    assert column(uri, "id") == list(range(20))
    assert "text" in lance.dataset(uri, version=dropped.version).schema.names
    assert table.schema.names == ["id", "n"]


def test_a_column_of_the_same_name_that_was_added_later_is_not_dropped(uri: str) -> None:
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    lance.dataset(uri).drop_columns(["n"])
    lance.dataset(uri).add_columns({"n": "id + 1"})
    with pytest.raises(ConfigError, match="column 'n' was not created by Dovetail"):
        table.drop("n")
    assert column(uri, "n") == list(range(1, 21))


def test_no_error_about_an_existing_column_suggests_to_remove_it(uri: str) -> None:
    table = dt.table(uri)
    with pytest.raises(ConfigError) as added:
        table.add_column("text", fns.doubled)
    with pytest.raises(ConfigError) as filled:
        table.backfill("text", fns.doubled, cluster=HALF)
    for caught in (added, filled):
        assert [fix for fix in fixes(caught.value) if "drop" in fix or "force" in fix] == []
        table_fixes = [fix for fix in fixes(caught.value) if fix.startswith("table.")]
        for fix in table_fixes:
            eval(fix, {"table": table, "udf": fns.doubled, "doubled": fns.doubled})
    assert table.schema.names == ["id", "text", "text_2"]


# --- columns that Lance itself dropped


def test_the_records_of_a_removed_column_can_be_dropped(uri: str) -> None:
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    lance.dataset(uri).drop_columns(["n"])
    table.drop("n")
    assert kept_of(uri, "n") == []
    assert table.schema.names == ["id", "text"]
    with pytest.raises(ConfigError, match="no column 'n'"):
        table.drop("n")


def test_a_removed_and_an_existing_column_are_dropped_in_one_call(uri: str) -> None:
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    table.add_column("m", fns.doubled)
    lance.dataset(uri).drop_columns(["n"])
    with pytest.raises(ConfigError, match="no column 'never'"):
        table.drop(["m", "n", "never"])
    assert kept_of(uri, "n")
    table.drop(["m", "n"])
    assert table.schema.names == ["id", "text"]
    assert kept_of(uri, "n") == kept_of(uri, "m") == []


# --- while it is filled


def test_a_function_that_is_set_during_a_backfill_stays_set(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 1000)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}", recompute=True)'
    with driver(tmp_path, uri, call, calls) as running:
        until(calls.is_held, "it is in the middle")
        dt.table(uri).add_column("n", fns.tripled)
        calls.go()
        running.finish()
    assert by_id(uri, "n") == twice(range(2000))
    record = read_column(TableStore(uri), "n")
    assert record is not None
    assert (record.name, record.recomputing) == ("tripled", False)
    dt.table(uri).backfill("n", cluster=HALF, trust_table=True)
    assert by_id(uri, "n") == {row: 3 * row for row in range(2000)}


def test_a_plan_uses_the_rate_of_earlier_runs_of_the_same_function(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 2000, 1000))
    assert table.plan_backfill("n", fns.slow, cluster=HALF, sample=False).rate is None
    table.backfill("n", fns.slow, cluster=HALF)
    plan = table.plan_backfill("n", cluster=HALF, recompute=True, sample=False)
    assert (plan.rate is not None, plan.rate_from) == (True, "measured in earlier runs")
    assert table.plan_backfill("n", fns.tripled, cluster=HALF, sample=False).rate is None


def test_a_table_that_is_removed_during_a_backfill_is_not_created_again(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 1000)
    with driver(tmp_path, uri, f'backfill("n", fill_functions.held, cluster="{HALF}")', calls) as running:
        until(calls.is_held, "it is in the middle")
        # not while Lance commits, which would create the folder again
        until(lambda: dt.table(uri).history("n")[0].fragments > 0, "the first commit is written down")
        Path(uri).rename(tmp_path / "removed")  # in one step: the run may be writing into it
        calls.go()
        assert running.ended() != 0
        running.all_gone()
        assert "the table no longer exists" in running.output
    assert not Path(uri).exists()


def test_writing_a_file_does_not_create_the_folder_of_a_table(tmp_path: Path) -> None:
    store = TableStore(str(tmp_path / "gone.lance"))
    for write in (store.put, store.create):
        with pytest.raises(FileNotFoundError, match="no longer exists"):
            write("c-n/jobs/run.json", b"{}")
    assert list(tmp_path.iterdir()) == []


# --- fixes that are some


def test_the_fixes_for_a_fragment_of_an_empty_table_work(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows_from(0, 0), uri)
    table = dt.table(uri)
    with pytest.raises(ConfigError, match="no fragment 0: it has no rows") as caught:
        table.backfill("n", fns.doubled, fragments=[0], cluster=HALF)
    assert fixes(caught.value) == ["add rows to the table", "omit fragments"]
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 0


def test_the_fix_for_a_table_of_the_legacy_format_works(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 20, 10, data_storage_version="legacy")
    with pytest.raises(ConfigError, match="cannot add 'n'") as caught:
        dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    (fix,) = fixes(caught.value)
    assert "data_storage_version 2.0 or newer" in fix
    new = eval(fix[fix.index("lance.write_dataset") :], {"lance": lance}).uri
    dt.table(new).backfill("n", fns.doubled, cluster=HALF)
    assert by_id(new, "n") == twice(range(20))
