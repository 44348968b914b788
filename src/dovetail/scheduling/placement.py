"""Placement of workers on nodes by fragmentation gradient descent (FGD), one worker at a time.

A worker goes where the fragmentation of the cluster for the expected workload grows least; the worker that stops is
the one whose removal lowers it most ("Beware of Fragmentation", ATC'23). Two callers share the score:

- `Placer` places on a `Ledger`. Every shape has a heap of nodes, best first; a placement ranks again only the nodes
  that changed, so its cost does not depend on the size of the cluster.
- `GroupPlacer` places on groups of nodes in the same state, which is how a replan sees the cluster; `stop_rank` is the
  order in which a replan stops workers.

A gang is placed within one node if it fits, else on the fewest whole nodes: nodes without any GPU work (for a gang
without GPUs: empty nodes), with the same number of ranks on each where that divides.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.resources.fit import CardAssignment, Fit
from dovetail.scheduling.fragmentation import Fragmentation, HostMasks, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.resources.free_resources import FreeCards, FreeResources
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape

MAX_CACHED_CHOICES = 200_000
SCORE_LEVELS = 100
"""Levels of the fragmentation score: near zero, one level is 0.04 GPUs."""
_NODE_BITS = 24
_NODE_MASK = (1 << _NODE_BITS) - 1
_CPU_BITS = 32
_CPU_MASK = (1 << _CPU_BITS) - 1
_MAX_SCORE = 1 << 24
_DOES_NOT_FIT = -1


class SeatChoice(NamedTuple):
    """The best card assignment on a node, and its score."""

    score: int
    way: CardAssignment


class Ranker(Protocol):
    """For one shape: the best card assignment on a node in a given state; None if the shape does not fit."""

    fit: Fit

    def best(self, free: FreeResources) -> SeatChoice | None: ...


class Score(Protocol):
    """The measure that placement maximises."""

    def ranker(self, shape: Shape) -> Ranker: ...


class FragmentationScore:
    """Fragmentation gradient descent: the seat that costs the expected workload the least usable GPU.

    The score is deliberately coarse, 0 to `levels`: nearly equal nodes tie, and ties are packed. An exact gradient
    allocates 1.2 to 1.4 points less on the published trace (docs/decisions/002).
    """

    def __init__(self, workload: Workload, levels: int = SCORE_LEVELS, *, fullest_cards: bool = False) -> None:
        self.levels = levels
        self.fullest_cards = fullest_cards
        """Among cards with the same score take the fullest; otherwise the first, as the published algorithm does."""
        self.fragmentation = Fragmentation(workload)
        self._on_cards: dict[Shape, _ChoicesOnCards] = {}

    def change(self, nodes: Iterable[tuple[FreeResources, FreeResources]]) -> int:
        """Score of a change of nodes (before, after): half of the levels if fragmentation stays, more if it falls."""
        of = self.fragmentation.of_free
        gain = sum(of(before) - of(after) for before, after in nodes)
        return _quantised_score(gain, self.fragmentation.weight, self.levels)

    def ranker(self, shape: Shape) -> Ranker:
        on_cards = self._on_cards.setdefault(shape.on_cards, _ChoicesOnCards(Fit(shape.on_cards), self))
        return _FragmentationRanker(Fit(shape.rank), on_cards, self.fragmentation.host)


class _FragmentationRanker:
    __slots__ = ("_host", "_on_cards", "_shape", "fit")

    def __init__(self, fit: Fit, on_cards: _ChoicesOnCards, host: HostMasks) -> None:
        self.fit = fit
        self._shape = fit.shape
        self._host = host
        self._on_cards = on_cards

    def best(self, free: FreeResources) -> SeatChoice | None:
        shape, host = self._shape, self._host
        cpu_milli, memory_bytes, cards, custom = free
        cpu_left, memory_left = cpu_milli - shape.cpu_milli, memory_bytes - shape.memory_bytes
        if cpu_left < 0 or memory_left < 0:
            return None
        if host.only_cpus and not shape.custom:
            return self._on_cards[cards, host.by_cpus[cpu_milli], host.by_cpus[cpu_left]]
        custom_left = free.custom_after(shape.custom)
        if custom_left is None:
            return None
        before, after = host.mask(cpu_milli, memory_bytes, custom), host.mask(cpu_left, memory_left, custom_left)
        return self._on_cards[cards, before, after]


class _ChoicesOnCards(dict[tuple["FreeCards", int, int], "SeatChoice | None"]):
    """(cards, classes that fit the host before, and after) -> best choice; for shapes with the same GPU request."""

    def __init__(self, fit: Fit, score: FragmentationScore) -> None:
        super().__init__()
        self.fit = fit
        self.fragmentation = score.fragmentation
        self.levels = score.levels
        self.fullest_cards = score.fullest_cards

    def __missing__(self, key: tuple[FreeCards, int, int]) -> SeatChoice | None:
        if len(self) >= MAX_CACHED_CHOICES:
            self.clear()
        found = self[key] = self._choose(*key)
        return found

    def _choose(self, cards: FreeCards, before: int, after: int) -> SeatChoice | None:
        fragmentation = self.fragmentation
        fragments_now = fragmentation.of(cards, before)
        best: SeatChoice | None = None
        best_key = (0, 0)
        for way in self.fit.card_assignments(cards):
            then = cards.after(way) if way else cards
            assert then is not None, (self.fit.shape, cards.free, way)
            gain = fragments_now - fragmentation.of(then, after)
            score = _quantised_score(gain, fragmentation.weight, self.levels)
            idle_milli = sum(cards.free[share.card].milli for share in way) if self.fullest_cards else 0
            if best is None or (score, -idle_milli) > best_key:
                best, best_key = SeatChoice(score, way), (score, -idle_milli)
        return best


def stop_rank(score: FragmentationScore, before: FreeResources, after: FreeResources) -> tuple[int, int]:
    """Rank of a worker that could be stopped: the highest one stops.

    The worker whose removal lowers fragmentation most; ties go to the node with the most idle capacity, because
    placement fills the others first.
    """
    return (score.change([(before, after)]), tightness(before))


def tightness(free: FreeResources) -> int:
    """The order of groups of nodes with the same score, lowest first: by idle GPU, then by idle CPUs."""
    return free.cards.idle_milli << _CPU_BITS | min(free.cpu_milli, _CPU_MASK)


def _quantised_score(gain: int, weight: int, levels: int) -> int:
    """0 to `levels`; half of them when nothing is gained or lost."""
    if not weight:
        return levels // 2
    gain_gpus = max(-700.0, min(700.0, gain / (1000 * weight)))
    return int(levels / (1 + math.exp(-gain_gpus)))


class GangRanker:
    """Ranks nodes for all ranks at once; its assignment lists the cards of the ranks one after the other."""

    __slots__ = ("fit", "rank", "ranks")

    def __init__(self, rank: Ranker, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.fit = rank.fit

    def best(self, free: FreeResources) -> SeatChoice | None:
        choices = list(_choices_for_ranks(self.rank, free, self.ranks))
        if len(choices) < self.ranks:
            return None
        together = tuple(share for choice in choices for share in choice.way)
        return SeatChoice(sum(choice.score for choice in choices) // self.ranks, together)

    def split_by_rank(self, together: CardAssignment) -> list[CardAssignment]:
        cards = self.fit.shape.cards
        return [together[rank * cards : (rank + 1) * cards] for rank in range(self.ranks)]


def worker_ranker(score: Score, shape: Shape) -> Ranker:
    """The ranker for whole workers of a shape: of a gang for all its ranks."""
    ranker = score.ranker(shape)
    return GangRanker(ranker, shape.ranks) if shape.ranks > 1 else ranker


def seats_for_choice(ranker: Ranker, node: str, choice: SeatChoice) -> Seats:
    """The seats of one worker on a node, one per rank."""
    if isinstance(ranker, GangRanker):
        return tuple(ranker.fit.seat(node, way) for way in ranker.split_by_rank(choice.way))
    return (ranker.fit.seat(node, choice.way),)


def _choices_for_ranks(rank: Ranker, free: FreeResources, most: int) -> Iterator[SeatChoice]:
    """Choices for one rank after the other, until `most` or until the node is full."""
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
    choices: dict[FreeResources, list[SeatChoice]] = {}
    whole: list[tuple[int, int]] = []
    for position, free in enumerate(ledger.free):
        if free not in choices:
            choices[free] = list(_choices_for_ranks(rank, free, ranks_in_all)) if is_whole_node(free, shape) else []
        if choices[free]:
            whole.append((-len(choices[free]), position))
    whole.sort()
    seats = []
    for position, ranks in deal_ranks(ranks_in_all, whole):
        node = ledger.cluster.nodes[position].name
        seats += [rank.fit.seat(node, choice.way) for choice in choices[ledger.free[position]][:ranks]]
    return tuple(seats) if len(seats) == ranks_in_all else None


def is_whole_node(free: FreeResources, shape: Shape) -> bool:
    cards = free.cards
    if shape.computes_on_gpu:
        return all(cards.is_whole(index) for index in range(len(cards.free)))
    return free == cards.kind.untouched()


def deal_ranks(ranks: int, whole: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(Position of a node, ranks there) for the fewest nodes; `whole` lists (negative capacity, position), sorted."""
    chosen: list[tuple[int, int]] = []
    left = ranks
    for negative_capacity, position in whole:
        if left <= 0:
            break
        chosen.append((position, min(left, -negative_capacity)))
        left += negative_capacity
    if left > 0:
        return []
    each, rest = divmod(ranks, len(chosen))
    smallest = -whole[len(chosen) - 1][0]
    return [(position, each) for position, _ in chosen] if not rest and each <= smallest else chosen


