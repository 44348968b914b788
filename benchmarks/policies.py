"""Placement policies that Dovetail is compared with, as scores for its placement."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import dovetail as dt
from dovetail.resources.fit import Fit
from dovetail.scheduling.placement import SeatChoice

if TYPE_CHECKING:
    from dovetail.resources.fit import CardAssignment
    from dovetail.resources.free_resources import FreeCards, FreeResources
    from dovetail.scheduling.placement import Ranker, Score

POLICIES = ("fgd", "best_fit", "dot_product", "packing", "clustering", "random")
PODS_LIMIT_MILLI = 10**9


class BestFit:
    """The node that is left with the least CPU and GPU, and on it the tightest card."""

    def __init__(self, cluster: dt.Cluster) -> None:
        self.most_cpu_milli = max(node.usable_cpu_milli for node in cluster.nodes) or 1
        self.most_gpu_milli = 1000 * max(len(node.gpus) for node in cluster.nodes) or 1

    def ranker(self, shape: dt.Shape) -> Ranker:
        return _LeftoverRanker(Fit(shape.rank), self.most_cpu_milli, self.most_gpu_milli)


class _LeftoverRanker:
    def __init__(self, fit: Fit, most_cpu_milli: int, most_gpu_milli: int) -> None:
        self.fit = fit
        self.most_cpu_milli = most_cpu_milli
        self.most_gpu_milli = most_gpu_milli

    def best(self, free: FreeResources) -> SeatChoice | None:
        ways = self.fit.assignments(free)
        if not ways:
            return None
        way = tightest(ways, free.cards)
        cpu_left = (free.cpu_milli - self.fit.shape.cpu_milli) / self.most_cpu_milli
        gpu_left = (free.cards.idle_milli - sum(share.milli for share in way)) / self.most_gpu_milli
        return SeatChoice(int(100 * (1 - 0.5 * cpu_left - 0.5 * gpu_left)), way)


def tightest(ways: tuple[CardAssignment, ...], cards: FreeCards) -> CardAssignment:
    """The assignment whose cards have the least left; the first of several."""
    return min(ways, key=lambda way: sum(cards.free[share.card].milli for share in way))


class Rule(Protocol):
    """How good it is to sit this way on a node in this state."""

    def __call__(self, shape: dt.Shape, free: FreeResources, way: CardAssignment) -> int: ...


class RuleScore:
    """A score given as a plain rule; a share sits on the tightest card."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def ranker(self, shape: dt.Shape) -> Ranker:
        return _RuleRanker(Fit(shape), self.rule)


class _RuleRanker:
    def __init__(self, fit: Fit, rule: Rule) -> None:
        self.fit = fit
        self.rule = rule

    def best(self, free: FreeResources) -> SeatChoice | None:
        ways = self.fit.assignments(free)
        if not ways:
            return None
        way = tightest(ways, free.cards)
        return SeatChoice(self.rule(self.fit.shape, free, way), way)


def dot_product(shape: dt.Shape, free: FreeResources, way: CardAssignment) -> int:
    gpu_milli = sum(share.milli for share in way)
    cpus = (free.cpu_milli / 128_000) * (shape.cpu_milli / 128_000)
    gpus = (free.cards.idle_milli / 8_000) * (gpu_milli / 8_000)
    return int(100 * (1 - (cpus + gpus) / 2))


def packing(shape: dt.Shape, free: FreeResources, way: CardAssignment) -> int:
    """First cards that are shared already, then idle cards of used nodes, then unused nodes."""
    if not shape.cards:
        return 0
    cards = free.cards
    count = len(cards.free)
    if all(cards.is_whole(index) for index in range(count)):
        return max(33 - count, count)
    idle = sum(cards.is_whole(share.card) for share in way)
    if idle:
        return max(50 - idle, 33)
    return max(100 - sum(cards.free[share.card].milli for share in way) // 10 // 10, 50)


def clustering(shape: dt.Shape, free: FreeResources, way: CardAssignment) -> int:  # noqa: ARG001
    """Like with like. What sits on a node is told by the custom resources that `marked` added."""
    if not shape.cards:
        return 0
    kinds = {name for name, left in free.custom if left < PODS_LIMIT_MILLI}
    base = 25 * (8_000 - free.cards.idle_milli) // 8_000
    if not kinds:
        return base + 25
    if _kind(shape) not in kinds:
        return base
    return base + (75 if len(kinds) == 1 else 50)


def marked(cluster: dt.Cluster) -> dt.Cluster:
    """The same cluster with one custom resource per kind of GPU pod, of which each pod takes a thousandth."""
    custom = tuple((kind, PODS_LIMIT_MILLI) for kind in ("1", "2", "4", "8", "other", "share"))
    return replace(cluster, nodes=tuple(replace(node, custom=custom) for node in cluster.nodes))


def marked_shape(shape: dt.Shape) -> dt.Shape:
    return replace(shape, custom=((_kind(shape), 1),)) if shape.cards else shape


def _kind(shape: dt.Shape) -> str:
    if shape.gpu_milli < 1000:
        return "share"
    return str(shape.cards) if shape.cards in (1, 2, 4, 8) else "other"


class Policy:
    """Seats pods on a ledger, one after the other."""

    def __init__(self, name: str, cluster: dt.Cluster, workload: dt.Workload, seed: int) -> None:
        scores: dict[str, Score] = {
            "fgd": dt.FragmentationScore(workload),
            "best_fit": BestFit(cluster),
            "dot_product": RuleScore(dot_product),
            "packing": RuleScore(packing),
            "clustering": RuleScore(clustering),
            "random": RuleScore(packing),
        }
        self.name = name
        self.random = random.Random(f"random {seed}")
        self.placer = dt.Placer(dt.Ledger(marked(cluster) if name == "clustering" else cluster), scores[name])

    def seats(self, shape: dt.Shape) -> bool:
        """Whether the pod found a place."""
        if self.name == "random":
            return self._seats_anywhere(shape)
        return self.placer.place(marked_shape(shape) if self.name == "clustering" else shape) is not None

    def _seats_anywhere(self, shape: dt.Shape) -> bool:
        ledger = self.placer.ledger
        able = self.placer.fitting_positions(shape)
        if not able:
            return False
        position = self.random.choice(able)
        free, fit = ledger.free[position], Fit(shape)
        ledger.take(fit.seat(ledger.cluster.nodes[position].name, tightest(fit.assignments(free), free.cards)))
        return True
