"""Admission of a run to a shared Ray cluster: claim, plan within its share, and reserved placement groups.

On a shared cluster all runs write into one book who may use how much; what a run then takes is given by Ray alone.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.claims.cluster_store import ClusterClaimStore, ClusterView
from dovetail.claims.owner import is_alive, this_process
from dovetail.claims.quota import even_cap, packed_cap, round_seats_to_cards
from dovetail.claims.shared_plan import expand_plan, max_seats, min_seats, remaining_cluster, required_labels
from dovetail.claims.store import ClaimRequest
from dovetail.claims.wait import wait_for_claim
from dovetail.engines.ray.claim_storage import DriverLiveness, KvClaimRows
from dovetail.engines.ray.cluster_usage import read_cluster_usage as look_who
from dovetail.engines.ray.discovery import NoNodesError
from dovetail.engines.ray.placement_groups import GroupState, Reservation, no_answer_error
from dovetail.errors import Change, DovetailError, InfeasibleError, Problem
from dovetail.resources.amounts import (
    add_amounts,
    cluster_capacity,
    fits_within,
    min_amounts,
    seats_from_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.runtime.admission import Admission, print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.claims.owner import ProcessId
    from dovetail.claims.store import Grant, Wait
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.runtime.ray_site import NodeDiscovery
    from dovetail.scheduling.plan import Plan

GRANT_TIMEOUT_S = 3.0
"""So long Ray may need to give what somebody has just given back."""
RETRY_INTERVAL_S = 1.0
"""Between two attempts; what others hold is looked at anew."""
MESSAGE_INTERVAL_S = 10.0
MAX_SHOWN_HOLDERS = 5
UNDECIDED_TEXT = "Ray does not say whether it gives it: does one of the nodes hang?"


def admit_on_ray(
    run: str,
    alone: Plan,
    planned: Callable[[Cluster], Plan] | None,
    *,
    wait: bool,
    looks: NodeDiscovery,
    share: float | None = None,
) -> Admission:
    """Waits for a place, with a line that says who holds what; without `wait` that is an InfeasibleError.

    `alone` is the plan for an empty cluster, `planned` makes one for what others leave. `share`: at most this part of
    the cluster.
    """
    about = ClaimRequest(run, since=time.time())
    return _RayAdmission(about, *plan_within_share(alone, planned, share), planned, wait, looks, share).acquire()


def plan_within_share(
    alone: Plan, planned: Callable[[Cluster], Plan] | None, share: float | None
) -> tuple[Plan, Amounts | None]:
    """A plan for a share of every node, or for as much on fewer nodes."""
    if share is None or share >= 1:
        return alone, None
    cluster = alone.cluster
    liked = {(seat.node, card) for seats in alone.seats.values() for seat in seats for card in seat.gpus}
    refused: InfeasibleError | None = None
    for portion in (even_cap, packed_cap):
        cap = portion(cluster, share, liked)
        rest = seats_from_amounts(subtract_amounts(cluster_capacity(cluster), cap))
        try:
            plan = _plan_beside_others(planned, alone, cluster, rest, f"share={share:g}")
            if fits_within(sum_seats(min_seats(plan)), cap):  # a plan that was given is not made again
                return plan, cap
        except InfeasibleError as error:
            refused = refused or error
    message = f"the run does not fit into its share of the cluster, {share:g}"
    evidence = tuple(problem.message for problem in refused.problems) if refused is not None else ()
    fixes = ("a larger share, or none: --share 1", "ask for less per worker")
    raise InfeasibleError(Problem("DT396", message, evidence, fixes)) from None


def _plan_beside_others(
    planned: Callable[[Cluster], Plan] | None, alone: Plan, cluster: Cluster, reserved: Seats, why: str
) -> Plan:
    """Without `planned` the controller sees to it that nobody sits where others do."""
    if planned is None or not reserved:
        return alone
    return expand_plan(planned(remaining_cluster(cluster, reserved)), cluster, reserved, why)


@dataclass
class _RayAdmission:
    about: ClaimRequest
    exclusive_plan: Plan
    cap: Amounts | None
    plan_for: Callable[[Cluster], Plan] | None
    wait: bool
    discovery: NodeDiscovery
    share: float | None
    _need: Seats = ()
    """What it asks for if it found no room for the least of `alone`."""
    _last_line: str = ""
    _last_line_at: float = float("-inf")

    def acquire(self) -> Admission:
        book = self._book()
        while True:
            if self._is_plan_outdated(book) and not self._replan_for(book.view.cluster):
                self._pause_and_refresh(book)
                continue
            grant = wait_for_claim(
                book,
                replace(self.about, cap=self.cap, required_labels=required_labels(self.exclusive_plan)),
                self._need or min_seats(self.exclusive_plan),
                max_seats(self.exclusive_plan),
                say=print_stderr,
                no_wait=not self.wait,
                foreign_holders=partial(self._holders, others=True),
                is_obsolete=partial(self._is_plan_outdated, book),
            )
            if grant is None:  # the cluster has changed, or it asks for other seats now
                continue
            place = self._reserve_within_grant(book, grant)
            if place is not None:
                return place
            self._pause_and_refresh(book)

    def _is_plan_outdated(self, book: ClusterClaimStore, wait: Wait | None = None) -> bool:
        """Whether it is planned for another cluster than there is by now, or has no room but would have some in other
        seats: on cards of another kind, for one."""
        if self.plan_for is None:
            return False
        changed = book.view.cluster.nodes != self.exclusive_plan.cluster.nodes
        return changed or (wait is not None and not wait.will_fit and self._find_other_seats(wait))

    def _find_other_seats(self, wait: Wait) -> bool:
        """Beside what the others cannot do without, if there is room; whether that is new."""
        cluster = self.exclusive_plan.cluster
        capacity = cluster_capacity(cluster)
        taken = add_amounts(subtract_amounts(capacity, self.cap or capacity), wait.foreign)
        for other in wait.others:
            if not other.waiting or other.since < wait.owner.since:
                taken = add_amounts(taken, sum_seats(other.need))
        try:
            plan = _plan_beside_others(
                self.plan_for,
                self.exclusive_plan,
                cluster,
                seats_from_amounts(min_amounts(taken, capacity)),
                "others are here",
            )
        except InfeasibleError:
            return False
        before, self._need = self._need or min_seats(self.exclusive_plan), min_seats(plan)
        return self._need != before

    def _replan_for(self, cluster: Cluster) -> bool:
        """For the cluster as it is now; False: it has no room for that, but may change again."""
        assert self.plan_for is not None
        try:
            self.exclusive_plan, self.cap = plan_within_share(self.plan_for(cluster), self.plan_for, self.share)
            self._need = ()
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._print_throttled(f"waiting for nodes: the cluster has changed, and {error.problems[0].message}")
            return False
        return True

    def _pause_and_refresh(self, book: ClusterClaimStore) -> None:
        time.sleep(RETRY_INTERVAL_S)
        book.refresh()

    def _reserve_within_grant(self, book: ClusterClaimStore, grant: Grant) -> Admission | None:
        """A place in what the book grants; None, and nothing is kept, if Ray does not give it now."""
        try:
            plan, ids = (None if self._is_plan_outdated(book) else self._plan_within_grant(book, grant)), book.view.ids
            if plan is not None:
                grant = _record_need(book, grant, plan)
                holdings = self._reserve(plan, ids)
                if holdings is not None:
                    return Admission(plan, (book, grant), holdings)
        except BaseException:
            book.release(grant.owner.id)
            raise
        book.release(grant.owner.id)
        return None

    def _plan_within_grant(self, book: ClusterClaimStore, grant: Grant) -> Plan | None:
        """None: what is left has no room for all stages as it lies, and others may move."""
        cluster = book.view.cluster
        if cluster == self.exclusive_plan.cluster and not (grant.reserved and _is_shared(book, grant)):
            return self.exclusive_plan  # what is reserved then is only what it does not ask for
        try:
            return _plan_beside_others(
                self.plan_for, self.exclusive_plan, cluster, grant.reserved, "others hold a part of this cluster"
            )
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._print_throttled(f"waiting for room: {error.problems[0].message}")
            return None

    # --- Ray

    def _reserve(self, plan: Plan, ids: Mapping[str, str]) -> Reservation | None:
        """What the plan cannot do without; None if others have it now, or if a node is just leaving."""
        holdings = Reservation(self.about.name, ids)
        need = min_seats(plan)
        state = holdings.try_acquire(need, GRANT_TIMEOUT_S)
        if state is GroupState.GRANTED:
            return holdings
        holders = self._holders()
        if state is GroupState.NEVER and not (self.wait and self._has_node_left(need)):
            raise _infeasible_error(need, holders)
        if not self.wait:
            raise no_answer_error(UNDECIDED_TEXT) if state is GroupState.UNDECIDED else _busy_error(need, holders)
        reasons = (UNDECIDED_TEXT,) if state is GroupState.UNDECIDED else holders
        self._print_throttled(
            f"waiting for Ray to give {_need_text(need)}: {'; '.join(reasons) or 'nobody says that he holds it'}"
        )
        return None

    def _has_node_left(self, need: Seats) -> bool:
        """Whether one of its nodes is not there any more, and it can be planned for others."""
        present = self._refresh_view().ids
        return self.plan_for is not None and any(seat.node not in present for seat in need)

    def _holders(self, *, others: bool = False) -> tuple[str, ...]:
        """One line each; `others`: only those who are none of us."""
        try:
            lines = look_who(self.discovery.latest).holder_lines(only_others=others)
        except DovetailError as error:
            lines = [f"who holds it is not known: {error.problems[0].message}"]
        more = [f"and {len(lines) - MAX_SHOWN_HOLDERS} more"] if len(lines) > MAX_SHOWN_HOLDERS else []
        return (*lines[:MAX_SHOWN_HOLDERS], *more)

    def _print_throttled(self, line: str) -> None:
        now = time.monotonic()
        if line != self._last_line and now >= self._last_line_at + MESSAGE_INTERVAL_S:
            self._last_line, self._last_line_at = line, now
            print_stderr(line)

    # --- the book

    def _book(self) -> ClusterClaimStore:
        drivers = DriverLiveness()
        job = drivers.current_job()

        def me() -> ProcessId:
            mine = this_process()
            return mine._replace(space=f"{mine.space}|{job}")

        alive = partial(is_process_alive, drivers.is_alive)
        return ClusterClaimStore(
            KvClaimRows(), self._current_view(), self._refresh_view, share=self.share, alive=alive, process=me
        )

    def _refresh_view(self) -> ClusterView:
        with suppress(NoNodesError):  # till there are some again, it is as it was
            self.discovery()
        return self._current_view()

    def _current_view(self) -> ClusterView:
        seen = self.discovery.latest
        return ClusterView(seen.cluster, seen.ids, seen.foreign)


def is_process_alive(driver_is_there: Callable[[str], bool | None], process: ProcessId) -> bool | None:
    """Whether the process of a run is there; None: it is on another machine, and its driver may be all that is left of
    it, so that its heartbeat must tell."""
    space, _, job = process.space.rpartition("|")
    if driver_is_there(job) is False:
        return False
    return is_alive(process._replace(space=space)) if space == this_process().space else None


def _is_shared(book: ClusterClaimStore, grant: Grant) -> bool:
    """Whether anybody else has a part of the cluster: another run, or one of those who write no rows."""
    owners = book.owners()
    return any(owner.id != grant.owner.id for owner in owners) or bool(book.foreign_usage(owners))


def _record_need(book: ClusterClaimStore, grant: Grant, plan: Plan) -> Grant:
    """The same, with its least as it is planned now: Ray gives it just there, so that nobody else can ever sit there,
    and whoever deals must know. A plan that was given may lie elsewhere."""
    need = min_seats(plan)
    if not fits_within(sum_seats(need), grant.owner.limit):
        return grant
    owner = replace(grant.owner, need=round_seats_to_cards(need, plan.cluster))
    book.update(owner, {}, owner.limit)
    return replace(grant, owner=owner)


def _need_text(need: Seats) -> str:
    nodes = {seat.node for seat in need}
    found = [f"{sum(seat.cpu_milli for seat in need) / 1000:g} CPUs"]
    cards = len({(seat.node, card) for seat in need for card in seat.gpus})
    found += [f"{cards} GPUs"] if cards else []
    custom = {name for seat in need for name, _ in seat.custom}
    found += [f"{sum(dict(seat.custom).get(name, 0) for seat in need) / 1000:g} {name}" for name in sorted(custom)]
    return f"{', '.join(found)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"


def _busy_error(need: Seats, holders: tuple[str, ...]) -> InfeasibleError:
    message = f"the run needs {_need_text(need)} to begin, but other programs on this cluster hold too much"
    fixes = (
        Change({"wait": True}, note="the run starts as soon as they are free"),
        "dovetail cluster show --engine ray:auto says who sits where",
    )
    return InfeasibleError(Problem("DT120", message, holders, fixes))


def _infeasible_error(need: Seats, holders: tuple[str, ...]) -> InfeasibleError:
    message = f"Ray says that it can never give {_need_text(need)}"
    asked = tuple(f"{node}: {amount} {what}" for (node, _, what), amount in sorted(sum_seats(need).items()))
    fixes = (
        "start it again: a node may have left just now",
        "dovetail cluster show --engine ray:auto says what is there",
    )
    return InfeasibleError(Problem("DT395", message, (*asked[:MAX_SHOWN_HOLDERS], *holders), fixes))
