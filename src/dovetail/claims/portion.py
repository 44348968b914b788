"""How much is a share of a cluster, node by node? For runs that must leave the rest to others, whoever is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import CPU, HOST, MEMORY, capacity_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster

CAPPED = (CPU, MEMORY)


def evenly(cluster: Cluster, share: float, liked: Collection[tuple[str, int]] = ()) -> Amounts:
    """The same share of the CPUs and the memory of every node."""
    capacity = capacity_of(cluster)
    cards = kept_cards(cluster, share, liked)
    return {
        key: int(amount * share) if key[2] in CAPPED and key[1] == HOST else amount
        for key, amount in capacity.items()
        if (key[1] == HOST or key[:2] in cards) and int(amount * (share if key[2] in CAPPED else 1))
    }


def packed(cluster: Cluster, share: float, liked: Collection[tuple[str, int]] = ()) -> Amounts:
    """As much in all, but on as few nodes as that takes: for workers that are larger than a share of a node."""
    capacity = capacity_of(cluster)
    cards = kept_cards(cluster, share, liked)
    having = {node for node, _ in cards}
    order = sorted((node.name for node in cluster.nodes), key=lambda name: name not in having)
    found = {
        key: amount for key, amount in capacity.items() if key[:2] in cards or (key[1] == HOST and key[2] not in CAPPED)
    }
    for what in CAPPED:
        budget = int(share * sum(amount for key, amount in capacity.items() if key[1] == HOST and key[2] == what))
        for name in order:
            amount = min(budget, capacity.get((name, HOST, what), 0))
            if amount:
                found[name, HOST, what] = amount
                budget -= amount
    return found


def kept_cards(cluster: Cluster, share: float, liked: Collection[tuple[str, int]] = ()) -> set[tuple[str, int]]:
    """So many whole cards of all, those it likes first; at least one if it likes some."""
    cards = [(node.name, card) for node in cluster.nodes for card in range(len(node.gpus))]
    count = max(int(len(cards) * share), 1 if liked else 0)
    return set(sorted(cards, key=lambda card: card not in liked)[:count])
