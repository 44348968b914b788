"""Where does a gang sit: several processes that start together or not at all?

Within a node when it fits, else on whole nodes: the fewest whose cards nobody computes on (for a gang without GPUs:
where nobody sits at all), with the same number of ranks on each where that divides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.scheduling.scores import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.fit import Way
    from dovetail.resources.free import Free
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.scores import Ranker


class GangRanker:
    """Ranks nodes for all ranks at once; its way is those of the ranks, one after the other."""

    __slots__ = ("fit", "rank", "ranks")

    def __init__(self, rank: Ranker, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.fit = rank.fit

    def best(self, free: Free) -> Choice | None:
        choices = list(_choices(self.rank, free, self.ranks))
        if len(choices) < self.ranks:
            return None
        together = tuple(share for choice in choices for share in choice.way)
        return Choice(sum(choice.score for choice in choices) // self.ranks, together)

    def ways_of_ranks(self, together: Way) -> list[Way]:
        cards = self.fit.shape.cards
        return [together[rank * cards : (rank + 1) * cards] for rank in range(self.ranks)]


def _choices(rank: Ranker, free: Free, most: int) -> Iterator[Choice]:
    """Where ranks would sit on this node, one after the other, until `most` or until it is full."""
    for _ in range(most):
        choice = rank.best(free)
        if choice is None:
            return
        yield choice
        then = free.taken(rank.fit.seat("", choice.way))
        assert then is not None, (rank.fit.shape, free, choice)
        free = then


def seats_on_whole_nodes(ledger: Ledger, gang: GangRanker) -> Seats | None:
    """Seats for all ranks on the fewest whole nodes, or None."""
    rank, shape, ranks_in_all = gang.rank, gang.fit.shape, gang.ranks
    room: dict[Free, list[Choice]] = {}
    whole: list[tuple[int, int]] = []
    for position, free in enumerate(ledger.free):
        if free not in room:
            room[free] = list(_choices(rank, free, ranks_in_all)) if is_whole(free, shape) else []
        if room[free]:
            whole.append((-len(room[free]), position))
    whole.sort()
    seats = []
    for position, ranks in dealt(ranks_in_all, whole):
        node = ledger.cluster.nodes[position].name
        seats += [rank.fit.seat(node, choice.way) for choice in room[ledger.free[position]][:ranks]]
    return tuple(seats) if len(seats) == ranks_in_all else None


def is_whole(free: Free, shape: Shape) -> bool:
    cards = free.cards
    if shape.computes_on_gpu:
        return all(cards.is_whole(index) for index in range(len(cards.free)))
    return free == cards.kind.untouched()


def dealt(ranks: int, whole: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(position of a node, ranks there) for the fewest of the nodes, given with the most room first."""
    chosen: list[tuple[int, int]] = []
    left = ranks
    for minus_room, position in whole:
        if left <= 0:
            break
        chosen.append((position, min(left, -minus_room)))
        left += minus_room
    if left > 0:
        return []
    each, rest = divmod(ranks, len(chosen))
    smallest = -whole[len(chosen) - 1][0]
    return [(position, each) for position, _ in chosen] if not rest and each <= smallest else chosen