class Placer:
    """Places workers on a ledger by one score. Deterministic: equal ledgers, scores and calls give equal seats."""

    def __init__(self, ledger: Ledger, score: Score) -> None:
        self.ledger = ledger
        self.score = score
        self._rankings: dict[Shape, _NodeHeap] = {}

    def find(self, shape: Shape) -> Seats | None:
        """The best seats for one more worker, without taking them; None if it does not fit. A gang gets one node if it
        fits on one, else whole nodes."""
        ranking = self._ranking(shape)
        seats = ranking.first()
        if seats is None and isinstance(ranking.ranker, GangRanker):
            return seats_on_whole_nodes(self.ledger, ranking.ranker)
        return seats

    def place(self, shape: Shape) -> Seats | None:
        """Place one more worker with all of its ranks; None if it does not fit."""
        seats = self.find(shape)
        for seat in seats or ():
            self.ledger.take(seat)
        return seats

    def fill(self, shape: Shape, most: int) -> list[Seats]:
        """Place up to `most` workers, one after the other."""
        placed: list[Seats] = []
        while len(placed) < most and (seats := self.place(shape)) is not None:
            placed.append(seats)
        return placed

    def give_back(self, seats: Seats) -> None:
        for seat in seats:
            self.ledger.give_back(seat)

    def fitting_positions(self, shape: Shape) -> list[int]:
        """Positions of all nodes on which one more worker fits."""
        return self._ranking(shape).fitting_positions()

    def _ranking(self, shape: Shape) -> _NodeHeap:
        ranking = self._rankings.get(shape)
        if ranking is None:
            ranking = self._rankings[shape] = _NodeHeap(self.ledger, worker_ranker(self.score, shape))
        ranking.refresh()
        return ranking


