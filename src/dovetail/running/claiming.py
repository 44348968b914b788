"""How does a run get its place on a machine that others use, too?"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.claims.book import About
from dovetail.claims.keeper import Keeper
from dovetail.claims.ledger_db import ClaimBook
from dovetail.claims.left import ideal_of, need_of, planned_beside
from dovetail.claims.waiting import wait_for_claim
from dovetail.engines.local.seating import INSIDE
from dovetail.errors import DovetailError
from dovetail.observe.folder import home

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.book import Book, Grant
    from dovetail.control.events import Event
    from dovetail.engines.ray.holding import Holdings
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.plan import Plan

LEDGER = "ledger.db"
POLL_ON_RAY_S = 0.25
"""A look at whether somebody wrote costs a call over the network there."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a run may use, and the plan for it."""

    plan: Plan
    held: tuple[Book, Grant] | None = None
    """None: inside a worker of another run, whose place it shares."""
    holdings: Holdings | None = None
    """What it holds of a Ray cluster."""

    @property
    def reserved(self) -> Seats:
        """What others have."""
        return self.held[1].reserved if self.held is not None else ()

    def keepers(self, post: Callable[[Event], None]) -> list[Keeper]:
        """The observer that tells others what we hold, and us what they do."""
        if self.held is None:
            return []
        holdings = self.holdings
        if holdings is None:
            return [Keeper(*self.held, post, say)]

        def say_of_it(line: str) -> None:
            if not holdings.gone:  # of that the run itself tells
                say(line)

        return [Keeper(*self.held, post, say_of_it, poll_s=POLL_ON_RAY_S, also=lambda: holdings.held)]

    def leave(self) -> None:
        """Never raises: a claim is void anyway when its process ends."""
        if self.holdings is not None:
            self.holdings.close()
        if self.held is not None and not (self.holdings is not None and self.holdings.gone):
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
