"""Recomputation of filled rows: repeated, interrupted, of fragments and of conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

import lance

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, Calls, by_id, column, create_table, driver, left_over, twice
from backfill_scenes import failing_function
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def failed(table: dt.Table) -> list[int]:
    return [row.offset for row in table.errors("n")]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder that says which rows fail: 7 and 13."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for row in (7, 13):
        (folder / str(row)).touch()
    return folder


def test_rows_of_a_condition_can_be_recomputed_repeatedly(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 400, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF, where="id < 50")
    for _ in range(2):
        calls.forget()
        assert table.backfill("n", fns.doubled, cluster=HALF, where="id < 50", recompute=True).rows == 50
        assert set(calls.rows()) == set(range(50))
    assert table.backfill("n", fns.doubled, cluster=HALF, where="id < 50").rows == 0
    assert by_id(uri, "n") == twice(range(400), range(50, 400))


def test_a_recomputation_of_some_rows_leaves_other_fragments_done(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 400, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    table.backfill("n", fns.doubled, cluster=HALF, where="id < 50", recompute=True)
    calls.forget()
    table.backfill("n", cluster=HALF)
    assert not set(calls.rows()) & set(range(100, 400))


@pytest.mark.processes
@pytest.mark.long
def test_an_interrupted_recomputation_is_resumed(tmp_path: Path, calls: Calls) -> None:
    """A drain ends the run well, but not the column."""
    import signal

    uri = create_table(tmp_path, 3000, 1500)
    table = dt.table(uri)
    table.backfill("n", fns.slow, cluster="4cpu, 4GB")
    calls.forget()
    call = f'backfill("n", fill_functions.slow, cluster="{HALF}", recompute=True)'
    with driver(tmp_path, uri, call, calls, processes=True) as running:
        until(lambda: calls.count() >= 200, "rows are computed")
        running.kill(signal.SIGINT)
        assert "n: drained" in running.finish()
    table.backfill("n", fns.slow, cluster="4cpu, 4GB", recompute=True)
    assert calls.rows() == dict.fromkeys(range(3000), 1)
    assert column(uri, "n") == [2 * row for row in range(3000)]


def test_a_recomputation_of_fragments_has_no_note_about_others(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 30, 10))
    table.backfill("n", fns.doubled, cluster=HALF)
    again = table.backfill("n", fns.doubled, recompute=True, fragments=[1], cluster=HALF)
    assert (again.rows, again.fragments) == (10, 1)
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 0
    assert left_over(table.uri) == []


def test_a_recomputed_fragment_has_the_errors_of_the_recomputation(tmp_path: Path, bad: Path) -> None:
    uri, udf = create_table(tmp_path, 40, 20), failing_function(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    assert failed(table) == [7, 13]
    (bad / "7").unlink()
    (bad / "9").touch()
    filled = table.backfill("n", udf, cluster=HALF, on_error="skip", recompute=True, fragments=[0])
    assert filled.errors == 2
    assert by_id(uri, "n") == twice(range(40), missing=(9, 13))
    assert failed(table) == [9, 13]
    (bad / "9").unlink()
    (bad / "13").unlink()
    assert table.retry_errors("n", udf, cluster=HALF).rows == 2
    assert by_id(uri, "n") == twice(range(40))
    assert table.backfill("n", udf, cluster=HALF, on_error="skip", max_errors=0).rows == 0


def test_a_recomputation_with_a_condition_keeps_the_errors_of_other_rows(tmp_path: Path, bad: Path) -> None:
    uri, udf = create_table(tmp_path, 40, 20), failing_function(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    table.backfill("n", udf, cluster=HALF, on_error="skip", where="id < 10")
    assert failed(table) == [7, 13]
    (bad / "7").unlink()
    (bad / "9").touch()
    how: dict[str, Any] = {"on_error": "skip", "recompute": True, "fragments": [0], "where": "id < 10"}
    table.backfill("n", udf, cluster=HALF, **how)
    assert by_id(uri, "n") == twice(range(40), missing=(9, 13))
    assert failed(table) == [9, 13]
    (bad / "9").unlink()
    (bad / "13").unlink()
    table.retry_errors("n", udf, cluster=HALF)
    assert by_id(uri, "n") == twice(range(40))
    assert failed(table) == []


def test_a_restored_version_has_its_errors_or_is_computed_again(tmp_path: Path, bad: Path) -> None:
    uri, udf = create_table(tmp_path, 40, 20), failing_function(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    before = lance.dataset(uri).version
    for row in (7, 13):
        (bad / str(row)).unlink()
    table.retry_errors("n", udf, cluster=HALF)
    assert table.backfill("n", udf, cluster=HALF).rows == 0
    lance.dataset(uri, version=before).restore()  # type: ignore[no-untyped-call]
    assert by_id(uri, "n") == twice(range(40), missing=(7, 13))
    assert table.backfill("n", udf, cluster=HALF).rows == 20
    assert by_id(uri, "n") == twice(range(40))
    assert table.backfill("n", udf, cluster=HALF).rows == 0
