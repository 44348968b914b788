"""Foreign usage: work on the Ray cluster that is not Dovetail's, as runs plan around it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import CARD_FIELDS, HOST, add_amounts, cluster_capacity, min_amounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster


FOREIGN_DEBOUNCE_S = 3.0
"""Foreign usage counts after this time. Shorter peaks are resources that a run of Dovetail just acquired or
released, and no worker should be drained for those."""


class UsageDebouncer:
    """Minimum of the foreign usage over a time window. The first observation, and any decrease, count at once."""

    def __init__(self, steady_s: float = FOREIGN_DEBOUNCE_S) -> None:
        self._steady_s = steady_s
        self._history: list[tuple[float, Amounts]] = []

    def update(self, now: float, amounts: Amounts) -> Amounts:
        while len(self._history) > 1 and self._history[1][0] <= now - self._steady_s:
            del self._history[0]
        self._history.append((now, amounts))
        found = amounts
        for _, earlier in self._history:
            found = min_amounts(found, earlier)
        return found


def place_foreign_usage(cluster: Cluster, foreign: Amounts, owners: Sequence[Owner]) -> Amounts:
    """Foreign usage with the GPUs chosen that disturb least: Ray reports only how many GPUs of a node are used.
    First GPUs that no run was granted, then GPUs that no run holds, the last first."""
    capacity = cluster_capacity(cluster)
    granted: Amounts = {}
    held: Amounts = {}
    for owner in owners:
        granted, held = add_amounts(granted, owner.granted), add_amounts(held, owner.held)
    found = min_amounts({key: amount for key, amount in foreign.items() if key[1] == HOST}, capacity)
    for node in cluster.nodes:
        count = len({card for name, card, _ in foreign if name == node.name and card != HOST})

        def disturbance(card: int, name: str = node.name) -> tuple[bool, bool, int]:
            return _is_card_used(held, name, card), _is_card_used(granted, name, card), -card

        for card in sorted(range(len(node.gpus)), key=disturbance)[:count]:
            keys = [(node.name, card, what) for what in CARD_FIELDS]
            found |= {key: capacity[key] for key in keys if key in capacity}
    return found


def _is_card_used(amounts: Amounts, node: str, card: int) -> bool:
    return any((node, card, what) in amounts for what in CARD_FIELDS)
