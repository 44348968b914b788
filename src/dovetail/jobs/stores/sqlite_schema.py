"""Schema of the SQLite store: tables, version, and the offset of its clock.

A job has one row in `jobs`, which every step changes, and one in `contents`, which never changes. Only `jobs` has
indexes: ready jobs by bucket and order, jobs by the time at which something is due, finished jobs by time.
"""

# ruff: noqa: S608 - queries are put together from constants; values are bound

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import Problem
from dovetail.jobs.job import FINISHED, JobState
from dovetail.jobs.store import SCHEMA_VERSION, StoreVersionError
from dovetail.jobs.stores.boot_clock import new_offset_ms

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID = 0x646A6F62
"""Application id in the header of the file: "djob"."""
STATES = (
    JobState.SCHEDULED,
    JobState.BLOCKED,
    JobState.READY,
    JobState.LEASED,
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.DEAD,
)
"""States by their number in the database. Numbers never change: append new states."""
STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}
READY = STATE_NUMBERS[JobState.READY]
LEASED = STATE_NUMBERS[JobState.LEASED]
FINISHED_NUMBERS = frozenset(STATE_NUMBERS[state] for state in FINISHED)

_TABLES = f"""
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    state INTEGER NOT NULL,
    bucket INTEGER NOT NULL,
    order_key INTEGER NOT NULL,
    submitted_ms INTEGER NOT NULL,
    enqueued_ms INTEGER NOT NULL,
    due_ms INTEGER,
    token INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    counted_after INTEGER NOT NULL,
    worker TEXT,
    started_ms INTEGER,
    finished_ms INTEGER,
    cancel_requested INTEGER NOT NULL,
    progress REAL,
    message TEXT NOT NULL,
    result_encoding TEXT NOT NULL,
    error TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    unmet TEXT,
    key TEXT,
    function TEXT NOT NULL,
    schedule TEXT,
    attempts TEXT,
    preempted_for TEXT,
    gang TEXT
);
CREATE INDEX jobs_by_state ON jobs (state, id);
CREATE INDEX ready_jobs ON jobs (bucket, order_key, id, enqueued_ms) WHERE state = {READY};
CREATE INDEX due_jobs ON jobs (due_ms, id) WHERE due_ms IS NOT NULL;
CREATE INDEX finished_jobs ON jobs (finished_ms, id, bytes) WHERE finished_ms IS NOT NULL;
CREATE UNIQUE INDEX job_keys ON jobs (key) WHERE key IS NOT NULL;
CREATE TABLE contents (seq INTEGER PRIMARY KEY, spec TEXT NOT NULL, payload BLOB NOT NULL);
CREATE TABLE results (seq INTEGER PRIMARY KEY, result BLOB NOT NULL);
CREATE TABLE dependencies (dependency TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (dependency, job)) WITHOUT ROWID;
CREATE TABLE buckets (id INTEGER PRIMARY KEY, queue TEXT NOT NULL, shape TEXT NOT NULL, UNIQUE (queue, shape));
CREATE TABLE counts (
    state INTEGER NOT NULL, bucket INTEGER NOT NULL, jobs INTEGER NOT NULL, PRIMARY KEY (state, bucket)
) WITHOUT ROWID;
CREATE TABLE queues (
    queue TEXT PRIMARY KEY, paused INTEGER NOT NULL, weight INTEGER, max_running INTEGER
) WITHOUT ROWID;
CREATE TABLE schedules (name TEXT PRIMARY KEY, declaration TEXT NOT NULL, next_ms INTEGER NOT NULL);
CREATE TABLE workers (
    id TEXT PRIMARY KEY, declaration TEXT NOT NULL, registered_ms INTEGER NOT NULL, heartbeat_ms INTEGER NOT NULL,
    waiter TEXT, offered_ms INTEGER, lease_ms INTEGER, free_slots INTEGER, free TEXT, ends_ms INTEGER
);
CREATE TABLE reservations (
    queue TEXT PRIMARY KEY, job TEXT NOT NULL, worker TEXT NOT NULL, tried_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE deferrals (job TEXT PRIMARY KEY, deferred_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX deferrals_by_time ON deferrals (deferred_ms);
CREATE TABLE assigned (worker TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (worker, job)) WITHOUT ROWID;
CREATE TABLE awaited (job TEXT NOT NULL, waiter TEXT NOT NULL, PRIMARY KEY (job, waiter)) WITHOUT ROWID;
CREATE TABLE clocks (boot TEXT PRIMARY KEY, offset_ms INTEGER NOT NULL);
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO numbers VALUES ('next_seq', 1), ('next_bucket', 1), ('topology', 0), ('latest_ms', 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
"""`bytes`: of payload and result. `deferrals`: jobs that a claim has left to a better worker. `assigned`: gangs with
members that are to be sent to a worker. `awaited`: which waiter to wake when a job finishes. `topology` changes with
the rows of `workers`, but for heartbeats and offers. `latest_ms`: at or after the store's time so far."""


def is_ready_for_use(db: sqlite3.Connection, path: str) -> bool:
    """Whether the database has the tables of this version; False if it is empty. Reads only."""
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if application == APPLICATION_ID:
        if version == SCHEMA_VERSION:
            return True
        raise _newer_error(path, version)
    [objects] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or objects:
        evidence = f"SQLite application id {application}, user version {version}, tables and indexes: {objects}"
        raise foreign_error(path, evidence)
    return False


def create_tables(db: sqlite3.Connection) -> None:
    """In a transaction."""
    for statement in _TABLES.split(";"):
        if statement.strip():
            db.execute(statement)


def read_clock_offset(db: sqlite3.Connection, boot: str) -> int | None:
    """Offset of this boot; None if it has none yet. Without an id of the boot, each process has its own."""
    if not boot:
        return new_offset_ms(0)
    found = db.execute("SELECT offset_ms FROM clocks WHERE boot = ?", (boot,)).fetchone()
    return None if found is None else int(found[0])


def make_clock_offset(db: sqlite3.Connection, boot: str) -> None:
    """In a write transaction: give this boot an offset, unless another process has done so."""
    if read_clock_offset(db, boot) is not None:
        return
    [latest_ms] = db.execute("SELECT value FROM numbers WHERE name = 'latest_ms'").fetchone()
    db.execute("DELETE FROM clocks")
    db.execute("INSERT INTO clocks VALUES (?, ?)", (boot, new_offset_ms(latest_ms)))


def foreign_error(path: str, evidence: str) -> StoreVersionError:
    fix = 'name another file, such as dt.Queue("sqlite:///jobs-dovetail.db")'
    return StoreVersionError(Problem("DT661", "is not a job store of Dovetail", (evidence,), (fix,), path))


def _newer_error(path: str, version: int) -> StoreVersionError:
    evidence = f"schema version {version} in the file, {SCHEMA_VERSION} in this version of Dovetail"
    fixes = ("pip install --upgrade dovetail-ml", 'name another file, such as dt.Queue("sqlite:///jobs-old.db")')
    return StoreVersionError(Problem("DT661", "was written by another version of Dovetail", (evidence,), fixes, path))
