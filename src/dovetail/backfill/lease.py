"""Lease of a column: one backfill at a time, by Lamport's bakery algorithm in files with heartbeats.

Lance offers no exclusive create on object stores, so the lease is Lamport's bakery in files of `<column>/lease/`:

    <id>.asks    the claim: written first, deleted first
    <id>.tries   the claimant saw no predecessor and checks again
    <id>.holds   the second check succeeded: the claimant holds the lease
    <id>.beat    time of the last heartbeat

A claimant lists the other claims. If none tries or holds, and no live claim has a smaller id, it writes `tries`, checks
again, and holds the lease if nothing changed; otherwise it deletes `tries`. Two cannot hold it: the one with the
smaller id would have claimed after the other's second check, and so would have seen the other's `tries`.

The liveness of a process on this machine is known. A process elsewhere is dead when its heartbeat file has not changed
for 20 s by the observer's clock; clocks of other machines are only displayed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dovetail.backfill.store import column_folder
from dovetail.claims.owner import ProcessId, is_alive, this_process
from dovetail.errors import Change, Problem, RunError
from dovetail.machine.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dovetail.backfill.store import TableStore

COLUMN_TAKEN = "DT434"
HEARTBEAT_S = 5.0
LEASE_TIMEOUT_S = 20.0
"""Time without a heartbeat after which a holder counts as dead."""
FIRST_POLL_S = 0.02
MAX_POLL_S = 2.0
_STALE_FILE_NS = 3600 * 10**9
TEMPORARY_FILE_S = 600.0
"""Age of a temporary file whose process is dead: files of a lease are written at once."""
_OWN_IDS: set[str] = set()
"""Claim ids of this process, without those that could not be released because the store was unreachable."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    owner: str
    run: str
    host: str
    pid: int
    began: float
    beat: float
    alive: bool
    """Whether the holder is alive; for a process elsewhere, by the time in its heartbeat."""


def read_holder(store: TableStore, column: str) -> LeaseHolder | None:
    """The current holder, or the last one if it died; None if there is none."""
    found = [claim.holder for claim in _read_claims(store, _lease_folder(column)) if claim.holds]
    return max(found, key=lambda one: (one.alive, one.began), default=None)


@dataclass(frozen=True, slots=True)
class _Claim:
    id: str
    holder: LeaseHolder
    there: bool | None
    """Whether its process is alive; None: it is elsewhere, and only the heartbeat shows it."""
    beat: bytes | None
    tries: bool
    holds: bool


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """A heartbeat, and since when it is unchanged by the local clock."""

    beat: bytes | None
    since: float
    changed: bool = False
    """It changed since the first look: the process is alive, whatever time it writes."""


