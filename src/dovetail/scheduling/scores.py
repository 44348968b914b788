"""How good is a node for a worker? Higher is better; placement takes the first of the best.

A score is asked once per shape for a ranker, which then tells, for any state of a node, the best way to sit there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.resources.fit import Fit, Way
from dovetail.scheduling.fragmentation import Fragmentation, HostMasks, Workload

if TYPE_CHECKING:
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free import Cards, Free
    from dovetail.resources.shape import Shape

MEMO_LIMIT = 200_000


class Choice(NamedTuple):
    """The best way to sit on a node, and how good that is."""

    score: int
    way: Way


class Ranker(Protocol):
    """For one shape: the best way to sit on a node in this state; None if it does not fit there."""

    fit: Fit

    def best(self, free: Free) -> Choice | None: ...


class Score(Protocol):
    """What placement maximises."""

    def ranker(self, shape: Shape) -> Ranker: ...


class FragmentationScore:
    """Fragmentation gradient descent: the seat that costs the expected work the least usable GPU.

    The score is deliberately coarse, 0 to 100: near-equal nodes tie, and ties go to the first node, which packs. An
    exact gradient allocates 1.2 to 1.4 points less on the published trace (docs/decisions/002).
    """

    def __init__(self, workload: Workload) -> None:
        self.fragmentation = Fragmentation(workload)
        self._on_cards: dict[Shape, _ChoicesOnCards] = {}

    def ranker(self, shape: Shape) -> Ranker:
        on_cards = self._on_cards.setdefault(shape.on_cards, _ChoicesOnCards(Fit(shape.on_cards), self.fragmentation))
        return _FragmentationRanker(Fit(shape.rank), on_cards, self.fragmentation.host)


class _FragmentationRanker:
    __slots__ = ("_host", "_on_cards", "_shape", "fit")

    def __init__(self, fit: Fit, on_cards: _ChoicesOnCards, host: HostMasks) -> None:
        self.fit = fit
        self._shape = fit.shape
        self._host = host
        self._on_cards = on_cards

    def best(self, free: Free) -> Choice | None:
        shape, host = self._shape, self._host
        cpu_milli, memory_bytes, cards, custom = free
        cpu_left, memory_left = cpu_milli - shape.cpu_milli, memory_bytes - shape.memory_bytes
        if cpu_left < 0 or memory_left < 0:
            return None
        if host.only_cpus and not shape.custom:
            return self._on_cards[cards, host.by_cpus[cpu_milli], host.by_cpus[cpu_left]]
        custom_left = free.custom_left(shape.custom)
        if custom_left is None:
            return None
        before, after = host.mask(cpu_milli, memory_bytes, custom), host.mask(cpu_left, memory_left, custom_left)
        return self._on_cards[cards, before, after]


class _ChoicesOnCards(dict[tuple["Cards", int, int], "Choice | None"]):
    """(cards, classes the host seats before, and after) -> the best choice; for shapes that want the same of cards."""

    def __init__(self, fit: Fit, fragmentation: Fragmentation) -> None:
        super().__init__()
        self.fit = fit
        self.fragmentation = fragmentation

    def __missing__(self, key: tuple[Cards, int, int]) -> Choice | None:
        if len(self) >= MEMO_LIMIT:
            self.clear()
        found = self[key] = self._choose(*key)
        return found

    def _choose(self, cards: Cards, before: int, after: int) -> Choice | None:
        fragmentation = self.fragmentation
        fragments_now = fragmentation.of(cards, before)
        best: Choice | None = None
        for way in self.fit.ways_on_cards(cards):
            then = cards.after(way) if way else cards
            assert then is not None, (self.fit.shape, cards.free, way)
            score = _quantised(fragments_now - fragmentation.of(then, after), fragmentation.weight)
            if best is None or score > best.score:
                best = Choice(score, way)
        return best


def _quantised(gain: int, weight: int) -> int:
    """0 to 100; 50 when nothing is gained or lost."""
    if not weight:
        return 50
    gain_gpus = max(-700.0, min(700.0, gain / (1000 * weight)))
    return int(100 / (1 + math.exp(-gain_gpus)))


class BestFit:
    """The node that is left with the least CPU and GPU, and on it the tightest card."""

    def __init__(self, cluster: Cluster) -> None:
        self.most_cpu_milli = max(node.usable_cpu_milli for node in cluster.nodes) or 1
        self.most_gpu_milli = 1000 * max(len(node.gpus) for node in cluster.nodes) or 1

    def ranker(self, shape: Shape) -> Ranker:
        return _LeftoverRanker(Fit(shape.rank), self.most_cpu_milli, self.most_gpu_milli, tightest=True)


class Spread(BestFit):
    """The opposite: the node with the most left, and on it the emptiest card. Takes turns; packs nothing."""

    def ranker(self, shape: Shape) -> Ranker:
        return _LeftoverRanker(Fit(shape.rank), self.most_cpu_milli, self.most_gpu_milli, tightest=False)


class _LeftoverRanker:
    __slots__ = ("fit", "most_cpu_milli", "most_gpu_milli", "tightest")

    def __init__(self, fit: Fit, most_cpu_milli: int, most_gpu_milli: int, *, tightest: bool) -> None:
        self.fit = fit
        self.most_cpu_milli = most_cpu_milli
        self.most_gpu_milli = most_gpu_milli
        self.tightest = tightest

    def best(self, free: Free) -> Choice | None:
        ways = self.fit.ways(free)
        if not ways:
            return None
        way = tightest(ways, free.cards) if self.tightest else tightest(ways, free.cards, reverse=True)
        cpu_left = (free.cpu_milli - self.fit.shape.cpu_milli) / self.most_cpu_milli
        gpu_left = (free.cards.idle_milli - sum(share.milli for share in way)) / self.most_gpu_milli
        left = 0.5 * cpu_left + 0.5 * gpu_left
        return Choice(int(100 * (1 - left)) if self.tightest else int(100 * left), way)


def tightest(ways: tuple[Way, ...], cards: Cards, *, reverse: bool = False) -> Way:
    """The way whose cards have the least left (or the most), the first of several."""
    if len(ways) == 1:
        return ways[0]
    idle = [sum(cards.free[share.card].milli for share in way) for way in ways]
    return ways[idle.index(max(idle) if reverse else min(idle))]
