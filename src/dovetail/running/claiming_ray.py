"""How does a run get its place on a Ray cluster, beside other runs and whoever else is there?

On a shared cluster all runs write into one book who may use how much; what a run then takes is given by Ray alone.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.claims.book import About
from dovetail.claims.cluster_book import ClusterBook, Sight
from dovetail.claims.left import asks_of, ideal_of, left_of, need_of, whole_again
from dovetail.claims.portion import evenly, packed
from dovetail.claims.process import is_there, this_process
from dovetail.claims.waiting import wait_for_claim
from dovetail.claims.whole import whole_seats
from dovetail.engines.ray.book import Drivers, KvRows
from dovetail.engines.ray.discovery import NoNodes
from dovetail.engines.ray.groups import no_answer
from dovetail.engines.ray.holding import Holdings, Taken
from dovetail.engines.ray.using import look as look_who
from dovetail.errors import DovetailError, InfeasibleError, Problem
from dovetail.resources.amounts import amounts_of, capacity_of, least, minus, plus, seats_of, within
from dovetail.running.claiming import Place, say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.claims.book import Grant, Wait
    from dovetail.claims.owner import Process
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.running.ray_looks import Looks
    from dovetail.scheduling.plan import Plan

GRANT_S = 3.0
"""So long Ray may need to give what somebody has just given back."""
AGAIN_S = 1.0
"""Between two attempts; what others hold is looked at anew."""
SAY_AGAIN_S = 10.0
SHOWN = 5
UNDECIDED = "Ray does not say whether it gives it: does one of the nodes hang?"


def place_on_ray(
    run: str,
    alone: Plan,
    planned: Callable[[Cluster], Plan] | None,
    *,
    wait: bool,
    looks: Looks,
    share: float | None = None,
) -> Place:
    """Waits for a place, with a line that says who holds what; without `wait` that is an InfeasibleError.

    `alone` is the plan for an empty cluster, `planned` makes one for what others leave. `share`: at most this part of
    the cluster.
    """
    about = About(run, since=time.time())
    return _Placing(about, *capped(alone, planned, share), planned, wait, looks, share).beside_others()


def capped(alone: Plan, planned: Callable[[Cluster], Plan] | None, share: float | None) -> tuple[Plan, Amounts | None]:
    """A plan for a share of every node, or for as much on fewer nodes."""
    if share is None or share >= 1:
        return alone, None
    cluster = alone.cluster
    liked = {(seat.node, card) for seats in alone.seats.values() for seat in seats for card in seat.gpus}
    refused: InfeasibleError | None = None
    for portion in (evenly, packed):
        cap = portion(cluster, share, liked)
        rest = seats_of(minus(capacity_of(cluster), cap))
        try:
            plan = _planned_for(planned, alone, cluster, rest, f"share={share:g}")
            if within(amounts_of(need_of(plan)), cap):  # a plan that was given is not made again
                return plan, cap
        except InfeasibleError as error:
            refused = refused or error
    message = f"the run does not fit into its share of the cluster, {share:g}"
    evidence = tuple(problem.message for problem in refused.problems) if refused is not None else ()
    fixes = ("a larger share, or none: --share 1", "or ask for less per worker")
    raise InfeasibleError(Problem("DT396", message, evidence, fixes)) from None


def _planned_for(
    planned: Callable[[Cluster], Plan] | None, alone: Plan, cluster: Cluster, reserved: Seats, why: str
) -> Plan:
    """Without `planned` the controller sees to it that nobody sits where others do."""
    if planned is None or not reserved:
        return alone
    return whole_again(planned(left_of(cluster, reserved)), cluster, reserved, why)


@dataclass
class _Placing:
    about: About
    alone: Plan
    cap: Amounts | None
    planned: Callable[[Cluster], Plan] | None
    wait: bool
    looks: Looks
    share: float | None
    _need: Seats = ()
    """What it asks for if it found no room for the least of `alone`."""
    _said: str = ""
    _said_at: float = float("-inf")

    def beside_others(self) -> Place:
        book = self._book()
        while True:
            if self._is_void(book) and not self._plans_again(book.seen.cluster):
                self._pause(book)
                continue
            grant = wait_for_claim(
                book,
                replace(self.about, cap=self.cap, asks=asks_of(self.alone)),
                self._need or need_of(self.alone),
                ideal_of(self.alone),
                say=say,
                no_wait=not self.wait,
                strangers=partial(self._holders, others=True),
                void=partial(self._is_void, book),
            )
            if grant is None:  # the cluster has changed, or it asks for other seats now
                continue
            place = self._within(book, grant)
            if place is not None:
                return place
            self._pause(book)

    def _is_void(self, book: ClusterBook, wait: Wait | None = None) -> bool:
        """Whether it is planned for another cluster than there is by now, or has no room but would have some in other
        seats: on cards of another kind, for one."""
        if self.planned is None:
            return False
        changed = book.seen.cluster.nodes != self.alone.cluster.nodes
        return changed or (wait is not None and not wait.comes and self._sits_elsewhere(wait))

    def _sits_elsewhere(self, wait: Wait) -> bool:
        """Beside what the others cannot do without, if there is room; whether that is new."""
        cluster = self.alone.cluster
        capacity = capacity_of(cluster)
        taken = plus(minus(capacity, self.cap or capacity), wait.foreign)
        for other in wait.others:
            if not other.waiting or other.since < wait.owner.since:
                taken = plus(taken, amounts_of(other.need))
        try:
            plan = _planned_for(self.planned, self.alone, cluster, seats_of(least(taken, capacity)), "others are here")
        except InfeasibleError:
            return False
        before, self._need = self._need or need_of(self.alone), need_of(plan)
        return self._need != before

    def _plans_again(self, cluster: Cluster) -> bool:
        """For the cluster as it is now; False: it has no room for that, but may change again."""
        assert self.planned is not None
        try:
            self.alone, self.cap = capped(self.planned(cluster), self.planned, self.share)
            self._need = ()
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._tell(f"waiting for nodes: the cluster has changed, and {error.problems[0].message}")
            return False
        return True

    def _pause(self, book: ClusterBook) -> None:
        time.sleep(AGAIN_S)
        book.look_again()

    def _within(self, book: ClusterBook, grant: Grant) -> Place | None:
        """A place in what the book grants; None, and nothing is kept, if Ray does not give it now."""
        try:
            plan, ids = (None if self._is_void(book) else self._plan(book, grant)), book.seen.ids
            if plan is not None:
                grant = _needing(book, grant, plan)
                holdings = self._take(plan, ids)
                if holdings is not None:
                    return Place(plan, (book, grant), holdings)
        except BaseException:
            book.release(grant.owner.id)
            raise
        book.release(grant.owner.id)
        return None

    def _plan(self, book: ClusterBook, grant: Grant) -> Plan | None:
        """None: what is left has no room for all stages as it lies, and others may move."""
        cluster = book.seen.cluster
        if cluster == self.alone.cluster and not (grant.reserved and _others_hold(book, grant)):
            return self.alone  # what is reserved then is only what it does not ask for
        try:
            return _planned_for(self.planned, self.alone, cluster, grant.reserved, "others hold a part of this cluster")
        except InfeasibleError as error:
            if not self.wait:
                raise
            self._tell(f"waiting for room: {error.problems[0].message}")
            return None

    # --- Ray

    def _take(self, plan: Plan, ids: Mapping[str, str]) -> Holdings | None:
        """What the plan cannot do without; None if others have it now, or if a node is just leaving."""
        holdings = Holdings(self.about.name, ids)
        need = need_of(plan)
        state = holdings.take(need, GRANT_S)
        if state is Taken.GRANTED:
            return holdings
        holders = self._holders()
        if state is Taken.NEVER and not (self.wait and self._leaves(need)):
            raise _never(need, holders)
        if not self.wait:
            raise no_answer(UNDECIDED) if state is Taken.UNDECIDED else _not_now(need, holders)
        reasons = (UNDECIDED,) if state is Taken.UNDECIDED else holders
        self._tell(f"waiting for Ray to give {_words(need)}: {'; '.join(reasons) or 'nobody says that he holds it'}")
        return None

    def _leaves(self, need: Seats) -> bool:
        """Whether one of its nodes is not there any more, and it can be planned for others."""
        present = self._look().ids
        return self.planned is not None and any(seat.node not in present for seat in need)

    def _holders(self, *, others: bool = False) -> tuple[str, ...]:
        """One line each; `others`: only those who are none of us."""
        try:
            lines = look_who(self.looks.seen).holder_lines(only_others=others)
        except DovetailError as error:
            lines = [f"who holds it is not known: {error.problems[0].message}"]
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        return (*lines[:SHOWN], *more)

    def _tell(self, line: str) -> None:
        now = time.monotonic()
        if line != self._said and now >= self._said_at + SAY_AGAIN_S:
            self._said, self._said_at = line, now
            say(line)

    # --- the book

    def _book(self) -> ClusterBook:
        drivers = Drivers()
        job = drivers.this()

        def me() -> Process:
            mine = this_process()
            return mine._replace(space=f"{mine.space}|{job}")

        alive = partial(is_there_by, drivers.there)
        return ClusterBook(KvRows(), self._sight(), self._look, share=self.share, alive=alive, process=me)

    def _look(self) -> Sight:
        with suppress(NoNodes):  # till there are some again, it is as it was
            self.looks()
        return self._sight()

    def _sight(self) -> Sight:
        seen = self.looks.seen
        return Sight(seen.cluster, seen.ids, seen.foreign)


def is_there_by(driver_is_there: Callable[[str], bool | None], process: Process) -> bool | None:
    """Whether the process of a run is there; None: it is on another machine, and its driver may be all that is left of
    it, so that its heartbeat must tell."""
    space, _, job = process.space.rpartition("|")
    if driver_is_there(job) is False:
        return False
    return is_there(process._replace(space=space)) if space == this_process().space else None


def _others_hold(book: ClusterBook, grant: Grant) -> bool:
    """Whether anybody else has a part of the cluster: another run, or one of those who write no rows."""
    owners = book.owners()
    return any(owner.id != grant.owner.id for owner in owners) or bool(book.foreign_beside(owners))


def _needing(book: ClusterBook, grant: Grant, plan: Plan) -> Grant:
    """The same, with its least as it is planned now: Ray gives it just there, so that nobody else can ever sit there,
    and whoever deals must know. A plan that was given may lie elsewhere."""
    need = need_of(plan)
    if not within(amounts_of(need), grant.owner.limit):
        return grant
    owner = replace(grant.owner, need=whole_seats(need, plan.cluster))
    book.update(owner, {}, owner.limit)
    return replace(grant, owner=owner)


def _words(need: Seats) -> str:
    nodes = {seat.node for seat in need}
    found = [f"{sum(seat.cpu_milli for seat in need) / 1000:g} CPUs"]
    cards = len({(seat.node, card) for seat in need for card in seat.gpus})
    found += [f"{cards} GPUs"] if cards else []
    custom = {name for seat in need for name, _ in seat.custom}
    found += [f"{sum(dict(seat.custom).get(name, 0) for seat in need) / 1000:g} {name}" for name in sorted(custom)]
    return f"{', '.join(found)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"


def _not_now(need: Seats, holders: tuple[str, ...]) -> InfeasibleError:
    message = f"{_words(need)} must be free to begin, and others on this cluster hold too much"
    fixes = (
        "wait=True: it begins as soon as that is free",
        "dovetail cluster show --engine ray:auto says who sits where",
    )
    return InfeasibleError(Problem("DT120", message, holders, fixes))


def _never(need: Seats, holders: tuple[str, ...]) -> InfeasibleError:
    message = f"Ray says that it can never give {_words(need)}"
    asked = tuple(f"{node}: {amount} {what}" for (node, _, what), amount in sorted(amounts_of(need).items()))
    fixes = (
        "start it again: a node may have left just now",
        "dovetail cluster show --engine ray:auto says what is there",
    )
    return InfeasibleError(Problem("DT395", message, (*asked[:SHOWN], *holders), fixes))
