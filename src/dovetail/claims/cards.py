"""Which of our cards is that? Two runs may see different cards of one machine, and count them from zero.

Cards are told apart by their uuid where that is known (CUDA_VISIBLE_DEVICES hides some from a run), else by position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.resources.amounts import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seat, Seats

Uuids = dict[str, list[str]]
"""Node -> the uuid of each of its cards."""


def uuids_of(cluster: Cluster) -> Uuids:
    return {node.name: [gpu.uuid for gpu in node.gpus] for node in cluster.nodes if node.gpus}


def seen_from(owner: Owner, theirs: Uuids, ours: Uuids) -> Owner:
    """The same owner with its cards at our positions; what we do not see of them is left out."""
    if theirs == ours:
        return owner
    places = {
        (node, card): _place(uuid, card, ours.get(node, []))
        for node, uuids in theirs.items()
        for card, uuid in enumerate(uuids)
    }
    return replace(
        owner,
        need=_seats(owner.need, places),
        ideal=None if owner.ideal is None else _seats(owner.ideal, places),
        granted=_amounts(owner.granted, places),
        limit=_amounts(owner.limit, places),
        held=_amounts(owner.held, places),
        cap=None if owner.cap is None else _amounts(owner.cap, places),
    )


def _place(uuid: str, card: int, ours: Sequence[str]) -> int | None:
    if uuid in ours and uuid:
        return ours.index(uuid)
    known = bool(uuid) and all(ours)
    return None if known or card >= len(ours) else card


def _amounts(amounts: Amounts, places: Mapping[tuple[str, int], int | None]) -> Amounts:
    found: Amounts = {}
    for (node, card, what), amount in amounts.items():
        place = HOST if card == HOST else places.get((node, card))
        if place is not None:
            found[node, place, what] = amount
    return found


def _seats(seats: Seats, places: Mapping[tuple[str, int], int | None]) -> Seats:
    return tuple(_seat(seat, places) for seat in seats)


def _seat(seat: Seat, places: Mapping[tuple[str, int], int | None]) -> Seat:
    there = ((share, places.get((seat.node, share.card))) for share in seat.cards)
    return seat._replace(cards=tuple(share._replace(card=place) for share, place in there if place is not None))
