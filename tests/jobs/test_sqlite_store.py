"""The SQLite store against the contract of the store port."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import pytest
from hypothesis import given

from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, Renewal, WorkerInfo
from dovetail.jobs.stores import sqlite_store
from dovetail.jobs.stores.file_wakeup import WakeupFolder
from dovetail.jobs.stores.sqlite_store import SqliteStore
from jobs.store_contract import CPU_NODE, StoreContract, StoreScene, free_of, spec
from jobs.store_traces import Operation, StoreTrace, TraceClock, assert_like_memory_store, random_trace, traces
from jobs.test_memory_store import ManualClock
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[StoreScene]:
        clock = ManualClock()
        stores: list[SqliteStore] = []

        def another() -> SqliteStore:
            stores.append(SqliteStore(tmp_path / "jobs.db", clock_ms=clock))
            return stores[-1]

        yield StoreScene(another(), clock.advance, another)
        for store in stores:
            store.close()


@given(traces())
def test_random_traces_give_what_the_memory_store_gives(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_like_memory_store(lambda clock: SqliteStore(Path(folder) / "jobs.db", clock_ms=clock), operations)


class Alternating:
    """Two stores on one file that take turns, as two processes would. What one remembers, the other may change."""

    def __init__(self, *stores: SqliteStore) -> None:
        self._stores = stores
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        self._turn += 1
        return getattr(self._stores[self._turn % len(self._stores)], name)

    def close(self) -> None:
        for store in self._stores:
            store.close()


@given(traces())
def test_two_stores_on_one_file_that_take_turns_give_what_one_memory_store_gives(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"

        def open_two(clock: TraceClock) -> Any:
            return Alternating(SqliteStore(path, clock_ms=clock), SqliteStore(path, clock_ms=clock))

        assert_like_memory_store(open_two, operations)


@given(traces())
def test_a_store_has_the_same_contents_when_it_is_opened_again(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = TraceClock()
        path = Path(folder) / "jobs.db"
        trace = StoreTrace(SqliteStore(path, clock_ms=clock), clock)
        for operation in operations:
            trace.apply(operation)
        before = trace.contents()
        trace.store.close()
        with closing(SqliteStore(path, clock_ms=clock)) as again:
            assert StoreTrace(again, clock).contents() == before


def test_texts_that_are_not_unicode_do_not_stop_a_job(tmp_path: Path) -> None:
    """Names of files may have surrogates, and so may errors that show them."""
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        store.submit([spec("a", options={"file": "\udcff"}), spec("b")])
        reply = store.exchange(Exchange("w1", (), (), Claim(2, free_of(CPU_NODE))))
        assert [job.spec.options for job in reply.claimed] == [{"file": "\udcff"}, {}]
        renewals = [Renewal(job.spec.id, job.lease.token, 0.5, "at \udcff") for job in reply.claimed]
        ends = [
            Completion(job.spec.id, job.lease.token, Outcome.ERROR, error="\udcfe", traceback="\udcfd", final=True)
            for job in reply.claimed
        ]
        assert store.exchange(Exchange("w1", (), renewals)).refused == []
        assert store.exchange(Exchange("w1", ends)).refused == []
        for record in store.get(["a", "b"]):
            assert record is not None
            assert record.state is JobState.FAILED
            assert record.attempts[0].traceback == "\udcfd"
        assert store.purge(JobFilter()).jobs == 2
        assert store.stats() == []


def test_a_thread_that_waits_for_many_jobs_is_woken(tmp_path: Path) -> None:
    count = 1_000
    ids = [f"{n:04}" for n in range(count)]
    with closing(SqliteStore(tmp_path / "jobs.db")) as store, closing(SqliteStore(tmp_path / "jobs.db")) as other:
        store.submit([spec(job_id) for job_id in ids])
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(store.wait_finished(ids, PATIENCE_S)))
        thread.start()
        other.cancel(ids[700:702])
        thread.join(PATIENCE_S)
        assert found == [["0700", "0701"]]


def test_a_wake_up_that_was_never_sent_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that should have sent it was killed after its commit."""
    monkeypatch.setattr(sqlite_store, "LOOK_AGAIN_S", 0.05)
    with closing(SqliteStore(tmp_path / "jobs.db")) as store, closing(SqliteStore(tmp_path / "jobs.db")) as other:
        store.submit([spec("a")])
        monkeypatch.setattr(WakeupFolder, "notify", lambda *_: [])
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(store.wait_finished(["a"], PATIENCE_S)))
        thread.start()
        other.cancel(["a"])
        thread.join(PATIENCE_S)
        assert found == [["a"]]


def test_a_worker_whose_fifo_was_removed_is_woken_again_after_its_next_wait(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "jobs.db")) as store, closing(SqliteStore(tmp_path / "jobs.db")) as other:
        store.register_worker(WorkerInfo("w1"))
        for fifo in (tmp_path / "jobs.db-wakeup").iterdir():
            fifo.unlink()
        other.submit([spec("a")])
        while store.wait("w1", 0.0):
            pass
        assert store.wait("w1", 0.0), "it does not know what it has missed"
        while store.wait("w1", 0.0):
            pass
        other.submit([spec("b")])
        assert store.wait("w1", PATIENCE_S)


# --- power failures


