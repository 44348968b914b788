"""Guarantees of backfills: nothing is lost, little is computed twice, nothing hangs."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

from click.testing import CliRunner  # noqa: E402

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import (  # noqa: E402
    CLUSTER,
    HALF,
    OTHER,
    Calls,
    by_id,
    children,
    column,
    compact,
    create_table,
    driver,
    history,
    left_over,
    rows_from,
    twice,
)
from dovetail.cli import command_line  # noqa: E402
from dovetail.errors import InfeasibleError, RunError  # noqa: E402
from waiting import until  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.aids import Script

LOST_S = 2.0
"""Of each worker, by a kill."""
CALL_S = 0.1
"""The most that a call counts for, which takes 2 ms: the rest was a pause of the machine."""


# --- what fits


def test_a_function_of_two_cpus_runs_on_two(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 500)
    filled = dt.table(uri).backfill("n", fns.wide, cluster=CLUSTER)
    assert (filled.rows, filled.workers, filled.notes) == (2000, 1, [])
    assert column(uri, "n") == [2 * row for row in range(2000)]


def test_eight_workers_on_two_cpus_are_two_with_a_note(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 500)
    filled = dt.table(uri).backfill("n", fns.doubled, workers=8, cluster=CLUSTER)
    assert filled.workers == 2
    assert filled.notes == ["running 2 of 8 workers: 8 need 8.0 CPUs, 2.0 available"]
    assert str(filled).count("running 2 of 8 workers") == 1
    assert column(uri, "n") == [2 * row for row in range(2000)]


def test_a_function_that_fits_on_no_node_is_refused_at_once_with_a_fix(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 500)
    table = dt.table(uri)
    began = time.process_time()
    with pytest.raises(InfeasibleError) as caught:
        table.backfill("n", fns.enormous, cluster=CLUSTER)
    assert time.process_time() - began < 1.0
    assert "64 CPUs" in caught.value.problems[0].message
    assert "@dt.udf(cpus=2)" in caught.value.problems[0].fix_texts[0]


# --- kill -9


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder of its own, so that `dovetail ls` lists only the runs of this test."""
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))


def _killed(
    tmp_path: Path, calls: Calls, *, rows: int, each: int, kills: int, workers: int, seed: int, per_kill: int
) -> None:
    """The driver is killed at random moments; each time the same call is made again."""
    uri = create_table(tmp_path, rows, each)
    call = f'backfill("n", fill_functions.slow, workers={workers}, cluster="{workers}cpu, 8GB", commit_every="1s")'
    dice = Random(seed)
    visible = 0
    for _ in range(kills):
        enough = calls.count() + dice.randrange(1, per_kill)
        with driver(tmp_path, uri, call, calls, processes=True) as running:
            until(partial(_has_computed, calls, enough, running), "some rows are computed")
            running.kill()
            running.ended()
            _assert_no_run_is_running(uri)
            visible = _fragments_are_whole(uri, each, visible)
            running.all_gone()
    with driver(tmp_path, uri, call, calls, processes=True) as running:
        running.finish()
    assert column(uri, "n") == [2 * row for row in range(rows)]
    assert history(uri).count("lost") <= kills
    assert history(uri)[-1] == "finished"
    assert not left_over(uri)
    _little_was_computed_twice(calls)
    assert set(calls.rows()) == set(range(rows))


def _has_computed(calls: Calls, rows: int, running: Script) -> bool:
    return calls.count() >= rows or running.process.poll() is not None


def _assert_no_run_is_running(uri: str) -> None:
    assert "running" not in history(uri)
    listed = CliRunner().invoke(command_line, ["ls", "--json"], catch_exceptions=False)
    assert [run["status"] for run in json.loads(listed.stdout) if run["status"] == "running"] == []


def _fragments_are_whole(uri: str, each: int, before: int) -> int:
    """Number of visible rows; asserts that all rows of a fragment are visible, or none."""
    values = column(uri, "n") if "n" in lance.dataset(uri).schema.names else []
    seen = 0
    for at in range(0, len(values), each):
        some = values[at : at + each]
        assert some in ([None] * each, [2 * row for row in range(at, at + each)])
        seen += some[0] is not None
    assert seen >= before
    return seen


def _little_was_computed_twice(calls: Calls) -> None:
    """Assert that little work was repeated by another worker, in seconds that the function itself measured."""
    by_row = defaultdict(list)
    for call in calls.all():
        by_row[call.row].append(call)
    again: dict[int, float] = defaultdict(float)
    for found in by_row.values():
        found.sort(key=lambda call: call.ended)
        for call in found[:-1]:
            again[call.pid] += min(call.ended - call.began, CALL_S)
    assert max(again.values(), default=0.0) <= LOST_S


