"""Job store in Redis 7 or Valkey, for workers and submitters on many machines.

Each step is one call of a Lua function (`redis_functions/`), which the server runs without interruption: the functions
mirror `state_machine.py`, `ordering.py`, `transaction.py` and the first assignment of `resources/fit.py`. The time is
the server's.

A worker waits for a member of the sorted set `wake:WORKER` (BZPOPMIN), which steps add for the workers that their
effects concern. The request stays at the server when `wake` ends the wait: a busy worker sends nothing for its waits.
An idle worker sends its next exchange behind the request: the server runs it as soon as it ends the wait, which saves a
round trip. So a worker that is stopped or unreachable while it is idle can still claim once; these leases expire.
A submitter that waits for jobs subscribes to a channel per job; only the end of jobs that are waited for is published.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.jobs.job import FINISHED
from dovetail.jobs.store import Page, Purged, QueueStats, Receipt, purgeable_states
from dovetail.jobs.stores import redis_codec as codec
from dovetail.jobs.stores.redis_connection import RedisLink, RedisServer, has_words, pack_command
from dovetail.jobs.stores.serialization import schedule_to_text, spec_to_text, worker_to_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dovetail.jobs.job import JobRecord, JobSpec, JobState
    from dovetail.jobs.store import Exchange, JobFilter, Reply, Reservation, Schedule, WorkerInfo

WAKE_BLOCK_S = 20
"""Time for which the server keeps a request for a wake-up. Until then a worker that vanished can take one from a
successor with the same id."""
LATE_S = 10.0
"""Delay of a reply from which the connection counts as broken."""
IDS_PER_CALL = 500
LIST_LIMIT = 1_000


class RedisStore:
    """Jobs under one prefix of one database."""

    def __init__(self, url: str, *, prefix: str = "dovetail", clock_ms: Callable[[], int] | None = None) -> None:
        if not prefix or set("{}") & set(prefix):
            message = f"prefix={short_repr(prefix)} must be a text without braces"
            raise ConfigError(Problem("DT666", message, fixes=('prefix="dovetail"',)))
        self._server = RedisServer(url, prefix, clock_ms)
        self._has_test_clock = clock_ms is not None
        self._waiters: dict[str, WorkerWaiter] = {}
        self._subscriptions: list[Subscription] = []
        self._lock = threading.Lock()
        self._closing = Signal()
        self._closed = False
        self._process = os.getpid()

    # --- jobs

    def submit(self, specs: Sequence[JobSpec]) -> list[Receipt]:
        if not specs:
            return []
        return [codec.receipt_from(item) for item in self._server.call(b"submit", *_job_arguments(specs))]

    def ingest(
        self,
        list_name: str,
        rejected_list: str,
        messages: Sequence[bytes],
        rejected: Sequence[bytes],
        specs: Sequence[JobSpec],
    ) -> bool:
        """Take these messages from the right end of a list of another program, keep entries for rejected ones in a
        list, and submit jobs, in one step. False: the list has changed; nothing was done."""
        names = codec.to_bytes(list_name), codec.to_bytes(rejected_list)
        counts = b"%d" % len(messages), b"%d" % len(rejected)
        return bool(self._server.call(b"ingest", *names, *counts, *messages, *rejected, *_job_arguments(specs)))

    def cancel(self, ids: Sequence[str], reason: str = "") -> list[JobState | None]:
        states = self._server.call(b"cancel", codec.to_bytes(reason), *map(codec.to_bytes, ids))
        return [codec.state_from(state) for state in states]

    def requeue(self, ids: Sequence[str]) -> list[JobState | None]:
        return [codec.state_from(state) for state in self._server.call(b"requeue", *map(codec.to_bytes, ids))]

    def purge(self, chosen: JobFilter, limit: int = 10_000, keep_bytes: int | None = None) -> Purged:
        """In parts of at most 1,000 jobs, so that no step takes long."""
        states = sorted(purgeable_states(chosen)) if not chosen.states or chosen.states & FINISHED else []
        jobs = removed_bytes = 0
        skipped: dict[str, int] = {}
        while states and jobs < limit:
            keep = False if keep_bytes is None else keep_bytes
            request = [codec.filter_data(chosen, states), limit - jobs, keep, skipped]
            count, count_bytes, is_done, left = self._server.call(b"purge", codec.request_text(request))
            jobs, removed_bytes = jobs + count, removed_bytes + count_bytes
            skipped = {state.decode(): number for state, number in zip(left[::2], left[1::2], strict=True)}
            if is_done:
                break
        return Purged(jobs, removed_bytes)

    def get(self, ids: Sequence[str]) -> list[JobRecord | None]:
        found: list[JobRecord | None] = []
        for part in _parts(ids):
            rows = self._server.call(b"get", *map(codec.to_bytes, part))
            found += [None if row is None else codec.record_from(row) for row in rows]
        return found

    def find(self, chosen: JobFilter, limit: int = 100, before: str | None = None) -> Page:
        """Looks through at most 1,000 jobs per step: a long list is not of one moment, each of its records is."""
        filter_data = codec.filter_data(chosen, sorted(chosen.states))
        jobs: list[JobRecord] = []
        position: bytes | None = None if before is None else codec.to_bytes(before)
        while len(jobs) <= limit:
            count = min(limit + 1 - len(jobs), LIST_LIMIT)
            start = False if position is None else codec.to_text(position)
            rows, position = self._server.call(b"find", codec.request_text([filter_data, count, start]))
            jobs += map(codec.record_from, rows)
            if position is None:
                break
        return Page(jobs[:limit], jobs[limit - 1].id if len(jobs) > limit else None)

    def id_of_key(self, key: str) -> str | None:
        found = self._server.call(b"id_of_key", codec.to_bytes(key))
        return None if found is None else codec.to_text(found)

    def wait_finished(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        if timeout_s <= 0 or not ids or self._closed:
            return self._finished(b"finished", ids)
        subscription = self._subscription()
        try:
            found = subscription.wait(ids, timeout_s, lambda: self._finished(b"watch", ids))
        except BaseException:
            subscription.disconnect()
            raise
        self._keep(subscription)
        return found

    def _keep(self, subscription: Subscription) -> None:
        """Keep a wake-up for the next wait."""
        with self._lock:
            if not self._closed:
                self._subscriptions.append(subscription)
                return
        subscription.disconnect()

    def _finished(self, function: bytes, ids: Sequence[str]) -> list[str]:
        rows = [self._server.call(function, *map(codec.to_bytes, part)) for part in _parts(ids)]
        return [codec.to_text(job_id) for row in rows for job_id in row]

    def _subscription(self) -> Subscription:
        self._check_process()
        with self._lock:
            if self._subscriptions:
                return self._subscriptions.pop()
        return Subscription(self._server, self._closing)

    # --- workers

    def register_worker(self, worker: WorkerInfo) -> None:
        text, queues = codec.to_bytes(worker_to_text(worker)), codec.request_text(list(worker.queues))
        self._server.call(b"register_worker", codec.to_bytes(worker.id), text, queues)

    def remove_worker(self, worker: str) -> None:
        self._server.call(b"remove_worker", codec.to_bytes(worker))
        with self._lock:
            waiter = self._waiters.pop(worker, None)
        if waiter is not None:
            waiter.end()

    def workers(self) -> list[WorkerInfo]:
        return sorted(map(codec.worker_from, self._server.call(b"workers")), key=_worker_id)

    def exchange(self, request: Exchange) -> Reply:
        reply = self._server.call(b"exchange", *codec.exchange_arguments(request))
        return codec.reply_from(reply, request)

    def wait(self, worker: str, timeout_s: float) -> bool:
        return self._waiter(worker).wait(timeout_s)

    def wait_and_exchange(self, request: Exchange, timeout_s: float) -> Reply | None:
        if self._has_test_clock:  # the call would have the time at which it was sent
            self.wait(request.worker, timeout_s)
            return None
        command = self._server.command(b"exchange", *codec.exchange_arguments(request))
        reply = self._waiter(request.worker).exchange(command, timeout_s)
        return None if reply is None else codec.reply_from(reply, request)

    def wake(self, worker: str) -> None:
        self._waiter(worker).wake()

    def _waiter(self, worker: str) -> WorkerWaiter:
        self._check_process()
        found = self._waiters.get(worker)
        if found is None:
            with self._lock:
                found = self._waiters.get(worker)
                if found is None:
                    found = self._waiters[worker] = WorkerWaiter(self._server, worker)
                    if self._closed:
                        found.end()
        return found

    def _check_process(self) -> None:
        """A fork has waits of its own: it must not use the sockets of its parent."""
        if self._process != os.getpid():
            self._process, self._lock, self._closing = os.getpid(), threading.Lock(), Signal()
            self._waiters, self._subscriptions = {}, []

    # --- queues and schedules

    def set_paused(self, queue: str, paused: bool) -> None:
        self._server.call(b"set_paused", codec.to_bytes(queue), b"1" if paused else b"0")

    def set_limits(self, queue: str, weight: int | None, max_running: int | None) -> None:
        numbers = (b"" if number is None else b"%d" % number for number in (weight, max_running))
        self._server.call(b"set_limits", codec.to_bytes(queue), *numbers)

    def stats(self) -> list[QueueStats]:
        return codec.stats_from(self._server.call(b"stats"))

    def reservations(self) -> list[Reservation]:
        return codec.reservations_from(self._server.call(b"reservations"))

    def put_schedule(self, schedule: Schedule) -> None:
        text = codec.to_bytes(schedule_to_text(schedule))
        self._server.call(b"put_schedule", codec.to_bytes(schedule.name), text, b"%d" % schedule.next_ms)

    def remove_schedule(self, name: str) -> bool:
        return bool(self._server.call(b"remove_schedule", codec.to_bytes(name)))

    def schedules(self) -> list[Schedule]:
        return codec.schedules_from(self._server.call(b"schedules"))

    def fire(self, name: str, fire_ms: int, next_ms: int, spec: JobSpec) -> Receipt | None:
        times = b"%d" % fire_ms, b"%d" % next_ms
        receipt = self._server.call(b"fire", codec.to_bytes(name), *times, *_job_arguments([spec]))
        return None if receipt is None else codec.receipt_from(receipt)

    # --- the store itself

    def now_ms(self) -> int:
        now_ms: int = self._server.call(b"now")
        return now_ms

    def local_host(self) -> str:
        """Address of this machine on the route to the server."""
        link = self._server.connect()
        try:
            name = link.socket.getsockname()
        finally:
            link.disconnect()
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiters = list(self._waiters.values())
            subscriptions, self._subscriptions = self._subscriptions, []
        self._closing.set()
        for waiter in waiters:
            waiter.end()
        for subscription in subscriptions:
            subscription.disconnect()
        self._server.close()


class Signal:
    """A flag that ends a `poll`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)


