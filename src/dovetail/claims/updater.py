"""Claim updater: observer and thread that report what a run holds to the claim store and post changed limits to the
run.

`saw` only notes what changed; the thread does the rest, so that no run waits for a disk. Limits are posted to the run
as `Reserved`, and count for others once `saw` has seen them arrive.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker
from dovetail.control.events import CapacityReserved, WorkerLost, WorkerStopped
from dovetail.errors import DovetailError
from dovetail.resources.amounts import add_amounts, max_amounts, seats_from_amounts, subtract_amounts, sum_seats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.claims.store import ClaimStore, Grant
    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.seat import Seats


class LimitTracker:
    """Kept by whoever watches a run. A limit counts until the run has seen a later one."""

    def __init__(self, capacity: Amounts, limit: Amounts) -> None:
        self._capacity = capacity
        self._acknowledged = limit
        self._posted: list[tuple[CapacityReserved, Amounts]] = []
        self._posted_capacity = capacity
        self._seats: dict[int, Seats] = {}

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> bool:
        """Whether anything is different now."""
        changed = False
        for event in events:
            if isinstance(event, WorkerStopped | WorkerLost):
                changed |= self._seats.pop(event.worker, None) is not None
            elif isinstance(event, CapacityReserved):
                changed |= self._acknowledge(event)
        for command in commands:
            if isinstance(command, StartWorker):
                self._seats[command.worker] = command.seats
                changed = True
        return changed

    def _acknowledge(self, event: CapacityReserved) -> bool:
        for number, (posted, limit) in enumerate(self._posted):
            if posted == event:
                self._acknowledged = limit
                del self._posted[: number + 1]
                return True
        return False

    def next_limit_event(self, limit: Amounts, capacity: Amounts | None = None) -> CapacityReserved | None:
        """What to post, so that the run keeps to this; None if it knows or will. `capacity`: where that has changed."""
        self._capacity = self._capacity if capacity is None else capacity
        last = self._posted[-1][1] if self._posted else self._acknowledged
        if limit == last and self._posted_capacity == self._capacity:
            return None
        self._posted_capacity = self._capacity
        event = CapacityReserved(seats_from_amounts(subtract_amounts(self._capacity, limit)))
        self._posted.append((event, limit))
        return event

    @property
    def held(self) -> Amounts:
        return sum_seats(seat for seats in self._seats.values() for seat in seats)

    @property
    def may_use(self) -> Amounts:
        """All that the run may use by what it holds and has heard, or will hear before a later word."""
        found = max_amounts(self.held, self._acknowledged)
        for _, limit in self._posted:
            found = max_amounts(found, limit)
        return found


UPDATE_S = 1.0
"""Between two looks into the ledger when nothing happens: is everybody still there?"""
POLL_S = 0.1
"""Between two looks at whether somebody wrote."""
CLOSE_TIMEOUT_S = 2.0
"""The end of a run waits no longer for the ledger; its row is void with its process."""
RELEVANT_TYPES = frozenset({StartWorker, WorkerStopped, WorkerLost, CapacityReserved})


class ClaimUpdater:
    """Registers what a run holds, and posts what it must leave to others. An observer of its loop."""

    def __init__(
        self,
        book: ClaimStore,
        grant: Grant,
        post: Callable[[Event], None],
        say: Callable[[str], None] = lambda _: None,
        *,
        every_s: float = UPDATE_S,
        poll_s: float = POLL_S,
        also: Callable[[], Amounts] = dict,
    ) -> None:
        """`say` is told once when the ledger cannot be used; the run goes on with what it has. `also`: what the run
        holds although none of its workers sits there; asked from another thread than the run's."""
        self._book, self._owner, self._post, self._say = book, grant.owner, post, say
        self._limits = LimitTracker(add_amounts(grant.owner.limit, sum_seats(grant.reserved)), grant.owner.limit)
        self._every_s, self._poll_s, self._extra_held = every_s, poll_s, also
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="dovetail-claims", daemon=True)
        self._thread.start()

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        told = RELEVANT_TYPES
        if any(type(event) in told for event in events) or any(type(command) in told for command in commands):
            with self._lock:
                changed = self._limits.record(events, commands)
            if changed:
                self._wake.set()

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        """Everything is given back: call it when no worker is left. May be called twice."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            woken = self._wake.wait(self._poll_s)
            self._wake.clear()
            try:
                if (woken or self._book.has_changed() or time.monotonic() >= due) and not self._closing:
                    due = time.monotonic() + self._every_s
                    self._update_claim()
                    self._has_failed = False
            except Exception as error:  # the run goes on, whatever becomes of its claim
                if not self._has_failed and not self._closing:
                    self._say(f"{error}\nthe run goes on with what it has of the machine")
                self._has_failed = True
        with suppress(DovetailError):
            self._book.release(self._owner.id)

    def _update_claim(self) -> None:
        with self._lock:
            held, believes = self._limits.held, self._limits.may_use
        also = self._extra_held()
        self._owner = self._book.update(self._owner, max_amounts(held, also), max_amounts(believes, also))
        with self._lock:
            event = self._limits.next_limit_event(self._owner.limit, self._book.capacity)
        if event is not None and not self._closing:
            self._post(event)
