"""Crashes of workers on SQLite and on Redis."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.stores.store_url import sqlite_path
from jobs.crash_suite import CrashSuite, Fleet
from jobs.worker_aids import wait_for_file, wait_for_state, write
from redis_aids import RedisProcess, run_server
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestSqlite(CrashSuite):
    @pytest.fixture
    def url(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return f"sqlite:///{tmp_path_factory.mktemp('store') / 'jobs.db'}"

    @contextmanager
    def no_writes(self, url: str) -> Iterator[None]:
        with closing(sqlite3.connect(sqlite_path(url), timeout=PATIENCE_S)) as database:
            database.execute("BEGIN IMMEDIATE")
            yield

    def store_bytes(self, url: str) -> int:
        """Size of the store without its log, which keeps the size of a burst up to a limit."""
        path = Path(sqlite_path(url))
        with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as database:
            empty_log = "PRAGMA wal_checkpoint(TRUNCATE)"
            until(lambda: database.execute(empty_log).fetchone()[0] == 0, "the log is in the file")
        return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if file.is_file())


class TestRedis(CrashSuite):
    @pytest.fixture
    def url(self) -> Iterator[str]:
        for server in run_server("--appendonly", "yes", "--appendfsync", "always"):
            yield server.url

    def store_bytes(self, url: str) -> int:
        from redis import Redis

        with Redis.from_url(url) as client:
            return int(client.info("memory")["used_memory"])


def test_a_restarted_redis_loses_nothing_and_workers_reconnect(tmp_path: Path) -> None:
    server = RedisProcess("--appendonly", "yes", "--appendfsync", "always")
    server.start()
    fleet = Fleet(server.url)
    try:
        fleet.start(2, lease=30, isolation="thread")
        go = tmp_path / "go"
        began = [tmp_path / f"began{number}" for number in range(4)]
        jobs = [fleet.submit("wait_for_file", str(go), str(file), isolation="thread") for file in began]
        later = fleet.submit("add", 1, delay="1s", isolation="thread")
        for file in began:
            wait_for_file(file)
        server.kill()
        write(go, str(os.getpid()))  # they end while the store is away
        server.start()
        for job in (*jobs, later):
            wait_for_state(job, JobState.SUCCEEDED)
            assert [attempt.outcome for attempt in job.record().attempts] == [Outcome.SUCCEEDED]
        fleet.check_nothing_is_left()
    finally:
        fleet.close()
        server.close()
