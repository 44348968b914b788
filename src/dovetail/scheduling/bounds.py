"""Upper bounds on the rate of any plan, and the resource that sets them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.amounts import RESOURCES, total_free
from dovetail.resources.fit import Fit
from dovetail.scheduling.demand import Demand, workers_needed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.shape import Shape
    from dovetail.scheduling.packing import NodeGroups

CARD_ROUNDING_STEPS = (1, 2, 3, 4, 5)


class Limit(NamedTuple):
    """A rate in source items per second that cannot be exceeded, and what there is too little of beyond it."""

    rate: float
    resource: str


def resource_limits(demands: Sequence[Demand], groups: NodeGroups) -> list[Limit]:
    """For every resource what there is over what one source item needs of it; the lowest first."""
    limits = []
    for name, (have, needs) in _totals(demands, groups).items():
        per_item = sum(need / demand.speed for demand, need in zip(demands, needs, strict=True))
        if per_item > 0:
            limits.append(Limit(have / per_item, name))
    limits += [
        Limit(demand.high * demand.speed, f"the {demand.high} worker{'s' * (demand.high > 1)} of {demand.name}")
        for demand in demands
        if demand.high is not None
    ]
    return sorted(limits, key=lambda limit: float(f"{limit.rate:.9g}"))


def rate_bound(demands: Sequence[Demand], groups: NodeGroups) -> float:
    """The highest rate whose whole numbers of workers pass every test that needs no packing. Never below what packing
    can reach, and mostly closer to it than the fractions of `limits_of`."""
    limits = resource_limits(demands, groups)
    high = limits[0].rate if limits else math.inf
    tests = _CountTests(demands, groups)
    if not math.isfinite(high):
        return high
    if tests.can_reach(high):
        return high
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if tests.can_reach(middle):
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return high


class _CountTests:
    """Sums over the cluster, how many of each unit fit alone, and shares of cards rounded in ways that stay true.

    For the last: if x is the share of a card and (k+1)x is not whole, then floor((k+1)x)/k may stand for x, and still
    no card holds more than 1 (Fekete and Schepers). k=1 says that no two shares above a half sit on one card.
    """

    def __init__(self, demands: Sequence[Demand], groups: NodeGroups) -> None:
        self.demands = demands
        self.totals = _totals(demands, groups)
        self.max_alone = [
            sum(fit.capacity(free) // demand.shape.ranks * len(nodes) for free, nodes in groups.items())
            if demand.shape.ranks == 1
            else None
            for demand, fit in ((demand, Fit(demand.shape.rank)) for demand in demands)
        ]
        untouched = all(card.milli in (0, 1000) for free in groups for card in free.cards.free)
        self.cards = (
            sum(len(nodes) * sum(card.milli == 1000 for card in free.cards.free) for free, nodes in groups.items())
            if untouched
            else None
        )

    def can_reach(self, rate: float) -> bool:
        counts = [workers_needed(demand, rate) for demand in self.demands]
        if any(d.high is not None and count > d.high for d, count in zip(self.demands, counts, strict=True)):
            return False
        if any(room is not None and count > room for room, count in zip(self.max_alone, counts, strict=True)):
            return False
        for have, needs in self.totals.values():
            if sum(count * need for count, need in zip(counts, needs, strict=True)) > have:
                return False
        return self.cards is None or all(self._has_enough_cards(counts, k, self.cards) for k in CARD_ROUNDING_STEPS)

    def _has_enough_cards(self, counts: list[int], k: int, cards: int) -> bool:
        shares = self.totals["GPUs"][1]
        asked = 0
        for count, demand, share in zip(counts, self.demands, shares, strict=True):
            each = share // (demand.shape.ranks * demand.shape.cards) if demand.shape.cards else 0
            rounded = (k + 1) * each // 1000 * 1000 if (k + 1) * each % 1000 else k * each
            asked += count * demand.shape.ranks * demand.shape.cards * rounded
        return asked <= k * 1000 * cards


def _totals(demands: Sequence[Demand], groups: NodeGroups) -> dict[str, tuple[int, list[int]]]:
    """Resource -> (what there is, what one worker of each unit needs at least)."""
    have = total_free({free: len(positions) for free, positions in groups.items()})
    asked = {name for demand in demands for name, _ in demand.shape.custom}
    have = {name: have[name] for name in RESOURCES} | {f"custom {name}": have.get(name, 0) for name in sorted(asked)}
    return {
        name: (amount, [_min_need(demand.shape, name, groups) for demand in demands]) for name, amount in have.items()
    }


def _min_need(shape: Shape, name: str, groups: NodeGroups) -> int:
    """What one worker, with all its ranks, needs of a resource, on the cards where it needs the least."""
    host = {"CPUs": shape.cpu_milli, "memory": shape.memory_bytes, "NVDECs": shape.nvdecs, "NVENCs": shape.nvencs}
    if name in host:
        return shape.ranks * host[name]
    if name.startswith("custom "):
        return shape.ranks * dict(shape.custom).get(name.removeprefix("custom "), 0)
    if not shape.computes_on_gpu:
        return 0
    fit = Fit(shape.rank)
    kinds = {free.cards.kind for free in groups}
    column = 1 if name == "GPUs" else 2
    shares = [share[column] for kind in kinds for share in fit.shares(kind) or () if share is not None]
    return shape.ranks * shape.cards * min(shares, default=0)