class Lease:
    """Lease of a column, as a context manager. A thread writes a heartbeat every 5 s from the claim on."""

    def __init__(self, store: TableStore, column: str, run: str) -> None:
        self._store = store
        self._column = column
        self._folder = _lease_folder(column)
        self._run = run
        self._id = f"{time.time_ns():020d}-{uuid.uuid4().hex}"
        self._ended = threading.Event()
        self._lost = False
        self._last_confirmed = time.monotonic()
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._thread = threading.Thread(target=self._run_heartbeat, name="dovetail-lease", daemon=True)

    @classmethod
    def acquire(cls, store: TableStore, column: str, run: str, *, wait: bool, say: Callable[[str], None]) -> Lease:
        lease = cls(store, column, run)
        try:
            lease._announce()
            lease._wait_until_held(wait, say)
            store.delete_temporary(lease._folder, TEMPORARY_FILE_S)
        except BaseException:
            lease.release()
            raise
        return lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def is_lost(self) -> bool:
        """Whether another process took it over, or may have because the store was unreachable for too long."""
        if not self._lost and time.monotonic() - self._last_confirmed > LEASE_TIMEOUT_S:
            self._send_heartbeat()
        return self._lost

    def check_still_held(self) -> bool:
        """Whether it is still held, checked now instead of at the last heartbeat."""
        if not self._ended.is_set():
            self._send_heartbeat()
        return not self._lost and not self._ended.is_set()

    def release(self) -> None:
        self._ended.set()
        _OWN_IDS.discard(self._id)
        if self._thread.ident is not None:
            self._thread.join()
        self._remove(self._id)

    def _announce(self) -> None:
        process = this_process()
        host = socket.gethostname()
        record = {
            "owner": f"{self._run} on {host}, pid {process.pid}",
            "run": self._run,
            "host": host,
            "process": list(process),
            "began": time.time(),
        }
        _OWN_IDS.add(self._id)
        self._put("asks", json.dumps(record))
        self._thread.start()

    def _wait_until_held(self, wait: bool, say: Callable[[str], None]) -> None:
        last_text = ""
        pause = FIRST_POLL_S
        while True:
            has = self._try_acquire(say)
            if has is None:
                self._put("holds", "")
                return
            if has.holds:
                doubted = self._may_be_dead(has)
                if not wait and not doubted:
                    raise _taken_error(self._column, has.holder)
                text = _waiting_text(self._column, has.holder, doubted=doubted)
                if text != last_text:
                    say(text)
                last_text = text
            self._ended.wait(pause)
            pause = min(MAX_POLL_S, pause * 1.5)

    def _try_acquire(self, say: Callable[[str], None]) -> _Claim | None:
        """The claim that comes first; None: the lease is ours, and later claimants see it."""
        before = self._find_predecessor(say)
        if before is not None:
            return before
        self._put("tries", "")
        before = self._find_predecessor(say)
        if before is not None:
            self._store.delete(self._path("tries"))
        return before

    def _find_predecessor(self, say: Callable[[str], None]) -> _Claim | None:
        """The claim that holds, else tries, else precedes ours. Removes claims of dead processes."""
        looked = time.monotonic()
        claims = {claim.id: claim for claim in _read_claims(self._store, self._folder)}
        if claims.pop(self._id, None) is None:
            message = f"the lease of column {self._column!r} expired: no heartbeat for {LEASE_TIMEOUT_S:g} s"
            raise RunError(Problem(COLUMN_TAKEN, message, fixes=("repeat the backfill",)))
        before: list[_Claim] = []
        for id_, claim in claims.items():
            why = self._reason_dead(claim, looked)
            if why:
                if claim.holds:
                    say(f"taking over column {self._column!r} from {claim.holder.owner}: {why}")
                self._remove(id_)
            elif claim.holds or claim.tries or id_ < self._id:
                before.append(claim)
        return max(before, key=lambda one: (one.holds, one.tries), default=None)

    def _reason_dead(self, claim: _Claim, looked: float) -> str:
        """Why the claimant is dead; "": it is alive, or not known yet. `looked`: a time before the claim was read."""
        if claim.there is not None:
            return "" if claim.there else "its process is dead"
        latest = self._heartbeats.get(claim.id)
        if latest is None or latest.beat != claim.beat:
            self._heartbeats[claim.id] = _Heartbeat(claim.beat, time.monotonic(), changed=latest is not None)
            return ""
        return f"no heartbeat for {LEASE_TIMEOUT_S:g} s" if looked - latest.since > LEASE_TIMEOUT_S else ""

    def _may_be_dead(self, claim: _Claim) -> bool:
        """Whether it may be dead: its last heartbeat is old by its own clock and has not changed since the first
        look."""
        return claim.there is None and not claim.holder.alive and not self._heartbeats[claim.id].changed

    def _run_heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        began = time.monotonic()
        try:
            self._put("beat", repr(time.time()))
            if f"{self._id}.asks" in self._store.names(self._folder):
                self._last_confirmed = began
            else:
                self._lost = True
                self._ended.set()
        except OSError:  # store unreachable: after the timeout other processes consider this one dead
            if time.monotonic() - self._last_confirmed > LEASE_TIMEOUT_S:
                self._lost = True

    def _path(self, what: str) -> str:
        return f"{self._folder}/{self._id}.{what}"

    def _put(self, what: str, text: str) -> None:
        self._store.put(self._path(what), text.encode())

    def _remove(self, id_: str) -> None:
        self._store.delete(*(f"{self._folder}/{id_}.{what}" for what in ("asks", "tries", "holds", "beat")))


