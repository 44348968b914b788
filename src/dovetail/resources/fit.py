"""Test whether a shape fits on a node, and on which of its cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.free_resources import WHOLE_CARD_MILLI, FreeCard, FreeCards, FreeResources, NodeKind
from dovetail.resources.seat import CardShare, Seat
from dovetail.resources.shape import Shape, ShapeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.resources.cluster import Gpu

CardAssignment = tuple[CardShare, ...]
"""Share of each card of a node that one worker takes."""

ASSIGNMENT_CACHE_LIMIT = 100_000
CAPACITY_LIMIT = 10**9
"""Capacity of a node that does not limit a shape; practically infinite."""


class Fit:
    """Card assignments of one shape (of a gang: one rank) on nodes; computed once per state of the cards of a node."""

    __slots__ = ("_shares", "_ways", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._shares: dict[NodeKind, tuple[CardShare | None, ...] | None] = {}
        self._ways: dict[FreeCards, tuple[CardAssignment, ...]] = {}

    def assignments(self, free: FreeResources) -> tuple[CardAssignment, ...]:
        """All distinct card assignments on a node now, lowest cards first; empty if the shape does not fit."""
        shape = self.shape
        if free.cpu_milli < shape.cpu_milli or free.memory_bytes < shape.memory_bytes:
            return ()
        if shape.custom and free.custom_after(shape.custom) is None:
            return ()
        return self.card_assignments(free.cards)

    def card_assignments(self, cards: FreeCards) -> tuple[CardAssignment, ...]:
        """The same, without CPUs, memory and custom resources."""
        found = self._ways.get(cards)
        if found is None:
            if len(self._ways) >= ASSIGNMENT_CACHE_LIMIT:
                self._ways.clear()
            found = self._ways[cards] = tuple(self._find_ways(cards))
        return found

    def capacity(self, free: FreeResources) -> int:
        """Number of workers of this shape that fit together on a node in this state."""
        shape = self.shape
        custom = dict(free.custom)
        pairs = [(free.cpu_milli, shape.cpu_milli), (free.memory_bytes, shape.memory_bytes)]
        pairs += [(custom.get(name, 0), amount) for name, amount in shape.custom]
        on_host = min((have // need for have, need in pairs if need), default=CAPACITY_LIMIT)
        return min(on_host, self._room_on_cards(free.cards), CAPACITY_LIMIT)

    def _room_on_cards(self, cards: FreeCards) -> int:
        shares = self.shares(cards.kind)
        if shares is None:
            return 0
        if self.shape.kind is ShapeKind.CPU_ONLY:
            return CAPACITY_LIMIT
        if self.shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU):
            return sum(_shares_that_fit(cards.free[share.card], share) for share in shares if share is not None)
        count = 0
        now: FreeCards | None = cards
        while now is not None and (ways := self.card_assignments(now)):
            now = now.after(ways[0])
            count += 1
        return count

    def shares(self, kind: NodeKind) -> tuple[CardShare | None, ...] | None:
        """Share that a worker would take of each card of a node, None for unsuitable cards; None if its labels exclude
        the node."""
        if kind not in self._shares:
            allowed = all(kind.labels.get(name) in values for name, values in self.shape.labels)
            self._shares[kind] = (
                tuple(
                    card_share(self.shape, index, gpu, key)
                    for index, (gpu, key) in enumerate(zip(kind.gpus, kind.keys, strict=True))
                )
                if allowed
                else None
            )
        return self._shares[kind]

    def seat(self, node: str, way: CardAssignment) -> Seat:
        shape = self.shape
        return Seat(node, shape.cpu_milli, shape.memory_bytes, way, shape.custom)

    def _find_ways(self, cards: FreeCards) -> Iterable[CardAssignment]:
        shares = self.shares(cards.kind)
        if shares is None:
            return ()
        if self.shape.kind is ShapeKind.CPU_ONLY:
            return ((),)
        able = [share for share in shares if share is not None and card_accepts(self.shape, share, cards)]
        match self.shape.kind:
            case ShapeKind.WHOLE_NUMBERED_GPU:
                return _assignments_with_codecs(self.shape, able, cards)
            case ShapeKind.ENTIRE_GPU:
                return _entire_card_assignments(self.shape, able, cards)
            case _:
                return _single_card_assignments(able, cards)


def card_share(shape: Shape, index: int, gpu: Gpu, key: str) -> CardShare | None:
    """Share that a worker takes of this card; None if the card is unsuitable."""
    if shape.kind is ShapeKind.CPU_ONLY or (shape.accelerators and key not in shape.accelerators):
        return None
    if shape.gpu_memory_bytes > gpu.memory_bytes:
        return None
    if shape.kind is ShapeKind.WHOLE_NUMBERED_GPU:
        return CardShare(index, WHOLE_CARD_MILLI, gpu.memory_bytes)
    if shape.kind is ShapeKind.ENTIRE_GPU:
        return CardShare(index, WHOLE_CARD_MILLI, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs)
    if shape.nvdecs > gpu.nvdecs or shape.nvencs > gpu.nvencs:
        return None
    if shape.kind is ShapeKind.CODEC:
        return CardShare(index, 0, 0, shape.nvdecs, shape.nvencs)
    milli = shape.gpu_milli or WHOLE_CARD_MILLI * shape.gpu_memory_bytes // gpu.memory_bytes
    memory_bytes = shape.gpu_memory_bytes or gpu.memory_bytes * shape.gpu_milli // WHOLE_CARD_MILLI
    return CardShare(index, milli, memory_bytes, shape.nvdecs, shape.nvencs)


def card_accepts(shape: Shape, share: CardShare, cards: FreeCards) -> bool:
    """Whether this share of the card is free now. Codecs of several cards are counted together elsewhere."""
    card = cards.free[share.card]
    if shape.cards == 1 and (card.nvdecs < shape.nvdecs or card.nvencs < shape.nvencs):
        return False
    if shape.kind is ShapeKind.WHOLE_NUMBERED_GPU:
        return cards.is_whole(share.card)
    if shape.kind is ShapeKind.ENTIRE_GPU:
        return cards.is_untouched(share.card)
    return card.milli >= share.milli and card.memory_bytes >= share.memory_bytes


def _shares_that_fit(card: FreeCard, share: CardShare) -> int:
    """Number of such shares that fit on the free part of a card."""
    return min(have // take for have, take in zip(card, share[1:], strict=True) if take)


def _single_card_assignments(able: list[CardShare], cards: FreeCards) -> Iterable[CardAssignment]:
    """One assignment per card; of cards in the same state only the first."""
    seen = set()
    for share in able:
        alike = (cards.free[share.card], cards.kind.gpus[share.card])
        if alike not in seen:
            seen.add(alike)
            yield (share,)


def _assignments_with_codecs(shape: Shape, able: list[CardShare], cards: FreeCards) -> Iterable[CardAssignment]:
    """The first cards that together have the requested codecs, which are taken from the first card on."""
    chosen = _cards_with_codecs(shape, [(share, cards.free[share.card]) for share in able])
    if chosen is None:
        return ()
    nvdecs, nvencs, dealt = shape.nvdecs, shape.nvencs, []
    for share in chosen:
        card = cards.free[share.card]
        here = share._replace(nvdecs=min(nvdecs, card.nvdecs), nvencs=min(nvencs, card.nvencs))
        nvdecs, nvencs = nvdecs - here.nvdecs, nvencs - here.nvencs
        dealt.append(here)
    return (tuple(dealt),)


def _entire_card_assignments(shape: Shape, able: list[CardShare], cards: FreeCards) -> Iterable[CardAssignment]:
    """The first entire cards; together they must have the requested codecs."""
    chosen = _cards_with_codecs(shape, [(share, cards.free[share.card]) for share in able])
    return () if chosen is None else (tuple(chosen),)


def _requested_codecs(shape: Shape, card: FreeCard) -> int:
    return (card.nvdecs if shape.nvdecs else 0) + (card.nvencs if shape.nvencs else 0)


def _cards_with_codecs(shape: Shape, able: list[tuple[CardShare, FreeCard]]) -> list[CardShare] | None:
    """As many cards as the shape needs that together have its codecs; cards with few codecs first, so that the others
    stay free for workers that need codecs. Without codecs: the first cards."""
    count = shape.cards
    if len(able) < count:
        return None
    if count == 1 or not (shape.nvdecs or shape.nvencs):
        return [share for share, _ in able[:count]]
    able = sorted(able, key=lambda item: _requested_codecs(shape, item[1]))
    for codec, need in (("nvdecs", shape.nvdecs), ("nvencs", shape.nvencs)):
        if sum(sorted((getattr(card, codec) for _, card in able), reverse=True)[:count]) < need:
            return None
    # reached[n]: (NVDECs, NVENCs), neither counted beyond need, that some n of the cards so far have, and which cards
    reached: list[dict[tuple[int, int], list[CardShare]]] = [{} for _ in range(count + 1)]
    reached[0][0, 0] = []
    goal = (shape.nvdecs, shape.nvencs)
    for share, card in able:
        for taken in range(count - 1, -1, -1):
            for (nvdecs, nvencs), chosen in reached[taken].items():
                sums = (min(goal[0], nvdecs + card.nvdecs), min(goal[1], nvencs + card.nvencs))
                reached[taken + 1].setdefault(sums, [*chosen, share])
        if goal in reached[count]:
            return sorted(reached[count][goal])
    return None