class Log:
    """Syncs of the write-ahead log, and how much of it would survive a power failure."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self.durable_bytes = 0
        self._fdatasync = os.fdatasync
        patch.setattr(os, "fdatasync", self._sync)

    def _sync(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._fdatasync(descriptor)
        self.syncs += 1
        self.durable_bytes = max(self.durable_bytes, size)

    def survivors(self, path: Path) -> Path:
        """The files as they were after a power failure now."""
        copy = path.with_name("survivors.db")
        copy.write_bytes(path.read_bytes())
        log = Path(f"{path}-wal").read_bytes()
        assert len(log) > self.durable_bytes, "some of the log is not durable"
        copy.with_name("survivors.db-wal").write_bytes(log[: self.durable_bytes])
        return copy


def test_what_was_answered_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    path = tmp_path / "jobs.db"
    with closing(SqliteStore(path)) as store:
        store.submit([spec(name) for name in ("first", "second", "third", "waiting")])
        jobs = store.exchange(Exchange("w1", (), (), Claim(2, free_of(CPU_NODE)))).claimed
        assert [job.spec.id for job in jobs] == ["first", "second"]
        store.cancel(["third"])
        end = Completion("first", jobs[0].lease.token, Outcome.SUCCEEDED, b"1")
        store.exchange(Exchange("w1", [end]))
        synced = log.syncs
        assert synced == 4
        for number in range(20):
            store.exchange(Exchange("w1", (), [Renewal("second", jobs[1].lease.token, number / 20)]))
            store.register_worker(WorkerInfo(f"w{number}"))
        assert log.syncs == synced
        with closing(SqliteStore(log.survivors(path))) as survivors:
            names = ["first", "second", "third", "waiting"]
            states = [record.state for record in survivors.get(names) if record is not None]
            assert states == [JobState.SUCCEEDED, JobState.LEASED, JobState.CANCELLED, JobState.READY]
            assert survivors.workers() == []


# --- cost


class RecordedConnection(sqlite3.Connection):
    """Records the queries of all connections."""

    queries: ClassVar[set[str]] = set()

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        self.queries.add(query)
        return super().execute(query, *values)

    def executemany(self, query: str, rows: Any) -> sqlite3.Cursor:
        self.queries.add(query)
        return super().executemany(query, rows)


def test_no_step_reads_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query on jobs uses an index, so that the cost of a step does not grow with the number of jobs."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **options: connect(*a, factory=RecordedConnection, **options))
    path = tmp_path / "jobs.db"
    with closing(SqliteStore(path)) as store:
        clock = TraceClock()
        trace = StoreTrace(store, clock)
        for operation in random_trace(5, 300):
            trace.apply(operation)
    plans: list[str] = []
    with closing(connect(path)) as db:
        for query in RecordedConnection.queries:
            if query.split()[0] in ("SELECT", "UPDATE", "DELETE") and "finished_ms IS NOT NULL" not in query:
                rows = db.execute(f"EXPLAIN QUERY PLAN {query}", [0] * query.count("?")).fetchall()
                plans += [f"{detail} in {query}" for *_, detail in rows]
    assert len(plans) > 20
    assert [plan for plan in plans if plan.startswith(("SCAN jobs", "SCAN contents", "SCAN results"))] == []
    sorts = [plan for plan in plans if "TEMP B-TREE" in plan and "FROM jobs" in plan]
    assert [plan for plan in sorts if "GROUP BY worker" not in plan] == []  # that sorts running jobs only


@pytest.mark.bar
def test_a_claim_costs_the_same_in_a_long_queue(tmp_path: Path) -> None:
    def cost_s(depth: int) -> float:
        costs = []
        with closing(SqliteStore(tmp_path / f"{depth}.db")) as store:
            for start in range(0, depth, 1000):
                store.submit([spec(f"{start + n:06}") for n in range(1000)])
            for _ in range(12):
                began = time.process_time()
                store.exchange(Exchange("w1", (), (), Claim(64, free_of(CPU_NODE))))
                costs.append(time.process_time() - began)
        return min(costs)

    costs = {depth: cost_s(depth) for depth in (1_000, 100_000)}
    assert costs[100_000] < 1.5 * costs[1_000], costs


@pytest.mark.long
def test_memory_and_file_do_not_grow_with_the_number_of_jobs_that_were_run(tmp_path: Path) -> None:
    """A soak: 200,000 jobs through two workers, purged when they are done."""
    process = psutil.Process()
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:

        def run(jobs: int, prefix: str) -> tuple[int, int]:
            for start in range(0, jobs, 1_000):
                store.submit([spec(f"{prefix}{start + n:06}", payload=bytes(200)) for n in range(1_000)])
                ends: list[Completion] = []
                while True:
                    reply = store.exchange(Exchange("w1", ends, (), Claim(64, free_of(CPU_NODE))))
                    if not reply.claimed:
                        break
                    ends = [
                        Completion(job.spec.id, job.lease.token, Outcome.SUCCEEDED, bytes(200)) for job in reply.claimed
                    ]
                store.purge(JobFilter())
            return process.memory_info().rss, (tmp_path / "jobs.db").stat().st_size

        memory, size = run(20_000, "a")
        later_memory, later_size = run(180_000, "b")
        assert store.stats() == []
        assert later_memory < memory + 20_000_000
        assert later_size < 2 * size + 1_000_000
