"""Sums of resources per node and card: add, subtract and compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.seat import CardShare, Seat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seats

AmountKey = tuple[str, int, str]
"""(node, card or HOST, resource)."""
Amounts = dict[AmountKey, int]
"""Amounts above zero only, so that equal amounts are equal dicts."""

HOST = -1
CPU, MEMORY = "cpu_milli", "memory_bytes"
CARD_FIELDS = CardShare._fields[1:]
CUSTOM_PREFIX = "custom "
"""Prefix of the names of custom resources, which separates them from built-in resources."""


def sum_seats(seats: Iterable[Seat]) -> Amounts:
    """Sum of the resources of some seats."""
    found: Amounts = {}
    for seat in seats:
        node = seat.node
        parts = [((node, HOST, CPU), seat.cpu_milli), ((node, HOST, MEMORY), seat.memory_bytes)]
        parts += [((node, HOST, CUSTOM_PREFIX + name), amount) for name, amount in seat.custom]
        for share in seat.cards:
            parts += [((node, share.card, what), amount) for what, amount in zip(CARD_FIELDS, share[1:], strict=True)]
        for key, amount in parts:
            if amount > 0:
                found[key] = found.get(key, 0) + amount
    return found


def cluster_capacity(cluster: Cluster) -> Amounts:
    """All resources of a cluster."""
    return sum_seats(
        Seat(
            node.name,
            node.usable_cpu_milli,
            node.memory_bytes,
            tuple(
                CardShare(card, WHOLE_CARD_MILLI, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs)
                for card, gpu in enumerate(node.gpus)
            ),
            node.custom,
        )
        for node in cluster.nodes
    )


def free_amounts(node: str, free: FreeResources) -> Amounts:
    """Free resources of a node."""
    cards = tuple(CardShare(card, *left) for card, left in enumerate(free.cards.free))
    return sum_seats((Seat(node, free.cpu_milli, free.memory_bytes, cards, free.custom),))


def seats_from_amounts(amounts: Amounts) -> Seats:
    """One seat per node with exactly these amounts, in the order of the node names."""
    return tuple(_seat(node, amounts) for node in sorted({key[0] for key in amounts}))


def _seat(node: str, amounts: Amounts) -> Seat:
    mine = {(card, what): amount for (name, card, what), amount in amounts.items() if name == node}
    cards = sorted({card for card, _ in mine} - {HOST})
    return Seat(
        node,
        mine.get((HOST, CPU), 0),
        mine.get((HOST, MEMORY), 0),
        tuple(CardShare(card, *(mine.get((card, what), 0) for what in CARD_FIELDS)) for card in cards),
        tuple(
            sorted(
                (what.removeprefix(CUSTOM_PREFIX), amount)
                for (_, what), amount in mine.items()
                if what.startswith(CUSTOM_PREFIX)
            )
        ),
    )


def add_amounts(one: Amounts, other: Amounts) -> Amounts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


def subtract_amounts(one: Amounts, other: Amounts) -> Amounts:
    """The difference, at least 0."""
    return {key: amount - other.get(key, 0) for key, amount in one.items() if amount > other.get(key, 0)}


def min_amounts(one: Amounts, other: Amounts) -> Amounts:
    return {key: min(amount, other[key]) for key, amount in one.items() if key in other}


def max_amounts(one: Amounts, other: Amounts) -> Amounts:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one | other}


def fits_within(one: Amounts, other: Amounts) -> bool:
    """Whether the other amounts are at least as large for every resource."""
    return all(amount <= other.get(key, 0) for key, amount in one.items())


CARD_RESOURCES = ("GPUs", "GPU memory", "NVDECs", "NVENCs")
"""Resources of a card, in the order of the fields of a card."""
RESOURCES = ("CPUs", "memory", *CARD_RESOURCES)


def total_free(nodes: Mapping[FreeResources, int]) -> dict[str, int]:
    """Totals over nodes, given the number of nodes in each state: milli-CPUs, bytes, milli-GPUs, codecs, and custom
    resources by name."""
    totals = dict.fromkeys(RESOURCES, 0)
    for free, count in nodes.items():
        totals["CPUs"] += count * free.cpu_milli
        totals["memory"] += count * free.memory_bytes
        for column, name in enumerate(CARD_RESOURCES):
            totals[name] += count * sum(card[column] for card in free.cards.free)
        for name, amount in free.custom:
            totals[name] = totals.get(name, 0) + count * amount
    return totals