def _lease_folder(column: str) -> str:
    return f"{column_folder(column)}/lease"


def _read_claims(store: TableStore, folder: str) -> list[_Claim]:
    names = set(store.names(folder))
    found: list[_Claim] = []
    for name in names:
        id_, _, what = name.partition(".")
        if what != "asks":
            _delete_stale_file(store, folder, name, names)
            continue
        record = store.get(f"{folder}/{name}")
        if record is None:
            continue  # released meanwhile
        beat = store.get(f"{folder}/{id_}.beat") if f"{id_}.beat" in names else None
        who, there = _parse_claim(id_, record, beat)
        found.append(_Claim(id_, who, there, beat, f"{id_}.tries" in names, f"{id_}.holds" in names))
    return found


def _delete_stale_file(store: TableStore, folder: str, name: str, names: set[str]) -> None:
    """Delete a file left by a late heartbeat, if it is old: a listing may lack files that were just created."""
    id_ = name.partition(".")[0]
    began = id_.partition("-")[0]
    if f"{id_}.asks" not in names and began.isdecimal() and time.time_ns() - int(began) > _STALE_FILE_NS:
        store.delete(f"{folder}/{name}")


def _parse_claim(id_: str, record: bytes, beat: bytes | None) -> tuple[LeaseHolder, bool | None]:
    """The holder, and whether its process is alive."""
    try:
        record_data = json.loads(record)
        process = ProcessId(*record_data["process"])
        owner, run, host, began = (
            record_data["owner"],
            record_data["run"],
            record_data["host"],
            float(record_data["began"]),
        )
        there = _is_process_alive(id_, process, host)
    except (ValueError, KeyError, TypeError, AttributeError):  # unknown content, or a later version
        owner, run, host, began = "a process whose record cannot be read", "", "", 0.0
        process, there = ProcessId(0, ""), None
    try:
        last = float(beat) if beat else began
    except ValueError:
        last = began
    alive = time.time() - last <= LEASE_TIMEOUT_S if there is None else there
    return LeaseHolder(owner, run, host, process.pid, began, last, alive), there


def _is_process_alive(id_: str, process: ProcessId, host: str) -> bool | None:
    """Whether it is alive; None: it is on another machine. Machines are identified by boot id, because host names may
    repeat."""
    here = this_process()
    if process.space.partition(" ")[0] != here.space.partition(" ")[0]:
        return None
    if not process.space and host != socket.gethostname():
        return None
    there = is_alive(process)
    if there and process.pid == here.pid:
        return id_ in _OWN_IDS
    if there is False and process_start_time(process.pid) is not None:
        return None  # the pid was reused, or the clock was set, which shifts all start times
    return there


def _waiting_text(column: str, has: LeaseHolder, *, doubted: bool) -> str:
    if not doubted:
        return f"column {column!r} is being filled by {has.owner}: waiting"
    return f"column {column!r} was being filled by {has.owner}: checking for {LEASE_TIMEOUT_S:g} s whether it is alive"


def _taken_error(column: str, has: LeaseHolder) -> RunError:
    message = f"column {column!r} is being filled by {has.owner}"
    wait = Change({"wait": True}, note="wait until it has finished")
    if not has.pid:
        return RunError(Problem(COLUMN_TAKEN, message, fixes=(wait,)))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(has.began))
    evidence = (f"since {since}, last heartbeat {max(0.0, time.time() - has.beat):.0f} s ago",)
    return RunError(Problem(COLUMN_TAKEN, message, evidence, (wait, f"kill {has.pid}  # on {has.host}: stop it")))


@contextmanager
def hold_leases(
    store: TableStore, columns: Iterable[str], run: str, *, wait: bool, say: Callable[[str], None]
) -> Iterator[list[Lease]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Lease.acquire(store, column, run, wait=wait, say=say)) for column in sorted({*columns})
        ]
