"""Fair share: max-min split of every resource among runs, and the next grant and limit of one run. Pure.

Every run gets the same amount of each resource; what one cannot use goes to the others, and no run gets less than its
minimum. GPUs are assigned whole while there are enough.

The grants of all owners never exceed the machine. A grant grows only by what is granted to no owner. It shrinks only by
what its run neither holds nor may still use: a smaller limit was posted to the run, and the run has acknowledged it.
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
    """Split a total evenly among (minimum, maximum) pairs; what exceeds a maximum goes to the others. In multiples of
    `granule` where possible, the remainder to the first."""
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
"""Workers that run out of memory get more than planned."""


@dataclass(frozen=True, slots=True)
class Share:
    """Fair share of an owner, and its minimum as seated."""

    amounts: Amounts
    need: Amounts


def fair_shares(cluster: Cluster, owners: Sequence[Owner], foreign: Amounts | None = None) -> dict[str, Share]:
    """Shares of all owners whose minimum fits. Owners that have begun are seated first, then in the order of arrival.
    `foreign` is not available to them."""
    order = sorted(owners, key=lambda owner: (owner.waiting, owner.since, owner.id))
    allocation = Allocation(cluster, order, foreign or {})
    seated = [owner for owner in order if allocation.try_seat(owner)]
    allocation.assign_free_cards(seated)
    capacity = subtract_amounts(cluster_capacity(cluster), foreign or {})
    found: dict[str, Amounts] = {owner.id: {} for owner in seated}
    for key, total in capacity.items():
        for owner, amount in _split_resource(key, total, seated, allocation):
            if amount:
                found[owner][key] = amount
    shares = {owner.id: Share(found[owner.id], allocation.needs[owner.id]) for owner in seated}
    return shares | {
        owner.id: _keep_unneeded(owner, allocation) for owner in order if owner.id not in shares and not owner.waiting
    }


def _keep_unneeded(owner: Owner, allocation: Allocation) -> Share:
    """An owner that has begun and whose minimum does not fit beside the others keeps what no other needs."""
    return Share(min_amounts(owner.limit, allocation.free), {})


def _split_resource(
    key: AmountKey, total: int, seated: Sequence[Owner], allocation: Allocation
) -> list[tuple[str, int]]:
    node, card, what = key
    here = [owner for owner in seated if card == HOST or owner.id in allocation.card_owners[node, card]]
    needs = [allocation.needs[owner.id].get(key, 0) for owner in here]
    if what.startswith(CUSTOM_PREFIX) or card != HOST:  # only for owners that request some
        asking = [owner for owner, need in zip(here, needs, strict=True) if need or len(here) == 1]
        here = asking or here
        needs = [allocation.needs[owner.id].get(key, 0) for owner in here]
    if not here or (what.startswith(CUSTOM_PREFIX) and not any(needs)):
        return []
    wishes = [(need, _max_usable(owner, key, total)) for owner, need in zip(here, needs, strict=True)]
    granule = WHOLE_CPU_MILLI if what == CPU and total >= WHOLE_CPU_MILLI * len(here) else 1
    return list(zip([owner.id for owner in here], split_evenly(total, wishes, granule), strict=True))


def _max_usable(owner: Owner, key: AmountKey, total: int) -> int:
    """Maximum that an owner can use of a resource of a node; limited for CPUs and memory by its ideal."""
    what = key[2]
    total = total if owner.cap is None else min(total, owner.cap.get(key, 0))
    if owner.ideal is not None and what == CPU:
        return min(total, sum(seat.cpu_milli for seat in owner.ideal))
    if owner.ideal is not None and what == MEMORY and all(seat.memory_bytes for seat in owner.ideal):
        return min(total, MEMORY_GROWTH_FACTOR * sum(seat.memory_bytes for seat in owner.ideal))
    return total


def next_grant(
    cluster: Cluster, owners: Sequence[Owner], me: Owner, may_use: Amounts, foreign: Amounts | None = None
) -> tuple[Owner, Share | None]:
    """The owner `me` after this step, and its share: None while its minimum does not fit. `may_use`: all that its
    run may use by what it holds and by the limits posted to it. `owners`: all owners, with `me`. `foreign`: held by
    others."""
    foreign = foreign or {}
    share = fair_shares(cluster, owners, foreign).get(me.id)
    mine = share.amounts if share is not None else {}
    granted = max_amounts(may_use, min_amounts(me.granted, mine))
    free = subtract_amounts(cluster_capacity(cluster), foreign)
    for other in owners:
        if other.id != me.id:
            free = subtract_amounts(free, other.granted)
    more = min_amounts(subtract_amounts(free, granted), subtract_amounts(mine, granted))
    granted = add_amounts(granted, more)
    limit = min_amounts(granted, mine)
    if not me.waiting and not (share is not None and fits_within(share.need, limit)):
        # it is to move to other GPUs that are not free yet: until then it stays where it is
        limit = min_amounts(granted, me.limit)
    return replace(me, granted=granted, limit=limit), share
