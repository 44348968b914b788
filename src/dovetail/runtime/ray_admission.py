"""Admission of a run to a shared Ray cluster: claim, plan within its share, and reserved placement groups.

All runs on a cluster write their claims to one store, which decides how much each may use. A run then reserves its
resources with Ray placement groups.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.claims.cluster_store import ClusterClaimStore, ClusterView
from dovetail.claims.owner import is_alive, this_process
from dovetail.claims.share_cap import even_cap, packed_cap, round_seats_to_cards
from dovetail.claims.shared_plan import expand_plan, max_seats, min_seats, remaining_cluster, required_labels
from dovetail.claims.store import ClaimRequest
from dovetail.claims.wait import wait_for_claim
from dovetail.engines.ray.claim_storage import DriverLiveness, KvClaimRows
from dovetail.engines.ray.cluster_usage import read_cluster_usage
from dovetail.engines.ray.discovery import NoNodesError
from dovetail.engines.ray.placement_groups import FIRST_PROBE_TIMEOUT_S, GroupReservation, GroupState, no_answer_error
from dovetail.engines.ray.raylet_probe import find_silent_nodes
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
"""Time that Ray may need to grant resources that were just released."""
RETRY_INTERVAL_S = 1.0
"""Time between two attempts; usage is read again for each."""
MESSAGE_INTERVAL_S = 10.0
MAX_SHOWN_HOLDERS = 5
UNDECIDED_TEXT = "Ray has not decided on the placement group; a node may be unresponsive"


def admit_on_ray(
    run: str,
    alone: Plan,
    planned: Callable[[Cluster], Plan] | None,
    *,
    wait: bool,
    discovery: NodeDiscovery,
    share: float | None = None,
    timeout_s: float | None = None,
) -> Admission:
    """Waits for resources, and prints who holds them; without `wait`, or after `timeout_s`, it raises an
    InfeasibleError.

    `alone` is the plan for an empty cluster; `planned` plans for what others leave free. `share` is the maximum
    fraction of the cluster.
    """
    about = ClaimRequest(run, since=time.time())
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return _RayAdmission(
        about, *plan_within_share(alone, planned, share), planned, wait, discovery, share, end
    ).acquire()


def plan_within_share(
    alone: Plan, planned: Callable[[Cluster], Plan] | None, share: float | None
) -> tuple[Plan, Amounts | None]:
    """A plan for a share of every node, or for the same amount on fewer nodes."""
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
            if fits_within(sum_seats(min_seats(plan)), cap):  # a plan that the user passed is not changed
                return plan, cap
        except InfeasibleError as error:
            refused = refused or error
    message = f"the run does not fit into a share of {share:g} of the cluster"
    evidence = tuple(problem.message for problem in refused.problems) if refused is not None else ()
    fixes = ("--share 1, or a larger share", "request less per worker")
    raise InfeasibleError(Problem("DT396", message, evidence, fixes)) from None


def _plan_beside_others(
    planned: Callable[[Cluster], Plan] | None, alone: Plan, cluster: Cluster, reserved: Seats, why: str
) -> Plan:
    """Without `planned`, the controller avoids the seats of others at run time."""
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
    wait_until: float | None = None
    """When it stops waiting, as of time.monotonic(); None: never."""
    _need: Seats = ()
    """Requested seats, if there was no room for the minimum of `exclusive_plan`."""
    _silent_ids: dict[str, str] = field(default_factory=dict)
    """Nodes that do not answer -> Ray's ids; the run is planned without them."""
    _last_line: str = ""
    _last_line_at: float = float("-inf")

    def acquire(self) -> Admission:
        book = self._claim_store()
        while True:
            timeout_s = None if self.wait_until is None else max(0.0, self.wait_until - time.monotonic())
            self.wait = self.wait and timeout_s != 0.0
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
                timeout_s=timeout_s,
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
        """Plans beside the minimum of the other runs; returns whether the request has changed."""
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
                "other runs use this cluster",
            )
        except InfeasibleError:
            return False
        before, self._need = self._need or min_seats(self.exclusive_plan), min_seats(plan)
        return self._need != before

    def _replan_for(self, cluster: Cluster) -> bool:
        """Plans for the cluster as it is now; False if it does not fit at present."""
        assert self.plan_for is not None
        try:
            self.exclusive_plan, self.cap = plan_within_share(self.plan_for(cluster), self.plan_for, self.share)
            self._need = ()
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._print_throttled(f"waiting for nodes: the cluster has changed: {error.problems[0].message}")
            return False
        return True

    def _pause_and_refresh(self, book: ClusterClaimStore) -> None:
        time.sleep(RETRY_INTERVAL_S)
        book.refresh()

    def _reserve_within_grant(self, book: ClusterClaimStore, grant: Grant) -> Admission | None:
        """Reserves resources within the grant; None, and no claim is held, if Ray does not grant them now."""
        try:
            plan, ids = (None if self._is_plan_outdated(book) else self._plan_within_grant(book, grant)), book.view.ids
            if plan is not None:
                grant = _record_need(book, grant, plan)
                reservation = self._reserve(plan, ids)
                if reservation is not None:
                    return Admission(plan, (book, grant), reservation)
        except BaseException:
            book.release(grant.owner.id)
            raise
        book.release(grant.owner.id)
        return None

    def _plan_within_grant(self, book: ClusterClaimStore, grant: Grant) -> Plan | None:
        """None if the free resources do not fit all stages at present."""
        cluster = book.view.cluster
        if cluster == self.exclusive_plan.cluster and not (grant.reserved and _is_shared(book, grant)):
            return self.exclusive_plan  # the reserved part is outside its request
        try:
            return _plan_beside_others(
                self.plan_for, self.exclusive_plan, cluster, grant.reserved, "other runs hold a part of this cluster"
            )
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._print_throttled(f"waiting for room: {error.problems[0].message}")
            return None

    # --- Ray

    def _reserve(self, plan: Plan, ids: Mapping[str, str]) -> GroupReservation | None:
        """Reserves the minimum of the plan; None if others hold it now, or if a node is leaving."""
        reservation = GroupReservation(self.about.name, ids)
        need = min_seats(plan)
        state = reservation.try_acquire(need, GRANT_TIMEOUT_S)
        if state is GroupState.GRANTED:
            return reservation
        if reservation.silent and self.plan_for is not None:
            self._leave_out(reservation.silent)
            return None
        holders = self._holders()
        if state is GroupState.NEVER and not (self.wait and self._has_node_left(need)):
            raise _infeasible_error(need, holders)
        undecided = _silent_text(reservation.silent) if reservation.silent else UNDECIDED_TEXT
        if not self.wait:
            raise no_answer_error(undecided) if state is GroupState.UNDECIDED else _busy_error(need, holders)
        reasons = (undecided,) if state is GroupState.UNDECIDED else holders
        self._print_throttled(
            f"waiting for Ray to grant {_need_text(need)}: {'; '.join(reasons) or 'no running job claims it'}"
        )
        return None

    def _leave_out(self, silent: frozenset[str]) -> None:
        """Plan without nodes that do not answer, until they do."""
        for node in silent:
            self._silent_ids[node] = self.discovery.latest.ids.get(node, "")
        self._print_throttled(f"planning without them: {_silent_text(silent)}")

    def _has_node_left(self, need: Seats) -> bool:
        """Whether one of the requested nodes has left, and a new plan is possible."""
        present = self._refresh_view().ids
        return self.plan_for is not None and any(seat.node not in present for seat in need)

    def _holders(self, *, others: bool = False) -> tuple[str, ...]:
        """Holders of resources, one line each; `others`: only those that are not Dovetail runs."""
        try:
            lines = read_cluster_usage(self.discovery.latest).holder_lines(only_others=others)
        except DovetailError as error:
            lines = [f"holders are unknown: {error.problems[0].message}"]
        more = [f"and {len(lines) - MAX_SHOWN_HOLDERS} more"] if len(lines) > MAX_SHOWN_HOLDERS else []
        return (*lines[:MAX_SHOWN_HOLDERS], *more)

    def _print_throttled(self, line: str) -> None:
        now = time.monotonic()
        if line != self._last_line and now >= self._last_line_at + MESSAGE_INTERVAL_S:
            self._last_line, self._last_line_at = line, now
            print_stderr(line)

    # --- the claim store

    def _claim_store(self) -> ClusterClaimStore:
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
        with suppress(NoNodesError):  # keep the last view until there are nodes again
            self.discovery()
        if self._silent_ids:
            silent = find_silent_nodes(self._silent_ids.values(), FIRST_PROBE_TIMEOUT_S)
            self._silent_ids = {node: number for node, number in self._silent_ids.items() if number in silent}
        return self._current_view()

    def _current_view(self) -> ClusterView:
        """The cluster without nodes that do not answer, unless no node does."""
        seen = self.discovery.latest
        nodes = tuple(node for node in seen.cluster.nodes if node.name not in self._silent_ids)
        if not self._silent_ids or not nodes:
            return ClusterView(seen.cluster, seen.ids, seen.foreign)
        ids = {name: number for name, number in seen.ids.items() if name not in self._silent_ids}
        foreign = tuple(seat for seat in seen.foreign if seat.node not in self._silent_ids)
        return ClusterView(replace(seen.cluster, nodes=nodes), ids, foreign)


