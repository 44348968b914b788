"""How much is that, node by node and card by card? Seats and clusters as plain sums that can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.free import WHOLE_CARD_MILLI
from dovetail.resources.seat import CardShare, Seat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free import Free
    from dovetail.resources.seat import Seats

Key = tuple[str, int, str]
"""Node, card or HOST, and what of it."""
Amounts = dict[Key, int]
"""Only what is above zero, so that equal amounts are equal dicts."""

HOST = -1
CPU, MEMORY = "cpu_milli", "memory_bytes"
OF_CARD = CardShare._fields[1:]
CUSTOM = "custom "
"""What the names of custom resources begin with, so that none of them is taken for something else."""


def amounts_of(seats: Iterable[Seat]) -> Amounts:
    """What all these seats take together."""
    found: Amounts = {}
    for seat in seats:
        node = seat.node
        parts = [((node, HOST, CPU), seat.cpu_milli), ((node, HOST, MEMORY), seat.memory_bytes)]
        parts += [((node, HOST, CUSTOM + name), amount) for name, amount in seat.custom]
        for share in seat.cards:
            parts += [((node, share.card, what), amount) for what, amount in zip(OF_CARD, share[1:], strict=True)]
        for key, amount in parts:
            if amount > 0:
                found[key] = found.get(key, 0) + amount
    return found


def capacity_of(cluster: Cluster) -> Amounts:
    """Everything that can be taken of a cluster."""
    return amounts_of(
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


def free_on(node: str, free: Free) -> Amounts:
    """What is left of a node."""
    cards = tuple(CardShare(card, *left) for card, left in enumerate(free.cards.free))
    return amounts_of((Seat(node, free.cpu_milli, free.memory_bytes, cards, free.custom),))


def seats_of(amounts: Amounts) -> Seats:
    """One seat per node that takes just this, in the order of their names."""
    return tuple(_seat(node, amounts) for node in sorted({key[0] for key in amounts}))


def _seat(node: str, amounts: Amounts) -> Seat:
    mine = {(card, what): amount for (name, card, what), amount in amounts.items() if name == node}
    cards = sorted({card for card, _ in mine} - {HOST})
    return Seat(
        node,
        mine.get((HOST, CPU), 0),
        mine.get((HOST, MEMORY), 0),
        tuple(CardShare(card, *(mine.get((card, what), 0) for what in OF_CARD)) for card in cards),
        tuple(
            sorted((what.removeprefix(CUSTOM), amount) for (_, what), amount in mine.items() if what.startswith(CUSTOM))
        ),
    )


def plus(one: Amounts, other: Amounts) -> Amounts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


def minus(one: Amounts, other: Amounts) -> Amounts:
    """What is left, and never less than nothing."""
    return {key: amount - other.get(key, 0) for key, amount in one.items() if amount > other.get(key, 0)}


def least(one: Amounts, other: Amounts) -> Amounts:
    return {key: min(amount, other[key]) for key, amount in one.items() if key in other}


def most(one: Amounts, other: Amounts) -> Amounts:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one | other}


def within(one: Amounts, other: Amounts) -> bool:
    """Whether the other has at least as much of everything."""
    return all(amount <= other.get(key, 0) for key, amount in one.items())
