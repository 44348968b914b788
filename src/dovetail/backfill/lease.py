"""Lease of a column: one backfill at a time, by Lamport's bakery algorithm in files with heartbeats.

Object stores have no lock that Lance could give us, so this is Lamport's bakery, in files of `<column>/lease/`:

    <id>.asks    who it is: written once, before anything else, and the first to go
    <id>.tries   it saw nobody before it, and is about to look again
    <id>.holds   it looked again, and has it
    <id>.beat    when it was last there

Who asks looks who else does. With nobody there that tries or holds, and nobody alive that asked with a smaller id, it
writes that it tries, looks again, and has it if that still is so; otherwise it takes the try back. Of two that had it,
the one with the smaller id would have asked after the other's second look, and so would have seen the other's try.

A process that can be seen from here is there or is not. One that cannot is dead when its heartbeat stayed the same for
20 s, by the clock of the one that looks: what clocks of other machines show decides nothing, and is only for display.
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
from dovetail.errors import Problem, RunError
from dovetail.machine.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dovetail.backfill.store import Store

COLUMN_TAKEN = "DT434"
HEARTBEAT_S = 5.0
LEASE_TIMEOUT_S = 20.0
"""Without a heartbeat."""
FIRST_POLL_S = 0.02
MAX_POLL_S = 2.0
_STALE_FILE_NS = 3600 * 10**9
_OWN_IDS: set[str] = set()
"""Ids of this process. One that could not be given back, because the store did not answer, is not among them."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    owner: str
    run: str
    host: str
    pid: int
    began: float
    beat: float
    alive: bool
    """Of one that cannot be seen from here: by the time that it wrote."""


def read_holder(store: Store, column: str) -> LeaseHolder | None:
    """Who has it, or had it last and died; None: nobody."""
    found = [claim.holder for claim in _read_claims(store, _lease_folder(column)) if claim.holds]
    return max(found, key=lambda one: (one.alive, one.began), default=None)


@dataclass(frozen=True, slots=True)
class _Claim:
    id: str
    holder: LeaseHolder
    there: bool | None
    """Its process; None: it cannot be seen from here, and only the heartbeat can tell."""
    beat: bytes | None
    tries: bool
    holds: bool


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """A heartbeat, and since when it is the same, by our own clock."""

    beat: bytes | None
    since: float
    changed: bool = False
    """Since we first looked: it is alive, whatever time it writes."""


class Lease:
    """A context manager; a thread says every 5 s that we are there, from the moment of asking."""

    def __init__(self, store: Store, column: str, run: str) -> None:
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
    def acquire(cls, store: Store, column: str, run: str, *, wait: bool, say: Callable[[str], None]) -> Lease:
        lease = cls(store, column, run)
        try:
            lease._announce()
            lease._wait_until_held(wait, say)
        except BaseException:
            lease.release()
            raise
        return lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def is_lost(self) -> bool:
        """Somebody took it over because we seemed dead, or may have: for too long the store did not answer."""
        if not self._lost and time.monotonic() - self._last_confirmed > LEASE_TIMEOUT_S:
            self._send_heartbeat()
        return self._lost

    def check_still_held(self) -> bool:
        """The same, but looks now: somebody may have taken it over since the last heartbeat."""
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
        told = ""
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
                if text != told:
                    say(text)
                told = text
            self._ended.wait(pause)
            pause = min(MAX_POLL_S, pause * 1.5)

    def _try_acquire(self, say: Callable[[str], None]) -> _Claim | None:
        """Who is before us; None: nobody, and whoever asks from now on sees that we are."""
        before = self._find_predecessor(say)
        if before is not None:
            return before
        self._put("tries", "")
        before = self._find_predecessor(say)
        if before is not None:
            self._store.delete(self._path("tries"))
        return before

    def _find_predecessor(self, say: Callable[[str], None]) -> _Claim | None:
        """Who holds it, or else tries to get it, or else asked before us. The dead are removed."""
        looked = time.monotonic()
        claims = {claim.id: claim for claim in _read_claims(self._store, self._folder)}
        if claims.pop(self._id, None) is None:
            message = (
                f"the claim to column {self._column!r} was removed: nothing was heard of us for {LEASE_TIMEOUT_S:g} s"
            )
            raise RunError(Problem(COLUMN_TAKEN, message, fixes=("call backfill again",)))
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
        """Nothing: it is not, or nobody can know yet. `looked`: a time before the claim was read."""
        if claim.there is not None:
            return "" if claim.there else "its process is gone"
        heard = self._heartbeats.get(claim.id)
        if heard is None or heard.beat != claim.beat:
            self._heartbeats[claim.id] = _Heartbeat(claim.beat, time.monotonic(), changed=heard is not None)
            return ""
        return f"no heartbeat for {LEASE_TIMEOUT_S:g} s" if looked - heard.since > LEASE_TIMEOUT_S else ""

    def _may_be_dead(self, claim: _Claim) -> bool:
        """It may be dead: it last wrote long ago, if its clock is right, and nothing was heard of it since we look."""
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
        except OSError:  # the store does not answer; others think us dead after a while, and so must we
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


