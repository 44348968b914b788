"""Allocation of nodes and GPUs to runs: seat the minimum of every run first, then assign the free GPUs in turns. Pure.

`fair_share` calls it for all runs; `cluster_store` for the cap of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import HOST, add_amounts, cluster_capacity, fits_within, subtract_amounts, sum_seats
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.seat import CardShare

CardKey = tuple[str, int]
"""Node and position of a GPU."""


class Allocation:
    """A machine or cluster on which owners are seated one after the other."""

    def __init__(self, cluster: Cluster, owners: Sequence[Owner], foreign: Amounts) -> None:
        self.nodes = {node.name: node for node in cluster.nodes}
        self.free = subtract_amounts(cluster_capacity(cluster), foreign)
        self._foreign = _cards_in(foreign)
        self.needs: dict[str, Amounts] = {}
        """Owner -> amounts of its minimum, where it was seated."""
        self.card_owners: dict[CardKey, list[str]] = {
            (node.name, card): [] for node in cluster.nodes for card in range(len(node.gpus))
        }
        """GPU -> its owners."""
        self._limits = {owner.id: _cards_in(owner.limit) for owner in owners}
        self._grants = {owner.id: _cards_in(owner.granted) for owner in owners}

    def try_seat(self, owner: Owner) -> bool:
        """Seat the minimum of an owner, all or nothing."""
        mine = self._find_all(owner)
        if mine is None:
            mine = sum_seats(owner.need)  # as planned, if nothing better is found
            if not fits_within(mine, self.free) or not _is_within_cap(owner, mine):
                return False
        self.free = subtract_amounts(self.free, mine)
        self.needs[owner.id] = mine
        for card in sorted(_cards_in(mine)):
            self.card_owners[card].append(owner.id)
        return True

    def _find_all(self, owner: Owner) -> Amounts | None:
        before = self.free
        mine: Amounts = {}
        try:
            for seat in sorted(owner.need, key=_seat_size, reverse=True):
                found = self._find_seat(owner, seat, mine)
                if found is None:
                    return None
                mine = add_amounts(mine, found)
                self.free = subtract_amounts(self.free, found)
            return mine
        finally:
            self.free = before

    def _find_seat(self, owner: Owner, seat: Seat, mine: Amounts) -> Amounts | None:
        """Amounts of an equal seat that is free, on the planned node first. Of equally good GPUs the planned one is
        preferred: the run may hold it in a way that it cannot change."""
        planned = self.nodes.get(seat.node)
        own = {node for node, _, _ in owner.limit}
        nodes = [
            node
            for node in self.nodes.values()
            if planned is not None and labels_match(node, planned, owner.required_labels)
        ]
        for node in sorted(nodes, key=lambda node: (node.name not in own, node is not planned)):
            found = self._find_on_node(owner, seat, node, _cards_in(mine))
            if found is not None and _is_within_cap(owner, add_amounts(mine, found)):
                return found
        return None

    def _find_on_node(self, owner: Owner, seat: Seat, node: Node, mine: set[CardKey]) -> Amounts | None:
        planned = self.nodes[seat.node].gpus
        shares: list[CardShare] = []
        for share in seat.cards:
            able = [
                (self._rank(owner.id, (node.name, card), mine), (node.name, card) != (seat.node, share.card), card)
                for card, gpu in enumerate(node.gpus)
                if share.card < len(planned)
                and gpu == planned[share.card]
                and all(other.card != card for other in shares)
                and _may_use_card(owner, (node.name, card))
                and fits_within(sum_seats((Seat(node.name, cards=(share._replace(card=card),)),)), self.free)
            ]
            if not able:
                return None
            shares.append(share._replace(card=min(able)[-1]))
        takes = sum_seats((seat._replace(node=node.name, cards=tuple(shares)),))
        return takes if fits_within(takes, self.free) else None

    def _rank(self, owner: str, card: CardKey, mine: set[CardKey]) -> tuple[bool, int, bool, bool, bool]:
        """Sort key of a GPU for an owner, lowest first: one it uses, one without other owners, one it already has."""
        others = any(card in cards for other, cards in self._grants.items() if other != owner)
        return (
            card not in mine,
            len(self.card_owners[card]),
            card not in self._limits[owner],
            card not in self._grants[owner],
            others,
        )

    def assign_free_cards(self, owners: Sequence[Owner]) -> None:
        """Assign the GPUs without an owner, one at a time, to the owner with the fewest: first GPUs of a model that the
        owner uses, then the others, to owners that use GPUs at all."""
        counts = {owner.id: len(_cards_in(self.needs[owner.id])) for owner in owners}
        most = {owner.id: None if owner.ideal is None else len(_cards_in(sum_seats(owner.ideal))) for owner in owners}
        models = {owner.id: self._card_models(owner) for owner in owners}
        caps = {owner.id: owner for owner in owners}
        free = {card for card, holders in self.card_owners.items() if not holders and card not in self._foreign}

        def suits(owner: str, card: CardKey) -> bool:
            return (self._gpu(card) in models[owner] or (others and bool(models[owner]))) and _may_use_card(
                caps[owner], card
            )

        others = False
        while free:
            able = [
                owner.id
                for owner in owners
                if (most[owner.id] is None or counts[owner.id] < (most[owner.id] or 0))
                and any(suits(owner.id, card) for card in free)
            ]
            if not able and others:
                return
            if not able:
                others = True
                continue
            first = min(able, key=lambda owner: counts[owner])  # of those with the fewest, the first to come
            card = min(
                (card for card in free if suits(first, card)),
                key=lambda card: (self._rank(first, card, set()), card),
            )
            counts[first] += 1
            self.card_owners[card].append(first)
            free.remove(card)

    def _card_models(self, owner: Owner) -> set[Gpu]:
        """GPU models that its minimum and its plan use."""
        planned = _cards_in(sum_seats(owner.ideal or ())) & self.card_owners.keys()
        return {self._gpu(card) for card in _cards_in(self.needs[owner.id]) | planned}

    def _gpu(self, card: CardKey) -> Gpu:
        return self.nodes[card[0]].gpus[card[1]]


def _cards_in(amounts: Amounts) -> set[CardKey]:
    return {(node, card) for node, card, _ in amounts if card != HOST}


def _is_within_cap(owner: Owner, amounts: Amounts) -> bool:
    return owner.cap is None or fits_within(amounts, owner.cap)


def _may_use_card(owner: Owner, card: CardKey) -> bool:
    return owner.cap is None or (*card, "milli") in owner.cap


def _seat_size(seat: Seat) -> tuple[int, int, int]:
    return len(seat.cards), sum(share.milli for share in seat.cards), seat.cpu_milli


def labels_match(node: Node, other: Node, required: Collection[str] | None) -> bool:
    """Whether the required labels have the same values on both nodes; None: all labels."""
    if required is None:
        return node.labels == other.labels
    mine, theirs = dict(node.labels), dict(other.labels)
    return all(mine.get(name) == theirs.get(name) for name in required)
