"""What does a run hold, and which limits may it still believe in? Pure: what was posted, and what was seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker
from dovetail.control.events import Reserved, WorkerLost, WorkerStopped
from dovetail.resources.amounts import amounts_of, minus, most, seats_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.seat import Seats


class Account:
    """Kept by whoever watches a run. A limit counts until the run has seen a later one."""

    def __init__(self, capacity: Amounts, limit: Amounts) -> None:
        self._capacity = capacity
        self._heard = limit
        self._posted: list[tuple[Reserved, Amounts]] = []
        self._told = capacity
        self._seats: dict[int, Seats] = {}

    def saw(self, events: Sequence[Event], commands: Sequence[Command]) -> bool:
        """Whether anything is different now."""
        changed = False
        for event in events:
            if isinstance(event, WorkerStopped | WorkerLost):
                changed |= self._seats.pop(event.worker, None) is not None
            elif isinstance(event, Reserved):
                changed |= self._was_heard(event)
        for command in commands:
            if isinstance(command, StartWorker):
                self._seats[command.worker] = command.seats
                changed = True
        return changed

    def _was_heard(self, event: Reserved) -> bool:
        for number, (posted, limit) in enumerate(self._posted):
            if posted == event:
                self._heard = limit
                del self._posted[: number + 1]
                return True
        return False

    def tell(self, limit: Amounts, capacity: Amounts | None = None) -> Reserved | None:
        """What to post, so that the run keeps to this; None if it knows or will. `capacity`: where that has changed."""
        self._capacity = self._capacity if capacity is None else capacity
        last = self._posted[-1][1] if self._posted else self._heard
        if limit == last and self._told == self._capacity:
            return None
        self._told = self._capacity
        event = Reserved(seats_of(minus(self._capacity, limit)))
        self._posted.append((event, limit))
        return event

    @property
    def held(self) -> Amounts:
        return amounts_of(seat for seats in self._seats.values() for seat in seats)

    @property
    def believes(self) -> Amounts:
        """All that the run may use by what it holds and has heard, or will hear before a later word."""
        found = most(self.held, self._heard)
        for _, limit in self._posted:
            found = most(found, limit)
        return found
