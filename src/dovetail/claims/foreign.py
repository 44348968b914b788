"""What is held by those who write no rows, and is it really? Pure: looks at a cluster, each with its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import HOST, OF_CARD, capacity_of, least, plus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster

STEADY_S = 3.0
"""What others are seen to hold counts when it was there so long: for moments that is what somebody of us just took or
gave back, and no worker should be drained for that."""


class Steady:
    """What others hold for some time. The first look counts at once; less counts at once, too."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        self._steady_s = steady_s
        self._looks: list[tuple[float, Amounts]] = []

    def saw(self, now: float, amounts: Amounts) -> Amounts:
        while len(self._looks) > 1 and self._looks[1][0] <= now - self._steady_s:
            del self._looks[0]
        self._looks.append((now, amounts))
        found = amounts
        for _, earlier in self._looks:
            found = least(found, earlier)
        return found


def beside(cluster: Cluster, foreign: Amounts, owners: Sequence[Owner]) -> Amounts:
    """The same where it is least in the way: nobody knows which card of a node others have, only how many. So it is
    one that none of us was granted, else one that none of us holds, the last first."""
    capacity = capacity_of(cluster)
    granted: Amounts = {}
    held: Amounts = {}
    for owner in owners:
        granted, held = plus(granted, owner.granted), plus(held, owner.held)
    found = least({key: amount for key, amount in foreign.items() if key[1] == HOST}, capacity)
    for node in cluster.nodes:
        count = len({card for name, card, _ in foreign if name == node.name and card != HOST})

        def in_the_way(card: int, name: str = node.name) -> tuple[bool, bool, int]:
            return _touched(held, name, card), _touched(granted, name, card), -card

        for card in sorted(range(len(node.gpus)), key=in_the_way)[:count]:
            keys = [(node.name, card, what) for what in OF_CARD]
            found |= {key: capacity[key] for key in keys if key in capacity}
    return found


def _touched(amounts: Amounts, node: str, card: int) -> bool:
    return any((node, card, what) in amounts for what in OF_CARD)
