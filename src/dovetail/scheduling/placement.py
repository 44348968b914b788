"""Which node does the next worker go to, and who leaves first?

Work per placement does not grow with the cluster: for every shape the nodes stand in a heap, best first, and only
nodes that changed since that shape was last asked for are ranked again.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from dovetail.scheduling.gangs import GangRanker, seats_on_whole_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.free import Free
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.fragmentation import Fragmentation
    from dovetail.scheduling.scores import Choice, Ranker, Score

_NODE_BITS = 24
_NODE_MASK = (1 << _NODE_BITS) - 1
_TOP_SCORE = 1 << 24
_NO_ROOM = -1


class Placer:
    """Seats workers on a ledger by one score. Same ledger, same score, same calls: same seats."""

    def __init__(self, ledger: Ledger, score: Score) -> None:
        self.ledger = ledger
        self.score = score
        self._rankings: dict[Shape, _Ranking] = {}

    def find(self, shape: Shape) -> Seats | None:
        """The best place for one more worker, without taking it; None if there is none. A gang sits on one node if it
        fits on one, else on whole nodes."""
        ranking = self._ranking(shape)
        seats = ranking.first()
        if seats is None and isinstance(ranking.ranker, GangRanker):
            return seats_on_whole_nodes(self.ledger, ranking.ranker)
        return seats

    def place(self, shape: Shape) -> Seats | None:
        """Seats one more worker: all of its ranks, or nothing."""
        seats = self.find(shape)
        for seat in seats or ():
            self.ledger.take(seat)
        return seats

    def fill(self, shape: Shape, most: int) -> list[Seats]:
        """Up to `most` workers, one after the other."""
        placed: list[Seats] = []
        while len(placed) < most and (seats := self.place(shape)) is not None:
            placed.append(seats)
        return placed

    def give_back(self, seats: Seats) -> None:
        for seat in seats:
            self.ledger.give_back(seat)

    def candidates(self, shape: Shape) -> list[int]:
        """Positions of all nodes that could seat one more worker."""
        return self._ranking(shape).able()

    def _ranking(self, shape: Shape) -> _Ranking:
        ranking = self._rankings.get(shape)
        if ranking is None:
            ranker = self.score.ranker(shape)
            ranking = _Ranking(self.ledger, GangRanker(ranker, shape.ranks) if shape.ranks > 1 else ranker)
            self._rankings[shape] = ranking
        ranking.refresh()
        return ranking


class _Ranking:
    """The nodes in the order in which one shape wants them.

    An entry is one integer, (how far from the top score, position of the node), so that a heap of them sorts by score
    and then by node order. Entries that no longer hold stay in the heap until they come up.
    """

    __slots__ = ("_choices", "_entries", "_era", "_heap", "_ledger", "_seen", "ranker")

    def __init__(self, ledger: Ledger, ranker: Ranker) -> None:
        self.ranker = ranker
        self._ledger = ledger
        self._choices: list[Choice | None] = []
        self._entries: list[int] = []
        self._heap: list[int] = []
        self._seen = 0
        self._era = -1

    def refresh(self) -> None:
        """Ranks the nodes again that changed since the last time."""
        ledger = self._ledger
        changes = ledger.changes
        if self._era != ledger.era or len(self._heap) > 4 * len(self._entries) + 64:
            self._rank_all()
            return
        best, entries, choices, heap, free = self.ranker.best, self._entries, self._choices, self._heap, ledger.free
        changed = changes[self._seen :]
        for position in changed if len(changed) < 2 else set(changed):
            choice = choices[position] = best(free[position])
            if choice is None:
                entries[position] = _NO_ROOM
                continue
            entry = (_TOP_SCORE - choice[0]) << _NODE_BITS | position
            if entries[position] != entry:
                entries[position] = entry
                heappush(heap, entry)
        self._seen = len(changes)

    def first(self) -> Seats | None:
        """Seats on the best node that has room for all ranks."""
        heap, entries = self._heap, self._entries
        while heap:
            position = heap[0] & _NODE_MASK
            if entries[position] == heap[0]:
                return self._seats(position)
            heappop(heap)
        return None

    def able(self) -> list[int]:
        return [position for position, entry in enumerate(self._entries) if entry != _NO_ROOM]

    def _seats(self, position: int) -> Seats:
        choice, ranker = self._choices[position], self.ranker
        assert choice is not None, (ranker.fit.shape, position)
        node = self._ledger.cluster.nodes[position].name
        if isinstance(ranker, GangRanker):
            return tuple(ranker.fit.seat(node, way) for way in ranker.ways_of_ranks(choice.way))
        return (ranker.fit.seat(node, choice.way),)

    def _rank_all(self) -> None:
        known: dict[Free, Choice | None] = {}
        self._choices, self._entries = [], []
        for position, free in enumerate(self._ledger.free):
            if free not in known:
                known[free] = self.ranker.best(free)
            choice = known[free]
            self._choices.append(choice)
            self._entries.append(_NO_ROOM if choice is None else (_TOP_SCORE - choice.score) << _NODE_BITS | position)
        self._heap = [entry for entry in self._entries if entry != _NO_ROOM]
        heapify(self._heap)
        self._seen = len(self._ledger.changes)
        self._era = self._ledger.era


def first_to_leave(ledger: Ledger, workers: Sequence[Seats], fragmentation: Fragmentation) -> int:
    """Which of these workers to stop: the one whose leaving makes the most GPU usable again; of several the one on the
    last node, because placement fills the first, and there the last in the list."""
    assert workers, "nobody is there to leave"
    known: dict[object, int] = {}
    best: tuple[int, int, int] | None = None
    for number, seats in enumerate(workers):
        last = max(ledger.position(seat.node) for seat in seats)
        nodes = [seat.node for seat in seats]
        key = tuple(
            (
                nodes.index(seat.node),
                ledger.free_on(seat.node),
                seat.cpu_milli,
                seat.memory_bytes,
                seat.cards,
                seat.custom,
            )
            for seat in seats
        )
        gain = known.get(key)
        if gain is None:
            gain = known[key] = _gain_of_leaving(ledger, seats, fragmentation)
        if best is None or (gain, last, number) > best:
            best = (gain, last, number)
    assert best is not None
    return best[2]


def _gain_of_leaving(ledger: Ledger, seats: Seats, fragmentation: Fragmentation) -> int:
    now = {seat.node: ledger.free_on(seat.node) for seat in seats}
    then: dict[str, Free] = dict(now)
    for seat in seats:
        then[seat.node] = then[seat.node].given_back(seat)
    return sum(fragmentation.of_free(now[node]) - fragmentation.of_free(then[node]) for node in now)
