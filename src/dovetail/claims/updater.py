"""Claim updater: observer and thread that report what a run holds to the claim store and post changed limits to the
run.

The observer's `on_step` only records what changed; the thread does the rest, so that a run never waits for a disk.
Limits are posted to the run as `CapacityReserved`, and count for other runs when `on_step` has seen them arrive.
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
    """Seats and limits of a run. A limit counts until the run has acknowledged a later one."""

    def __init__(self, capacity: Amounts, limit: Amounts) -> None:
        self._capacity = capacity
        self._acknowledged = limit
        self._posted: list[tuple[CapacityReserved, Amounts]] = []
        self._posted_capacity = capacity
        self._seats: dict[int, Seats] = {}

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> bool:
        """Record a step of the run; whether anything has changed."""
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
        """The event that posts a limit to the run; None if it was posted already. `capacity`: if that has changed."""
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
        """Amounts that the run may use: what it holds, its acknowledged limit, and all limits posted since."""
        found = max_amounts(self.held, self._acknowledged)
        for _, limit in self._posted:
            found = max_amounts(found, limit)
        return found


UPDATE_S = 1.0
"""Interval for an update without changes, which detects runs that have died."""
POLL_S = 0.1
"""Interval for checking whether another run has written."""
CLOSE_TIMEOUT_S = 2.0
"""Limit for deleting the claim at the end of a run; a row is invalid without its process anyway."""
RELEVANT_TYPES = frozenset({StartWorker, WorkerStopped, WorkerLost, CapacityReserved})


class ClaimUpdater:
    """Reports what a run holds to the claim store, and posts limits to the run. An observer of its loop."""

    def __init__(
        self,
        store: ClaimStore,
        grant: Grant,
        post: Callable[[Event], None],
        say: Callable[[str], None] = lambda _: None,
        *,
        every_s: float = UPDATE_S,
        poll_s: float = POLL_S,
        extra_held: Callable[[], Amounts] = dict,
    ) -> None:
        """`say`: prints a message, once, when the store cannot be used; the run continues with what it has.
        `extra_held`: what the run holds without a worker; called in another thread than the run's."""
        self._store, self._owner, self._post, self._say = store, grant.owner, post, say
        self._limits = LimitTracker(add_amounts(grant.owner.limit, sum_seats(grant.reserved)), grant.owner.limit)
        self._every_s, self._poll_s, self._extra_held = every_s, poll_s, extra_held
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="dovetail-claims", daemon=True)
        self._thread.start()

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        if any(type(each) in RELEVANT_TYPES for each in (*events, *commands)):
            with self._lock:
                changed = self._limits.record(events, commands)
            if changed:
                self._wake.set()

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        """Delete the claim; call it when no worker is left. May be called twice."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            woken = self._wake.wait(self._poll_s)
            self._wake.clear()
            try:
                if (woken or self._store.has_changed() or time.monotonic() >= due) and not self._closing:
                    due = time.monotonic() + self._every_s
                    self._update_claim()
                    self._has_failed = False
            except Exception as error:  # the run continues without its claim
                if not self._has_failed and not self._closing:
                    self._say(f"{error}\nthe run continues with its current share of the machine")
                self._has_failed = True
        with suppress(DovetailError):
            self._store.release(self._owner.id)

    def _update_claim(self) -> None:
        with self._lock:
            held, may_use = self._limits.held, self._limits.may_use
        extra = self._extra_held()
        self._owner = self._store.update(self._owner, max_amounts(held, extra), max_amounts(may_use, extra))
        with self._lock:
            event = self._limits.next_limit_event(self._owner.limit, self._store.capacity)
        if event is not None and not self._closing:
            self._post(event)
