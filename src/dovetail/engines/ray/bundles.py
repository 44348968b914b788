"""Bundles of placement groups: amounts in Ray's resources, and which groups are removable or can shrink. Pure, without
Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.amounts import CPU, CUSTOM_PREFIX, HOST, MEMORY, Amounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CPU_STEP_MILLI = 125
"""Ray counts in 1/10000 and converts to floats by truncation: 1.501 CPUs become 1.5009. Eighths of a CPU, and whole
MiB, are exact."""
MIB = 1 << 20
RAY_UNITS_PER_ONE = 10_000
NodeAmounts = dict[str, int]
"""Resource of one node, without GPUs -> amount above zero."""


def amounts_per_node(amounts: Amounts) -> dict[str, NodeAmounts]:
    """Node -> requested amounts without GPUs, rounded down to what Ray counts exactly, but not to zero."""
    found: dict[str, NodeAmounts] = {}
    for (node, card, what), amount in amounts.items():
        if card == HOST:
            unit = CPU_STEP_MILLI if what == CPU else MIB if what == MEMORY else 1
            found.setdefault(node, {})[what] = max(unit, amount // unit * unit)
    return found


def cards_per_node(amounts: Amounts) -> dict[str, list[int]]:
    """Node -> positions of its GPUs that are used."""
    found: dict[str, set[int]] = {}
    for node, card, _ in amounts:
        if card != HOST:
            found.setdefault(node, set()).add(card)
    return {node: sorted(cards) for node, cards in found.items()}


def to_bundle(host: Mapping[str, int], cards: int = 0) -> dict[str, float]:
    """Amounts of one node as a bundle of Ray."""
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
    """A number of 1/10000 as float; the next lower one if the conversion is not exact."""
    return (
        next(count for count in range(parts, 0, -1) if int(count / RAY_UNITS_PER_ONE * RAY_UNITS_PER_ONE) == count)
        / RAY_UNITS_PER_ONE
    )


def subtract(one: Mapping[str, int], other: Mapping[str, int]) -> NodeAmounts:
    """Difference, without amounts of zero or less."""
    return {what: amount - other.get(what, 0) for what, amount in one.items() if amount > other.get(what, 0)}


def add(one: Mapping[str, int], other: Mapping[str, int]) -> NodeAmounts:
    return {what: one.get(what, 0) + other.get(what, 0) for what in {**one, **other}}


def removable_groups(groups: Sequence[NodeAmounts], surplus: NodeAmounts) -> list[int]:
    """Indices of groups that are entirely surplus, the largest first."""
    left, found = dict(surplus), []
    for number in sorted(range(len(groups)), key=lambda number: sum(groups[number].values()), reverse=True):
        if all(amount <= left.get(what, 0) for what, amount in groups[number].items()):
            found.append(number)
            left = subtract(left, groups[number])
    return found


def shrinkable_group(groups: Sequence[NodeAmounts], surplus: NodeAmounts) -> tuple[int, NodeAmounts] | None:
    """Index of the group with the most surplus, and its amounts without it; None if there is no surplus."""
    spare = [sum(min(amount, surplus.get(what, 0)) for what, amount in group.items()) for group in groups]
    if not any(spare):
        return None
    number = max(range(len(groups)), key=lambda number: spare[number])
    return number, subtract(groups[number], surplus)