class WorkerWaiter:
    """The waits of one worker: its request for a wake-up at the server, and the wake-ups of this process."""

    def __init__(self, server: RedisServer, worker: str) -> None:
        self._server = server
        self._key = server.prefix + b"wake:" + codec.to_bytes(worker)
        self._signal = Signal()
        self._is_woken = False
        self._ended = False
        self._waiting = threading.Lock()
        self._connection: RedisLink | None = None
        self._late_at: float | None = None
        """Deadline of the reply to the request; None if no request is at the server."""
        self._poll = select.poll()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._signal.set()

    def end(self) -> None:
        """End this wait and all later ones."""
        self._ended = True
        self.wake()
        if self._waiting.acquire(blocking=False):  # otherwise the waiting thread disconnects
            self._disconnect()
            self._waiting.release()

    def wait(self, timeout_s: float) -> bool:
        with self._waiting:
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> bool:
        if self._is_woken:
            return self._clear()
        try:
            if timeout_s <= 0:
                return self._ask()
            return self._wait_until(time.monotonic() + timeout_s)
        except self._server.broken:
            self._disconnect()
            return True  # a wake-up may be lost
        except self._server.refused as error:
            self._disconnect()
            if has_words(error, "UNBLOCKED"):  # the server became a replica
                return True
            self._server.refuse(error)

    def exchange(self, command: bytes, timeout_s: float) -> Any:
        """Wait, with this call behind the request; its reply, or None if it was not made or has failed."""
        with self._waiting:
            if self._is_woken:
                self._clear()
                return None
            try:
                return self._exchange(command, time.monotonic() + timeout_s)
            except self._server.broken:
                self._disconnect()
                return None

    def _exchange(self, command: bytes, deadline: float) -> Any:
        connection = self._connected()
        if self._late_at is None:
            self._request(connection, command)
        else:
            connection.send_packed(command)
        self._late_at = None  # from here on, both replies are read, or the connection is closed
        replies: list[Any] = []
        try:
            if not self._is_readable(connection, deadline):
                if self._ended:
                    return None
                self._server.add_wake_up(self._key)
            while len(replies) < 2:
                replies += connection.read_all()
        finally:
            if len(replies) < 2:
                self._disconnect()
        return None if isinstance(replies[1], Exception) else replies[1]

    def _is_readable(self, connection: RedisLink, deadline: float) -> bool:
        """Wait for a reply until the deadline, or until `wake`."""
        ready = dict(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if self._signal.fd in ready and not self._ended:
            self._clear()
        return connection.socket.fileno() in ready

    def _clear(self) -> bool:
        if self._ended:
            self._disconnect()
        else:
            self._signal.clear()
            self._is_woken = False  # after the signal, so that it is never set without the flag
        return True

    def _ask(self) -> bool:
        """Whether there is a wake-up, without waiting."""
        connection = self._connected()
        if self._late_at is None:
            connection.send(b"ZPOPMIN", self._key)
            return bool(connection.read())
        self._server.ping()
        return bool(self._poll.poll(0)) and self._read(connection)

    def _wait_until(self, deadline: float) -> bool:
        connection = self._connected()
        while True:
            if self._late_at is None:
                self._request(connection)
            left_s = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0.0, left_s) * 1000))
            if self._signal.fd in ready:
                return self._clear()
            if ready:
                if self._read(connection):
                    return True
            elif time.monotonic() >= deadline:
                if self._late_at is not None and time.monotonic() > self._late_at:
                    self._disconnect()
                    return True
                return False

    def _connected(self) -> RedisLink:
        if self._connection is None:
            connection = self._server.connect()
            self._poll = select.poll()
            self._poll.register(self._signal.fd, select.POLLIN)
            self._poll.register(connection.socket, select.POLLIN)
            self._connection, self._late_at = connection, None
        return self._connection

    def _request(self, connection: RedisLink, following: bytes = b"") -> None:
        """Ask for a wake-up, and send a command that the server runs behind it."""
        connection.send_packed(pack_command((b"BZPOPMIN", self._key, b"%d" % WAKE_BLOCK_S)) + following)
        self._late_at = time.monotonic() + WAKE_BLOCK_S + LATE_S

    def _read(self, connection: RedisLink) -> bool:
        """Read the reply to the request: whether it is a wake-up."""
        reply = connection.read()
        self._late_at = None
        return reply is not None

    def _disconnect(self) -> None:
        connection, self._connection, self._late_at = self._connection, None, None
        if connection is not None:
            connection.disconnect()


