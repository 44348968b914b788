"""Placement while a system runs: restarts after the loss of a node, further bundles, bundles to release. Pure.

The placer is that of the plan (`placement.BundlePlacer`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.actors.placement import BundlePlacer, PlacedBundle
from dovetail.resources.amounts import add_amounts, subtract_amounts, sum_seats
from dovetail.resources.ledger import Ledger
from dovetail.streaming.reserved_capacity import ReservedCapacity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dovetail.actors.colocation import Bundle
    from dovetail.actors.role import Pool
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Node
    from dovetail.resources.seat import Seats


class LivePlacement:
    """Placement on the present cluster, beside the seats that other runs hold."""

    def __init__(
        self, bundles: Sequence[Bundle], pools: Mapping[str, Pool], cluster: Cluster, reserved: Seats = ()
    ) -> None:
        self._bundles, self._pools = bundles, pools
        self.cluster = cluster
        self._nodes = {node.name: node for node in cluster.nodes}
        self._reserved = ReservedCapacity(reserved)

    def reserve(self, seats: Seats) -> None:
        """Replace the seats that other runs hold."""
        self._reserved = ReservedCapacity(seats)

    def on_node_joined(self, node: Node) -> None:
        self._nodes[node.name] = node
        self.cluster = replace(self.cluster, nodes=tuple(self._nodes.values()))

    def on_node_left(self, node: str) -> None:
        self._nodes.pop(node, None)
        if self._nodes:
            self.cluster = replace(self.cluster, nodes=tuple(self._nodes.values()))

    def has_nodes_of(self, seats: Seats) -> bool:
        return all(seat.node in self._nodes for seat in seats)

    def place(self, bundle: Bundle, placed: Sequence[PlacedBundle], avoid: Collection[str] = ()) -> PlacedBundle | None:
        """Seats for one more bundle beside the placed ones, not on the nodes of `avoid`; None if it does not fit."""
        nodes = tuple(node for name, node in self._nodes.items() if name not in avoid)
        if not nodes:
            return None
        cluster = replace(self.cluster, nodes=nodes)
        names = {node.name for node in nodes}
        staying = [one for one in placed if names.issuperset(one.nodes)]
        seats = [seat for one in staying for process in one.seats for seat in process]
        others = [seat for worker in self._reserved.external_workers(cluster, seats) for seat in worker.seats]
        others = [seat for seat in others if seat.node in names]
        placer = BundlePlacer(Ledger(cluster, others), self._bundles, self._pools)
        for one in staying:
            placer.adopt(one)
        return placer.place(bundle)

    def bundles_to_release(self, placed: Mapping[int, PlacedBundle]) -> list[int]:
        """Bundles above the minimum of their role whose seats are now held by other runs, the latest ones first."""
        amounts = {
            number: sum_seats(seat for process in one.seats for seat in process) for number, one in placed.items()
        }
        taken: Amounts = {}
        for part in amounts.values():
            taken = add_amounts(taken, part)
        over = self._reserved.excess(self.cluster, taken)
        counts = Counter(one.bundle.name for one in placed.values())
        released = []
        for number in sorted(placed, reverse=True):
            bundle = placed[number].bundle
            if counts[bundle.name] > bundle.low and not over.keys().isdisjoint(amounts[number]):
                counts[bundle.name] -= 1
                over = subtract_amounts(over, amounts[number])
                released.append(number)
        return released
