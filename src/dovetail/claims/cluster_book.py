"""Who may use how much of a cluster that changes, and that others use who know nothing of us?

Nodes are known to others by their ids, because names may differ from one driver to the next; cards are taken whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.claims.book import Book
from dovetail.claims.dealing import Table, alike
from dovetail.claims.foreign import STEADY_S, Steady, beside
from dovetail.claims.portion import evenly, packed
from dovetail.claims.process import is_there, this_process
from dovetail.claims.whole import whole_amounts, whole_seats
from dovetail.resources.amounts import amounts_of, capacity_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dovetail.claims.book import About, Grant, Rows, Wait
    from dovetail.claims.owner import Owner, Process
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Node
    from dovetail.resources.seat import Seat, Seats

LOOK_S = 1.0
"""Between two looks at what there is and what others hold."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a cluster."""

    cluster: Cluster
    ids: Mapping[str, str]
    """Node -> what all drivers call it."""
    foreign: Seats = ()
    """What others hold who are none of us."""


class ClusterBook(Book):
    """The owners of one cluster. `look` is called at most once per `look_s`, by whoever asks or updates."""

    where = "this cluster"
    stale_s, beat_s = 30.0, 2.0

    def __init__(
        self,
        rows: Rows,
        seen: Sight,
        look: Callable[[], Sight] | None = None,
        *,
        share: float | None = None,
        look_s: float = LOOK_S,
        steady_s: float = STEADY_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        alive: Callable[[Process], bool | None] = is_there,
        process: Callable[[], Process] = this_process,
    ) -> None:
        super().__init__(rows, "", seen.cluster, wall=wall, alive=alive, process=process)
        self._look, self._look_s, self._clock, self._share = look, look_s, clock, share
        self._steady = Steady(steady_s)
        self._nodes: dict[str, Node] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        """Owner -> its last heartbeat, and when we first saw that."""
        self._looked = clock()
        self._first = {node.name for node in seen.cluster.nodes}
        self.set_cluster(seen)

    def set_cluster(self, seen: Sight) -> None:
        """What there is from now on."""
        self.seen = seen
        self.cluster = seen.cluster
        self.capacity = capacity_of(self.cluster)
        self.foreign = self._steady.saw(self._clock(), amounts_of(seen.foreign))
        self._cards = {}  # which card of a node is which is not known before it is held
        self._names = dict(seen.ids)
        self._nodes |= {node.name: node for node in seen.cluster.nodes}

    def ask(self, about: About, need: Seats, ideal: Seats | None = None, *, hurry: bool = False) -> Grant | Wait:
        self.look_again()
        need = self._moved(need, about.asks)
        all_of = None if ideal is None else whole_seats(ideal, self.cluster)
        return super().ask(about, whole_seats(need, self.cluster), all_of, hurry=hurry)

    def update(self, me: Owner, held: Amounts, believes: Amounts) -> Owner:
        self.look_again()
        me = replace(me, need=self._moved(me.need, me.asks))
        me = replace(me, cap=self._cap(me))
        held, believes = (self._there(whole_amounts(each, self.capacity)) for each in (held, believes))
        return super().update(me, held, believes)

    def _is_there(self, owner: Owner) -> bool:
        """Clocks of other machines may be wrong: how old a heartbeat is, is how long we have seen no other."""
        there = self._alive(owner.process)
        if there is not None:
            return there
        now = self._clock()
        if self._beats.get(owner.id, (None, now))[0] != owner.heartbeat:
            self._beats[owner.id] = owner.heartbeat, now
        return now - self._beats[owner.id][1] < self.stale_s

    def foreign_beside(self, owners: list[Owner]) -> Amounts:
        return beside(self.cluster, self.foreign, owners)

    def look_again(self) -> None:
        """If it is time for it."""
        now = self._clock()
        if self._look is not None and now >= self._looked + self._look_s:
            self._looked = now
            self.set_cluster(self._look())

    def _there(self, amounts: Amounts) -> Amounts:
        return {key: amount for key, amount in amounts.items() if key in self.capacity}

    def _moved(self, need: Seats, asks: Collection[str] | None) -> Seats:
        """Seats on nodes that have left, on others of their kind: without that nobody would find them a place again."""
        present = {node.name for node in self.cluster.nodes}
        return tuple(seat if seat.node in present else self._elsewhere(seat, asks) for seat in need)

    def _elsewhere(self, seat: Seat, asks: Collection[str] | None) -> Seat:
        before = self._nodes.get(seat.node)
        if before is None:
            return seat
        for node in sorted(self.cluster.nodes, key=lambda node: node.gpus != before.gpus):
            cards = _alike_cards(seat, before, node) if alike(node, before, asks) else None
            if cards is not None and node.usable_cpu_milli >= seat.cpu_milli:
                shares = tuple(share._replace(card=card) for share, card in zip(seat.cards, cards, strict=True))
                return seat._replace(node=node.name, cards=shares)
        return seat

    def _cap(self, me: Owner) -> Amounts | None:
        """With its share of nodes that have joined; anew when one has left of which it had some."""
        cap, present = me.cap, {node.name for node in self.cluster.nodes}
        if cap is None or self._share is None:
            return cap
        if any(node not in present for node, _, _ in cap):
            self._first = present
            return self._anew(me, self._share)
        known = self._first | {node for node, _, _ in cap}
        new = tuple(node for node in self.cluster.nodes if node.name not in known)
        return cap if not new else cap | evenly(replace(self.cluster, nodes=new), self._share)

    def _anew(self, me: Owner, share: float) -> Amounts:
        """The share of every node if its least fits into that, else as much on fewer nodes."""
        liked = {(seat.node, card) for seat in me.need for card in seat.gpus}
        evened = replace(me, cap=evenly(self.cluster, share, liked))
        fits = Table(self.cluster, [evened], {}).seat(evened)
        return evened.cap if fits and evened.cap is not None else packed(self.cluster, share, liked)


def _alike_cards(seat: Seat, before: Node, node: Node) -> list[int] | None:
    """Cards of another node like those of this seat; None if it has not enough of them."""
    found: list[int] = []
    for share in seat.cards:
        kind = before.gpus[share.card] if share.card < len(before.gpus) else None
        free = [card for card, gpu in enumerate(node.gpus) if gpu == kind and card not in found]
        if not free:
            return None
        found.append(free[0])
    return found
