"""The table port over SQLite: rows that a step has read or changed are kept in memory, and written together.

Within one write transaction this is the only writer, so that what was read stays true. Changes are written by `flush`,
before a query that needs the indexes and at the end of each step.

Records that steps read with `get` have no payload and no result, which no step needs; only those of a bucket have their
payload, for the worker that claims them.
"""

# ruff: noqa: S608 - queries are put together from constants; values are bound

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dovetail.jobs.job import JobRecord, JobSpec, JobState
from dovetail.jobs.offer_groups import OfferGroups
from dovetail.jobs.ordering import order_of
from dovetail.jobs.store import PLAIN_QUEUE, QueueSettings, Reservation, purgeable_states
from dovetail.jobs.stores.memory_store import unsent_workers
from dovetail.jobs.stores.serialization import (
    attempts_from_text,
    attempts_to_text,
    gang_from_text,
    gang_to_text,
    schedule_from_text,
    schedule_to_text,
    shape_from_text,
    shape_to_text,
    spec_from_text,
    spec_to_text,
)
from dovetail.jobs.stores.sqlite_schema import LEASED, READY, STATE_NUMBERS, STATES
from dovetail.jobs.stores.sqlite_workers import (
    put_heartbeat,
    put_offer,
    put_worker,
    read_offering_workers,
    read_workers,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.job_table import Bucket
    from dovetail.jobs.store import JobFilter, Offer, OfferingWorker, Schedule, WorkerInfo
    from dovetail.resources.shape import Shape

SCHEDULES_CACHED = 1_000
IDS_PER_QUERY = 256
SPECS_CACHED = 4_096
SPEC_CACHE_BYTES = 8 * 2**20
LARGEST_CACHED_PAYLOAD_BYTES = 16_384
FIRST_CHUNK, LONGEST_CHUNK = 16, 512
"""Number of jobs read ahead from a bucket or the list of finished jobs; it grows while jobs are taken."""

Row = tuple[Any, ...]
JOB_COLUMNS = (
    "seq, id, state, bucket, submitted_ms, enqueued_ms, due_ms, token, attempt, counted_after, worker, started_ms,"
    " finished_ms, cancel_requested, progress, message, result_encoding, error, unmet, attempts,"
    " bytes, preempted_for, gang"
)
_INSERT = """INSERT INTO jobs (
    seq, id, state, bucket, order_key, submitted_ms, enqueued_ms, due_ms, token, attempt, counted_after, worker,
    started_ms, finished_ms, cancel_requested, progress, message, result_encoding, error, unmet, attempts, bytes, key,
    function, schedule
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_UPDATE = """UPDATE jobs SET state = ?, bucket = ?, order_key = ?, enqueued_ms = ?, due_ms = ?, token = ?, attempt = ?,
    counted_after = ?, worker = ?, started_ms = ?, finished_ms = ?, cancel_requested = ?, progress = ?, message = ?,
    result_encoding = ?, error = ?, unmet = ?, attempts = ?, bytes = ?, preempted_for = ?, gang = ? WHERE seq = ?"""
_RENEW = """UPDATE jobs SET due_ms = ?, progress = ?, message = ?, cancel_requested = ?, error = ?,
    preempted_for = ?, gang = ? WHERE seq = ?"""
_COUNT = """INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (state, bucket) DO UPDATE SET jobs = jobs + excluded.jobs"""
_HEADS = f"""SELECT {JOB_COLUMNS} FROM jobs WHERE seq IN (SELECT (
    SELECT seq FROM jobs AS ready WHERE ready.state = {READY} AND ready.bucket = counts.bucket
    ORDER BY ready.order_key, ready.id LIMIT 1
) FROM counts WHERE counts.state = {READY} AND counts.bucket IN """
_NEXT_OF_BUCKET = f"""SELECT {JOB_COLUMNS} FROM jobs WHERE state = {READY} AND bucket = ?
    AND (order_key, id) > (?, ?) ORDER BY order_key, id LIMIT ?"""
_LEASED_JOBS = f"""SELECT coalesce(sum(jobs), 0) FROM counts JOIN buckets ON buckets.id = counts.bucket
    WHERE counts.state = {LEASED} AND buckets.queue = ?"""


class SpecCache:
    """Specifications by the row of their job, which never change. Thread: the one that leads a group commit."""

    def __init__(self) -> None:
        self._specs: dict[int, JobSpec] = {}
        self._bytes = 0

    def get(self, seq: int) -> JobSpec | None:
        return self._specs.get(seq)

    def add(self, seq: int, spec: JobSpec) -> None:
        """Cache a specification with its payload, unless that is large."""
        if len(spec.payload) > LARGEST_CACHED_PAYLOAD_BYTES or seq in self._specs:
            return
        self._specs[seq] = spec
        self._bytes += len(spec.payload)
        while len(self._specs) > SPECS_CACHED or self._bytes > SPEC_CACHE_BYTES:
            oldest = next(iter(self._specs))
            self._bytes -= len(self._specs.pop(oldest).payload)


class SqliteTable:
    """Rows of one store on the connection that writes, inside a write transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._specs = SpecCache()
        self.begin()

    def begin(self) -> None:
        """Drop what was read in an earlier transaction."""
        self._records: dict[str, JobRecord | None] = {}
        self._stored: dict[str, JobRecord] = {}
        self._seqs: dict[str, int] = {}
        self._payload_bytes: dict[str, int] = {}
        self._buckets: dict[tuple[str, Shape], int] = {}
        self._shapes: dict[int, Shape] = {}
        self._announced: set[str] = set()
        self._dependants: dict[str, set[str]] = {}
        self._clear_changes()

    def _clear_changes(self) -> None:
        self._changed: dict[str, JobRecord] = {}
        self._deleted: list[JobRecord] = []
        self._new_keys: dict[str, str] = {}
        self._dependency_changes: dict[tuple[str, str], bool] = {}

    # --- jobs

    def prefetch(self, ids: Iterable[str]) -> None:
        wanted = [job_id for job_id in dict.fromkeys(ids) if job_id not in self._records]
        self._announced.update(wanted)
        self._read(wanted)

    def get(self, job_id: str) -> JobRecord | None:
        if job_id not in self._records:
            self._read([job_id])
        return self._records[job_id]

    def payload(self, record: JobRecord) -> bytes:
        self.flush()
        query = "SELECT payload FROM contents WHERE seq = ?"
        [payload] = self._db.execute(query, (self._seqs[record.spec.id],)).fetchone()
        return bytes(payload)

    def put(self, record: JobRecord) -> None:
        job_id = record.spec.id
        before = self._records.get(job_id)
        self._records[job_id] = self._changed[job_id] = record
        if before is None and record.spec.key is not None:
            self._new_keys[record.spec.key] = job_id
        if record.state is JobState.BLOCKED or (before is not None and before.state is JobState.BLOCKED):
            self._index_dependencies(before, record)
        if record.gang is not None or (before is not None and before.gang is not None):
            self._index_members(before, record)

    def delete(self, record: JobRecord) -> None:
        self._records[record.spec.id] = None
        self._deleted.append(record)

    def id_of_key(self, key: str) -> str | None:
        found = self._new_keys.get(key)
        if found is None:
            row = self._db.execute("SELECT id FROM jobs WHERE key = ?", (key,)).fetchone()
            found = None if row is None else row[0]
        return found

    def dependants(self, job_id: str) -> list[JobRecord]:
        found = self._dependants.get(job_id)
        if found is None:
            self._read_dependants([job_id, *(self._announced - self._dependants.keys())])
            found = self._dependants[job_id]
        if not found:
            return []
        self._read([other for other in found if other not in self._records])
        return [record for other in sorted(found) if (record := self._records[other]) is not None]

    def assigned(self, worker: str) -> list[str]:
        return [job for (job,) in self._db.execute("SELECT job FROM assigned WHERE worker = ? ORDER BY job", (worker,))]

    def due(self, now_ms: int, limit: int) -> list[JobRecord]:
        self.flush()
        query = f"SELECT {JOB_COLUMNS} FROM jobs WHERE due_ms <= ? ORDER BY due_ms, id LIMIT ?"
        return self._decode(self._db.execute(query, (now_ms, limit)).fetchall())

    def next_due_ms(self) -> int | None:
        self.flush()
        row = self._db.execute("SELECT due_ms FROM jobs WHERE due_ms IS NOT NULL ORDER BY due_ms LIMIT 1").fetchone()
        return None if row is None else int(row[0])

    def buckets(self, queues: Sequence[str], limit: int) -> list[Bucket]:
        self.flush()
        marks = ", ".join("?" * len(queues))
        query = f"""SELECT buckets.id FROM counts JOIN buckets ON buckets.id = counts.bucket
            WHERE counts.state = {READY} AND buckets.queue IN ({marks})"""
        numbers = [number for (number,) in self._db.execute(query, tuple(queues))]
        if len(numbers) == 1:
            return [SqliteBucket(self, numbers[0], limit)]
        found: list[Bucket] = []
        for chunk in _chunks(numbers):
            rows = self._db.execute(f"{_HEADS} ({', '.join('?' * len(chunk))}))", chunk).fetchall()
            records = self._decode(rows, payloads=True)
            found += [SqliteBucket(self, row[3], limit, [record]) for row, record in zip(rows, records, strict=True)]
        return found

    def next_of_bucket(self, bucket: int, behind: tuple[int, str], limit: int) -> list[JobRecord]:
        """Ready jobs after this order, with their payloads."""
        rows = self._db.execute(_NEXT_OF_BUCKET, (bucket, *behind, limit)).fetchall()
        return self._decode(rows, payloads=True)

    def finished(self, chosen: JobFilter) -> Iterator[tuple[str, int]]:
        self.flush()
        where, values = finished_filter(chosen)
        cursor = self._db.execute(f"SELECT id, bytes FROM jobs WHERE {where} ORDER BY finished_ms, id", values)
        size = FIRST_CHUNK
        while rows := cursor.fetchmany(size):
            self.prefetch(job_id for job_id, _ in rows)
            yield from rows
            size = min(2 * size, LONGEST_CHUNK)

    def finished_bytes(self, chosen: JobFilter) -> int:
        self.flush()
        where, values = finished_filter(chosen)
        [total] = self._db.execute(f"SELECT coalesce(sum(bytes), 0) FROM jobs WHERE {where}", values).fetchone()
        return int(total)

    # --- queues, workers and schedules

    def queue_settings(self) -> Mapping[str, QueueSettings]:
        return read_queue_settings(self._db)

    def put_queue_settings(self, queue: str, settings: QueueSettings) -> None:
        self._db.execute("DELETE FROM queues WHERE queue = ?", (queue,))
        if settings != PLAIN_QUEUE:
            self._db.execute("INSERT INTO queues VALUES (?, ?, ?, ?)", (queue, *settings))

    def reservations(self) -> Mapping[str, Reservation]:
        return read_reservations(self._db)

    def put_reservation(self, reservation: Reservation) -> None:
        self._db.execute("INSERT OR REPLACE INTO reservations VALUES (?, ?, ?, ?)", reservation)

    def delete_reservation(self, queue: str) -> None:
        self._db.execute("DELETE FROM reservations WHERE queue = ?", (queue,))

    def leased_jobs(self, queue: str) -> int:
        self.flush()
        [count] = self._db.execute(_LEASED_JOBS, (queue,)).fetchone()
        return int(count)

    def workers(self) -> list[WorkerInfo]:
        self.flush()
        return read_workers(self._db)

    def put_worker(self, worker: WorkerInfo) -> None:
        put_worker(self._db, worker)
        self._change_topology()

    def delete_worker(self, worker: str) -> None:
        self._db.execute("DELETE FROM workers WHERE id = ?", (worker,))
        self._change_topology()

    def heartbeat(self, worker: str, now_ms: int, offer: Offer | None) -> bool:
        return put_heartbeat(self._db, worker, now_ms, offer)

    def put_offer(self, worker: str, offer: Offer) -> None:
        put_offer(self._db, worker, offer)

    def offering_workers(self, now_ms: int) -> list[OfferingWorker]:
        return read_offering_workers(self._db, now_ms)

    def offer_groups(self, now_ms: int) -> OfferGroups:
        return OfferGroups(self.offering_workers(now_ms))

    def deferred_ms(self, job_id: str) -> int | None:
        row = self._db.execute("SELECT deferred_ms FROM deferrals WHERE job = ?", (job_id,)).fetchone()
        return None if row is None else int(row[0])

    def put_deferral(self, job_id: str, now_ms: int, before_ms: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO deferrals VALUES (?, ?)", (job_id, now_ms))
        self._db.execute("DELETE FROM deferrals WHERE deferred_ms < ?", (before_ms,))

    def schedules(self) -> list[Schedule]:
        return read_schedules(self._db)

    def put_schedule(self, schedule: Schedule) -> None:
        row = (schedule.name, schedule_to_text(schedule), schedule.next_ms)
        self._db.execute("INSERT OR REPLACE INTO schedules VALUES (?, ?, ?)", row)

    def delete_schedule(self, name: str) -> None:
        self._db.execute("DELETE FROM schedules WHERE name = ?", (name,))

    # --- waiters

    def bind_worker(self, worker: str, waiter: str) -> None:
        """Set the waiter to wake for a worker."""
        self._db.execute("UPDATE workers SET waiter = ? WHERE id = ?", (waiter, worker))
        self._change_topology()

    def topology(self) -> int:
        """A number that changes with the workers and their waiters."""
        return self._number("topology")

    def worker_waiters(self) -> list[tuple[str, frozenset[str], str]]:
        """Workers that have a waiter: id, queues, waiter."""
        rows = self._db.execute("SELECT id, declaration, waiter FROM workers WHERE waiter IS NOT NULL ORDER BY id")
        return [(worker, frozenset(json.loads(text)["queues"]), waiter) for worker, text, waiter in rows]

    def await_jobs(self, ids: Sequence[str], waiter: str) -> None:
        """Wake a waiter when one of these jobs finishes; the id "" stands for all."""
        self._db.executemany("INSERT OR IGNORE INTO awaited VALUES (?, ?)", [(job_id, waiter) for job_id in ids])

    def await_no_jobs(self, ids: Sequence[str], waiter: str) -> None:
        self._db.executemany("DELETE FROM awaited WHERE job = ? AND waiter = ?", [(job_id, waiter) for job_id in ids])

    def take_waiters(self, finished: Iterable[str]) -> set[str]:
        """Waiters of these jobs. Each is taken once: it looks at its jobs, and waits again."""
        if self._db.execute("SELECT 1 FROM awaited LIMIT 1").fetchone() is None:
            return set()
        found: set[str] = set()
        for chunk in _chunks(["", *finished]):
            marks = ", ".join("?" * len(chunk))
            rows = self._db.execute(f"SELECT DISTINCT waiter FROM awaited WHERE job IN ({marks})", chunk).fetchall()
            if rows:
                found.update(waiter for (waiter,) in rows)
                self._db.execute(f"DELETE FROM awaited WHERE job IN ({marks})", chunk)
        return found

    def forget_waiters(self, waiters: Iterable[str]) -> None:
        """Remove waiters whose processes have ended."""
        rows = [(waiter,) for waiter in waiters]
        self._db.executemany("UPDATE workers SET waiter = NULL WHERE waiter = ?", rows)
        self._db.executemany("DELETE FROM awaited WHERE waiter = ?", rows)
        self._change_topology()

    def keep_latest_ms(self, latest_ms: int) -> None:
        """Record that the store's time may have come to this."""
        self._db.execute("UPDATE numbers SET value = max(value, ?) WHERE name = 'latest_ms'", (latest_ms,))

    def delete_unused_buckets(self) -> None:
        self._db.execute("DELETE FROM buckets WHERE id NOT IN (SELECT bucket FROM counts)")
        self._buckets.clear()

    # --- writing

    def flush(self) -> None:
        """Write all changes."""
        if not (self._changed or self._deleted):
            return
        counts: dict[tuple[int, int], int] = {}
        inserts: list[Row] = []
        updates: list[Row] = []
        renewals: list[Row] = []
        results: list[Row] = []
        for job_id, record in self._changed.items():
            before = self._stored.get(job_id)
            if before is None:
                inserts.append(self._insert_row(record, counts))
            elif before.state is record.state is JobState.LEASED and before.token == record.token:
                renewals.append(self._renewal_row(record))
            else:
                updates.append(self._update_row(before, record, counts))
                if record.result is not None:
                    results.append((self._seqs[job_id], record.result))
            self._stored[job_id] = record
        if inserts:
            self._insert(inserts)
        self._run_many(_UPDATE, updates)
        self._run_many(_RENEW, renewals)
        self._run_many("INSERT INTO results VALUES (?, ?)", results)
        self._delete_rows(counts)
        self._write_dependencies()
        self._write_counts(counts)
        self._clear_changes()

    def _insert_row(self, record: JobRecord, counts: dict[tuple[int, int], int]) -> Row:
        spec, state, bucket = record.spec, STATE_NUMBERS[record.state], self._bucket(record)
        counts[state, bucket] = counts.get((state, bucket), 0) + 1
        return (
            *(spec.id, state, bucket, order_of(record)[0], record.submitted_ms, record.enqueued_ms, record.due_ms),
            *(record.token, record.attempt, record.counted_after, record.worker, record.started_ms),
            *(record.finished_ms, record.cancel_requested, record.progress, record.message, record.result_encoding),
            *(record.error, _unmet_text(record), _attempts_text(record), len(spec.payload) + len(record.result or b"")),
            *(spec.key, spec.function, spec.schedule),
        )

    def _update_row(self, before: JobRecord, record: JobRecord, counts: dict[tuple[int, int], int]) -> Row:
        job_id, state, bucket = record.spec.id, STATE_NUMBERS[record.state], self._bucket(record)
        old = STATE_NUMBERS[before.state], self._bucket(before)
        if old != (state, bucket):
            counts[old] = counts.get(old, 0) - 1
            counts[state, bucket] = counts.get((state, bucket), 0) + 1
        return (
            *(state, bucket, order_of(record)[0], record.enqueued_ms, record.due_ms, record.token, record.attempt),
            *(record.counted_after, record.worker, record.started_ms, record.finished_ms, record.cancel_requested),
            *(record.progress, record.message, record.result_encoding, record.error, _unmet_text(record)),
            *(_attempts_text(record), self._payload_bytes[job_id] + len(record.result or b""), record.preempted_for),
            *(gang_to_text(record.gang), self._seqs[job_id]),
        )

    def _renewal_row(self, record: JobRecord) -> Row:
        row = (record.due_ms, record.progress, record.message, record.cancel_requested, record.error)
        return *row, record.preempted_for, gang_to_text(record.gang), self._seqs[record.spec.id]

    def _insert(self, rows: list[Row]) -> None:
        first = self._take_numbers("next_seq", len(rows))
        contents: list[Row] = []
        for seq, row in enumerate(rows, first):
            record = self._stored[row[0]]
            self._seqs[row[0]], self._payload_bytes[row[0]] = seq, len(record.spec.payload)
            self._specs.add(seq, record.spec)
            contents.append((seq, spec_to_text(record.spec), record.spec.payload))
        self._run_many(_INSERT, [(seq, *row) for seq, row in enumerate(rows, first)])
        self._run_many("INSERT INTO contents VALUES (?, ?, ?)", contents)

    def _delete_rows(self, counts: dict[tuple[int, int], int]) -> None:
        if not self._deleted:
            return
        seqs = []
        for record in self._deleted:
            of = STATE_NUMBERS[record.state], self._bucket(record)
            counts[of] = counts.get(of, 0) - 1
            seqs.append((self._seqs[record.spec.id],))
            self._stored.pop(record.spec.id, None)
        for table in ("jobs", "contents", "results"):
            self._db.executemany(f"DELETE FROM {table} WHERE seq = ?", seqs)

    def _write_dependencies(self) -> None:
        if not self._dependency_changes:
            return
        added = [pair for pair, is_added in self._dependency_changes.items() if is_added]
        removed = [pair for pair, is_added in self._dependency_changes.items() if not is_added]
        self._run_many("INSERT OR IGNORE INTO dependencies VALUES (?, ?)", added)
        self._run_many("DELETE FROM dependencies WHERE dependency = ? AND job = ?", removed)

    def _write_counts(self, counts: dict[tuple[int, int], int]) -> None:
        changes = [(state, bucket, change) for (state, bucket), change in counts.items() if change]
        self._run_many(_COUNT, changes)
        lower = [(state, bucket) for state, bucket, change in changes if change < 0]
        self._run_many("DELETE FROM counts WHERE state = ? AND bucket = ? AND jobs = 0", lower)

    def _run_many(self, statement: str, rows: list[Row]) -> None:
        if not rows:
            return
        try:
            self._db.executemany(statement, rows)
        except UnicodeEncodeError:  # texts of users' errors may have lone surrogates; nothing was written of that row
            self._db.executemany(statement.replace("INSERT INTO", "INSERT OR REPLACE INTO"), map(_encodable, rows))

    def _index_members(self, before: JobRecord | None, after: JobRecord) -> None:
        old, new, job_id = unsent_workers(before), unsent_workers(after), after.spec.id
        removed, added = ([(worker, job_id) for worker in sorted(workers)] for workers in (old - new, new - old))
        self._db.executemany("DELETE FROM assigned WHERE worker = ? AND job = ?", removed)
        self._db.executemany("INSERT INTO assigned VALUES (?, ?)", added)

    def _index_dependencies(self, before: JobRecord | None, after: JobRecord) -> None:
        job_id = after.spec.id
        old = before.unmet if before is not None and before.state is JobState.BLOCKED else ()
        new = after.unmet if after.state is JobState.BLOCKED else ()
        for other in old:
            if other not in new:
                self._dependency_changes[other, job_id] = False
                self._dependants.get(other, set()).discard(job_id)
        for other in new:
            if other not in old:
                self._dependency_changes[other, job_id] = True
                if other in self._dependants:
                    self._dependants[other].add(job_id)

    # --- reading

    def _read(self, ids: Sequence[str]) -> None:
        """Read jobs into memory."""
        for chunk in _chunks(ids):
            self._records.update(dict.fromkeys(chunk))
            marks = ", ".join("?" * len(chunk))
            self._decode(self._db.execute(f"SELECT {JOB_COLUMNS} FROM jobs WHERE id IN ({marks})", chunk).fetchall())

    def _read_dependants(self, ids: Sequence[str]) -> None:
        for chunk in _chunks(ids):
            marks = ", ".join("?" * len(chunk))
            found: dict[str, set[str]] = {job_id: set() for job_id in chunk}
            query = f"SELECT dependency, job FROM dependencies WHERE dependency IN ({marks})"
            for dependency, job in self._db.execute(query, chunk):
                found[dependency].add(job)
            self._dependants |= found
        for (dependency, job), is_added in self._dependency_changes.items():
            of_job = self._dependants.get(dependency)
            if of_job is not None:
                (of_job.add if is_added else of_job.discard)(job)

    def _decode(self, rows: list[Row], *, payloads: bool = False) -> list[JobRecord]:
        """Records of rows. A job that is in memory already is as it was read or changed."""
        specs = self._specs_of(rows, payloads=payloads)
        found: list[JobRecord] = []
        for row in rows:
            record = self._records.get(row[1])
            if record is None:
                record = record_of(row, specs[row[0]], self._shape(row[3]))
                self._records[row[1]] = self._stored[row[1]] = record
                self._seqs[row[1]], self._payload_bytes[row[1]] = row[0], row[20]
            elif payloads and record.spec is not specs[row[0]]:
                record = record_of(row, specs[row[0]], self._shape(row[3]))
            found.append(record)
        return found

    def _specs_of(self, rows: list[Row], *, payloads: bool) -> dict[int, JobSpec]:
        found: dict[int, JobSpec] = {}
        missing: dict[int, str] = {}
        for row in rows:
            spec = self._specs.get(row[0])
            if spec is not None:
                found[row[0]] = spec
            elif payloads or self._records.get(row[1]) is None:
                missing[row[0]] = row[1]
        for chunk in _chunks(list(missing)):
            marks = ", ".join("?" * len(chunk))
            columns = "seq, spec, payload" if payloads else "seq, spec, x''"
            for seq, text, payload in self._db.execute(f"SELECT {columns} FROM contents WHERE seq IN ({marks})", chunk):
                spec = found[seq] = spec_from_text(missing[seq], text, payload)
                if payloads:
                    self._specs.add(seq, spec)
        return found

    def _shape(self, bucket: int) -> Shape:
        shape = self._shapes.get(bucket)
        if shape is None:
            [text] = self._db.execute("SELECT shape FROM buckets WHERE id = ?", (bucket,)).fetchone()
            shape = self._shapes[bucket] = shape_from_text(text)
        return shape

    def _bucket(self, record: JobRecord) -> int:
        """Number of the bucket of a job, which is created if it does not exist."""
        named = record.spec.queue, record.shape
        number = self._buckets.get(named)
        if number is None:
            values = record.spec.queue, shape_to_text(record.shape)
            row = self._db.execute("SELECT id FROM buckets WHERE queue = ? AND shape = ?", values).fetchone()
            if row is None:
                number = self._take_numbers("next_bucket", 1)
                self._db.execute("INSERT INTO buckets VALUES (?, ?, ?)", (number, *values))
            else:
                number = int(row[0])
            self._buckets[named] = number
        return number

    def _number(self, name: str) -> int:
        [value] = self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,)).fetchone()
        return int(value)

    def _take_numbers(self, name: str, count: int) -> int:
        """Reserve new numbers. Returns the first one."""
        first = self._number(name)
        self._db.execute("UPDATE numbers SET value = ? WHERE name = ?", (first + count, name))
        return first

    def _change_topology(self) -> None:
        self._db.execute("UPDATE numbers SET value = value + 1 WHERE name = 'topology'")


class SqliteBucket:
    """Ready jobs of one queue and shape, read in chunks: each chunk is as large as all earlier ones together."""

    __slots__ = ("_bucket", "_chunk", "_limit", "_position", "_records", "_table")

    def __init__(self, table: SqliteTable, bucket: int, limit: int, first: Sequence[JobRecord] = ()) -> None:
        """`first`: the first jobs, if they were read before."""
        self._table, self._bucket, self._limit = table, bucket, limit
        self._records = first or table.next_of_bucket(bucket, _BEFORE_ALL, min(limit, FIRST_CHUNK))
        self._chunk = len(self._records)
        self._position = 0

    def peek(self) -> JobRecord | None:
        if self._position >= len(self._records):
            if not self._records or self._limit <= 0:
                return None
            last = order_of(self._records[-1])
            self._records = self._table.next_of_bucket(self._bucket, last, min(self._chunk, self._limit))
            self._position = 0
            self._chunk = min(2 * self._chunk, LONGEST_CHUNK)
            if not self._records:
                return None
        return self._records[self._position]

    def pop(self) -> None:
        self._position += 1
        self._limit -= 1


_BEFORE_ALL = (-(2**62), "")


# --- rows


def record_of(row: Row, spec: JobSpec, shape: Shape, result: bytes | None = None) -> JobRecord:
    """The record of a row of `JOB_COLUMNS`."""
    return JobRecord(
        spec=spec,
        state=STATES[row[2]],
        shape=shape,
        submitted_ms=row[4],
        enqueued_ms=row[5],
        due_ms=row[6],
        token=row[7],
        attempt=row[8],
        counted_after=row[9],
        worker=row[10],
        started_ms=row[11],
        finished_ms=row[12],
        cancel_requested=bool(row[13]),
        progress=row[14],
        message=row[15],
        result_encoding=row[16],
        error=row[17],
        unmet=tuple(json.loads(row[18])) if row[18] else (),
        attempts=attempts_from_text(row[19]) if row[19] else (),
        preempted_for=row[21],
        gang=gang_from_text(row[22]),
        result=result,
    )


def finished_filter(chosen: JobFilter) -> tuple[str, list[Any]]:
    """Condition for finished jobs that a filter accepts, and its values."""
    states = sorted(STATE_NUMBERS[state] for state in purgeable_states(chosen))
    terms = ["finished_ms IS NOT NULL"]
    if chosen.states:
        terms.append(f"state IN ({', '.join(map(str, states))})")
    more, values = row_filter(chosen)
    return " AND ".join(terms + more), values


def row_filter(chosen: JobFilter) -> tuple[list[str], list[Any]]:
    """Conditions of a filter except for the states, and their values."""
    terms: list[str] = []
    values: list[Any] = []
    for column, value in (("function", chosen.function), ("schedule", chosen.schedule)):
        if value is not None:
            terms.append(f"{column} = ?")
            values.append(value)
    if chosen.queue is not None:
        terms.append("bucket IN (SELECT id FROM buckets WHERE queue = ?)")
        values.append(chosen.queue)
    if chosen.finished_before_ms is not None:
        terms.append("finished_ms < ?")
        values.append(chosen.finished_before_ms)
    return terms, values


def read_queue_settings(db: sqlite3.Connection) -> dict[str, QueueSettings]:
    rows = db.execute("SELECT queue, paused, weight, max_running FROM queues")
    return {queue: QueueSettings(bool(paused), weight, max_running) for queue, paused, weight, max_running in rows}


def read_reservations(db: sqlite3.Connection) -> dict[str, Reservation]:
    rows = db.execute("SELECT queue, job, worker, tried_ms FROM reservations")
    return {row[0]: Reservation(*row) for row in rows}


def read_schedules(db: sqlite3.Connection) -> list[Schedule]:
    """All schedules, by name."""
    rows = db.execute("SELECT name, declaration, next_ms FROM schedules ORDER BY name").fetchall()
    return [_schedule(*row) for row in rows]


_schedule = lru_cache(SCHEDULES_CACHED)(schedule_from_text)


def _unmet_text(record: JobRecord) -> str | None:
    return json.dumps(record.unmet) if record.unmet else None


def _attempts_text(record: JobRecord) -> str | None:
    return attempts_to_text(record.attempts) if record.attempts else None


def _encodable(row: Row) -> Row:
    return tuple(
        value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value for value in row
    )


def _chunks(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Split items into lists whose lengths are powers of two, padded with the last item, so that few different
    statements occur."""
    for start in range(0, len(items), IDS_PER_QUERY):
        chunk = list(items[start : start + IDS_PER_QUERY])
        yield chunk + chunk[-1:] * ((1 << (len(chunk) - 1).bit_length()) - len(chunk))