@pytest.mark.usefixtures("own_home")
def test_a_killed_driver_resumes_where_it_was(tmp_path: Path, calls: Calls) -> None:
    _killed(tmp_path, calls, rows=3_000, each=500, kills=2, workers=2, seed=9, per_kill=1200)


@pytest.mark.long
@pytest.mark.usefixtures("own_home")
def test_a_driver_that_is_killed_twenty_times_resumes_where_it_was(tmp_path: Path, calls: Calls) -> None:
    _killed(tmp_path, calls, rows=20_000, each=1000, kills=20, workers=2, seed=20, per_kill=2000)


@pytest.mark.long
@pytest.mark.usefixtures("own_home")
def test_large_fragments_are_resumed(tmp_path: Path, calls: Calls) -> None:
    _killed(tmp_path, calls, rows=20_000, each=20_000, kills=10, workers=2, seed=21, per_kill=3000)


@pytest.mark.processes
@pytest.mark.long
def test_a_killed_worker_loses_at_most_two_seconds(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 3000, 3000)
    call = f'backfill("n", fill_functions.slow, cluster="{CLUSTER}")'
    with driver(tmp_path, uri, call, calls, processes=True) as running:
        until(lambda: calls.count() > 500, "some rows are computed")
        victim = calls.all()[-1].pid
        os.kill(victim, 9)
        running.finish()
    assert column(uri, "n") == [2 * row for row in range(3000)]
    assert dt.table(uri).errors("n") == []
    _little_was_computed_twice(calls)


# --- rows that fail


def _one_bad_row(tmp_path: Path, calls: Calls, rows: int, each: int) -> None:
    uri = create_table(tmp_path, rows, each)
    table = dt.table(uri)
    with pytest.raises(ZeroDivisionError) as caught:
        table.backfill("n", fns.brittle, cluster=CLUSTER)
    assert f"row {fns.BAD} (fragment 0, offset {fns.BAD})" in str(caught.value)
    assert isinstance(caught.value, RunError)
    assert history(uri) == ["failed"]
    visible = {row for row, value in by_id(uri, "n").items() if value is not None}
    assert len(visible) % each == 0

    calls.forget()
    filled = table.backfill("n", fns.brittle, cluster=CLUSTER, on_error="skip")
    assert filled.errors == 1
    assert by_id(uri, "n") == twice(range(rows), [fns.BAD])
    assert max(calls.rows().values()) == 1
    assert not set(calls.rows()) & visible
    (error,) = table.errors("n")
    assert (error.row, error.fragment, error.offset) == (fns.BAD, 0, fns.BAD)
    assert (error.error, error.message) == ("ZeroDivisionError", "seven hundred and seventy-seven")
    assert "in brittle" in error.traceback

    calls.forget()
    mended = dt.udf(fns.mended.fn, version=fns.brittle.version)  # the other rows stay filled
    filled = table.retry_errors("n", mended, cluster=CLUSTER)
    assert calls.rows() == {fns.BAD: 1}
    assert (filled.rows, filled.errors) == (1, 0)
    assert by_id(uri, "n") == twice(range(rows)) | {fns.BAD: -1}
    assert table.errors("n") == []

    calls.forget()
    assert table.backfill("n", mended, cluster=CLUSTER).rows == 0
    assert table.retry_errors("n", mended, cluster=CLUSTER).rows == 0
    assert not calls.rows()
    assert not left_over(uri)


def test_a_failed_row_raises_its_own_type_or_is_skipped_and_retried(tmp_path: Path, calls: Calls) -> None:
    _one_bad_row(tmp_path, calls, 10_000, 2000)


@pytest.mark.long
def test_one_bad_row_of_a_hundred_thousand(tmp_path: Path, calls: Calls) -> None:
    _one_bad_row(tmp_path, calls, 100_000, 10_000)


def test_a_row_that_fails_again_stays_listed(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 1000)
    table = dt.table(uri)
    table.backfill("n", fns.brittle, cluster=CLUSTER, on_error="skip")
    assert table.retry_errors("n", cluster=CLUSTER, on_error="skip").errors == 1
    assert [error.row for error in table.errors("n")] == [fns.BAD]
    assert table.retry_errors("n", fns.mended, cluster=CLUSTER).errors == 0
    assert table.errors("n") == []