class Subscription:
    """A connection that receives messages about finished jobs. One thread uses it at a time."""

    def __init__(self, server: RedisServer, closing: Signal) -> None:
        self._server = server
        self._closing = closing
        self._connection: RedisLink | None = None

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def wait(self, ids: Sequence[str], timeout_s: float, find: Callable[[], list[str]]) -> list[str]:
        """Wait until `find` finds a job, or the time has passed."""
        deadline = time.monotonic() + timeout_s
        channels = [self._server.prefix + b"finished:" + codec.to_bytes(job_id) for job_id in dict.fromkeys(ids)]
        while True:
            try:
                return self._wait(channels, deadline, find)
            except self._server.broken:
                self.disconnect()  # the next connection finds what has finished meanwhile
            except self._server.refused as error:
                self._server.refuse(error)

    def _wait(self, channels: list[bytes], deadline: float, find: Callable[[], list[str]]) -> list[str]:
        if self._connection is None:
            self._connection = self._server.connect()
        connection = self._connection
        connection.send(b"SUBSCRIBE", *channels)
        self._read_until(connection, b"subscribe", len(channels))
        found = find()
        poll = select.poll()
        poll.register(self._closing.fd, select.POLLIN)
        poll.register(connection.socket, select.POLLIN)
        while not found and (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(left_s * 1000))
            if self._closing.fd in ready:
                break
            if ready:
                connection.read_all()  # messages of jobs that have finished
                found = find()
        connection.send(b"UNSUBSCRIBE")
        self._read_until(connection, b"unsubscribe", 0)
        return found

    @staticmethod
    def _read_until(connection: RedisLink, kind: bytes, count: int) -> None:
        """Read replies until one of this kind reports `count` subscriptions."""
        while True:
            for reply in connection.read_all():
                if isinstance(reply, Exception):
                    raise reply
                if reply[0] == kind and reply[2] == count:
                    return


def _job_arguments(specs: Iterable[JobSpec]) -> list[bytes]:
    arguments: list[bytes] = []
    for spec in specs:
        arguments += (codec.to_bytes(spec.id), codec.to_bytes(spec_to_text(spec)), spec.payload)
    return arguments


def _parts(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[start : start + IDS_PER_CALL] for start in range(0, len(ids), IDS_PER_CALL))


def _worker_id(worker: WorkerInfo) -> str:
    return worker.id