def _read_claims(store: Store, folder: str) -> list[_Claim]:
    names = set(store.names(folder))
    found: list[_Claim] = []
    for name in names:
        id_, _, what = name.partition(".")
        if what != "asks":
            _delete_stale_file(store, folder, name, names)
            continue
        record = store.get(f"{folder}/{name}")
        if record is None:
            continue  # it left meanwhile
        beat = store.get(f"{folder}/{id_}.beat") if f"{id_}.beat" in names else None
        who, there = _parse_claim(id_, record, beat)
        found.append(_Claim(id_, who, there, beat, f"{id_}.tries" in names, f"{id_}.holds" in names))
    return found


def _delete_stale_file(store: Store, folder: str, name: str, names: set[str]) -> None:
    """What a heartbeat left that came too late. Nothing that is new: a list may be older than what it lacks."""
    id_ = name.partition(".")[0]
    began = id_.partition("-")[0]
    if f"{id_}.asks" not in names and began.isdecimal() and time.time_ns() - int(began) > _STALE_FILE_NS:
        store.delete(f"{folder}/{name}")


def _parse_claim(id_: str, record: bytes, beat: bytes | None) -> tuple[LeaseHolder, bool | None]:
    """Who it is, and whether its process is there."""
    try:
        said = json.loads(record)
        process = ProcessId(*said["process"])
        owner, run, host, began = said["owner"], said["run"], said["host"], float(said["began"])
        there = _is_process_alive(id_, process, host)
    except (ValueError, KeyError, TypeError, AttributeError):  # not one of ours, or of a version to come
        owner, run, host, began = "somebody whose record cannot be read", "", "", 0.0
        process, there = ProcessId(0, ""), None
    try:
        last = float(beat) if beat else began
    except ValueError:
        last = began
    alive = time.time() - last <= LEASE_TIMEOUT_S if there is None else there
    return LeaseHolder(owner, run, host, process.pid, began, last, alive), there


def _is_process_alive(id_: str, process: ProcessId, host: str) -> bool | None:
    """None: it cannot be seen from here. Two machines may have one name; what began with this machine's start is on
    this one."""
    here = this_process()
    if process.space.partition(" ")[0] != here.space.partition(" ")[0]:
        return None
    if not process.space and host != socket.gethostname():
        return None
    there = is_alive(process)
    if there and process.pid == here.pid:
        return id_ in _OWN_IDS
    if there is False and process_start_time(process.pid) is not None:
        return None  # another that got its number, or the clock was set, which moves the beginning of them all
    return there


def _waiting_text(column: str, has: LeaseHolder, *, doubted: bool) -> str:
    if not doubted:
        return f"column {column!r} is being filled by {has.owner}: waiting for it to end"
    return f"column {column!r} was being filled by {has.owner}: looking for {LEASE_TIMEOUT_S:g} s whether it still is"


def _taken_error(column: str, has: LeaseHolder) -> RunError:
    message = f"column {column!r} is being filled by {has.owner}"
    wait = "wait for it: pass wait=True"
    if not has.pid:
        return RunError(Problem(COLUMN_TAKEN, message, fixes=(wait,)))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(has.began))
    evidence = (f"since {since}, last heartbeat {max(0.0, time.time() - has.beat):.0f} s ago",)
    return RunError(Problem(COLUMN_TAKEN, message, evidence, (wait, f"end it, on {has.host}: kill {has.pid}")))


@contextmanager
def hold_leases(
    store: Store, columns: Iterable[str], run: str, *, wait: bool, say: Callable[[str], None]
) -> Iterator[list[Lease]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Lease.acquire(store, column, run, wait=wait, say=say)) for column in sorted({*columns})
        ]
