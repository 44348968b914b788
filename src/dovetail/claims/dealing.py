"""Which card is whose? Everybody's least is seated first, then the cards on which nobody sits are dealt in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import HOST, amounts_of, capacity_of, minus, plus, within
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.seat import CardShare

Card = tuple[str, int]
"""Node, and its position there."""


class Table:
    """A machine on which owners are seated one after the other."""

    def __init__(self, cluster: Cluster, owners: Sequence[Owner], foreign: Amounts) -> None:
        self.nodes = {node.name: node for node in cluster.nodes}
        self.left = minus(capacity_of(cluster), foreign)
        self._foreign = _cards(foreign)
        self.needs: dict[str, Amounts] = {}
        """Owner -> where its least workers sit."""
        self.sits: dict[Card, list[str]] = {
            (node.name, card): [] for node in cluster.nodes for card in range(len(node.gpus))
        }
        """Card -> its owners."""
        self._limits = {owner.id: _cards(owner.limit) for owner in owners}
        self._grants = {owner.id: _cards(owner.granted) for owner in owners}

    def seat(self, owner: Owner) -> bool:
        """All that it needs, or nothing."""
        mine = self._all_found(owner)
        if mine is None:
            mine = amounts_of(owner.need)  # just as it was planned, if nothing better is found
            if not within(mine, self.left) or not _allowed(owner, mine):
                return False
        self.left = minus(self.left, mine)
        self.needs[owner.id] = mine
        for card in sorted(_cards(mine)):
            self.sits[card].append(owner.id)
        return True

    def _all_found(self, owner: Owner) -> Amounts | None:
        before = self.left
        mine: Amounts = {}
        try:
            for seat in sorted(owner.need, key=_size, reverse=True):
                found = self._found(owner, seat, mine)
                if found is None:
                    return None
                mine = plus(mine, found)
                self.left = minus(self.left, found)
            return mine
        finally:
            self.left = before

    def _found(self, owner: Owner, seat: Seat, mine: Amounts) -> Amounts | None:
        """Where a seat like this one can be; first there where it is. Of cards that are equally good it is the one that
        was planned: a run may hold just that one in a way that it cannot change."""
        there = self.nodes.get(seat.node)
        own = {node for node, _, _ in owner.limit}
        nodes = [node for node in self.nodes.values() if there is not None and alike(node, there, owner.asks)]
        for node in sorted(nodes, key=lambda node: (node.name not in own, node is not there)):
            found = self._on(owner, seat, node, _cards(mine))
            if found is not None and _allowed(owner, plus(mine, found)):
                return found
        return None

    def _on(self, owner: Owner, seat: Seat, node: Node, mine: set[Card]) -> Amounts | None:
        liked = self.nodes[seat.node].gpus
        shares: list[CardShare] = []
        for share in seat.cards:
            able = [
                (self._rank(owner.id, (node.name, card), mine), (node.name, card) != (seat.node, share.card), card)
                for card, gpu in enumerate(node.gpus)
                if share.card < len(liked)
                and gpu == liked[share.card]
                and all(other.card != card for other in shares)
                and _may_have(owner, (node.name, card))
                and within(amounts_of((Seat(node.name, cards=(share._replace(card=card),)),)), self.left)
            ]
            if not able:
                return None
            shares.append(share._replace(card=min(able)[-1]))
        takes = amounts_of((seat._replace(node=node.name, cards=tuple(shares)),))
        return takes if within(takes, self.left) else None

    def _rank(self, owner: str, card: Card, mine: set[Card]) -> tuple[bool, int, bool, bool, bool]:
        """How bad a card is for an owner: best one where it sits, where nobody else does, or that it has already."""
        others = any(card in cards for other, cards in self._grants.items() if other != owner)
        return (
            card not in mine,
            len(self.sits[card]),
            card not in self._limits[owner],
            card not in self._grants[owner],
            others,
        )

    def deal(self, owners: Sequence[Owner]) -> None:
        """The cards on which nobody sits, one by one to who has fewest: first of the kinds that each is known to use,
        then those that are nobody's kind, for whoever uses cards at all."""
        counts = {owner.id: len(_cards(self.needs[owner.id])) for owner in owners}
        most = {owner.id: None if owner.ideal is None else len(_cards(amounts_of(owner.ideal))) for owner in owners}
        likes = {owner.id: self._likes(owner) for owner in owners}
        caps = {owner.id: owner for owner in owners}
        free = {card for card, sitting in self.sits.items() if not sitting and card not in self._foreign}

        def suits(owner: str, card: Card) -> bool:
            return (self._gpu(card) in likes[owner] or (others and bool(likes[owner]))) and _may_have(caps[owner], card)

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
            first = min(able, key=lambda owner: counts[owner])  # the earliest of those with fewest
            card = min(
                (card for card in free if suits(first, card)),
                key=lambda card: (self._rank(first, card, set()), card),
            )
            counts[first] += 1
            self.sits[card].append(first)
            free.remove(card)

    def _likes(self, owner: Owner) -> set[Gpu]:
        """The kinds of cards that it uses, as far as its least and its plan tell."""
        planned = _cards(amounts_of(owner.ideal or ())) & self.sits.keys()
        return {self._gpu(card) for card in _cards(self.needs[owner.id]) | planned}

    def _gpu(self, card: Card) -> Gpu:
        return self.nodes[card[0]].gpus[card[1]]


def _cards(amounts: Amounts) -> set[Card]:
    return {(node, card) for node, card, _ in amounts if card != HOST}


def _allowed(owner: Owner, amounts: Amounts) -> bool:
    return owner.cap is None or within(amounts, owner.cap)


def _may_have(owner: Owner, card: Card) -> bool:
    return owner.cap is None or (*card, "milli") in owner.cap


def _size(seat: Seat) -> tuple[int, int, int]:
    return len(seat.cards), sum(share.milli for share in seat.cards), seat.cpu_milli


def alike(node: Node, other: Node, asks: Collection[str] | None) -> bool:
    """Whether the labels that somebody asks for are the same there; None: all of them."""
    if asks is None:
        return node.labels == other.labels
    mine, theirs = dict(node.labels), dict(other.labels)
    return all(mine.get(name) == theirs.get(name) for name in asks)
