"""Fair share: max-min split of every resource among runs, and the next grant and limit of one run. Pure.

Everybody gets as much as the others, of each resource for itself; what one cannot use goes to the others, and nobody
gets less than it needs to go on. Cards are dealt whole as long as there are enough of them.

The grants of all owners never exceed the machine. A grant grows only by what nobody has, and shrinks only by what its
run neither holds nor believes to have: it was told of a smaller limit, and has heard it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.claims.allocation import Allocation
from dovetail.resources.amounts import (
    CPU,
    CUSTOM_PREFIX,
    HOST,
    MEMORY,
    add_amounts,
    cluster_capacity,
    fits_within,
    max_amounts,
    min_amounts,
    subtract_amounts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import AmountKey, Amounts
    from dovetail.resources.cluster import Cluster


def split_evenly(total: int, wishes: Sequence[tuple[int, int]], granule: int = 1) -> list[int]:
    """To each (least, most) as much as to the others, but never below its least nor above its most; what one does not
    want goes to the others. In whole granules as far as possible, the odd ones to the first."""
    bounds = [(low, max(low, high)) for low, high in wishes]
    assert sum(low for low, _ in bounds) <= total, (total, wishes)
    below, above = 0, total // granule + 1
    while above - below > 1:
        level = (below + above) // 2
        if sum(_clamp(level * granule, bound) for bound in bounds) <= total:
            below = level
        else:
            above = level
    got = [_clamp(below * granule, bound) for bound in bounds]
    left = total - sum(got)
    while left:
        wanting = [number for number, (_, high) in enumerate(bounds) if got[number] < high]
        if not wanting:
            break
        number = min(wanting, key=lambda number: got[number])
        more = min(granule, left, bounds[number][1] - got[number])
        got[number] += more
        left -= more
    return got


def _clamp(level: int, bound: tuple[int, int]) -> int:
    low, high = bound
    return min(max(level, low), high)


WHOLE_CPU_MILLI = 1000
MEMORY_GROWTH_FACTOR = 2
"""Workers that run out of memory get more than they were planned with."""


@dataclass(frozen=True, slots=True)
class Share:
    """What an owner may use, and which part of that it cannot do without."""

    amounts: Amounts
    need: Amounts


def fair_shares(cluster: Cluster, owners: Sequence[Owner], foreign: Amounts | None = None) -> dict[str, Share]:
    """Of everybody whose need can be met; who came first is seated first, and who has begun before all others. What is
    `foreign` is not theirs to share."""
    order = sorted(owners, key=lambda owner: (owner.waiting, owner.since, owner.id))
    table = Allocation(cluster, order, foreign or {})
    seated = [owner for owner in order if table.try_seat(owner)]
    table.assign_free_cards(seated)
    capacity = subtract_amounts(cluster_capacity(cluster), foreign or {})
    found: dict[str, Amounts] = {owner.id: {} for owner in seated}
    for key, total in capacity.items():
        for owner, amount in _split_resource(key, total, seated, table):
            if amount:
                found[owner][key] = amount
    shares = {owner.id: Share(found[owner.id], table.needs[owner.id]) for owner in seated}
    return shares | {
        owner.id: _keep_unneeded(owner, table) for owner in order if owner.id not in shares and not owner.waiting
    }


def _keep_unneeded(owner: Owner, table: Allocation) -> Share:
    """One that has begun and finds no seat for its least beside the others keeps what nobody else needs."""
    return Share(min_amounts(owner.limit, table.free), {})


def _split_resource(key: AmountKey, total: int, seated: Sequence[Owner], table: Allocation) -> list[tuple[str, int]]:
    node, card, what = key
    here = [owner for owner in seated if card == HOST or owner.id in table.card_owners[node, card]]
    needs = [table.needs[owner.id].get(key, 0) for owner in here]
    if what.startswith(CUSTOM_PREFIX) or card != HOST:  # of use only to those who asked for some
        asking = [owner for owner, need in zip(here, needs, strict=True) if need or len(here) == 1]
        here = asking or here
        needs = [table.needs[owner.id].get(key, 0) for owner in here]
    if not here or (what.startswith(CUSTOM_PREFIX) and not any(needs)):
        return []
    wishes = [(need, _max_usable(owner, key, total)) for owner, need in zip(here, needs, strict=True)]
    granule = WHOLE_CPU_MILLI if what == CPU and total >= WHOLE_CPU_MILLI * len(here) else 1
    return list(zip([owner.id for owner in here], split_evenly(total, wishes, granule), strict=True))


def _max_usable(owner: Owner, key: AmountKey, total: int) -> int:
    """What it can use of a node's CPUs or memory; of cards and the rest it says so by how many it asks for."""
    what = key[2]
    total = total if owner.cap is None else min(total, owner.cap.get(key, 0))
    if owner.ideal is not None and what == CPU:
        return min(total, sum(seat.cpu_milli for seat in owner.ideal))
    if owner.ideal is not None and what == MEMORY and all(seat.memory_bytes for seat in owner.ideal):
        return min(total, MEMORY_GROWTH_FACTOR * sum(seat.memory_bytes for seat in owner.ideal))
    return total


def next_grant(
    cluster: Cluster, owners: Sequence[Owner], me: Owner, believes: Amounts, foreign: Amounts | None = None
) -> tuple[Owner, Share | None]:
    """My row after this step, and my share: None while there is no room for my need. `believes`: all that my run may
    think to be its own, what it holds included; `owners` are all others and me; `foreign` is held by nobody of them."""
    foreign = foreign or {}
    share = fair_shares(cluster, owners, foreign).get(me.id)
    mine = share.amounts if share is not None else {}
    granted = max_amounts(believes, min_amounts(me.granted, mine))
    free = subtract_amounts(cluster_capacity(cluster), foreign)
    for other in owners:
        if other.id != me.id:
            free = subtract_amounts(free, other.granted)
    more = min_amounts(subtract_amounts(free, granted), subtract_amounts(mine, granted))
    granted = add_amounts(granted, more)
    limit = min_amounts(granted, mine)
    if not me.waiting and not (share is not None and fits_within(share.need, limit)):
        # it moves to other cards, and these are not free yet: till then it stays where it is
        limit = min_amounts(granted, me.limit)
    return replace(me, granted=granted, limit=limit), share
