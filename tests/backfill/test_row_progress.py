"""Progress, notes, status and history of a running backfill."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")


import dovetail as dt
from backfill_aids import HALF, Calls, by_id, create_table, driver, twice
from backfill_scenes import brittle_function, gated_function, run_beside
from dovetail.backfill.lease import Lease
from dovetail.backfill.result import BackfillResult
from dovetail.backfill.row_progress import RowProgress
from dovetail.backfill.store import TableStore
from dovetail.cli.backfill_renderer import BackfillRenderer
from dovetail.errors import Call, Text
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run
from dovetail.observe.summary import summarize_run
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def acquire_lease(uri: str) -> Lease:
    """Lease of column `n`, held by another run."""
    return Lease.acquire(TableStore(uri), "n", "other", wait=False, say=lambda _: None)


def test_the_progress_counts_rows_and_shows_when_no_results_arrive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.observe.progress.PLAIN_INTERVAL_S", 0.05)
    monkeypatch.setattr("dovetail.backfill.row_progress.SILENCE_S", 0.2)
    table = dt.table(create_table(tmp_path, 40, 40))
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 0), progress=True):
        printed = ""

        def is_shown() -> bool:
            nonlocal printed
            printed += capsys.readouterr().err
            return "no results for" in printed

        until(is_shown, "the line that no results arrive")
    assert "t.n: 0 of 40 rows (0 %)" in printed
    assert ", no results for " in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_the_status_of_a_backfill_shows_rows_failed_rows_table_and_column(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 1000, 500))
    (tmp_path / "bad").touch()
    filled = table.backfill("n", brittle_function(tmp_path), on_error="skip", cluster=HALF)
    assert filled.errors == 1
    assert filled.folder is not None
    lines = str(summarize_run(RunHistory.load(filled.folder))).splitlines()
    assert lines[0].startswith("t.n: finished after ")
    assert lines[1] == "  1000 of 1000 rows in, 999 out, 1 failed"
    assert lines[-1] == f"next        dovetail errors {filled.folder.name}"


def test_the_result_of_a_backfill_names_its_run(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 10, 10))
    (tmp_path / "bad").unlink(missing_ok=True)
    filled = table.backfill("n", brittle_function(tmp_path), cluster=HALF)
    (line,) = [line for line in str(filled).splitlines() if line.startswith("next")]
    assert filled.folder is not None
    assert line.split() == ["next", "dovetail", "status", filled.folder.name]
    assert find_run(line.split()[-1]).path == filled.folder


def test_the_history_shows_the_progress_of_a_running_backfill(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 40, 10))
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 35)):
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is written down")
        record = table.history("n")[0]
        assert (record.status, record.rows > 0) == ("running", True)


def test_a_script_without_a_terminal_prints_which_process_it_waits_for(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 20, 20)
    with (
        acquire_lease(uri) as lease,
        driver(tmp_path, uri, f'backfill("n", fill_functions.doubled, cluster="{HALF}")', calls) as running,
    ):
        running.says("is being filled by other on ")
        lease.release()
        running.finish()
    assert by_id(uri, "n") == twice(range(20))


def test_notes_are_printed_unless_progress_is_false() -> None:
    for show, expected in ((None, "n: waiting\n"), (True, "n: waiting\n"), (False, "")):
        stream = io.StringIO()
        RowProgress(BackfillResult("n"), show, stream).print_note("waiting")
        assert stream.getvalue() == expected


def test_notes_are_spelled_by_their_renderer() -> None:
    stream = io.StringIO()
    renderer = BackfillRenderer("t.lance", "n", "retry")
    note = Text("first ", Call("table.backfill", ("n",)))
    RowProgress(BackfillResult("n"), None, stream, renderer).print_note(note)
    assert stream.getvalue() == "n: first dovetail backfill run t.lance n\n"


def test_the_progress_counts_all_rows_that_are_done_and_rows_in_checkpoints() -> None:
    progress = RowProgress(BackfillResult("n", rows=5, errors=2), None)  # 5 of 500 rows match a condition
    progress.start_round(rows=1000, left=900, fragments=4)
    assert (progress.counts().finished, progress.counts().total, progress.counts().failed) == (100, 1000, 2)
    progress.count_rows_left = lambda: 400
    progress.committed = 2
    assert progress.counts().finished == 600
    committed, slowest = progress.counts().details
    assert (committed, slowest.partition(":")[0]) == ("2 of 4 fragments committed", "slowest")
