"""Changes of the table by other processes during a backfill."""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import datetime
import os
import threading
import time
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
from backfill_aids import HALF, Calls, by_id, compact, create_table, twice
from backfill_scenes import gated_function, run_beside
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.lease import Lease
from dovetail.backfill.store import TableStore
from dovetail.errors import ConfigError, RunError
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence


def rewrite(uri: str, ids: list[int], **values: list[int]) -> None:
    """Update values in place, as users do: rows stay where they are, and their fragment gets other files."""
    dataset = lance.dataset(uri)
    fragment = dataset.get_fragments()[0]
    rows = pa.table({"id": pa.array(ids, pa.int64()), **{name: pa.array(it) for name, it in values.items()}})
    metadata, fields = fragment.update_columns(rows, left_on="id", right_on="id")
    operation = lance.LanceOperation.Update(updated_fragments=[metadata], fields_modified=fields)
    lance.LanceDataset.commit(uri, operation, read_version=dataset.version)


def acquire_lease(uri: str) -> Lease:
    """Lease of column `n`, held by another run."""
    return Lease.acquire(TableStore(uri), "n", "other", wait=False, say=lambda _: None)


def test_values_written_by_others_are_kept_in_rows_that_are_not_computed(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 20, 20))
    table.backfill("n", fns.doubled, cluster=HALF)
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 0, 7), where="id < 10") as future:
        rewrite(table.uri, [15, 16], n=[-15, -16])
        (tmp_path / "go").touch()
        assert future.result().notes
    kept = {15: -15, 16: -16}
    assert by_id(table.uri, "n") == {row: 7 * row if row < 10 else kept.get(row, 2 * row) for row in range(20)}


def test_requested_fragments_that_vanish_are_not_replaced_by_the_whole_table(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 80, 20))
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 0), fragments=[0]) as future:
        compact(table.uri)
        (tmp_path / "go").touch()
        filled = future.result()
    assert (filled.rows, filled.fragments) == (20, 0)
    assert filled.notes[0].startswith("fragment 0 no longer exists (compaction)")


def test_rows_that_fail_are_counted_once_when_their_fragment_is_computed_again(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 80, 20))
    folder = tmp_path

    def fails(id: int) -> int:
        while id >= 79 and not (folder / "go").exists():
            (folder / "waits").touch()
            time.sleep(0.005)
        if id % 4 == 0:
            raise ValueError(str(id))
        return 2 * id

    function = dt.udf(fails, version="1")
    with run_beside(folder, table, "n", function, on_error="skip", max_errors=25, commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is made")
        compact(table.uri)
        (folder / "go").touch()
        filled = future.result()
    assert (filled.status, filled.errors, len(table.errors("n"))) == ("finished", 20, 20)


@pytest.mark.processes
def test_old_versions_may_be_cleaned_up_while_workers_start_and_stop(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 60, 10))
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

    with run_beside(tmp_path, table, "n", dt.udf(dies_later, version="1"), commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is made")
        lance.dataset(table.uri).add_columns(pa.field("other", pa.int64()))
        lance.dataset(table.uri).cleanup_old_versions(older_than=datetime.timedelta(0))
        (tmp_path / "go").touch()
        assert future.result().status == "finished"
    assert by_id(table.uri, "n") == twice(range(60))


def test_a_process_that_lost_its_lease_commits_nothing(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 40, 10))
    lease = tmp_path / "t.lance/_dovetail/c-n/lease"
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 35), commit_every="1h") as future:
        until(lambda: table.history("n")[0].fragments > 0, "the first commit is written down")
        for path in lease.iterdir():
            path.unlink(missing_ok=True)  # a heartbeat may just be written
        version = lance.dataset(table.uri).version
        (tmp_path / "go").touch()
        with pytest.raises(RunError, match="was taken over by another process"):
            future.result()
    assert lance.dataset(table.uri).version == version


def test_a_lease_is_held_for_each_of_several_columns(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 20, 10))
    table.backfill(["low", "high"], fns.pair, cluster=HALF)
    store = table._store
    with (
        Lease.acquire(store, "high", "another-run", wait=False, say=lambda _: None),
        pytest.raises(RunError, match="'high' is being filled by another-run"),
    ):
        table.backfill(["low", "high"], fns.pair, recompute=True, wait=False, cluster=HALF)


