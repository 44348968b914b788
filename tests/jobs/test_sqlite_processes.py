"""The SQLite store in several processes: kills in the middle of exchanges, forks, wake-ups."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.job import JobState, Outcome, Retries
from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, WorkerInfo
from dovetail.jobs.stores.sqlite_store import SqliteStore
from jobs.store_contract import CPU_NODE, free_of, spec
from runtime.aids import Script
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTS = Path(__file__).parents[1]
PRELUDE = """
import os, sys, threading, time
sys.path.insert(0, {tests!r})
from dovetail.jobs.job import JobSpec, Outcome
from dovetail.jobs.stores.sqlite_store import SqliteStore
from dovetail.jobs.store import Claim, Completion, Exchange, WorkerInfo
from jobs.store_contract import CPU_NODE, free_of, spec
store = SqliteStore({path!r})
"""
WORK = """
name = "w%d" % os.getpid()
store.register_worker(WorkerInfo(name))
done = ()
print("working", flush=True)
while True:
    reply = store.exchange(Exchange(name, done, (), Claim(8, free_of(CPU_NODE)), 300))
    done = tuple(Completion(job.spec.id, job.lease.token, Outcome.SUCCEEDED) for job in reply.claimed)
    if not done:
        store.wait(name, 0.1)
"""
SUBMIT = """
print("submitting", flush=True)
for number in range(10**6):
    batch = [spec("%d-%06d-%d" % (os.getpid(), number, n)) for n in range(5)]
    assert all(receipt.created for receipt in store.submit(batch))
    print("accepted", *(job.id for job in batch), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def run(tmp_path: Path, path: Path) -> Iterator[Callable[[str], Script]]:
    """Starts scripts that have the store open."""
    running: list[Script] = []

    def start(text: str) -> Script:
        script = PRELUDE.format(tests=str(TESTS), path=str(path)) + text
        running.append(Script(tmp_path, script, warm=True))
        return running[-1]

    yield start
    for script in running:
        script.__exit__()


def accepted_by(script: Script) -> list[str]:
    lines = (line.split() for line in script.output.splitlines() if line.endswith(tuple("0123456789")))
    return [job_id for line in lines if line[0] == "accepted" for job_id in line[1:]]


def check_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# --- kills


def test_kills_in_the_middle_of_exchanges_lose_nothing(run: Callable[[str], Script], path: Path) -> None:
    kills, jobs = (100, 500) if LONG else (4, 200)
    chance = random.Random(7)
    ids: list[str] = []
    with closing(SqliteStore(path)) as store:
        workers = [run(WORK) for _ in range(2)]
        for kill in range(kills):
            victim = workers.pop(0)
            victim.says("working")
            batch = [spec(f"{kill:03}-{number:03}", retries=Retries(lost=100)) for number in range(jobs)]
            ids += [receipt.id for receipt in store.submit(batch)]
            time.sleep(chance.random() * 0.03)  # not a wait: where in its work it is hit
            victim.kill()
            workers.append(run(WORK))
            assert store.cancel(["none"]) == [None], "the lock of the killed process is free"
        succeeded = {JobState.SUCCEEDED: len(ids)}
        until(lambda: store.stats()[0].counts == succeeded, "all jobs have succeeded")
        lost = 0
        for record in store.get(ids):
            assert record is not None
            ends = [attempt.outcome for attempt in record.attempts]
            assert ends.count(Outcome.SUCCEEDED) == 1
            assert set(ends) <= {Outcome.SUCCEEDED, Outcome.LOST}
            lost += ends.count(Outcome.LOST)
        assert lost or not LONG, "kills have hit running jobs"
    for worker in workers:
        worker.kill()
        worker.ended()
    check_file(path)


def test_a_submission_that_was_accepted_survives_the_kill_of_its_process(
    run: Callable[[str], Script], path: Path
) -> None:
    for _ in range(20 if LONG else 2):
        submitters = [run(SUBMIT) for _ in range(2)]
        for submitter in submitters:
            submitter.says("accepted")
        for submitter in submitters:
            submitter.kill()
            submitter.ended()
        with closing(SqliteStore(path)) as store:
            for submitter in submitters:
                accepted = accepted_by(submitter)
                assert accepted
                assert None not in store.get(accepted)
    check_file(path)


def test_a_killed_process_leaves_no_files(run: Callable[[str], Script], path: Path) -> None:
    script = run(
        """
store.submit([spec("a"), spec("b")])
store.register_worker(WorkerInfo("w1"))
threading.Thread(target=store.wait_finished, args=(["a"], 1000)).start()
print("waiting", flush=True)
while True:
    store.wait("w1", 1000)
"""
    )
    script.says("waiting")
    folder = path.with_name("jobs.db-wakeup")
    until(lambda: len(list(folder.glob("[!.]*"))) == 2, "both threads wait")
    script.kill()
    script.ended()
    with closing(SqliteStore(path)) as store:
        store.submit([spec("c")])
        until(lambda: not list(folder.glob("*")), "the files are removed")
        store.cancel(["a"])
        assert [worker.id for worker in store.workers()] == ["w1"]
    assert [found.name for found in path.parent.iterdir() if found.name.startswith("jobs.db")] == ["jobs.db"]


# --- wake-ups


def test_a_worker_of_another_process_is_woken(run: Callable[[str], Script], path: Path) -> None:
    script = run(
        """
store.register_worker(WorkerInfo("w1", ("x",)))
while store.wait("w1", 0.0):
    pass
print("waiting", flush=True)
assert store.wait("w1", 1000)
reply = store.exchange(Exchange("w1", (), (), Claim(8, free_of(CPU_NODE), ("x",))))
[job] = reply.claimed
store.exchange(Exchange("w1", (Completion("a", job.lease.token, Outcome.SUCCEEDED, b"1", "json"),)))
"""
    )
    script.says("waiting")
    with closing(SqliteStore(path)) as store:
        store.submit([spec("other")])
        store.submit([spec("a", queue="x")])
        assert store.wait_finished(["other", "a"], PATIENCE_S) == ["a"]
    script.finish()


def test_waiting_costs_no_cpu(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        store.register_worker(WorkerInfo("w1"))
        store.submit([spec("a", queue="x")])
        while store.wait("w1", 0.0):
            pass
        threads = [
            threading.Thread(target=store.wait, args=("w1", 1.0)),
            *(threading.Thread(target=store.wait_finished, args=(["a"], 1.0)) for _ in range(2)),
        ]
        for thread in threads:
            thread.start()
        began = time.process_time()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert time.process_time() - began < 0.1


# --- forks


def submit_in_child(store: SqliteStore, name: str) -> None:
    store.submit([spec(name)])
    assert store.wait_finished([name], 0.0) == []
    store.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of a process with threads
def test_a_forked_child_uses_a_connection_of_its_own(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with closing(SqliteStore(path)) as store:
        store.register_worker(WorkerInfo("w1"))
        store.submit([spec("parent")])
        while store.wait("w1", 0.0):
            pass
        children = [context.Process(target=submit_in_child, args=(store, f"child {n}")) for n in range(3)]
        for child in children:
            child.start()
        assert store.submit([spec("after")])[0].created
        for child in children:
            child.join(PATIENCE_S)
            assert child.exitcode == 0
        assert store.wait("w1", PATIENCE_S), "the waiter of the parent was not closed by a child"
        names = [record.id for record in store.find(JobFilter()).jobs]
        assert names == ["parent", *(f"child {n}" for n in (2, 1, 0)), "after"]
    check_file(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forks_while_threads_use_the_store_lose_nothing(path: Path) -> None:
    """In the child, the locks of the file would look as if they were its own."""
    submitted: list[str] = []
    stop = threading.Event()
    with closing(SqliteStore(path)) as store:

        def work(thread: int) -> None:
            number = 0
            while not stop.is_set():
                name = f"{thread}-{number}"
                store.submit([spec(name)])
                submitted.append(name)
                store.exchange(Exchange("w", (), (), Claim(1, free_of(CPU_NODE))))
                number += 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(50 if LONG else 8):
                pid = os.fork()
                if not pid:
                    try:
                        store.submit([spec(f"child {number}")])
                        os._exit(0 if store.get([f"child {number}"])[0] else 1)
                    finally:
                        os._exit(2)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                submitted.append(f"child {number}")
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert None not in store.get(submitted)
    check_file(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_locks_of_its_own(path: Path) -> None:
    """If it only believed so, the parent would remove the log that the child writes to when it closes the store."""
    store = SqliteStore(path)
    store.submit([spec("parent")])
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store.submit([spec("child 1")])
            os.write(ready[1], b".")
            os.read(go[0], 1)
            store.submit([spec("child 2")])
            os._exit(0)
        finally:
            os._exit(2)
    store.get(["parent"])
    os.read(ready[0], 1)
    store.close()
    os.write(go[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for descriptor in (*ready, *go):
        os.close(descriptor)
    with closing(SqliteStore(path)) as again:
        assert None not in again.get(["parent", "child 1", "child 2"])
    check_file(path)


def test_a_stopped_worker_is_refused_when_it_continues(run: Callable[[str], Script], path: Path) -> None:
    script = run(
        """
store.register_worker(WorkerInfo("w1"))
[job] = store.exchange(Exchange("w1", (), (), Claim(1, free_of(CPU_NODE)), 100)).claimed
print("claimed", flush=True)
while not os.path.exists("go"):
    time.sleep(0.005)
reply = store.exchange(Exchange("w1", (Completion("a", job.lease.token, Outcome.SUCCEEDED, b"late", "json"),)))
assert [lease.job_id for lease in reply.refused] == ["a"]
"""
    )
    with closing(SqliteStore(path)) as store:
        store.submit([spec("a")])
        script.says("claimed")
        script.kill(signal.SIGSTOP)
        found: list[Completion] = []

        def claims() -> bool:
            reply = store.exchange(Exchange("w2", (), (), Claim(1, free_of(CPU_NODE))))
            found.extend(Completion("a", job.lease.token, Outcome.SUCCEEDED, b"2") for job in reply.claimed)
            return bool(found)

        until(claims, "the lease has expired")
        (path.parent / "go").touch()
        script.kill(signal.SIGCONT)
        script.finish()
        assert store.exchange(Exchange("w2", found)).refused == []
        [record] = store.get(["a"])
        assert record is not None
        assert record.result == b"2"
