"""How does a run keep to its share of the machine? An observer, and a thread that reads and writes the ledger.

`saw` only notes what changed; the thread does the rest, so that no run waits for a disk. Limits are posted to the run
as `Reserved`, and count for others once `saw` has seen them arrive.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.claims.account import Account
from dovetail.control.commands import StartWorker
from dovetail.control.events import Reserved, WorkerLost, WorkerStopped
from dovetail.errors import DovetailError
from dovetail.resources.amounts import amounts_of, most, plus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.claims.book import Book, Grant
    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.resources.amounts import Amounts

EVERY_S = 1.0
"""Between two looks into the ledger when nothing happens: is everybody still there?"""
POLL_S = 0.1
"""Between two looks at whether somebody wrote."""
LEAVE_S = 2.0
"""The end of a run waits no longer for the ledger; its row is void with its process."""
TOLD = frozenset({StartWorker, WorkerStopped, WorkerLost, Reserved})


class Keeper:
    """Registers what a run holds, and posts what it must leave to others. An observer of its loop."""

    def __init__(
        self,
        book: Book,
        grant: Grant,
        post: Callable[[Event], None],
        say: Callable[[str], None] = lambda _: None,
        *,
        every_s: float = EVERY_S,
        poll_s: float = POLL_S,
        also: Callable[[], Amounts] = dict,
    ) -> None:
        """`say` is told once when the ledger cannot be used; the run goes on with what it has. `also`: what the run
        holds although none of its workers sits there; asked from another thread than the run's."""
        self._book, self._owner, self._post, self._say = book, grant.owner, post, say
        self._account = Account(plus(grant.owner.limit, amounts_of(grant.reserved)), grant.owner.limit)
        self._every_s, self._poll_s, self._also = every_s, poll_s, also
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._troubled = False
        self._thread = threading.Thread(target=self._work, name="dovetail-claims", daemon=True)
        self._thread.start()

    def saw(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        told = TOLD
        if any(type(event) in told for event in events) or any(type(command) in told for command in commands):
            with self._lock:
                changed = self._account.saw(events, commands)
            if changed:
                self._wake.set()

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        """Everything is given back: call it when no worker is left. May be called twice."""
        self._closing = True
        self._wake.set()
        self._thread.join(LEAVE_S)

    def _work(self) -> None:
        due = 0.0
        while not self._closing:
            woken = self._wake.wait(self._poll_s)
            self._wake.clear()
            try:
                if (woken or self._book.changed() or time.monotonic() >= due) and not self._closing:
                    due = time.monotonic() + self._every_s
                    self._turn()
                    self._troubled = False
            except Exception as error:  # the run goes on, whatever becomes of its claim
                if not self._troubled and not self._closing:
                    self._say(f"{error}\nthe run goes on with what it has of the machine")
                self._troubled = True
        with suppress(DovetailError):
            self._book.release(self._owner.id)

    def _turn(self) -> None:
        with self._lock:
            held, believes = self._account.held, self._account.believes
        also = self._also()
        self._owner = self._book.update(self._owner, most(held, also), most(believes, also))
        with self._lock:
            event = self._account.tell(self._owner.limit, self._book.capacity)
        if event is not None and not self._closing:
            self._post(event)
