"""Scores by what a node has left, to test `Placer` with scores other than fragmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.fit import CardAssignment, Fit
from dovetail.scheduling.placement import SeatChoice

if TYPE_CHECKING:
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free_resources import FreeCards, FreeResources
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.placement import Ranker


class BestFit:
    """The node that is left with the least CPU and GPU, and on it the tightest card."""

    def __init__(self, cluster: Cluster) -> None:
        self.most_cpu_milli = max(node.usable_cpu_milli for node in cluster.nodes) or 1
        self.most_gpu_milli = 1000 * max(len(node.gpus) for node in cluster.nodes) or 1

    def ranker(self, shape: Shape) -> Ranker:
        return _LeftoverRanker(Fit(shape.rank), self.most_cpu_milli, self.most_gpu_milli, tightest=True)


class Spread(BestFit):
    """The opposite: the node with the most left, and on it the emptiest card. Alternates between nodes."""

    def ranker(self, shape: Shape) -> Ranker:
        return _LeftoverRanker(Fit(shape.rank), self.most_cpu_milli, self.most_gpu_milli, tightest=False)


class _LeftoverRanker:
    __slots__ = ("fit", "most_cpu_milli", "most_gpu_milli", "tightest")

    def __init__(self, fit: Fit, most_cpu_milli: int, most_gpu_milli: int, *, tightest: bool) -> None:
        self.fit = fit
        self.most_cpu_milli = most_cpu_milli
        self.most_gpu_milli = most_gpu_milli
        self.tightest = tightest

    def best(self, free: FreeResources) -> SeatChoice | None:
        ways = self.fit.assignments(free)
        if not ways:
            return None
        way = tightest(ways, free.cards) if self.tightest else tightest(ways, free.cards, reverse=True)
        cpu_left = (free.cpu_milli - self.fit.shape.cpu_milli) / self.most_cpu_milli
        gpu_left = (free.cards.idle_milli - sum(share.milli for share in way)) / self.most_gpu_milli
        left = 0.5 * cpu_left + 0.5 * gpu_left
        return SeatChoice(int(100 * (1 - left)) if self.tightest else int(100 * left), way)


def tightest(ways: tuple[CardAssignment, ...], cards: FreeCards, *, reverse: bool = False) -> CardAssignment:
    """The way whose cards have the least left (or the most), the first of several."""
    if len(ways) == 1:
        return ways[0]
    idle = [sum(cards.free[share.card].milli for share in way) for way in ways]
    return ways[idle.index(max(idle) if reverse else min(idle))]
