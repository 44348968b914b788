"""Admission of a run to a shared machine: its claim in the ledger, and the plan for what it was granted."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.claims.shared_plan import max_seats, min_seats, plan_around
from dovetail.claims.sqlite_store import MachineClaimStore
from dovetail.claims.store import ClaimRequest
from dovetail.claims.updater import ClaimUpdater
from dovetail.claims.wait import wait_for_claim
from dovetail.engines.local.worker_spec import INSIDE_WORKER_VARIABLE
from dovetail.errors import DovetailError
from dovetail.observe.run_folder import home_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.store import ClaimStore, Grant
    from dovetail.control.events import Event
    from dovetail.engines.ray.placement_groups import Reservation
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.plan import Plan

LEDGER_FILE = "ledger.db"
RAY_POLL_S = 0.25
"""A look at whether somebody wrote costs a call over the network there."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a run may use, and the plan for it."""

    plan: Plan
    granted: tuple[ClaimStore, Grant] | None = None
    """None: inside a worker of another run, whose place it shares."""
    reservation: Reservation | None = None
    """What it holds of a Ray cluster."""

    @property
    def reserved(self) -> Seats:
        """What others have."""
        return self.granted[1].reserved if self.granted is not None else ()

    def claim_observers(self, post: Callable[[Event], None]) -> list[ClaimUpdater]:
        """The observer that tells others what we hold, and us what they do."""
        if self.granted is None:
            return []
        holdings = self.reservation
        if holdings is None:
            return [ClaimUpdater(*self.granted, post, print_stderr)]

        def say_of_it(line: str) -> None:
            if not holdings.is_ray_lost:  # of that the run itself tells
                print_stderr(line)

        return [ClaimUpdater(*self.granted, post, say_of_it, poll_s=RAY_POLL_S, extra_held=lambda: holdings.held)]

    def release(self) -> None:
        """Never raises: a claim is void anyway when its process ends."""
        if self.reservation is not None:
            self.reservation.close()
        if self.granted is not None and not (self.reservation is not None and self.reservation.is_ray_lost):
            book, grant = self.granted
            try:
                book.release(grant.owner.id)
            except DovetailError as error:
                print_stderr(
                    f"the claim of run {grant.owner.name} could not be given back: {error.problems[0].message}"
                )


def admit(run: str, alone: Plan, planned: Callable[[Cluster], Plan] | None, *, wait: bool) -> Admission:
    """Waits for a place, with a line that says who holds what; without `wait` that is an InfeasibleError.

    `alone` is the plan for an empty machine; `planned` makes one for what others leave (without it the controller sees
    to it that nobody sits where others do). Runs share what has the same name: this machine, or a cluster that was
    described in the same words.
    """
    if os.environ.get(INSIDE_WORKER_VARIABLE):
        return Admission(alone)
    cluster = alone.cluster
    host = socket.gethostname()
    machine = host if [node.name for node in cluster.nodes] == [host] else cluster.spec()
    book = MachineClaimStore(home_folder() / LEDGER_FILE, machine, cluster)
    grant = wait_for_claim(
        book, ClaimRequest(run), min_seats(alone), max_seats(alone), say=print_stderr, no_wait=not wait
    )
    assert grant is not None, "nobody told it to stop"
    try:
        shared = planned is not None and grant.reserved and len(book.owners()) > 1
        plan = plan_around(planned, cluster, grant.reserved) if planned is not None and shared else alone
    except BaseException:
        book.release(grant.owner.id)
        raise
    return Admission(plan, (book, grant))


def print_stderr(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - this is talk, not data
