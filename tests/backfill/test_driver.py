"""Filling columns: kinds of functions and types, parts of a table, interruptions and plans."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import (  # noqa: E402
    CLUSTER,
    HALF,
    Calls,
    by_id,
    column,
    create_table,
    driver,
    history,
    left_over,
    rows_from,
    twice,
)
from dovetail.errors import ConfigError, RunError  # noqa: E402
from waiting import until  # noqa: E402

# --- which rows


def test_where_computes_matching_rows_and_keeps_the_rest(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 500)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    calls.forget()
    table.backfill("n", fns.tripled, cluster=HALF, where="id >= 100 AND id < 700")
    assert calls.rows() == dict.fromkeys(range(100, 700), 1)
    table.backfill("n", fns.first_version, cluster=HALF, where="id >= 600 AND id < 800")
    expected = twice(range(2000))
    expected |= {row: 3 * row for row in range(100, 700)} | {row: row + 1 for row in range(600, 800)}
    assert by_id(uri, "n") == expected


def test_where_on_an_empty_column_leaves_the_rest_null(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 500)
    filled = dt.table(uri).backfill("n", fns.doubled, cluster=HALF, where="id % 10 = 3")
    assert filled.rows == 200
    assert by_id(uri, "n") == {row: 2 * row if row % 10 == 3 else None for row in range(2000)}
    calls.forget()
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF, where="id % 10 = 3")
    assert not calls.rows()


def test_where_that_names_nothing_ends(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 500)
    assert dt.table(uri).backfill("n", fns.doubled, cluster=HALF, where="id < 0").rows == 0
    assert column(uri, "n") == [None] * 2000


def test_where_on_the_column_itself_fills_empty_rows(tmp_path: Path, calls: Calls) -> None:
    uri = str(tmp_path / "t.lance")
    rows = pa.table(
        {"id": pa.array(range(100), pa.int64()), "n": pa.array([7 if at % 2 else None for at in range(100)])}
    )
    lance.write_dataset(rows, uri)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF, where="n IS NULL")
    assert by_id(uri, "n") == {at: 7 if at % 2 else 2 * at for at in range(100)}
    assert set(calls.rows()) == set(range(0, 100, 2))


def test_an_invalid_condition_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    with pytest.raises(ConfigError):
        dt.table(uri).backfill("n", fns.doubled, where="id >>> 3")
    assert "n" not in lance.dataset(uri).schema.names


def test_only_some_fragments_are_filled(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    assert table.backfill("n", fns.doubled, cluster=HALF, fragments=[2]).rows == 250
    assert by_id(uri, "n") == {row: 2 * row if 500 <= row < 750 else None for row in range(1000)}
    assert table.backfill("n", fns.doubled, cluster=HALF, fragments=2).rows == 500
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 250
    assert by_id(uri, "n") == twice(range(1000))
    with pytest.raises(ConfigError, match="no fragment 9"):
        table.backfill("n", fns.doubled, fragments=[9])


def test_deleted_rows_are_not_computed(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    lance.dataset(uri).delete("id % 5 = 1 OR (id >= 250 AND id < 500)")
    there = [row for row in range(1000) if row % 5 != 1 and not 250 <= row < 500]
    filled = dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert filled.rows == len(there)
    assert calls.rows() == dict.fromkeys(there, 1)
    assert by_id(uri, "n") == twice(there)


def test_tables_without_rows_are_nothing_to_do(tmp_path: Path) -> None:
    empty = str(tmp_path / "empty.lance")
    lance.write_dataset(rows_from(0, 0), empty)
    assert dt.table(empty).backfill("n", fns.doubled).rows == 0
    assert "n" in lance.dataset(empty).schema.names
    gone = create_table(tmp_path, 100, 50, "gone")
    lance.dataset(gone).delete("true")
    assert dt.table(gone).backfill("n", fns.doubled, cluster=HALF).rows == 0


# --- again


def test_another_version_computes_everything_again_with_a_note(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    table.backfill("n", fns.first_version, cluster=HALF)
    calls.forget()
    filled = table.backfill("n", fns.second_version, cluster=HALF)
    assert filled.rows == 1000
    assert any("4 fragments filled by another version of the function" in note for note in filled.notes)
    assert by_id(uri, "n") == {row: row + 2 for row in range(1000)}
    assert table.backfill("n", cluster=HALF).rows == 0


def test_a_killed_recomputation_is_resumed_and_ends(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    table = dt.table(uri)
    calls.go()
    table.backfill("n", fns.held, cluster=HALF)
    calls.forget()
    (calls.folder / "go").unlink()
    call = f'backfill("n", fill_functions.held, cluster="{HALF}", recompute=True)'
    with driver(tmp_path, uri, call, calls) as running:
        until(calls.is_held, "it is in the middle")
        running.kill()
        running.ended()
        running.all_gone()
    calls.go()
    assert table.backfill("n", fns.held, cluster=HALF, recompute=True).status == "finished"
    counted = calls.rows()
    assert set(counted) == set(range(4000))
    assert all(counted[row] == 1 for row in range(1000))
    calls.forget()
    assert table.backfill("n", cluster=HALF).rows == 0
    assert table.backfill("n", cluster=HALF, recompute=True).rows == 4000


def test_changed_input_is_computed_again(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    lance.dataset(uri).update({"id": "id + 5000"}, where="id < 10")
    calls.forget()
    table.backfill("n", cluster=HALF)
    assert by_id(uri, "n") == twice([*range(5000, 5010), *range(10, 1000)])
    assert set(calls.rows()) == set(range(5000, 5010))


def test_one_of_two_columns_that_was_dropped_and_added_again_is_filled_again(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    table = dt.table(uri)
    table.backfill(["low", "high"], fns.pair, cluster=HALF)
    lance.dataset(uri).drop_columns(["high"])
    assert table.backfill(["low", "high"], fns.pair, cluster=HALF).rows == 100
    assert column(uri, "high") == [f"high {row}" for row in range(100)]


def test_an_existing_and_a_new_column_are_filled_together(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    ids = pa.array(range(100), pa.int64())
    lance.write_dataset(pa.table({"id": ids, "low": pa.nulls(100, pa.int64()), "rest": ids}), uri, max_rows_per_file=50)
    assert dt.table(uri).backfill(["low", "high"], fns.pair, cluster=HALF).rows == 100
    assert column(uri, "low") == column(uri, "rest") == list(range(100))
    assert column(uri, "high") == [f"high {row}" for row in range(100)]


def test_a_dropped_column_leaves_nothing_and_can_be_added_again(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    table.drop("n")
    assert lance.dataset(uri).schema.names == ["id", "text"]
    assert not list(Path(uri).glob("_dovetail/c-n/**/*.json"))
    assert table.backfill("n", fns.tripled, cluster=HALF).rows == 100
    assert by_id(uri, "n") == {row: 3 * row for row in range(100)}


# --- kinds of functions and types


def test_a_named_tuple_fills_two_columns(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    table.add_column(["low", "high"], fns.pair)
    assert table.backfill("low", cluster=HALF).rows == 1000
    assert column(uri, "low") == list(range(1000))
    assert column(uri, "high") == [f"high {row}" for row in range(1000)]
    assert table.backfill("high", cluster=HALF).rows == 0


def test_a_class_is_set_up_once_in_each_worker(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    dt.table(uri).backfill("n", fns.Adder, cluster=HALF, slots=2)
    assert by_id(uri, "n") == {row: row + 1000 for row in range(1000)}
    assert calls.rows() == {-1: 1}


def test_an_async_function_is_called_for_many_rows_at_once(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    dt.table(uri).backfill("n", fns.later, cluster=HALF, slots=100)
    assert by_id(uri, "n") == twice(range(1000))
    assert max(calls.rows()) == 100, "as many as there are slots"


def test_a_function_of_batches_sees_all_columns_but_its_own(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 250)
    dt.table(uri).backfill("w", fns.widths, cluster=HALF)
    assert by_id(uri, "w") == {row: 100 * row + 2 for row in range(1000)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("floats", lambda at: [float(at)] * (at % 4)),
        ("vector", lambda at: [at, at + 1, at + 2]),
        ("record", lambda at: {"a": at, "b": str(at)}),
        ("raw", lambda at: b"%d" % at),
        ("moment", lambda at: datetime.fromtimestamp(at, UTC)),
    ],
)
def test_every_type_is_filled_in_parts_and_carried_forward(name: str, expected: Any, tmp_path: Path) -> None:
    uri = create_table(tmp_path, 300, 150)
    table = dt.table(uri)
    table.backfill("v", getattr(fns, name), cluster=HALF, where="id < 100")
    table.backfill("v", getattr(fns, name), cluster=HALF, where="id >= 200")
    found = by_id(uri, "v")
    wanted = {at: None if 100 <= at < 200 else expected(at) for at in range(300)}
    if name == "moment":  # whether it has a zone is the type's
        found = {at: value and value.replace(tzinfo=UTC) for at, value in found.items()}
    assert found == wanted


def test_null_is_given_as_none(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"text": ["a", None, "b"] * 10}), uri)
    dt.table(uri).backfill("u", fns.upper, cluster=HALF)
    assert column(uri, "u") == ["A", None, "B"] * 10


def test_names_with_spaces_and_capitals_are_names(tmp_path: Path) -> None:
    uri = str(tmp_path / "some Table.lance")
    lance.write_dataset(pa.table({"some Text": ["a", "bc"], "other": [1, 2]}), uri)
    table = dt.table(uri)
    table.backfill("The Length", fns.length, cluster=HALF)
    assert column(uri, "The Length") == [1, 2]
    table.backfill("The Length", fns.length, cluster=HALF, where="`some Text` = 'a'", recompute=True)
    assert history(uri, "The Length") == ["finished", "finished"]
    table.drop("The Length")


def test_a_column_that_shares_its_data_file_with_others_is_replaced_alone(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    ids = pa.array(range(100), pa.int64())
    lance.write_dataset(pa.table({"id": ids, "n": ids, "rest": ids}), uri, max_rows_per_file=50)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF, recompute=True)
    assert by_id(uri, "n") == twice(range(100))
    assert column(uri, "rest") == list(range(100))


def test_values_that_no_backfill_computed_are_replaced_only_by_a_recomputation(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    ids = pa.array(range(20), pa.int64())
    lance.write_dataset(pa.table({"id": ids, "n": pa.array([None, *range(1, 20)], pa.int64())}), uri)
    table = dt.table(uri)
    for _ in range(2):  # filling the empty rows does not make the other values ours
        with pytest.raises(dt.ConfigError, match=r"column 'n' has \d+ values that no backfill computed") as caught:
            table.backfill("n", fns.doubled, cluster=HALF)
        assert caught.value.codes == ("DT451",)
        only_empty, other = caught.value.problems[0].fix_texts
        assert (only_empty, other) == (
            'table.backfill("n", doubled, where="n IS NULL")',
            'table.add_column("n_2", doubled)',
        )
        with pytest.raises(dt.ConfigError):
            table.plan_backfill("n", fns.doubled, cluster=HALF)
        eval(only_empty, {"table": table, "doubled": fns.doubled})
        assert by_id(uri, "n") == {row: row for row in range(20)}
    table.backfill("n", fns.doubled, cluster=HALF, recompute=True)
    assert by_id(uri, "n") == twice(range(20))
    assert table.backfill("n", fns.tripled, cluster=HALF).rows == 20  # they are ours now


def test_tables_with_stable_row_ids_are_filled(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 200, 100, enable_stable_row_ids=True)
    lance.dataset(uri).delete("id < 20")
    lance.dataset(uri).optimize.compact_files()
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF, where="id < 100")
    assert by_id(uri, "n") == {row: 2 * row if row < 100 else None for row in range(20, 200)}


@pytest.mark.processes
@pytest.mark.long
def test_large_rows_do_not_fill_the_memory(tmp_path: Path, calls: Calls) -> None:
    uri = str(tmp_path / "t.lance")
    rows, blob = 600, os.urandom(1 << 20)
    for at in range(0, rows, 50):
        some = pa.table({"id": list(range(at, at + 50)), "blob": [blob] * 50})
        lance.write_dataset(some, uri, mode="append" if at else "create")
    lance.dataset(uri).optimize.compact_files()
    assert len(lance.dataset(uri).get_fragments()) == 1
    dt.table(uri).backfill("length", fns.size, cluster=HALF)
    assert column(uri, "length") == [1 << 20] * rows
    most_kb = max(calls.rows())
    assert 0 < most_kb << 10 < rows << 20, "less than the table, which a worker that reads it at once would hold"
    dt.table(uri).backfill("copy", fns.echo, cluster=HALF)
    assert lance.dataset(uri).to_table(columns=["copy"])["copy"].nbytes >= rows << 20
    assert not left_over(uri)


# --- trouble


def test_more_failed_setups_than_the_function_allows_end_it(tmp_path: Path) -> None:
    class NoModel:
        def setup(self) -> None:
            raise OSError("no model here")

        def __call__(self, id: int) -> int:  # noqa: A002
            return id

    table = dt.table(create_table(tmp_path, 20, 20))
    with pytest.raises(RunError, match=r"2 setups failed in a row, more than max_setup_failures=1 allows.*no model"):
        table.backfill("n", dt.udf(NoModel, max_setup_failures=1), workers=1, cluster=HALF)


def test_too_many_failed_rows_end_it(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 100)
    table = dt.table(uri)
    with pytest.raises(RunError, match=r"more than max_errors allows \(5\)"):
        table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip", max_errors=5)
    with pytest.raises(RunError, match=r"more than max_errors allows \(1% of"):
        table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip", max_errors="1%")
    assert (
        table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip", max_errors="20%").status == "finished"
    )
    assert by_id(uri, "n") == twice(range(1000), range(0, 1000, 10))
    assert [error.offset for error in table.errors("n")] == [*range(0, 100, 10)] * 10
    assert not left_over(uri)


def test_an_exception_of_a_kind_that_is_tried_again_is(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 500, 250)
    retry = dt.Retry(ConnectionError, times=3, backoff=0.001)
    filled = dt.table(uri).backfill("n", fns.flaky, cluster=HALF, on_error=retry)
    assert filled.errors == 0
    assert by_id(uri, "n") == twice(range(500))
    with pytest.raises(ZeroDivisionError):
        dt.table(create_table(tmp_path, 1000, 500, "other")).backfill("n", fns.brittle, cluster=HALF, on_error=retry)


@pytest.mark.processes
@pytest.mark.parametrize("slots", [1, 2])
def test_rows_that_take_too_long_cost_only_themselves(slots: int, tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 500)
    table = dt.table(uri)
    table.backfill("n", fns.hangs, cluster=HALF, on_error="skip", timeout=0.5, slots=slots)
    assert by_id(uri, "n") == twice(range(1000), fns.HANGS)
    errors = [(500 * error.fragment + error.offset, error.error) for error in table.errors("n")]
    assert errors == [(row, "TimeoutError") for row in fns.HANGS]


@pytest.mark.processes
@pytest.mark.long
def test_an_interrupt_drains_and_the_same_call_resumes(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 6000, 3000)
    call = f'backfill("n", fill_functions.slow, cluster="{HALF}")'
    with driver(tmp_path, uri, call, calls, processes=True) as running:
        until(lambda: calls.count() >= 300, "rows are computed")
        running.kill(signal.SIGINT)
        output = running.finish()
        assert "n: drained" in output
        running.all_gone()
    assert history(uri) == ["drained"]
    before = calls.rows()
    assert len(before) < 6000
    filled = dt.table(uri).backfill("n", fns.slow, cluster=CLUSTER)
    assert filled.kept + filled.done_before == len(before)
    assert calls.rows() == dict.fromkeys(range(6000), 1)
    assert by_id(uri, "n") == twice(range(6000))


def test_a_table_that_cannot_be_written_is_reported_and_the_call_can_be_repeated(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    table.add_column("n", fns.doubled)
    real = lance.LanceDataset.commit

    def broken(*args: Any, **named: Any) -> Any:
        raise OSError("No space left on device (os error 28)")

    lance.LanceDataset.commit = broken
    try:
        with pytest.raises((OSError, RunError), match="No space left"):
            table.backfill("n", cluster=HALF)
    finally:
        lance.LanceDataset.commit = real
    assert history(uri) == ["failed"]
    assert column(uri, "n") == [None] * 1000
    calls.forget()
    assert table.backfill("n", cluster=HALF).fragments == 4
    assert by_id(uri, "n") == twice(range(1000))
    assert not calls.rows()


@pytest.mark.long
def test_parts_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 1000, 250)
    table = dt.table(uri)
    table.add_column("n", fns.doubled)
    in_the_way = Path(uri) / "_dovetail/c-n/parts"
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file where a folder should be")
    with pytest.raises((RunError, OSError)):
        table.backfill("n", cluster=HALF)
    assert history(uri) == ["failed"]
    in_the_way.unlink()
    table.backfill("n", cluster=HALF)
    assert by_id(uri, "n") == twice(range(1000))


@pytest.mark.processes
@pytest.mark.long
def test_a_fragment_of_many_tasks_leaves_few_files(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 20_000, 20_000)
    most = 0
    call = 'backfill("n", fill_functions.slow, cluster="8cpu, 8GB")'
    with driver(tmp_path, uri, call, calls, processes=True) as running:

        def over() -> bool:
            nonlocal most
            most = max(most, len([name for name in left_over(uri) if "/p." in name]))
            return running.process.poll() is not None

        until(over, "it ends")
        running.finish()
    assert most <= 8 * 8 + 8
    assert not left_over(uri)
    assert by_id(uri, "n") == twice(range(20_000))


# --- before it begins


def test_a_plan_has_the_pending_and_the_finished_work(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 500)
    table = dt.table(uri)
    plan = table.plan_backfill("n", fns.doubled, cluster=CLUSTER)
    assert (plan.fragments, plan.rows, plan.workers, plan.cpus) == (4, 2000, 2, 2.0)
    assert plan.rate is not None
    assert plan.seconds is not None
    assert "Workers:    2 x 1 CPU" in str(plan)
    assert "n" not in lance.dataset(uri).schema.names
    assert not (Path(uri) / "_dovetail").exists()
    table.backfill("n", fns.doubled, cluster=CLUSTER, fragments=1)
    plan = table.plan_backfill("n", cluster=CLUSTER)
    assert (plan.fragments, plan.rows, plan.done_fragments, plan.done_rows) == (3, 1500, 1, 500)
    table.backfill("n", cluster=CLUSTER)
    plan = table.plan_backfill("n", cluster=CLUSTER)
    assert (plan.fragments, plan.rows, plan.seconds) == (0, 0, 0.0)
    assert "Nothing to compute." in str(plan)


def test_a_plan_of_a_function_that_fails_has_the_rows_and_workers(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 2000)
    plan = dt.table(uri).plan_backfill("n", fns.brittle, cluster=CLUSTER)
    assert (plan.rows, plan.workers) == (2000, 2)


@pytest.mark.processes
def test_a_plan_of_a_function_that_crashes_has_a_note(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 2000, 2000)
    plan = dt.table(uri).plan_backfill("n", fns.leaves, cluster=CLUSTER)
    assert (plan.rows, plan.workers) == (2000, 2)
    plan = dt.table(uri).plan_backfill("n", fns.dies_at_once, cluster=CLUSTER)
    assert plan.rate is None
    assert any("no rows were sampled" in note for note in plan.notes)
    assert "Duration unknown" in str(plan)


def test_a_plan_without_a_sample_computes_nothing(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 2000, 2000)
    plan = dt.table(uri).plan_backfill("n", fns.doubled, sample=False, cluster=CLUSTER)
    assert plan.seconds is None
    assert not calls.rows()


def test_a_plan_of_a_function_that_fits_on_no_node_is_refused(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    with pytest.raises(dt.InfeasibleError, match="2 CPUs in all, 64 needed"):
        dt.table(uri).plan_backfill("n", fns.enormous, cluster=CLUSTER)


def test_a_plan_of_too_many_workers_notes_how_many_fit(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 50)
    plan = dt.table(uri).plan_backfill("n", fns.doubled, workers=8, sample=False, cluster=CLUSTER)
    assert plan.notes == ["running 2 of 8 workers: 8 need 8.0 CPUs, 2.0 available"]
