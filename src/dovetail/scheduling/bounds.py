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
    """An upper bound of the rate in source items per second, and the resource that sets it."""

    rate: float
    resource: str


def resource_limits(demands: Sequence[Demand], groups: NodeGroups) -> list[Limit]:
    """Bounds by resource: the amount available over the need of one source item, the lowest first."""
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
    """The highest rate whose whole worker counts pass every test that needs no packing.

    Never below the rate that packing reaches, and usually closer to it than `resource_limits`.
    """
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
    """Necessary conditions for worker counts: totals of the cluster, capacity for each unit alone, and rounded shares.

    Rounded shares are the dual feasible functions of Fekete and Schepers: if x is the share of a card and (k+1)x is not
    whole, x may be replaced by floor((k+1)x)/k, and still no card holds more than 1. With k=1, no two shares above one
    half fit on a card.
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
        if any(most is not None and count > most for most, count in zip(self.max_alone, counts, strict=True)):
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
    """Resource -> (amount available, least need of one worker of each unit)."""
    have = total_free({free: len(positions) for free, positions in groups.items()})
    asked = {name for demand in demands for name, _ in demand.shape.custom}
    have = {name: have[name] for name in RESOURCES} | {f"custom {name}": have.get(name, 0) for name in sorted(asked)}
    return {
        name: (amount, [_min_need(demand.shape, name, groups) for demand in demands]) for name, amount in have.items()
    }


def _min_need(shape: Shape, name: str, groups: NodeGroups) -> int:
    """Need of one worker with all its ranks, on the cards where it is smallest."""
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
