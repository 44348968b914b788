"""How much of each resource is free in all, in its own integers?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.resources.free import Free

ON_CARDS = ("GPUs", "GPU memory", "NVDECs", "NVENCs")
"""What a card holds, in the order in which cards hold it."""
RESOURCES = ("CPUs", "memory", *ON_CARDS)


def totals_of(nodes: Mapping[Free, int]) -> dict[str, int]:
    """Of so many nodes in each state: milli-CPUs, bytes, milli-GPUs, codecs, and custom resources by their names."""
    totals = dict.fromkeys(RESOURCES, 0)
    for free, count in nodes.items():
        totals["CPUs"] += count * free.cpu_milli
        totals["memory"] += count * free.memory_bytes
        for column, name in enumerate(ON_CARDS):
            totals[name] += count * sum(card[column] for card in free.cards.free)
        for name, amount in free.custom:
            totals[name] = totals.get(name, 0) + count * amount
    return totals
