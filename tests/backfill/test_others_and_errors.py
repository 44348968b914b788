"""What becomes of rows that failed, and of work that is under way, when somebody else changes the table or fills it?"""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import datetime
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

import lance
import pyarrow as pa

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, OTHER, by_id, column, compact, left_over, made, twice
from dovetail.backfill.checkpoints import CheckpointStore
from dovetail.backfill.lease import Lease
from dovetail.errors import ConfigError, RunError
from dovetail.observe.history import RunHistory
from dovetail.observe.summary import summarize_run
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

BAD = 5


def brittle(folder: Path, times: int = 2) -> Any:
    """A row fails while there is a file `bad`."""

    def function(id: int) -> int:
        if id == BAD and (folder / "bad").exists():
            raise ValueError("bad")
        return times * id

    return dt.udf(function, version=f"times {times}")


def gated(folder: Path, at: int, times: int = 2) -> Any:
    """Waits at a row until there is a file `go`, and says so."""

    def function(id: int) -> int:
        while id >= at and not (folder / "go").exists():
            (folder / "waits").touch()
            time.sleep(0.005)
        return times * id

    return dt.udf(function, version=f"gated {times}")


@contextmanager
def beside(folder: Path, table: dt.Table, *args: Any, call: str = "backfill", **how: Any) -> Iterator[Future[Any]]:
    """A call that waits at its gate; what it waits for is there when this ends."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(getattr(table, call), *args, **{"cluster": HALF, **how})
        try:
            until(lambda: (folder / "waits").exists() or future.done(), "it waits")
            assert not future.done(), future.result()
            yield future
        finally:
            (folder / "go").touch()


@pytest.fixture
def failed(tmp_path: Path) -> dt.Table:
    """A column `n` of two fragments in which one row failed; it would not again."""
    (tmp_path / "bad").touch()
    table = dt.table(made(tmp_path, 20, 10))
    table.backfill("n", brittle(tmp_path), on_error="skip", cluster=HALF)
    (tmp_path / "bad").unlink()
    assert [error.offset for error in table.errors("n")] == [BAD]
    return table


def rewrite(uri: str, ids: list[int], **values: list[int]) -> None:
    """As a user does it in place: rows stay where they are, and their fragment gets other files."""
    dataset = lance.dataset(uri)
    fragment = dataset.get_fragments()[0]
    rows = pa.table({"id": pa.array(ids, pa.int64()), **{name: pa.array(it) for name, it in values.items()}})
    metadata, fields = fragment.update_columns(rows, left_on="id", right_on="id")
    operation = lance.LanceOperation.Update(updated_fragments=[metadata], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=dataset.version)


# --- errors and retries


def of_m(folder: Path) -> Any:
    """The same of a column `m`."""

    def function(m: int) -> int:
        if m % 10 == 0 and (folder / "bad").exists():
            raise ValueError("bad")
        return m + 1

    return dt.udf(function, version="1")


@pytest.mark.processes
def test_rows_of_a_fragment_whose_input_changed_are_not_mended_among_old_values(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    table = dt.table(made(tmp_path, 9, 9))
    table.backfill("m", dt.udf(fns.doubled.fn, version="1"), cluster=HALF)
    function = of_m(tmp_path)
    table.backfill("n", function, on_error="skip", cluster=HALF)
    (tmp_path / "bad").unlink()
    table.backfill("m", dt.udf(fns.tripled.fn, version="2"), cluster=HALF)
    told = table.retry_errors("n", function, cluster=HALF)
    assert (told.rows, told.notes[0].partition(":")[0]) == (
        0,
        "2 rows of unfinished fragments, or of fragments whose input changed",
    )
    assert table.plan_backfill("n", function, sample=False, cluster=HALF).rows == 9
    table.backfill("n", function, cluster=HALF)
    assert by_id(table.uri, "n") == {row: 3 * row + 1 for row in range(9)}


@pytest.mark.processes
def test_a_retry_that_had_to_wait_leaves_what_others_filled_meanwhile(failed: dt.Table, tmp_path: Path) -> None:
    with beside(tmp_path, failed, "n", gated(tmp_path, 0, 7)), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(failed.retry_errors, "n", brittle(tmp_path), cluster=OTHER)
        lease = tmp_path / "t.lance/_dovetail/c-n/lease"
        until(lambda: len(list(lease.glob("*.asks"))) == 2, "the retry waits for its turn")
        (tmp_path / "go").touch()
        assert waiting.result().rows == 0
    assert column(failed.uri, "n") == [7 * row for row in range(20)]


def test_a_retry_under_which_the_table_is_compacted_says_what_to_do(failed: dt.Table, tmp_path: Path) -> None:
    with beside(tmp_path, failed, "n", gated(tmp_path, 0), call="retry_errors") as future:
        compact(failed.uri)
        (tmp_path / "go").touch()
        with pytest.raises(RunError, match="these rows were not retried") as caught:
            future.result()
    assert caught.value.problems[0].fix_texts == ('table.backfill("n", where="n IS NULL")',)
    table = dt.table(failed.uri)
    table.backfill("n", brittle(tmp_path), where="n IS NULL", cluster=HALF)
    assert by_id(table.uri, "n") == twice(range(20))


def test_what_failed_once_and_was_computed_since_is_not_listed_for_ever(failed: dt.Table, tmp_path: Path) -> None:
    function = brittle(tmp_path)
    failed.backfill("n", function, where="n IS NULL", cluster=HALF)
    assert failed.errors("n") == []
    failed.backfill("n", function, cluster=HALF)
    assert failed.errors("n") == []
    assert column(failed.uri, "n")[BAD] == 2 * BAD


def test_a_row_that_fails_again_from_other_input_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    table = dt.table(made(tmp_path, 9, 9))
    for version in range(3):
        table.backfill("m", dt.udf(fns.doubled.fn, version=str(version)), cluster=HALF)
        table.backfill("n", of_m(tmp_path), on_error="skip", cluster=HALF)
        assert [error.offset for error in table.errors("n")] == [0, 5]


def test_rows_that_are_deleted_are_no_errors_any_more(failed: dt.Table) -> None:
    lance.dataset(failed.uri).delete(f"id = {BAD}")
    assert failed.errors("n") == []


def test_after_a_retry_with_a_function_that_was_said_before_all_counts_as_done(
    failed: dt.Table, tmp_path: Path
) -> None:
    def mended(id: int) -> int:
        return 2 * id

    function = dt.udf(mended, version="mended")
    failed.add_column("n", function)
    assert failed.retry_errors("n", function, cluster=HALF).rows == 1
    plan = failed.plan_backfill("n", function, sample=False, cluster=HALF)
    assert (plan.rows, plan.done_rows) == (0, 20)
    assert failed.backfill("n", function, cluster=HALF).rows == 0
    assert by_id(failed.uri, "n") == twice(range(20))


def test_a_call_made_again_does_not_get_over_its_budget(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 200, 50))
    for _ in range(2):
        with pytest.raises(RunError, match=r"rows failed, more than max_errors allows \(5\)"):
            table.backfill("n", fns.every_tenth_fails, on_error="skip", max_errors=5, cluster=HALF)
    filled = table.backfill("n", fns.every_tenth_fails, on_error="skip", max_errors=20, cluster=HALF)
    assert by_id(table.uri, "n") == twice(range(200), range(0, 200, 10))
    again = table.backfill("n", fns.every_tenth_fails, on_error="skip", cluster=HALF)
    assert (filled.status, again.rows, again.set_aside) == ("finished", 0, 20)
    assert str(again) == "n: nothing to do, 200 rows are already filled, 20 of them set aside (NULL)"


def test_a_share_that_may_fail_is_of_the_rows_that_a_condition_names(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 200, 200))
    with pytest.raises(RunError, match=r"1 rows failed, more than max_errors allows \(50% of 1 rows\)"):
        table.backfill("n", fns.every_tenth_fails, where="id = 10", on_error="skip", max_errors="50%", cluster=HALF)


# --- others who write


def test_what_a_user_writes_into_the_column_meanwhile_is_kept_where_rows_are_not_asked_for(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 20, 20))
    table.backfill("n", fns.doubled, cluster=HALF)
    with beside(tmp_path, table, "n", gated(tmp_path, 0, 7), where="id < 10") as future:
        rewrite(table.uri, [15, 16], n=[-15, -16])
        (tmp_path / "go").touch()
        assert future.result().notes
    kept = {15: -15, 16: -16}
    assert by_id(table.uri, "n") == {row: 7 * row if row < 10 else kept.get(row, 2 * row) for row in range(20)}


def test_fragments_that_were_named_and_vanish_are_not_replaced_by_the_whole_table(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 80, 20))
    with beside(tmp_path, table, "n", gated(tmp_path, 0), fragments=[0]) as future:
        compact(table.uri)
        (tmp_path / "go").touch()
        filled = future.result()
    assert (filled.rows, filled.fragments) == (20, 0)
    assert filled.notes[0].startswith("fragment 0 no longer exists (compaction)")


def test_rows_that_fail_are_counted_once_when_their_fragment_is_computed_again(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 80, 20))
    folder = tmp_path

    def fails(id: int) -> int:
        while id >= 79 and not (folder / "go").exists():
            (folder / "waits").touch()
            time.sleep(0.005)
        if id % 4 == 0:
            raise ValueError(str(id))
        return 2 * id

    function = dt.udf(fails, version="1")
    with beside(folder, table, "n", function, on_error="skip", max_errors=25, commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is made")
        compact(table.uri)
        (folder / "go").touch()
        filled = future.result()
    assert (filled.status, filled.errors, len(table.errors("n"))) == ("finished", 20, 20)


@pytest.mark.processes
def test_old_versions_may_be_cleaned_up_while_workers_come_and_go(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 60, 10))
    folder = tmp_path

    def dies_later(id: int) -> int:
        import signal

        while id >= 30 and not (folder / "go").exists():
            (folder / "waits").touch()
            time.sleep(0.005)
        if id == 30 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * id

    with beside(tmp_path, table, "n", dt.udf(dies_later, version="1"), commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is made")
        lance.dataset(table.uri).add_columns(pa.field("other", pa.int64()))
        lance.dataset(table.uri).cleanup_old_versions(older_than=datetime.timedelta(0))
        (tmp_path / "go").touch()
        assert future.result().status == "finished"
    assert by_id(table.uri, "n") == twice(range(60))


def test_who_was_taken_over_commits_nothing_more(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 40, 10))
    lease = tmp_path / "t.lance/_dovetail/c-n/lease"
    with beside(tmp_path, table, "n", gated(tmp_path, 35), commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is written down")
        for path in lease.iterdir():
            path.unlink(missing_ok=True)  # a heartbeat may just be written
        version = lance.dataset(table.uri).version
        (tmp_path / "go").touch()
        with pytest.raises(RunError, match="was taken over by another process"):
            future.result()
    assert lance.dataset(table.uri).version == version


def test_columns_that_are_filled_together_are_held_each(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 20, 10))
    table.backfill(["low", "high"], fns.pair, cluster=HALF)
    store = table._store
    with (
        Lease.acquire(store, "high", "somebody", wait=False, say=lambda _: None),
        pytest.raises(RunError, match="'high' is being filled by somebody"),
    ):
        table.backfill(["low", "high"], fns.pair, recompute=True, wait=False, cluster=HALF)


# --- what is computed again


def test_computing_named_fragments_again_says_nothing_of_the_others(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 30, 10))
    table.backfill("n", fns.doubled, cluster=HALF)
    again = table.backfill("n", fns.doubled, recompute=True, fragments=[1], cluster=HALF)
    assert (again.rows, again.fragments) == (10, 1)
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 0
    assert left_over(table.uri) == []


def test_a_part_that_is_damaged_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = dt.table(made(tmp_path, 400, 400))
    monkeypatch.setattr("dovetail.backfill.task_queue.FIRST_TASK_BUDGET_S", 0.05)
    with pytest.raises(ValueError, match="350"):
        table.backfill("n", dt.udf(_slow_until_350, version="1"), cluster=HALF)
    parts = sorted((tmp_path / "t.lance/_dovetail/c-n/parts").rglob("p.*"))
    assert parts
    parts[0].write_bytes(b"")
    filled = table.backfill("n", dt.udf(fns.doubled.fn, version="1"), cluster=HALF)
    assert filled.status == "finished"
    assert by_id(table.uri, "n") == twice(range(400))


def _slow_until_350(id: int) -> int:
    time.sleep(0.001)
    if id == 350:
        raise ValueError("350")
    return 2 * id


def test_a_file_that_is_no_part_is_removed_by_who_reads_it(tmp_path: Path) -> None:
    from dovetail.backfill.checkpoints import Part, PartMissingError
    from dovetail.backfill.task import FillJob, RangeTask
    from dovetail.pipeline.error_policy import parse_error_policy

    job = FillJob(str(tmp_path), {}, 1, "c-n", ("id",), (), "i", "i", "run", parse_error_policy("fail"))
    kept, task, part = CheckpointStore(job), RangeTask(0, 10, "h", 0, 10), Part(0, 10, 3)
    path = tmp_path / "_dovetail/c-n/parts/i/0-h" / part.name
    path.parent.mkdir(parents=True)
    for damaged in (b"", b"abc"):
        path.write_bytes(damaged)
        with pytest.raises(PartMissingError):
            kept.load(task, part)
        assert not path.exists()


# --- what is refused leaves nothing behind


@pytest.mark.parametrize(
    "how",
    [{"fragments": [99]}, {"slots": 20_000}, {"workers": (4, 8)}, {"worker": 2}, {"where": "nobody = 1"}],
    ids=str,
)
def test_a_call_that_is_refused_adds_no_column(tmp_path: Path, how: dict[str, Any]) -> None:
    table = dt.table(made(tmp_path, 20, 10))
    with pytest.raises(dt.DovetailError):
        table.backfill("n", fns.doubled, cluster=HALF, **how)
    assert (table.version, "n" in table.schema.names) == (1, False)
    assert not (tmp_path / "t.lance/_dovetail").exists()


@pytest.mark.parametrize("name", ["_rowid", "_rowaddr", "_rowoffset", 5, None, [], ["a", "a"], "a`b"])
def test_names_that_no_column_can_have_are_refused(tmp_path: Path, name: Any) -> None:
    table = dt.table(made(tmp_path, 20, 10))
    with pytest.raises(ConfigError):
        table.add_column(name, fns.doubled)
    assert table.version == 1


def test_a_misspelled_argument_is_told_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown argument worker=.*workers"):
        dt.table(made(tmp_path, 20, 10)).backfill("n", fns.doubled, worker=2)


def test_arguments_and_table_are_told_at_once(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 20, 10))
    for call in (table.backfill, table.plan_backfill):
        with pytest.raises(ConfigError) as caught:
            call("n", dt.udf(of_m(tmp_path).fn), workers=0, commit_every="often")
        told = "".join(problem.message for problem in caught.value.problems)
        assert all(words in told for words in ("workers=0", "commit_every='often'", "'m'")), told


# --- plans and progress


def test_a_plan_with_a_condition_counts_the_rows_that_it_names(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 400, 100))
    plan = table.plan_backfill("n", fns.doubled, where="id < 5", sample=False, cluster=HALF)
    assert (plan.rows, plan.fragments) == (5, 1)


def test_a_plan_does_not_wait_for_a_machine_that_others_use(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 40, 40))
    with beside(tmp_path, table, "n", gated(tmp_path, 0), cluster="auto", workers=1):
        whole = dt.udf(fns.doubled.fn, cpus=os.cpu_count())
        plan = table.plan_backfill("m", whole)
    assert plan.rate is None
    assert "no rows were sampled: " in str(plan)


def test_the_progress_counts_rows_and_shows_when_no_results_arrive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.observe.progress.PLAIN_INTERVAL_S", 0.05)
    monkeypatch.setattr("dovetail.backfill.row_progress.SILENCE_S", 0.2)
    table = dt.table(made(tmp_path, 40, 40))
    with beside(tmp_path, table, "n", gated(tmp_path, 0), progress=True):
        said = ""

        def is_shown() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "no results for" in said

        until(is_shown, "the line that no results arrive")
    assert "t.n: 0 of 40 rows (0 %)" in said
    assert "0 of 1 fragments committed, no results for" in said


def test_the_status_of_a_backfill_shows_rows_failed_rows_table_and_column(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 1000, 500))
    (tmp_path / "bad").touch()
    filled = table.backfill("n", brittle(tmp_path), on_error="skip", cluster=HALF)
    assert filled.errors == 1
    assert filled.folder is not None
    lines = str(summarize_run(RunHistory.load(filled.folder))).splitlines()
    assert lines[0].startswith("t.n: finished after ")
    assert lines[1] == "  1000 of 1000 rows in, 999 out, 1 set aside"
    assert f"set aside   dovetail backfill {table.uri} n --errors" in lines


def test_a_backfill_that_runs_says_in_its_history_how_far_it_is(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 40, 10))
    with beside(tmp_path, table, "n", gated(tmp_path, 35)):
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is written down")
        job = table.history("n")[0]
        assert (job.status, job.rows > 0) == ("running", True)
