"""How does a run get its place on a machine that others use, too?"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.claims.keeper import Keeper
from dovetail.claims.ledger_db import About, ClaimBook
from dovetail.claims.left import ideal_of, need_of, planned_beside
from dovetail.claims.waiting import wait_for_claim
from dovetail.engines.local.seating import INSIDE
from dovetail.errors import DovetailError
from dovetail.observe.folder import home

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.ledger_db import Grant
    from dovetail.control.events import Event
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.plan import Plan

LEDGER = "ledger.db"


@dataclass(frozen=True, slots=True)
class Place:
    """What a run may use, and the plan for it."""

    plan: Plan
    held: tuple[ClaimBook, Grant] | None = None
    """None: inside a worker of another run, whose place it shares."""

    @property
    def reserved(self) -> Seats:
        """What others have."""
        return self.held[1].reserved if self.held is not None else ()

    def keepers(self, post: Callable[[Event], None]) -> list[Keeper]:
        """The observer that tells others what we hold, and us what they do."""
        return [Keeper(*self.held, post, say)] if self.held is not None else []

    def leave(self) -> None:
        """Never raises: a claim is void anyway when its process ends."""
        if self.held is not None:
            book, grant = self.held
            try:
                book.release(grant.owner.id)
            except DovetailError as error:
                say(f"the claim of run {grant.owner.name} could not be given back: {error.problems[0].message}")


def place_for(run: str, alone: Plan, planned: Callable[[Cluster], Plan] | None, *, wait: bool) -> Place:
    """Waits for a place, with a line that says who holds what; without `wait` that is an InfeasibleError.

    `alone` is the plan for an empty machine; `planned` makes one for what others leave (without it the controller sees
    to it that nobody sits where others do). Runs share what has the same name: this machine, or a cluster that was
    described in the same words.
    """
    if os.environ.get(INSIDE):
        return Place(alone)
    cluster = alone.cluster
    host = socket.gethostname()
    machine = host if [node.name for node in cluster.nodes] == [host] else cluster.spec()
    book = ClaimBook(home() / LEDGER, machine, cluster)
    grant = wait_for_claim(book, About(run), need_of(alone), ideal_of(alone), say=say, no_wait=not wait)
    assert grant is not None, "nobody told it to stop"
    try:
        shared = planned is not None and grant.reserved and len(book.owners()) > 1
        plan = planned_beside(planned, cluster, grant.reserved) if planned is not None and shared else alone
    except BaseException:
        book.release(grant.owner.id)
        raise
    return Place(plan, (book, grant))


def say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - this is talk, not data
