"""Rows of workers in the SQLite store: registration, heartbeats, offers."""

# ruff: noqa: S608 - queries are put together from constants; values are bound

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dovetail.jobs.free_vector import free_from_text, free_to_text
from dovetail.jobs.store import Offer, OfferingWorker
from dovetail.jobs.stores.serialization import worker_from_text, worker_to_text
from dovetail.jobs.stores.sqlite_schema import LEASED

if TYPE_CHECKING:
    import sqlite3

    from dovetail.jobs.store import WorkerInfo

WORKERS_CACHED = 1_000
_PUT = """INSERT INTO workers (id, declaration, registered_ms, heartbeat_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET declaration = excluded.declaration, registered_ms = excluded.registered_ms,
    heartbeat_ms = excluded.heartbeat_ms, offered_ms = NULL"""
_BEAT = "UPDATE workers SET heartbeat_ms = ? WHERE id = ?"
_OFFER = """UPDATE workers SET heartbeat_ms = ?, offered_ms = ?, lease_ms = ?, free_slots = ?, free = ?, ends_ms = ?
    WHERE id = ?"""
_OFFER_COLUMNS = "id, declaration, offered_ms, lease_ms, free_slots, free, ends_ms"


def put_worker(db: sqlite3.Connection, worker: WorkerInfo) -> None:
    """Insert or replace a worker, without an offer."""
    db.execute(_PUT, (worker.id, worker_to_text(worker), worker.registered_ms, worker.heartbeat_ms))


def put_heartbeat(db: sqlite3.Connection, worker: str, now_ms: int, offer: Offer | None) -> bool:
    """Record a heartbeat, and an offer if there is one. Returns False if the worker is not registered."""
    if offer is None:
        return db.execute(_BEAT, (now_ms, worker)).rowcount > 0
    values = now_ms, offer.offered_ms, offer.lease_ms, offer.slots, free_to_text(offer.free), offer.ends_ms, worker
    return db.execute(_OFFER, values).rowcount > 0


def put_offer(db: sqlite3.Connection, worker: str, offer: Offer) -> None:
    values = offer.slots, free_to_text(offer.free), offer.ends_ms, worker
    db.execute("UPDATE workers SET free_slots = ?, free = ?, ends_ms = ? WHERE id = ?", values)


def read_offering_workers(db: sqlite3.Connection, now_ms: int) -> list[OfferingWorker]:
    """Workers with a live offer, by id."""
    rows = db.execute(f"SELECT {_OFFER_COLUMNS} FROM workers WHERE offered_ms >= ? - lease_ms ORDER BY id", (now_ms,))
    return [OfferingWorker(worker, _queues(text), _offer(*offer)) for worker, text, *offer in rows]


def read_workers(db: sqlite3.Connection) -> list[WorkerInfo]:
    """All workers, by id, with the number of their leases."""
    leases = dict(db.execute(f"SELECT worker, count(*) FROM jobs WHERE state = {LEASED} GROUP BY worker").fetchall())
    found = []
    query = f"SELECT registered_ms, heartbeat_ms, {_OFFER_COLUMNS} FROM workers ORDER BY id"
    for registered_ms, heartbeat_ms, worker, text, *offer in db.execute(query).fetchall():
        info = worker_from_text(worker, text, registered_ms, heartbeat_ms, leases.get(worker, 0))
        found.append(info if offer[0] is None else replace(info, offer=_offer(*offer)))
    return found


@lru_cache(WORKERS_CACHED)
def _queues(declaration: str) -> tuple[str, ...]:
    return worker_from_text("", declaration).queues


@lru_cache(WORKERS_CACHED)
def _offer(offered_ms: int, lease_ms: int, slots: int, free: str, ends_ms: int | None) -> Offer:
    return Offer(offered_ms, lease_ms, slots, free_from_text(free), ends_ms)
