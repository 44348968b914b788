"""`retry_errors` and the list of failed rows after other changes of the table."""

# ruff: noqa: A002, A006 - parameters are called like columns, and one is `id`

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

import lance
import pyarrow as pa

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, OTHER, by_id, column, compact, create_table, twice
from backfill_scenes import BAD, brittle_function, gated_function, run_beside
from dovetail.errors import RunError
from staged_backfill import Staged
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def of_m(folder: Path) -> Any:
    """The same of a column `m`."""

    def function(m: int) -> int:
        if m % 10 == 0 and (folder / "bad").exists():
            raise ValueError("bad")
        return m + 1

    return dt.udf(function, version="1")


@pytest.fixture
def failed(tmp_path: Path) -> dt.Table:
    """A column `n` of two fragments in which one row failed; it would not again."""
    (tmp_path / "bad").touch()
    table = dt.table(create_table(tmp_path, 20, 10))
    table.backfill("n", brittle_function(tmp_path), on_error="skip", cluster=HALF)
    (tmp_path / "bad").unlink()
    assert [error.offset for error in table.errors("n")] == [BAD]
    return table


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(create_table(tmp_path, 200, 200), fns.doubled)


def test_errors_are_still_listed_after_other_rows_were_computed(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 400, 200)
    table = dt.table(uri)
    table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip", where="id < 100")
    before = [error.row for error in table.errors("n")]
    assert len(before) == 10
    table.backfill("n", fns.doubled, cluster=HALF, where="id >= 50")
    assert [error.row for error in table.errors("n")] == before[:5]
    assert table.retry_errors("n", fns.doubled, cluster=HALF).rows == 5
    assert by_id(uri, "n") == twice(range(400))
    assert table.errors("n") == []


def test_a_retry_that_fails_keeps_the_list(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 500)
    table = dt.table(uri)
    table.backfill("n", fns.brittle, cluster=HALF, on_error="skip")
    with pytest.raises(ZeroDivisionError):
        table.retry_errors("n", cluster=HALF)
    assert len(table.errors("n")) == 1
    assert by_id(uri, "n") == twice(range(1000), [fns.BAD])


def test_rows_of_a_fragment_whose_input_changed_are_not_retried_in_place(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    table = dt.table(create_table(tmp_path, 9, 9))
    table.backfill("m", dt.udf(fns.doubled.fn, version="1"), cluster=HALF)
    function = of_m(tmp_path)
    table.backfill("n", function, on_error="skip", cluster=HALF)
    (tmp_path / "bad").unlink()
    table.backfill("m", dt.udf(fns.tripled.fn, version="2"), cluster=HALF)
    result = table.retry_errors("n", function, cluster=HALF)
    assert (result.rows, result.notes[0].partition(":")[0]) == (
        0,
        "2 rows of unfinished fragments, or of fragments whose input changed",
    )
    assert table.plan_backfill("n", function, sample=False, cluster=HALF).rows == 9
    table.backfill("n", function, cluster=HALF)
    assert by_id(table.uri, "n") == {row: 3 * row + 1 for row in range(9)}


def test_a_retry_that_waited_keeps_what_another_process_filled(failed: dt.Table, tmp_path: Path) -> None:
    with run_beside(tmp_path, failed, "n", gated_function(tmp_path, 0, 7)), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(failed.retry_errors, "n", brittle_function(tmp_path), cluster=OTHER)
        lease = tmp_path / "t.lance/_dovetail/c-n/lease"
        until(lambda: len(list(lease.glob("*.asks"))) == 2, "the retry waits for its turn")
        (tmp_path / "go").touch()
        assert waiting.result().rows == 0
    assert column(failed.uri, "n") == [7 * row for row in range(20)]


def test_a_compaction_during_a_retry_is_reported_with_a_fix(failed: dt.Table, tmp_path: Path) -> None:
    with run_beside(tmp_path, failed, "n", gated_function(tmp_path, 0), call="retry_errors") as future:
        compact(failed.uri)
        (tmp_path / "go").touch()
        with pytest.raises(RunError, match="these rows were not retried") as caught:
            future.result()
    assert caught.value.problems[0].fix_texts == ('table.backfill("n", where="n IS NULL")',)
    table = dt.table(failed.uri)
    table.backfill("n", brittle_function(tmp_path), where="n IS NULL", cluster=HALF)
    assert by_id(table.uri, "n") == twice(range(20))


def test_a_failed_row_that_was_computed_since_is_not_listed(failed: dt.Table, tmp_path: Path) -> None:
    function = brittle_function(tmp_path)
    failed.backfill("n", function, where="n IS NULL", cluster=HALF)
    assert failed.errors("n") == []
    failed.backfill("n", function, cluster=HALF)
    assert failed.errors("n") == []
    assert column(failed.uri, "n")[BAD] == 2 * BAD


def test_a_row_that_fails_again_from_other_input_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    table = dt.table(create_table(tmp_path, 9, 9))
    for version in range(3):
        table.backfill("m", dt.udf(fns.doubled.fn, version=str(version)), cluster=HALF)
        table.backfill("n", of_m(tmp_path), on_error="skip", cluster=HALF)
        assert [error.offset for error in table.errors("n")] == [0, 5]


def test_deleted_rows_are_not_listed_as_errors(failed: dt.Table) -> None:
    lance.dataset(failed.uri).delete(f"id = {BAD}")
    assert failed.errors("n") == []


def mended(version: str) -> Any:
    def function(id: int) -> int:
        return 3 * id

    return dt.udf(function, version=version)


@pytest.mark.parametrize("is_set_before", [False, True])
def test_rows_of_an_earlier_version_do_not_count_as_done_after_a_retry(failed: dt.Table, is_set_before: bool) -> None:
    function = mended("other")
    if is_set_before:
        failed.add_column("n", function)
    filled = failed.retry_errors("n", function, cluster=HALF)
    assert filled.rows == 1
    assert filled.notes == [
        '19 rows were computed by another version of function: the next table.backfill("n") computes '
        'all rows with this one; @dt.udf(version="times 2") keeps them'
    ]
    assert by_id(failed.uri, "n") == twice(range(20)) | {BAD: 3 * BAD}
    plan = failed.plan_backfill("n", function, sample=False, cluster=HALF)
    assert (plan.rows, plan.done_rows) == (20, 0)
    assert failed.backfill("n", function, cluster=HALF).rows == 20
    assert by_id(failed.uri, "n") == {row: 3 * row for row in range(20)}


def test_with_the_version_in_the_note_of_a_retry_the_other_rows_stay_done(failed: dt.Table) -> None:
    (note,) = failed.retry_errors("n", mended("other"), cluster=HALF).notes
    version = note.partition('version="')[2].partition('"')[0]
    assert failed.backfill("n", mended(version), cluster=HALF).rows == 0
    assert by_id(failed.uri, "n") == twice(range(20)) | {BAD: 3 * BAD}


def test_a_retry_with_the_same_version_has_no_note_and_all_rows_are_done(failed: dt.Table, tmp_path: Path) -> None:
    function = brittle_function(tmp_path)
    filled = failed.retry_errors("n", function, cluster=HALF)
    assert (filled.rows, filled.notes) == (1, [])
    assert failed.backfill("n", function, cluster=HALF).rows == 0


def test_rows_of_a_condition_that_another_version_computed_are_noted_by_fragment(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 40, 20))
    table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip", where="id < 30")
    (note,) = table.retry_errors("n", fns.doubled, cluster=HALF).notes
    assert note.startswith("rows of 2 fragments were computed by another version of doubled: ")
    assert table.backfill("n", fns.doubled, cluster=HALF, where="id < 30").rows == 30


