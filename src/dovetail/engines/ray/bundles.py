"""Bundles of placement groups: amounts in Ray's resources, and which groups are removable or can shrink. Pure, without
Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import CPU, CUSTOM_PREFIX, HOST, MEMORY, Amounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CPU_STEP_MILLI = 125
"""Ray counts in ten-thousandths and passes them on as floats, cut off, not rounded: of 1.501 CPUs it gives back 1.5009.
Eighths of a CPU, and whole MiB, survive that."""
MIB = 1 << 20
RAY_UNITS_PER_ONE = 10_000
NodeAmounts = dict[str, int]
"""What of one node, cards apart -> how much; only what is above zero."""


def amounts_per_node(amounts: Amounts) -> dict[str, NodeAmounts]:
    """Node -> what is asked of it, cards apart, in amounts that Ray counts exactly: a little less, but not nothing."""
    found: dict[str, NodeAmounts] = {}
    for (node, card, what), amount in amounts.items():
        if card == HOST:
            unit = CPU_STEP_MILLI if what == CPU else MIB if what == MEMORY else 1
            found.setdefault(node, {})[what] = max(unit, amount // unit * unit)
    return found


def cards_per_node(amounts: Amounts) -> dict[str, list[int]]:
    """Node -> the positions of the cards that are touched there."""
    found: dict[str, set[int]] = {}
    for node, card, _ in amounts:
        if card != HOST:
            found.setdefault(node, set()).add(card)
    return {node: sorted(cards) for node, cards in found.items()}


def to_bundle(host: Mapping[str, int], cards: int = 0) -> dict[str, float]:
    """The same in Ray's words."""
    bundle: dict[str, float] = {"GPU": float(cards)} if cards else {}
    for what, amount in host.items():
        if what == MEMORY:
            bundle["memory"] = float(amount)
        else:
            bundle["CPU" if what == CPU else what.removeprefix(CUSTOM_PREFIX)] = _exact_fraction(
                amount * RAY_UNITS_PER_ONE // 1000
            )
    return bundle


def _exact_fraction(parts: int) -> float:
    """So many ten-thousandths, or the next fewer that are the same once they were a float."""
    return (
        next(count for count in range(parts, 0, -1) if int(count / RAY_UNITS_PER_ONE * RAY_UNITS_PER_ONE) == count)
        / RAY_UNITS_PER_ONE
    )


def subtract(one: Mapping[str, int], other: Mapping[str, int]) -> NodeAmounts:
    """What is left, and never less than nothing."""
    return {what: amount - other.get(what, 0) for what, amount in one.items() if amount > other.get(what, 0)}


def add(one: Mapping[str, int], other: Mapping[str, int]) -> NodeAmounts:
    return {what: one.get(what, 0) + other.get(what, 0) for what in {**one, **other}}


def removable_groups(groups: Sequence[NodeAmounts], surplus: NodeAmounts) -> list[int]:
    """Which of them can go whole, the largest first: all that they have is too much."""
    left, found = dict(surplus), []
    for number in sorted(range(len(groups)), key=lambda number: sum(groups[number].values()), reverse=True):
        if all(amount <= left.get(what, 0) for what, amount in groups[number].items()):
            found.append(number)
            left = subtract(left, groups[number])
    return found


def shrinkable_group(groups: Sequence[NodeAmounts], surplus: NodeAmounts) -> tuple[int, NodeAmounts] | None:
    """The group to be replaced by a smaller one so that least is too much, and what that has; None if all fit."""
    spare = [sum(min(amount, surplus.get(what, 0)) for what, amount in group.items()) for group in groups]
    if not any(spare):
        return None
    number = max(range(len(groups)), key=lambda number: spare[number])
    return number, subtract(groups[number], surplus)
