"""Claim store of a cluster, whose nodes join and leave, and which others use, too (`foreign_usage`).

`runtime.ray_admission` creates it with the rows of `engines.ray.claim_storage`. Rows contain node ids, because node
names may differ between drivers. GPUs are granted whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.claims.allocation import Allocation, labels_match
from dovetail.claims.foreign_usage import FOREIGN_DEBOUNCE_S, UsageDebouncer, place_foreign_usage
from dovetail.claims.owner import is_alive, this_process
from dovetail.claims.share_cap import even_cap, packed_cap, round_amounts_to_cards, round_seats_to_cards
from dovetail.claims.store import ClaimStore
from dovetail.resources.amounts import cluster_capacity, sum_seats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dovetail.claims.owner import Owner, ProcessId
    from dovetail.claims.store import ClaimRequest, ClaimRows, Grant, Wait
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Node
    from dovetail.resources.seat import Seat, Seats


REFRESH_S = 1.0
"""Interval for reading the cluster and the foreign usage."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster at one moment."""

    cluster: Cluster
    ids: Mapping[str, str]
    """Node -> id, which is the same for all drivers."""
    foreign: Seats = ()
    """Usage by programs other than Dovetail."""


class ClusterClaimStore(ClaimStore):
    """The owners of one cluster. `look` reads the cluster, at most once per `look_s`, within `request` and `update`."""

    scope = "this cluster"
    stale_s, heartbeat_s = 30.0, 2.0

    def __init__(
        self,
        rows: ClaimRows,
        seen: ClusterView,
        look: Callable[[], ClusterView] | None = None,
        *,
        share: float | None = None,
        look_s: float = REFRESH_S,
        steady_s: float = FOREIGN_DEBOUNCE_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        alive: Callable[[ProcessId], bool | None] = is_alive,
        process: Callable[[], ProcessId] = this_process,
    ) -> None:
        super().__init__(rows, "", seen.cluster, wall=wall, alive=alive, process=process)
        self._look, self._look_s, self._clock, self._share = look, look_s, clock, share
        self._foreign_usage = UsageDebouncer(steady_s)
        self._nodes: dict[str, Node] = {}
        self._heartbeats: dict[str, tuple[float, float]] = {}
        """Owner -> its last heartbeat, and the local time when it was first read."""
        self._refreshed_at = clock()
        self._initial_nodes = {node.name for node in seen.cluster.nodes}
        self.set_cluster(seen)

    def set_cluster(self, seen: ClusterView) -> None:
        """Set the nodes and the foreign usage."""
        self.view = seen
        self.cluster = seen.cluster
        self.capacity = cluster_capacity(self.cluster)
        self.foreign = self._foreign_usage.update(self._clock(), sum_seats(seen.foreign))
        self._cards = {}  # the uuids of GPUs are not known before they are held
        self._names = dict(seen.ids)
        self._nodes |= {node.name: node for node in seen.cluster.nodes}

    def request(
        self, about: ClaimRequest, need: Seats, ideal: Seats | None = None, *, accept_minimum: bool = False
    ) -> Grant | Wait:
        self.refresh()
        need = self._relocate(need, about.required_labels)
        all_of = None if ideal is None else round_seats_to_cards(ideal, self.cluster)
        return super().request(about, round_seats_to_cards(need, self.cluster), all_of, accept_minimum=accept_minimum)

    def update(self, me: Owner, held: Amounts, may_use: Amounts) -> Owner:
        self.refresh()
        me = replace(me, need=self._relocate(me.need, me.required_labels))
        me = replace(me, cap=self._updated_cap(me))
        held, may_use = (
            self._on_present_nodes(round_amounts_to_cards(each, self.capacity)) for each in (held, may_use)
        )
        return super().update(me, held, may_use)

    def _is_alive(self, owner: Owner) -> bool:
        """Clocks of other machines may differ: the age of a heartbeat is the local time since it was first read."""
        alive = self._alive(owner.process)
        if alive is not None:
            return alive
        now = self._clock()
        if self._heartbeats.get(owner.id, (None, now))[0] != owner.heartbeat:
            self._heartbeats[owner.id] = owner.heartbeat, now
        return now - self._heartbeats[owner.id][1] < self.stale_s

    def foreign_usage(self, owners: list[Owner]) -> Amounts:
        return place_foreign_usage(self.cluster, self.foreign, owners)

    def refresh(self) -> None:
        """Read the cluster again, if the interval has passed."""
        now = self._clock()
        if self._look is not None and now >= self._refreshed_at + self._look_s:
            self._refreshed_at = now
            self.set_cluster(self._look())

    def _on_present_nodes(self, amounts: Amounts) -> Amounts:
        return {key: amount for key, amount in amounts.items() if key in self.capacity}

    def _relocate(self, need: Seats, required: Collection[str] | None) -> Seats:
        """Move seats on nodes that have left to equal nodes; otherwise they could never be seated again."""
        present = {node.name for node in self.cluster.nodes}
        return tuple(seat if seat.node in present else self._relocate_seat(seat, required) for seat in need)

    def _relocate_seat(self, seat: Seat, required: Collection[str] | None) -> Seat:
        before = self._nodes.get(seat.node)
        if before is None:
            return seat
        for node in sorted(self.cluster.nodes, key=lambda node: node.gpus != before.gpus):
            cards = _equivalent_cards(seat, before, node) if labels_match(node, before, required) else None
            if cards is not None and node.usable_cpu_milli >= seat.cpu_milli:
                shares = tuple(share._replace(card=card) for share, card in zip(seat.cards, cards, strict=True))
                return seat._replace(node=node.name, cards=shares)
        return seat

    def _updated_cap(self, me: Owner) -> Amounts | None:
        """The cap with its share of nodes that joined; a new cap if a node of the old one has left."""
        cap, present = me.cap, {node.name for node in self.cluster.nodes}
        if cap is None or self._share is None:
            return cap
        if any(node not in present for node, _, _ in cap):
            self._initial_nodes = present
            return self._new_cap(me, self._share)
        known = self._initial_nodes | {node for node, _, _ in cap}
        new = tuple(node for node in self.cluster.nodes if node.name not in known)
        return cap if not new else cap | even_cap(replace(self.cluster, nodes=new), self._share)

    def _new_cap(self, me: Owner, share: float) -> Amounts:
        """The share of every node if the minimum fits, else the same amount on fewer nodes."""
        preferred = {(seat.node, card) for seat in me.need for card in seat.gpus}
        evened = replace(me, cap=even_cap(self.cluster, share, preferred))
        fits = Allocation(self.cluster, [evened], {}).try_seat(evened)
        return evened.cap if fits and evened.cap is not None else packed_cap(self.cluster, share, preferred)


def _equivalent_cards(seat: Seat, before: Node, node: Node) -> list[int] | None:
    """GPUs of another node that equal those of this seat; None if it has too few."""
    found: list[int] = []
    for share in seat.cards:
        kind = before.gpus[share.card] if share.card < len(before.gpus) else None
        free = [card for card, gpu in enumerate(node.gpus) if gpu == kind and card not in found]
        if not free:
            return None
        found.append(free[0])
    return found
