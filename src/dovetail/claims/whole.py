"""What is that if cards are taken whole only? On a cluster that others use no two runs share a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import HOST, OF_CARD, capacity_of
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import CardShare, Seats


def whole_amounts(amounts: Amounts, capacity: Amounts) -> Amounts:
    """Of every card that is touched all there is; the rest as it was."""
    found = {key: amount for key, amount in amounts.items() if key[1] == HOST}
    for node, card in {(node, card) for node, card, _ in amounts if card != HOST}:
        for what in OF_CARD:
            amount = capacity.get((node, card, what), 0) or amounts.get((node, card, what), 0)
            if amount:
                found[node, card, what] = amount
    return found


def whole_seats(seats: Seats, cluster: Cluster) -> Seats:
    """Seats that share a card become one, which has all of it."""
    capacity = capacity_of(cluster)
    groups: list[list[Seat]] = []
    for seat in seats:
        mine = [group for group in groups if _touches(seat, group)]
        for group in mine:
            groups.remove(group)
        groups.append([other for group in mine for other in group] + [seat])
    return tuple(_together(group, capacity) for group in groups)


def _touches(seat: Seat, group: Sequence[Seat]) -> bool:
    return any(other.node == seat.node and not set(other.gpus).isdisjoint(seat.gpus) for other in group)


def _together(group: Sequence[Seat], capacity: Amounts) -> Seat:
    first = group[0]
    cards = {share.card: _whole(first.node, share, capacity) for seat in group for share in seat.cards}
    custom: dict[str, int] = {}
    for seat in group:
        for name, amount in seat.custom:
            custom[name] = custom.get(name, 0) + amount
    return Seat(
        first.node,
        sum(seat.cpu_milli for seat in group),
        sum(seat.memory_bytes for seat in group),
        tuple(cards[card] for card in sorted(cards)),
        tuple(sorted(custom.items())),
    )


def _whole(node: str, share: CardShare, capacity: Amounts) -> CardShare:
    return share._replace(**{what: capacity.get((node, share.card, what), 0) for what in OF_CARD})
