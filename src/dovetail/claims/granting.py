"""What may one owner use from now on, and what is it told? Pure: one step of one owner, seen the rows of all.

The grants of all owners never exceed the machine. A grant grows only by what nobody has, and shrinks only by what its
run neither holds nor believes to have: it was told of a smaller limit, and has heard it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.claims.sharing import shares_of
from dovetail.resources.amounts import capacity_of, least, minus, most, plus, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.claims.sharing import Share
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster


def stepped(
    cluster: Cluster, owners: Sequence[Owner], me: Owner, believes: Amounts, foreign: Amounts | None = None
) -> tuple[Owner, Share | None]:
    """My row after this step, and my share: None while there is no room for my need. `believes`: all that my run may
    think to be its own, what it holds included; `owners` are all others and me; `foreign` is held by nobody of them."""
    foreign = foreign or {}
    share = shares_of(cluster, owners, foreign).get(me.id)
    mine = share.amounts if share is not None else {}
    granted = most(believes, least(me.granted, mine))
    free = minus(capacity_of(cluster), foreign)
    for other in owners:
        if other.id != me.id:
            free = minus(free, other.granted)
    more = least(minus(free, granted), minus(mine, granted))
    granted = plus(granted, more)
    limit = least(granted, mine)
    if not me.waiting and not (share is not None and within(share.need, limit)):
        # it moves to other cards, and these are not free yet: till then it stays where it is
        limit = least(granted, me.limit)
    return replace(me, granted=granted, limit=limit), share
