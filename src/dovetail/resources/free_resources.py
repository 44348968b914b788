"""Free resources of one node, as a hashable value shared by nodes in the same state."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from dovetail.resources.cluster import Gpu, Node
    from dovetail.resources.seat import CardShare, Seat

WHOLE_CARD_MILLI = 1000
TRANSITION_CACHE_LIMIT = 200_000
"""Maximum number of cached transitions between states of cards; above it the cache is cleared, so that the memory of
a long-lived ledger is bounded."""


class FreeCard(NamedTuple):
    """Free resources of one card."""

    milli: int
    memory_bytes: int
    nvdecs: int
    nvencs: int


class NodeKind:
    """Fixed properties of a node; one object for all nodes of a ledger that differ only in name."""

    __slots__ = ("__weakref__", "cpu_milli", "custom", "edges", "gpus", "keys", "labels", "memory_bytes", "states")

    def __init__(self, node: Node) -> None:
        self.cpu_milli = node.usable_cpu_milli
        self.memory_bytes = node.memory_bytes
        self.gpus: tuple[Gpu, ...] = node.gpus
        self.keys = tuple(gpu.key for gpu in node.gpus)
        self.labels = dict(node.labels)
        self.custom = node.custom
        self.states: WeakValueDictionary[tuple[FreeCard, ...], FreeCards] = WeakValueDictionary()
        self.edges = 0

    def untouched(self) -> FreeResources:
        """The state of such a node without workers."""
        cards = tuple(FreeCard(WHOLE_CARD_MILLI, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs) for gpu in self.gpus)
        return FreeResources(self.cpu_milli, self.memory_bytes, self.cards(cards), self.custom)

    def cards(self, free: tuple[FreeCard, ...]) -> FreeCards:
        """The one object for this state."""
        found = self.states.get(free)
        if found is None:
            found = self.states[free] = FreeCards(self, free)
        return found

    def count_edge(self) -> None:
        """Clear the cached transitions; states that are in use remain, as the same objects."""
        self.edges += 1
        if self.edges > TRANSITION_CACHE_LIMIT:
            for state in list(self.states.values()):
                state.forget()
            self.edges = 0


class FreeCards:
    """The free state of a node's cards. Compared by identity: `NodeKind.cards` makes each state once.

    States form a graph whose edges, takings and givings back, are found once and then followed, so that a seat on a
    node with 16 cards costs as much as on a node with one.
    """

    __slots__ = ("__weakref__", "_after", "_before", "free", "idle_milli", "kind", "most_milli")

    def __init__(self, kind: NodeKind, free: tuple[FreeCard, ...]) -> None:
        self.kind = kind
        self.free = free
        self.idle_milli = sum(card.milli for card in free)
        self.most_milli = max((card.milli for card in free), default=0)
        """Largest free share of one card."""
        self._after: dict[tuple[CardShare, ...], FreeCards | None] = {}
        self._before: dict[tuple[CardShare, ...], FreeCards | None] = {}

    def after(self, shares: tuple[CardShare, ...]) -> FreeCards | None:
        """The state after these shares are taken; None if they are not free."""
        try:
            return self._after[shares]
        except KeyError:
            found = self._moved(shares, -1)
            self.kind.count_edge()
            self._after[shares] = found
            return found

    def before(self, shares: tuple[CardShare, ...]) -> FreeCards | None:
        """The state after these shares are released; None if more would be free than the card has."""
        try:
            return self._before[shares]
        except KeyError:
            found = self._moved(shares, +1)
            self.kind.count_edge()
            self._before[shares] = found
            return found

    def forget(self) -> None:
        self._after.clear()
        self._before.clear()

    def is_whole(self, index: int) -> bool:
        """Whether no worker computes on this card; its codecs may be in use."""
        card = self.free[index]
        return card.milli == WHOLE_CARD_MILLI and card.memory_bytes == self.kind.gpus[index].memory_bytes

    def is_untouched(self, index: int) -> bool:
        card, gpu = self.free[index], self.kind.gpus[index]
        return self.is_whole(index) and card.nvdecs == gpu.nvdecs and card.nvencs == gpu.nvencs

    def _moved(self, shares: tuple[CardShare, ...], sign: int) -> FreeCards | None:
        free = list(self.free)
        for share in shares:
            if not 0 <= share.card < len(free) or min(share) < 0:
                return None
            card, gpu = free[share.card], self.kind.gpus[share.card]
            moved = FreeCard(*(have + sign * change for have, change in zip(card, share[1:], strict=True)))
            most = FreeCard(WHOLE_CARD_MILLI, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs)
            if any(not 0 <= have <= limit for have, limit in zip(moved, most, strict=True)):
                return None
            free[share.card] = moved
        return self.kind.cards(tuple(free))


class FreeResources(NamedTuple):
    """Free resources of a node. Hashable; equal for nodes in the same state in one ledger and its copies."""

    cpu_milli: int
    memory_bytes: int
    cards: FreeCards
    custom: tuple[tuple[str, int], ...]

    def taken(self, seat: Seat) -> FreeResources | None:
        """The state after this seat is taken; None if it does not fit."""
        cpu_milli = self.cpu_milli - seat.cpu_milli
        memory_bytes = self.memory_bytes - seat.memory_bytes
        cards = self.cards.after(seat.cards) if seat.cards else self.cards
        custom = self.custom_after(seat.custom) if seat.custom else self.custom
        within = 0 <= cpu_milli <= self.cpu_milli and 0 <= memory_bytes <= self.memory_bytes
        return (
            FreeResources(cpu_milli, memory_bytes, cards, custom)
            if within and cards is not None and custom is not None
            else None
        )

    def given_back(self, seat: Seat) -> FreeResources:
        """The state after this taken seat is released."""
        cards = self.cards.before(seat.cards) if seat.cards else self.cards
        assert cards is not None, f"a taken seat cannot be returned: {seat} on {self}"
        custom = self.custom
        for given, amount in seat.custom:
            custom = tuple((name, have + amount if name == given else have) for name, have in custom)
        return FreeResources(self.cpu_milli + seat.cpu_milli, self.memory_bytes + seat.memory_bytes, cards, custom)

    def custom_after(self, asked: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...] | None:
        """The custom resources after `asked` is taken; None if there is less."""
        left = dict(self.custom)
        for name, amount in asked:
            if amount < 0 or left.get(name, 0) < amount:
                return None
            if amount:
                left[name] -= amount
        return tuple(left.items())