class _NodeHeap:
    """Nodes in the order of preference of one shape.

    An entry is one integer, (distance from the top score, position of the node), so a heap of entries sorts by score
    and then by position. Outdated entries stay in the heap until they are popped.
    """

    __slots__ = ("_choices", "_entries", "_era", "_heap", "_ledger", "_seen", "ranker")

    def __init__(self, ledger: Ledger, ranker: Ranker) -> None:
        self.ranker = ranker
        self._ledger = ledger
        self._choices: list[SeatChoice | None] = []
        self._entries: list[int] = []
        self._heap: list[int] = []
        self._seen = 0
        self._era = -1

    def refresh(self) -> None:
        """Rank the nodes again that changed since the last call."""
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
                entries[position] = _DOES_NOT_FIT
                continue
            entry = (_MAX_SCORE - choice[0]) << _NODE_BITS | position
            if entries[position] != entry:
                entries[position] = entry
                heappush(heap, entry)
        self._seen = len(changes)

    def first(self) -> Seats | None:
        """Seats on the best node on which all ranks fit."""
        heap, entries = self._heap, self._entries
        while heap:
            position = heap[0] & _NODE_MASK
            if entries[position] == heap[0]:
                return self._seats(position)
            heappop(heap)
        return None

    def fitting_positions(self) -> list[int]:
        return [position for position, entry in enumerate(self._entries) if entry != _DOES_NOT_FIT]

    def _seats(self, position: int) -> Seats:
        choice, ranker = self._choices[position], self.ranker
        assert choice is not None, (ranker.fit.shape, position)
        return seats_for_choice(ranker, self._ledger.cluster.nodes[position].name, choice)

    def _rank_all(self) -> None:
        known: dict[FreeResources, SeatChoice | None] = {}
        self._choices, self._entries = [], []
        for position, free in enumerate(self._ledger.free):
            if free not in known:
                known[free] = self.ranker.best(free)
            choice = known[free]
            self._choices.append(choice)
            entry = _DOES_NOT_FIT if choice is None else (_MAX_SCORE - choice.score) << _NODE_BITS | position
            self._entries.append(entry)
        self._heap = [entry for entry in self._entries if entry != _DOES_NOT_FIT]
        heapify(self._heap)
        self._seen = len(self._ledger.changes)
        self._era = self._ledger.era


