"""Which seatings come into question? From changing nothing to repacking every node."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.scheduling.bounds import bound_of_counts
from dovetail.scheduling.demand import SPEED_LIMIT
from dovetail.scheduling.packing import groups_of
from dovetail.scheduling.replanning.repacking import Repacking, leavers
from dovetail.scheduling.replanning.seating import Manner, Seating, order_of
from dovetail.scheduling.replanning.upkeep import keep_spares, trim, undo_moves
from dovetail.scheduling.sizing import RATE_LIMIT, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.free import Free
    from dovetail.resources.ledger import Ledger
    from dovetail.scheduling.demand import Demand
    from dovetail.scheduling.packing import Packing
    from dovetail.scheduling.replanning.rooms import Floor
    from dovetail.scheduling.replanning.wants import Want
    from dovetail.scheduling.rules import Rules
    from dovetail.scheduling.sizing import Sizing

PRECISION = 2e-3
ROOMS_FOR_CARE = 200
"""Where more nodes than this are all different, less is tried: a replan is to take a second or two, not ten."""
COARSE = 1e-2
WORTH_REPACKING = 0.99
"""Share of the bound from which on nodes are not cleared."""
STEPS = 6
"""Rates below the best that are tried because they may need fewer changes."""


Sized = dict[tuple[tuple["Demand", ...], tuple["Free", ...]], "Sizing | None"]
"""Plans from empty that were made before; the same is asked for once a round."""


def rate_of(wants: Sequence[Want], counts: Sequence[int]) -> float:
    """Source items per second of these workers; endless if nothing limits them."""
    return min(
        (count * want.demand.speed for want, count in zip(wants, counts, strict=True) if want.limits),
        default=math.inf,
    )


class Search:
    """Tries rates on one floor, and remembers what came of them."""

    def __init__(self, start: Floor, empty: Ledger, wants: Sequence[Want], rules: Rules) -> None:
        self.start = start
        self.empty = empty
        self.wants = wants
        self.rules = rules
        self.careful = len(start.rooms) <= ROOMS_FOR_CARE
        self.precision = PRECISION if self.careful else COARSE
        self.tried: dict[tuple[int, ...], Floor | None] = {}
        order, nodes_first = (order_of(wants), "tight") if rules.reserve else (tuple(range(len(wants))), "roomy")
        ways = (False, True) if rules.reserve else (False,)
        self.manners = [Manner(order, moves, nodes_first, rules.take_back) for moves in ways]

    def bound(self) -> float:
        """No seating is faster: what the units could have on an empty cluster."""
        limiting = [want.demand for want in self.wants if want.limits]
        return min(bound_of_counts(limiting, groups_of(self.empty)), RATE_LIMIT) if limiting else 0.0

    def needs(self, rate: float) -> tuple[int, ...] | None:
        needs = tuple(want.count(rate) for want in self.wants)
        allowed = all(need <= want.most for need, want in zip(needs, self.wants, strict=True) if want.limits)
        return needs if allowed else None

    def at(self, rate: float) -> Floor | None:
        """A seating for this rate."""
        needs = self.needs(rate)
        if needs is None:
            return None
        if needs not in self.tried:
            self.tried[needs] = self._seated(needs)
        return self.tried[needs]

    def _seated(self, needs: tuple[int, ...]) -> Floor | None:
        best: Floor | None = None
        for manner in self.manners:
            floor = self.start.copy()
            if Seating(floor, self.wants, needs, manner).all():
                self._tidy(floor, needs)
                if best is None or floor.changes < best.changes:
                    best = floor
                if not self.careful:
                    break
        return best

    def _tidy(self, floor: Floor, needs: Sequence[int]) -> None:
        tidy(floor, self.wants, needs, self.rules)

    def highest(self, low: float, high: float) -> Floor | None:
        """The fastest seating that is found between two rates."""
        best = self.at(low)
        found = self.at(high)
        if found is not None:
            return found
        while high - low > self.precision * high:
            middle = (low + high) / 2
            floor = self.at(middle)
            if floor is not None:
                best = floor
                low = max(middle, self.rate(floor) * (1 + 1e-9))
            else:
                high = middle
        return best

    def below(self, top: float) -> list[Floor]:
        """Seatings that are a little slower."""
        steps = STEPS if self.careful else 1
        rates = (top * (1 - self.rules.close_enough * step / steps) for step in range(1, steps + 1))
        return [floor for rate in rates if (floor := self.at(rate)) is not None]

    def packed_anew(self, sized: Sized) -> Floor | None:
        """What a plan from empty gives, with everybody kept who would sit there anyway."""
        ledger = self._without_leavers()
        everywhere = [position for positions in self.start.rooms.values() for position in positions]
        repacking = Repacking(self.start, self.wants, everywhere, self.manners[-1])
        demands = [_beside(want, stay) for want, stay in zip(self.wants, repacking.staying, strict=True)]
        asked = (tuple(demands), tuple(ledger.free))
        if asked not in sized:
            sized[asked] = size(demands, ledger) if demands else None
        sizing = sized[asked]
        if sizing is None:
            return None
        needs = [count + stay for count, stay in zip(sizing.counts, repacking.staying, strict=True)]
        floor = repacking.floor(sizing.packing, needs)
        if floor is not None:
            self._tidy(floor, needs)
        return floor

    def _without_leavers(self) -> Ledger:
        ledger = self.empty.copy()
        names = [node.name for node in self.empty.cluster.nodes]
        for room, positions in self.start.rooms.items():
            stay = Counter(room.present)
            stay.subtract(leavers(room, self.wants))
            seats = [seat for sitter in stay.elements() for seat in sitter.seats]
            for position in positions:
                for seat in seats:
                    ledger.take(seat._replace(node=names[position]))
        return ledger

    def repacked(self, positions: list[int], low: float, high: float) -> Floor | None:
        """The fastest seating above `low` that clearing these nodes allows."""
        repacking = Repacking(self.start, self.wants, positions, self.manners[-1])
        best: tuple[Packing, tuple[int, ...]] | None = None
        low *= 1 + self.precision
        middle = low
        while high - low > self.precision * high:
            needs = self.needs(middle)
            packing = repacking.pack(needs) if needs is not None else None
            if needs is not None and packing is not None:
                best, low = (packing, needs), middle
            elif best is None:
                return None
            else:
                high = middle
            middle = (low + high) / 2
        if best is None:
            return None
        floor = repacking.floor(*best)
        if floor is not None:
            self._tidy(floor, best[1])
        return floor

    def rate(self, floor: Floor) -> float:
        return rate_of(self.wants, floor.counts)


def _beside(want: Want, stay: int) -> Demand:
    """What a unit asks for where some of its workers stay in any case."""
    demand = want.demand
    if want.limits and not stay and demand.per_node is None:
        return demand
    low = max(0, demand.low - stay)
    return replace(demand, rate=SPEED_LIMIT, per_source=1.0, low=low, high=low, per_node=None)


def tidy(floor: Floor, wants: Sequence[Want], needs: Sequence[int], rules: Rules) -> None:
    """Undoes what was not needed, keeps spares, and stops what is above its limit."""
    undo_moves(floor)
    most = [want.most if want.unit.per_node is None else need for want, need in zip(wants, needs, strict=True)]
    if rules.spares:
        keep_spares(floor, most)
        trim(floor, most)
    else:
        trim(floor, [need if want.gives else high for need, want, high in zip(needs, wants, most, strict=True)])


def candidates(
    start: Floor, empty: Ledger, wants: Sequence[Want], rules: Rules, sized: Sized | None = None
) -> list[Floor]:
    """Seatings worth comparing, the one with the fewest changes first; none if not every unit gets its least."""
    sized = {} if sized is None else sized
    search = Search(start, empty, wants, rules)
    bound = search.bound()
    rate_now = rate_of(wants, start.counts)
    low = min(rate_now if math.isfinite(rate_now) else 0.0, bound)
    now = search.at(low)
    if now is None:
        low, now = 0.0, search.at(0.0)
    calm = now is not None and not now.changes and low > 0
    if calm and search.at(min(low * (1 + rules.min_gain), bound)) is None:
        best, low = now, low * (1 + rules.min_gain)
    else:
        best = search.highest(low, bound)
    found = [floor for floor in (now, best) if floor is not None]
    top = max(low, search.rate(best)) if best is not None else 0.0
    if best is not None and best is not now:
        found += search.below(top)
    if rules.reserve and top < bound * WORTH_REPACKING and (search.careful or best is None):
        anew = search.packed_anew(sized)
        found += [anew] if anew is not None else []
        found += [
            floor for positions in emptiest(start) if (floor := search.repacked(positions, top, bound)) is not None
        ]
    return found


def emptiest(floor: Floor) -> list[list[int]]:
    """The one node with the most free, a quarter, half, and all of them."""
    by_free = []
    for room, positions in floor.rooms.items():
        kind = room.free.cards.kind
        share = room.free.cpu_milli / (kind.cpu_milli or 1)
        share += room.free.cards.idle_milli / (1000 * len(kind.gpus)) if kind.gpus else 0.0
        by_free += [(-share, position) for position in positions]
    ordered = [position for _, position in sorted(by_free)]
    sizes = dict.fromkeys((1, 2, len(ordered) // 4, len(ordered) // 2, len(ordered)))
    return [ordered[:size] for size in sizes if size]
