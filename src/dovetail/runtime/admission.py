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
from dovetail.errors import DovetailError, InfeasibleError, Problem
from dovetail.machine.job_seat import job_seat
from dovetail.observe.run_folder import home_folder
from dovetail.resources.amounts import (
    HOST,
    cluster_capacity,
    fits_within,
    seats_from_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.seat import CardShare, Seat
from dovetail.text_format import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.store import ClaimStore, Grant
    from dovetail.control.events import Event
    from dovetail.engines.ray.placement_groups import GroupReservation
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
    """None: the run is inside a worker of another run or inside a job, whose resources it uses."""
    reservation: GroupReservation | None = None
    """Reserved resources of a Ray cluster."""
    outside_job: Seats = ()
    """Parts of the visible cards that the job of this process does not have."""

    @property
    def reserved(self) -> Seats:
        """Seats of other runs."""
        return self.granted[1].reserved if self.granted is not None else self.outside_job

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
        return _admit_inside(alone, planned)
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


def _admit_inside(alone: Plan, planned: Callable[[Cluster], Plan] | None) -> Admission:
    """Admission within a worker of a run or a job: the claim of the machine has its resources already."""
    reserved = _outside_job(alone.cluster)
    if not reserved:
        return Admission(alone)
    plan = plan_around(planned, alone.cluster, reserved) if planned is not None else alone
    job_has = subtract_amounts(cluster_capacity(alone.cluster), sum_seats(reserved))
    if not fits_within(sum_seats(min_seats(plan)), job_has):
        message = "the run needs more of a GPU than its job has"
        fixes = ("submit the job with a whole GPU: --resources gpus=1",)
        raise InfeasibleError(Problem("DT120", message, fixes=fixes))
    return Admission(plan, outside_job=reserved)


def _outside_job(cluster: Cluster) -> Seats:
    """The parts of visible cards that belong to other jobs."""
    seat, node = job_seat(os.environ), cluster.nodes[0]
    if seat is None or len(cluster.nodes) != 1 or node.name != socket.gethostname():
        return ()
    if len(node.gpus) != len(seat.cards):
        return ()
    job_has = sum_seats((Seat(node.name, cards=tuple(CardShare(card, *has) for card, has in enumerate(seat.cards))),))
    cards = {key: amount for key, amount in cluster_capacity(cluster).items() if key[1] != HOST}
    return seats_from_amounts(subtract_amounts(cards, job_has))


def machine_claims(cluster: Cluster) -> MachineClaimStore:
    """The claims of everything that shares this machine, or a cluster with the same spec."""
    host = socket.gethostname()
    machine = host if [node.name for node in cluster.nodes] == [host] else cluster.spec(exact=False)
    return MachineClaimStore(home_folder() / LEDGER_FILE, machine, cluster)


def print_stderr(line: str) -> None:
    print(terminal_text(line), file=sys.stderr)  # noqa: T201 - a message, not data