def test_a_column_that_another_process_adds_at_the_same_time_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = create_table(tmp_path, 20, 20)
    add, others = LanceTable.add_columns, [fns.doubled]

    def adds(self: LanceTable, fields: Sequence[Any]) -> LanceTable:
        if others:
            dt.table(uri).add_column("n", others.pop())
        return add(self, fields)

    monkeypatch.setattr(LanceTable, "add_columns", adds)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert by_id(uri, "n") == twice(range(20))
    dt.table(uri).drop("n")
    others.append(fns.upper)
    with pytest.raises(ConfigError, match="cannot add 'n'"):
        dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert dt.table(uri).schema.field("n").type == pa.string()


def test_a_column_that_is_dropped_during_the_wait_is_reported(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 20, 20)
    dt.table(uri).add_column("n", fns.doubled)
    lease = acquire_lease(uri)

    def drops() -> None:
        until(lambda: len(list(Path(uri).glob("_dovetail/*/lease/*.asks"))) == 2, "it waits")
        lance.dataset(uri).drop_columns(["n"])
        lease.release()

    other = threading.Thread(target=drops)
    other.start()
    with pytest.raises(ConfigError, match="no column 'n'"):
        dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    other.join()


def test_a_column_that_is_being_filled_is_not_dropped(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 20, 20)
    table = dt.table(uri)
    table.add_column("n", fns.doubled)
    with acquire_lease(uri):
        with pytest.raises(RunError, match="is being filled by other on ") as caught:
            table.drop("n")
        assert [problem.fix_texts for problem in caught.value.problems] == [("wait until it has finished, or stop it",)]
        assert "n" in table.schema.names
    table.drop("n")
    assert "n" not in table.schema.names


def test_a_backfill_whose_commits_fail_ends_soon(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 6000, 100)

    def drops() -> None:
        until(lambda: any(len(one.data_files()) > 1 for one in lance.dataset(uri).get_fragments()), "it commits")
        lance.dataset(uri).drop_columns(["n"])

    other = threading.Thread(target=drops)
    other.start()
    with pytest.raises(RunError, match="'n' was dropped"):
        dt.table(uri).backfill("n", fns.slow, cluster=HALF, commit_every=0)
    other.join()
    assert len(calls.all()) < 4000


def test_renamed_columns_are_changed_input(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(20), "a": range(20), "b": range(100, 120)}), uri)
    table = dt.table(uri)
    udf = dt.udf(lambda a: 2 * a, version="1", input_columns=["a"], data_type="int64")
    table.backfill("n", udf, cluster=HALF)
    lance.dataset(uri).alter_columns({"path": "a", "name": "old"})  # type: ignore[dict-item]
    lance.dataset(uri).alter_columns({"path": "b", "name": "a"})  # type: ignore[dict-item]
    assert table.backfill("n", udf, cluster=HALF).rows == 20
    assert by_id(uri, "n") == {row: 2 * (row + 100) for row in range(20)}


@pytest.mark.parametrize("how", ["dropped", "renamed"])
def test_an_input_column_that_is_dropped_is_named(tmp_path: Path, how: str) -> None:
    uri = create_table(tmp_path, 60, 20)
    gate = tmp_path / "gate"

    def slow(text: str) -> int:
        while text == "row 30" and not gate.exists():
            (tmp_path / "waits").touch()
            time.sleep(0.005)
        return len(text)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(dt.table(uri).backfill, "n", dt.udf(slow), cluster=HALF, commit_every=0)
        until((tmp_path / "waits").exists, "it is in the middle")
        if how == "dropped":
            lance.dataset(uri).drop_columns(["text"])
        else:
            lance.dataset(uri).alter_columns({"path": "text", "name": "words"})  # type: ignore[dict-item]
        gate.touch()
        with pytest.raises(RunError, match=r"'text', which slow or where reads, was dropped or renamed") as error:
            running.result()
    assert "computed again" not in str(error.value)
