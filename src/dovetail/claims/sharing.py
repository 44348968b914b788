"""How much of a machine may each of those who share it use? Pure: same owners, same shares.

Everybody gets as much as the others, of each resource for itself; what one cannot use goes to the others, and nobody
gets less than it needs to go on. Cards are dealt whole as long as there are enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.claims.dealing import Table
from dovetail.claims.splitting import split
from dovetail.resources.amounts import CPU, CUSTOM, HOST, MEMORY, capacity_of, least, minus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts, Key
    from dovetail.resources.cluster import Cluster

WHOLE_CPU = 1000
GROWTH = 2
"""Workers that run out of memory get more than they were planned with."""


@dataclass(frozen=True, slots=True)
class Share:
    """What an owner may use, and which part of that it cannot do without."""

    amounts: Amounts
    need: Amounts


def shares_of(cluster: Cluster, owners: Sequence[Owner], foreign: Amounts | None = None) -> dict[str, Share]:
    """Of everybody whose need can be met; who came first is seated first, and who has begun before all others. What is
    `foreign` is not theirs to share."""
    order = sorted(owners, key=lambda owner: (owner.waiting, owner.since, owner.id))
    table = Table(cluster, order, foreign or {})
    seated = [owner for owner in order if table.seat(owner)]
    table.deal(seated)
    capacity = minus(capacity_of(cluster), foreign or {})
    found: dict[str, Amounts] = {owner.id: {} for owner in seated}
    for key, total in capacity.items():
        for owner, amount in _split(key, total, seated, table):
            if amount:
                found[owner][key] = amount
    shares = {owner.id: Share(found[owner.id], table.needs[owner.id]) for owner in seated}
    return shares | {
        owner.id: _as_it_is(owner, table) for owner in order if owner.id not in shares and not owner.waiting
    }


def _as_it_is(owner: Owner, table: Table) -> Share:
    """One that has begun and finds no seat for its least beside the others keeps what nobody else needs."""
    return Share(least(owner.limit, table.left), {})


def _split(key: Key, total: int, seated: Sequence[Owner], table: Table) -> list[tuple[str, int]]:
    node, card, what = key
    here = [owner for owner in seated if card == HOST or owner.id in table.sits[node, card]]
    needs = [table.needs[owner.id].get(key, 0) for owner in here]
    if what.startswith(CUSTOM) or card != HOST:  # of use only to those who asked for some
        asking = [owner for owner, need in zip(here, needs, strict=True) if need or len(here) == 1]
        here = asking or here
        needs = [table.needs[owner.id].get(key, 0) for owner in here]
    if not here or (what.startswith(CUSTOM) and not any(needs)):
        return []
    wishes = [(need, _most(owner, key, total)) for owner, need in zip(here, needs, strict=True)]
    granule = WHOLE_CPU if what == CPU and total >= WHOLE_CPU * len(here) else 1
    return list(zip([owner.id for owner in here], split(total, wishes, granule), strict=True))


def _most(owner: Owner, key: Key, total: int) -> int:
    """What it can use of a node's CPUs or memory; of cards and the rest it says so by how many it asks for."""
    what = key[2]
    total = total if owner.cap is None else min(total, owner.cap.get(key, 0))
    if owner.ideal is not None and what == CPU:
        return min(total, sum(seat.cpu_milli for seat in owner.ideal))
    if owner.ideal is not None and what == MEMORY and all(seat.memory_bytes for seat in owner.ideal):
        return min(total, GROWTH * sum(seat.memory_bytes for seat in owner.ideal))
    return total
