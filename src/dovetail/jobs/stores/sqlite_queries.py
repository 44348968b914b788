"""Queries of the SQLite store that change nothing: whole jobs, lists, counts."""

# ruff: noqa: S608 - queries are put together from constants; values are bound

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.jobs.store import Page
from dovetail.jobs.stores.memory_store import stats_of, without_contents
from dovetail.jobs.stores.serialization import shape_from_text, spec_from_text
from dovetail.jobs.stores.sqlite_schema import FINISHED_NUMBERS, READY, STATE_NUMBERS, STATES
from dovetail.jobs.stores.sqlite_table import IDS_PER_QUERY, JOB_COLUMNS, read_queue_settings, record_of, row_filter

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from dovetail.jobs.job import JobRecord, JobState
    from dovetail.jobs.store import JobFilter, QueueStats
    from dovetail.resources.shape import Shape

_COLUMNS = ", ".join(f"jobs.{column.strip()}" for column in JOB_COLUMNS.split(","))
_WHOLE = f"""SELECT {_COLUMNS}, shape, spec, payload, result FROM jobs JOIN buckets ON buckets.id = bucket
    JOIN contents USING (seq) LEFT JOIN results USING (seq) WHERE jobs.id IN """
_LISTED = f"""SELECT {_COLUMNS}, shape, spec, x'', NULL FROM jobs JOIN buckets ON buckets.id = bucket
    JOIN contents USING (seq) WHERE jobs.id IN """


def read_jobs(db: sqlite3.Connection, ids: Sequence[str]) -> list[JobRecord | None]:
    """Whole records, in the order of the ids."""
    found = _records(db, _WHOLE, ids)
    return [found.get(job_id) for job_id in ids]


def find_jobs(db: sqlite3.Connection, chosen: JobFilter, limit: int, before: str | None) -> Page:
    """A page of a list."""
    terms, values = row_filter(chosen)
    if before is not None:
        terms.append("id < ?")
        values.append(before)
    ids: list[str] = []
    for state in [None] if not chosen.states else sorted(STATE_NUMBERS[state] for state in chosen.states):
        of_state = [*terms, *([] if state is None else [f"state = {state}"])]
        where = f"WHERE {' AND '.join(of_state)}" if of_state else ""
        query = f"SELECT id FROM jobs {where} ORDER BY id DESC LIMIT ?"
        ids += [job_id for (job_id,) in db.execute(query, (*values, limit + 1))]
    ids.sort(reverse=True)
    found = _records(db, _LISTED, ids[:limit])
    jobs = [without_contents(found[job_id]) for job_id in ids[:limit]]
    return Page(jobs, jobs[-1].id if len(ids) > limit else None)


def id_of_key(db: sqlite3.Connection, key: str) -> str | None:
    row = db.execute("SELECT id FROM jobs WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def finished_of(db: sqlite3.Connection, ids: Sequence[str]) -> list[str]:
    """The jobs that are finished or unknown."""
    states: dict[str, int] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chunk = ids[start : start + IDS_PER_QUERY]
        states.update(db.execute(f"SELECT id, state FROM jobs WHERE id IN ({_marks(chunk)})", chunk))
    return [job_id for job_id in ids if states.get(job_id) is None or states[job_id] in FINISHED_NUMBERS]


def queue_stats(db: sqlite3.Connection) -> list[QueueStats]:
    """Counts of all queues that have jobs or settings, by name."""
    settings = read_queue_settings(db)
    counts: dict[str, dict[JobState, int]] = {queue: {} for queue in settings}
    shapes: dict[str, dict[Shape, int]] = {}
    query = "SELECT queue, shape, state, jobs FROM counts JOIN buckets ON buckets.id = bucket"
    for queue, shape, number, jobs in db.execute(query):
        of_queue, state = counts.setdefault(queue, {}), STATES[number]
        of_queue[state] = of_queue.get(state, 0) + jobs
        if number == READY:
            shapes.setdefault(queue, {})[shape_from_text(shape)] = jobs
    oldest: dict[str, int] = {}
    query = f"""SELECT queue, min(enqueued_ms) FROM jobs JOIN buckets ON buckets.id = bucket
        WHERE state = {READY} GROUP BY bucket"""
    for queue, enqueued_ms in db.execute(query):
        oldest[queue] = min(enqueued_ms, oldest.get(queue, enqueued_ms))
    return stats_of(counts, settings, oldest, shapes)


def _records(db: sqlite3.Connection, query: str, ids: Sequence[str]) -> dict[str, JobRecord]:
    found: dict[str, JobRecord] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chunk = ids[start : start + IDS_PER_QUERY]
        for row in db.execute(f"{query} ({_marks(chunk)})", chunk):
            *job, shape, text, payload, result = row
            found[job[1]] = record_of(job, spec_from_text(job[1], text, payload), shape_from_text(shape), result)
    return found


def _marks(items: Sequence[Any]) -> str:
    return ", ".join("?" * len(items))