def test_none_is_a_value_and_is_not_computed_again(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    table = dt.table(uri)
    for function, name in ((fns.half_none, "half"), (fns.all_none, "none")):
        calls.forget()
        assert table.backfill(name, function, cluster=CLUSTER).rows == 4000
        assert column(uri, name).count(None) == (2000 if name == "half" else 4000)
        calls.forget()
        assert table.backfill(name, cluster=CLUSTER).rows == 0
        assert not calls.rows()


# --- rows that kill


@pytest.mark.processes
def test_rows_that_kill_their_worker_are_isolated_and_no_process_is_left(tmp_path: Path) -> None:
    before = children()
    uri = create_table(tmp_path, 3000, 1500)
    filled = dt.table(uri).backfill("n", fns.deadly, cluster=CLUSTER, on_error="skip")
    assert filled.errors == len(fns.DEADLY)
    assert by_id(uri, "n") == twice(range(3000), fns.DEADLY)
    errors = dt.table(uri).errors("n")
    assert [(1500 * error.fragment + error.offset, error.error) for error in errors] == [
        (row, "WorkerDied") for row in fns.DEADLY
    ]
    assert not left_over(uri)
    until(lambda: not children() - before, "all workers are gone")


@pytest.mark.parametrize("function", [fns.BreaksAt, fns.arrays_that_break, fns.AsyncBreaksAt])
def test_a_row_that_leaves_its_process_broken_costs_no_other_row(tmp_path: Path, function: dt.Udf) -> None:
    uri = create_table(tmp_path, 1000, 1000)
    filled = dt.table(uri).backfill("n", function, cluster=HALF, on_error="skip")
    assert filled.errors == 1
    assert by_id(uri, "n") == twice(range(1000), [fns.BAD])
    (error,) = dt.table(uri).errors("n")
    assert (error.row, error.error) == (fns.BAD, "AcceleratorError")
    assert not left_over(uri)


@pytest.mark.parametrize("function", [fns.FailsFrom, fns.arrays_that_fail, fns.AsyncFailsFrom])
@pytest.mark.parametrize("fragment_rows", [1000, 150])
def test_a_row_after_which_all_rows_fail_costs_no_other_row(
    tmp_path: Path, function: dt.Udf, fragment_rows: int
) -> None:
    uri = create_table(tmp_path, 1000, fragment_rows)
    filled = dt.table(uri).backfill("n", function, cluster=HALF, on_error="skip")
    assert by_id(uri, "n") == twice(range(1000), [fns.BAD])
    assert filled.errors == 1
    (error,) = dt.table(uri).errors("n")
    assert (error.fragment * fragment_rows + error.offset, error.error) == (fns.BAD, "ValueError")
    assert not left_over(uri)


def test_the_first_row_of_a_worker_and_neighbours_may_break_workers(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 1000)
    filled = dt.table(uri).backfill("n", fns.FailsFromMany, cluster=HALF, on_error="skip")
    assert by_id(uri, "n") == twice(range(1000), fns.BREAKING_ROWS)
    assert filled.errors == len(fns.BREAKING_ROWS)
    assert calls.rows()[-1] <= 1 + 5 * len(fns.BREAKING_ROWS)


@pytest.mark.parametrize("function", [fns.outage, fns.async_outage])
def test_few_workers_are_replaced_where_all_rows_fail(tmp_path: Path, calls: Calls, function: dt.Udf) -> None:
    """Rows that passed before fail, too, in all workers: a service is down."""
    uri = create_table(tmp_path, 3000, 150)
    filled = dt.table(uri).backfill("n", function, cluster=HALF, on_error="skip")
    failed = [row for row, value in by_id(uri, "n").items() if value is None]
    assert failed == list(range(min(failed), 3000))
    assert min(failed) <= fns.OUTAGE
    assert filled.errors == len(dt.table(uri).errors("n")) == len(failed)
    assert calls.rows()[-1] <= 60, "about ten; more if tasks end after each row"
    assert not left_over(uri)


@pytest.mark.processes
def test_failed_rows_are_counted_beside_a_row_that_kills_its_worker(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 100)
    filled = dt.table(uri).backfill("n", fns.fails_and_dies, cluster=HALF, on_error="skip")
    assert by_id(uri, "n") == twice(range(100), range(10, 21))
    assert filled.errors == len(dt.table(uri).errors("n")) == 11


@pytest.mark.processes
def test_bad_rows_in_succession_cost_no_worker(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 1000)
    filled = dt.table(uri).backfill("n", fns.worker_of_good_rows, cluster=HALF, on_error="skip")
    assert filled.errors == len(fns.BAD_ROWS)
    workers = by_id(uri, "n")
    assert [row for row, worker in workers.items() if worker is None] == fns.BAD_ROWS
    assert len({worker for worker in workers.values() if worker is not None}) == 1


@pytest.mark.processes
def test_a_row_that_kills_the_worker_of_a_function_of_arrays_is_isolated(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 1000)
    filled = dt.table(uri).backfill("n", fns.arrays_that_die, cluster=HALF, on_error="skip")
    assert filled.errors == 1
    assert by_id(uri, "n") == twice(range(1000), [fns.BAD])
    (error,) = dt.table(uri).errors("n")
    assert (error.row, error.error) == (fns.BAD, "WorkerDied")
    assert not left_over(uri)


@pytest.mark.processes
def test_a_row_that_kills_its_worker_stops_the_backfill_with_its_address_and_no_process_is_left(tmp_path: Path) -> None:
    before = children()
    uri = create_table(tmp_path, 2000, 1000)
    with pytest.raises(RunError, match=f"offset {fns.BAD}.: WorkerDied"):
        dt.table(uri).backfill("n", fns.leaves, cluster=CLUSTER)
    until(lambda: not children() - before, "all workers are gone")


@pytest.mark.processes
@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.long), 2])
def test_three_rows_that_kill_workers_are_isolated(slots: int, tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    filled = dt.table(uri).backfill("n", fns.slow_three_deaths, cluster=CLUSTER, on_error="skip", slots=slots)
    assert by_id(uri, "n") == twice(range(100), fns.THREE)
    assert filled.errors == 3
    assert [error.offset for error in dt.table(uri).errors("n")] == [10, 10, 11]


@pytest.mark.processes
@pytest.mark.long
def test_rows_beside_a_fatal_row_are_not_blamed(tmp_path: Path) -> None:
    """Two at a time in one process: all of them die with it, again and again."""
    uri = create_table(tmp_path, 200, 50)
    filled = dt.table(uri).backfill("n", fns.sudden_death, cluster=HALF, on_error="skip", slots=2)
    assert by_id(uri, "n") == twice(range(200), [77])
    assert filled.errors == 1


# --- others at the table


def test_appends_deletes_and_another_column_during_a_backfill_have_no_effect(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}", commit_every=0)'
    with driver(tmp_path, uri, call, calls) as running:
        until(calls.is_held, "it is in the middle")
        lance.write_dataset(rows_from(4000, 6000), uri, mode="append", max_rows_per_file=1000)
        lance.dataset(uri).delete("id >= 1800 AND id < 2300")
        filled = dt.table(uri).backfill("other", fns.tripled, cluster=OTHER)
        assert filled.rows == 5500
        calls.go()
        running.finish()
    there = [row for row in range(6000) if not 1800 <= row < 2300]
    assert by_id(uri, "other") == {row: 3 * row for row in there}
    values = by_id(uri, "n")
    assert {row: value for row, value in values.items() if row < 4000} == twice(row for row in there if row < 4000)
    assert all(values[row] is None for row in range(4000, 6000))
    calls.forget()
    assert dt.table(uri).backfill("n", cluster=HALF, trust_table=True).rows == 2000
    assert by_id(uri, "n") == twice(there)
    assert calls.rows() == dict.fromkeys(range(4000, 6000), 1)


def test_a_compaction_in_the_middle_is_computed_again(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}", commit_every=0)'
    with driver(tmp_path, uri, call, calls) as running:
        until(calls.is_held, "it is in the middle")
        compact(uri, target_rows_per_fragment=4000)
        calls.go()
        output = running.finish()
    assert "computed again" in output
    assert by_id(uri, "n") == twice(range(4000))
    assert dt.table(uri).backfill("n", cluster=HALF, trust_table=True).rows == 0
    assert not left_over(uri)


def test_an_update_in_the_middle_gives_the_new_values(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}", commit_every=0)'
    with driver(tmp_path, uri, call, calls) as running:
        until(calls.is_held, "it is in the middle")
        lance.dataset(uri).update({"id": "id + 100000"}, where="id >= 1900 AND id < 2100")
        calls.go()
        running.finish()
    dt.table(uri).backfill("n", fns.held, cluster=HALF)
    there = [row + 100_000 * (1900 <= row < 2100) for row in range(4000)]
    assert by_id(uri, "n") == twice(there)


def test_a_second_backfill_waits_or_is_refused_with_the_name_of_the_owner(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    table = dt.table(uri)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}")'
    with driver(tmp_path, uri, call, calls) as first:
        until(calls.is_held, "it is in the middle")
        with pytest.raises(RunError, match=f"pid {first.process.pid}"):
            table.backfill("n", fns.held, cluster=HALF, wait=False)
        with driver(tmp_path, uri, call.replace(")", ", progress=True)"), calls) as second:
            second.says(f"pid {first.process.pid}: waiting")
            calls.go()
            first.finish()
            assert "nothing to do, 4,000 rows" in second.finish()
    assert by_id(uri, "n") == twice(range(4000))
    assert max(calls.rows().values()) == 1


def test_a_dead_owner_is_taken_over(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    call = f'backfill("n", fill_functions.held, cluster="{HALF}")'
    with driver(tmp_path, uri, call, calls) as first:
        until(calls.is_held, "it is in the middle")
        first.kill()
        first.ended()
        first.all_gone()
    calls.go()
    dt.table(uri).backfill("n", fns.held, cluster=HALF, wait=False)
    assert by_id(uri, "n") == twice(range(4000))
    assert history(uri) == ["lost", "finished"]