def test_rows_of_unfinished_fragments_are_not_retried(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 200, 200)
    staged = Staged(uri, fns.every_tenth_fails, on_error="skip")
    assert staged.worker()([staged.task(0, 100)])[0].errors == 10  # and then it was killed
    table = staged.table
    assert len(table.errors("n")) == 10
    result = table.retry_errors("n", fns.doubled, cluster=HALF)
    assert result.rows == 0
    assert '10 rows of unfinished fragments, or of fragments whose input changed: table.backfill("n") first' in str(
        result
    )
    assert table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip").kept == 100
    assert table.retry_errors("n", fns.doubled, cluster=HALF).rows == 20
    assert by_id(uri, "n") == twice(range(200))


def test_rows_are_retried_with_the_current_input_columns(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": list(range(20)), "b": [1000] * 20}), uri)

    @dt.udf(version="1")
    def before(a: int, b: int) -> int:
        if a == 5:
            raise ValueError("five")
        return a - b

    @dt.udf(version="2")
    def after(b: int, a: int) -> int:
        return a - b

    table = dt.table(uri)
    table.backfill("n", before, cluster=HALF, on_error="skip")
    assert table.retry_errors("n", after, cluster=HALF).rows == 1
    assert column(uri, "n") == [a - 1000 for a in range(20)]


def test_a_retry_after_a_compaction_notes_what_to_do(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 40, 20)
    table = dt.table(uri)
    table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip")
    lance.dataset(uri).optimize.compact_files()
    result = table.retry_errors("n", fns.doubled, cluster=HALF)
    assert result.rows == 0
    assert 'after a compaction table.backfill("n") computes what is NULL' in str(result)
    table.backfill("n", fns.doubled, cluster=HALF)
    assert by_id(uri, "n") == twice(range(40))


def test_a_corrected_function_that_reads_more_columns_is_another_version(tmp_path: Path) -> None:
    """Else it would not be noticed that what it reads more has changed."""
    uri = create_table(tmp_path, 20, 10)
    table = dt.table(uri)
    table.backfill("more", dt.udf(lambda id: id, data_type="int64"), cluster=HALF)

    def before(id: int) -> int:
        return 1 // (id - 7) * 0 + id

    def after(id: int, more: int) -> int:
        return id + more

    table.backfill("n", dt.udf(before), cluster=HALF, on_error="skip")
    filled = table.retry_errors("n", dt.udf(after), cluster=HALF)
    assert filled.notes == [
        '19 rows were computed by another version of after: the next table.backfill("n") computes all rows with '
        "this one"
    ]
    assert by_id(uri, "n") == {row: row if row != 7 else 14 for row in range(20)}
    table.backfill("n", dt.udf(after), cluster=HALF)
    table.backfill("more", dt.udf(lambda id: 100, data_type="int64"), cluster=HALF)
    assert table.backfill("n", dt.udf(after), cluster=HALF).rows == 20
    assert by_id(uri, "n") == {row: row + 100 for row in range(20)}
