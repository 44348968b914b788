"""What is kept, told and swept away when a column is filled again: by another condition, version, or after a kill?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import HALF, Calls, by_id, column, driver, left_over, made, twice  # noqa: E402
from waiting import until  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_of_a_condition_can_be_computed_again_any_number_of_times(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 400, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF, where="id < 50")
    for _ in range(2):
        calls.forget()
        assert table.backfill("n", fns.doubled, cluster=HALF, where="id < 50", recompute=True).rows == 50
        assert set(calls.rows()) == set(range(50))
    assert table.backfill("n", fns.doubled, cluster=HALF, where="id < 50").rows == 0
    assert by_id(uri, "n") == twice(range(400), range(50, 400))


@pytest.mark.processes
def test_to_compute_some_rows_again_leaves_fragments_done_that_it_did_not_touch(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 400, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    table.backfill("n", fns.doubled, cluster=HALF, where="id < 50", recompute=True)
    calls.forget()
    table.backfill("n", cluster=HALF)
    assert not set(calls.rows()) & set(range(100, 400))


def test_errors_are_still_told_after_other_rows_were_computed(tmp_path: Path) -> None:
    uri = made(tmp_path, 400, 200)
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
    uri = made(tmp_path, 1000, 500)
    table = dt.table(uri)
    table.backfill("n", fns.brittle, cluster=HALF, on_error="skip")
    with pytest.raises(ZeroDivisionError):
        table.retry_errors("n", cluster=HALF)
    assert len(table.errors("n")) == 1
    assert by_id(uri, "n") == twice(range(1000), [fns.BAD])


def test_checkpoints_of_what_nobody_goes_on_with_are_swept_away(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 4000, 2000)
    with driver(tmp_path, uri, f'backfill("n", fill_functions.held, cluster="{HALF}")', calls) as running:
        until(calls.is_held, "it is in the middle")
        running.kill()
        running.ended()
        running.all_gone()
    assert left_over(uri)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert not left_over(uri)


def test_checkpoints_of_fragments_that_are_gone_are_swept_away(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 4000, 1000)
    with driver(tmp_path, uri, f'backfill("n", fill_functions.held, cluster="{HALF}")', calls) as running:
        until(calls.is_held, "it is in the middle")
        running.kill()
        running.ended()
        running.all_gone()
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=4000)
    calls.go()
    dt.table(uri).backfill("n", fns.held, cluster=HALF)
    assert by_id(uri, "n") == twice(range(4000))
    assert not left_over(uri)


@pytest.mark.processes
@pytest.mark.long
def test_an_interrupted_recomputation_is_not_taken_for_finished(tmp_path: Path, calls: Calls) -> None:
    """A drain ends the run well, but not the column."""
    import signal

    uri = made(tmp_path, 3000, 1500)
    table = dt.table(uri)
    table.backfill("n", fns.slow, cluster="4cpu, 4GB")
    calls.forget()
    call = f'backfill("n", fill_functions.slow, cluster="{HALF}", recompute=True)'
    with driver(tmp_path, uri, call, calls) as running:
        until(lambda: len(calls.all()) >= 200, "rows are computed")
        running.kill(signal.SIGINT)
        assert "n: drained" in running.finish()
    table.backfill("n", fns.slow, cluster="4cpu, 4GB", recompute=True)
    assert calls.rows() == dict.fromkeys(range(3000), 1)
    assert column(uri, "n") == [2 * row for row in range(3000)]
