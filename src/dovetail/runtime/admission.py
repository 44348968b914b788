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
from dovetail.engines.local.worker_environment import INSIDE_WORKER_VARIABLE
from dovetail.errors import DovetailError
from dovetail.observe.run_folder import home_folder
from dovetail.text_format import terminal_text

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
"""Poll interval of the claim store on Ray, where a poll is a network call."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The resources that a run may use, and the plan for them."""

    plan: Plan
    granted: tuple[ClaimStore, Grant] | None = None
    """None: the run is inside a worker of another run, whose resources it shares."""
    reservation: Reservation | None = None
    """Reserved resources of a Ray cluster."""

    @property
    def reserved(self) -> Seats:
        """Seats of other runs."""
        return self.granted[1].reserved if self.granted is not None else ()

    def claim_observers(self, post: Callable[[Event], None]) -> list[ClaimUpdater]:
        """The observer that updates the claim of this run and reports changes of others."""
        if self.granted is None:
            return []
        reservation = self.reservation
        if reservation is None:
            return [ClaimUpdater(*self.granted, post, print_stderr)]

        def print_unless_lost(line: str) -> None:
            if not reservation.is_ray_lost:  # the run itself reports that
                print_stderr(line)

        return [
            ClaimUpdater(*self.granted, post, print_unless_lost, poll_s=RAY_POLL_S, extra_held=lambda: reservation.held)
        ]

    def release(self) -> None:
        """Never raises: a claim ends with its process anyway."""
        if self.reservation is not None:
            self.reservation.close()
        if self.granted is not None and not (self.reservation is not None and self.reservation.is_ray_lost):
            book, grant = self.granted
            try:
                book.release(grant.owner.id)
            except DovetailError as error:
                print_stderr(f"cannot release the claim of run {grant.owner.name}: {error.problems[0].message}")


def admit(
    run: str,
    alone: Plan,
    planned: Callable[[Cluster], Plan] | None,
    *,
    wait: bool,
    timeout_s: float | None = None,
) -> Admission:
    """Waits for resources, and prints who holds them; without `wait`, or after `timeout_s`, it raises an
    InfeasibleError.

    `alone` is the plan for an empty machine; `planned` plans for what others leave free (without it, the controller
    avoids the seats of others at run time). Runs share a machine, or a cluster with the same spec.
    """
    if os.environ.get(INSIDE_WORKER_VARIABLE):
        return Admission(alone)
    cluster = alone.cluster
    book = machine_claims(cluster)
    grant = wait_for_claim(
        book,
        ClaimRequest(run),
        min_seats(alone),
        max_seats(alone),
        say=print_stderr,
        no_wait=not wait,
        timeout_s=timeout_s,
    )
    assert grant is not None, "wait_for_claim returns None only when it is stopped"
    try:
        shared = planned is not None and grant.reserved and len(book.owners()) > 1
        plan = plan_around(planned, cluster, grant.reserved) if planned is not None and shared else alone
    except BaseException:
        book.release(grant.owner.id)
        raise
    return Admission(plan, (book, grant))


def machine_claims(cluster: Cluster) -> MachineClaimStore:
    """The claims of everything that shares this machine, or a cluster with the same spec."""
    host = socket.gethostname()
    machine = host if [node.name for node in cluster.nodes] == [host] else cluster.spec(exact=False)
    return MachineClaimStore(home_folder() / LEDGER_FILE, machine, cluster)


def print_stderr(line: str) -> None:
    print(terminal_text(line), file=sys.stderr)  # noqa: T201 - a message, not data