class PlacementRun:
    """Workers of one shape on one node, placed one at a time for as long as the score is not below the first one.

    If the node had the best score of all nodes at the start, it still has it for each worker of the run, so nodes in
    the same state can be filled with whole runs at once.
    """

    __slots__ = ("_free", "_ranker", "score", "tie", "workers")

    def __init__(self, ranker: Ranker, free: FreeResources, first: SeatChoice) -> None:
        self.score = first.score
        self.tie = tightness(free)
        self.workers: list[Seats] = []
        """Seats of each worker, without the name of the node."""
        self._ranker = ranker
        self._free: FreeResources | None = free
        self._append(first)

    def extend(self, most: int) -> int:
        """Extend the run to at most `most` workers; return how many of them it has."""
        while self._free is not None and len(self.workers) < most:
            choice = self._ranker.best(self._free)
            if choice is None or choice.score < self.score:
                self._free = None
            else:
                self._append(choice)
        return min(len(self.workers), most)

    def _append(self, choice: SeatChoice) -> None:
        seats = seats_for_choice(self._ranker, "", choice)
        for seat in seats:
            assert self._free is not None
            self._free = self._free.taken(seat)
        self.workers.append(seats)


class GroupPlacer:
    """Placement of workers of one shape on groups of nodes in the same state; every state is scored once."""

    __slots__ = ("_runs", "ranker", "score")

    def __init__(self, score: FragmentationScore, shape: Shape) -> None:
        self.score = score
        self.ranker = worker_ranker(score, shape)
        self._runs: dict[FreeResources, PlacementRun | None] = {}

    def run(self, free: FreeResources) -> PlacementRun | None:
        """The run of workers that starts in this state; None if no worker fits."""
        if free not in self._runs:
            first = self.ranker.best(free)
            self._runs[free] = None if first is None else PlacementRun(self.ranker, free, first)
        return self._runs[free]

    def free_after_one(self, free: FreeResources) -> FreeResources | None:
        """The state after one more worker; None if it does not fit."""
        run = self.run(free)
        then: FreeResources | None = free if run is not None else None
        for seat in run.workers[0] if run is not None else ():
            then = then.taken(seat) if then is not None else None
        return then