def is_process_alive(is_driver_alive: Callable[[str], bool | None], process: ProcessId) -> bool | None:
    """Whether the process of a run is alive; None if it is on another machine, where only its heartbeat shows that."""
    space, _, job = process.space.rpartition("|")
    if is_driver_alive(job) is False:
        return False
    return is_alive(process._replace(space=space)) if space == this_process().space else None


def _is_shared(book: ClusterClaimStore, grant: Grant) -> bool:
    """Whether another run, or a user other than Dovetail, holds a part of the cluster."""
    owners = book.owners()
    return any(owner.id != grant.owner.id for owner in owners) or bool(book.foreign_usage(owners))


def _record_need(book: ClusterClaimStore, grant: Grant, plan: Plan) -> Grant:
    """The grant with the minimum seats of the current plan: Ray reserves exactly those, so the store must know them."""
    need = min_seats(plan)
    if not fits_within(sum_seats(need), grant.owner.limit):
        return grant
    owner = replace(grant.owner, need=round_seats_to_cards(need, plan.cluster))
    book.update(owner, {}, owner.limit)
    return replace(grant, owner=owner)


def _silent_text(nodes: frozenset[str]) -> str:
    return f"{', '.join(sorted(nodes))} {'does' if len(nodes) == 1 else 'do'} not answer"


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
        "dovetail cluster show --engine ray:auto shows the holders",
    )
    return InfeasibleError(Problem("DT120", message, holders, fixes))


def _infeasible_error(need: Seats, holders: tuple[str, ...]) -> InfeasibleError:
    message = f"Ray reports {_need_text(need)} as infeasible"
    asked = tuple(f"{node}: {amount} {what}" for (node, _, what), amount in sorted(sum_seats(need).items()))
    fixes = (
        "try again: a node may just have left",
        "dovetail cluster show --engine ray:auto shows the nodes",
    )
    return InfeasibleError(Problem("DT395", message, (*asked[:MAX_SHOWN_HOLDERS], *holders), fixes))
