"""Cap of a run on a shared cluster: what `share=` means per node, and rounding to whole GPUs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import CARD_FIELDS, CPU, HOST, MEMORY, cluster_capacity
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import CardShare, Seats


def round_amounts_to_cards(amounts: Amounts, capacity: Amounts) -> Amounts:
    """Amounts with every used GPU rounded up to a whole one."""
    found = {key: amount for key, amount in amounts.items() if key[1] == HOST}
    for node, card in {(node, card) for node, card, _ in amounts if card != HOST}:
        for what in CARD_FIELDS:
            amount = capacity.get((node, card, what), 0) or amounts.get((node, card, what), 0)
            if amount:
                found[node, card, what] = amount
    return found


def round_seats_to_cards(seats: Seats, cluster: Cluster) -> Seats:
    """Merge seats that share a GPU into one seat that has the whole GPU."""
    capacity = cluster_capacity(cluster)
    groups: list[list[Seat]] = []
    for seat in seats:
        mine = [group for group in groups if _shares_card(seat, group)]
        for group in mine:
            groups.remove(group)
        groups.append([other for group in mine for other in group] + [seat])
    return tuple(_merge_seats(group, capacity) for group in groups)


def _shares_card(seat: Seat, group: Sequence[Seat]) -> bool:
    return any(other.node == seat.node and not set(other.gpus).isdisjoint(seat.gpus) for other in group)


def _merge_seats(group: Sequence[Seat], capacity: Amounts) -> Seat:
    first = group[0]
    cards = {share.card: _whole_card_share(first.node, share, capacity) for seat in group for share in seat.cards}
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


def _whole_card_share(node: str, share: CardShare, capacity: Amounts) -> CardShare:
    return share._replace(**{what: capacity.get((node, share.card, what), 0) for what in CARD_FIELDS})


CAPPED_RESOURCES = (CPU, MEMORY)


def even_cap(cluster: Cluster, share: float, preferred: Collection[tuple[str, int]] = ()) -> Amounts:
    """Cap with the same share of the CPUs and the memory of every node."""
    capacity = cluster_capacity(cluster)
    cards = capped_cards(cluster, share, preferred)
    return {
        key: int(amount * share) if key[2] in CAPPED_RESOURCES and key[1] == HOST else amount
        for key, amount in capacity.items()
        if (key[1] == HOST or key[:2] in cards) and int(amount * (share if key[2] in CAPPED_RESOURCES else 1))
    }


def packed_cap(cluster: Cluster, share: float, preferred: Collection[tuple[str, int]] = ()) -> Amounts:
    """Cap with the same total on as few nodes as possible: for workers that are larger than the share of a node."""
    capacity = cluster_capacity(cluster)
    cards = capped_cards(cluster, share, preferred)
    with_cards = {node for node, _ in cards}
    order = sorted((node.name for node in cluster.nodes), key=lambda name: name not in with_cards)
    found = {
        key: amount
        for key, amount in capacity.items()
        if key[:2] in cards or (key[1] == HOST and key[2] not in CAPPED_RESOURCES)
    }
    for what in CAPPED_RESOURCES:
        budget = int(share * sum(amount for key, amount in capacity.items() if key[1] == HOST and key[2] == what))
        for name in order:
            amount = min(budget, capacity.get((name, HOST, what), 0))
            if amount:
                found[name, HOST, what] = amount
                budget -= amount
    return found


def capped_cards(cluster: Cluster, share: float, preferred: Collection[tuple[str, int]] = ()) -> set[tuple[str, int]]:
    """Share of all GPUs in whole GPUs, the preferred ones first; at least one if any is preferred."""
    cards = [(node.name, card) for node in cluster.nodes for card in range(len(node.gpus))]
    count = max(int(len(cards) * share), 1 if preferred else 0)
    return set(sorted(cards, key=lambda card: card not in preferred)[:count])
