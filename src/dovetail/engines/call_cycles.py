"""Cycles of calls that wait for each other, across processes. Pure: the state of processes is asked for by a function.

A call that a slot waits for is stuck if it runs in a slot that waits itself, or if it is queued and all slots of its
object wait. Slots that can only be freed by each other are in a deadlock: none of them will ever continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Process = tuple[int, int]
    """Worker and rank."""


class WaitingSlot(NamedTuple):
    """A slot whose call waits for another call."""

    slot: tuple[int, int, int]
    """Worker, rank and a number in that process."""
    name: str
    """The object of the slot, in messages."""
    depth: int
    """How many callers wait for the call that runs in the slot."""
    called: Process
    """Process of the call that it waits for."""
    call: tuple[int, int, int]
    """Worker and rank of this slot, and the number that this process gave to the call that it waits for."""


class CallCycle(NamedTuple):
    names: tuple[str, ...]
    """Objects on the shortest cycle; the first one is also the last one."""
    slots: frozenset[WaitingSlot]
    """All slots of the deadlock that the first one is part of."""
    is_deepest: bool
    """Whether the first slot is the one whose call should fail: that of the last call of a chain."""

    def __str__(self) -> str:
        return " -> ".join(self.names)


def find_cycle(origin: WaitingSlot, slots_behind: Callable[[WaitingSlot], list[WaitingSlot]]) -> CallCycle | None:
    """The deadlock that a waiting slot is part of; None: there is none, or it is only behind one.

    `slots_behind` returns the slots that may free the call of a slot, if all of them wait, and otherwise nothing.
    """
    found = {origin.slot: origin}
    behind: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    todo = [origin]
    while todo:
        waiting = todo.pop()
        holders = slots_behind(waiting)
        if not holders:
            return None
        behind[waiting.slot] = [holder.slot for holder in holders]
        for holder in holders:
            known = found.setdefault(holder.slot, holder)
            if known.call != holder.call:
                return None  # it has continued meanwhile
            if holder.slot not in behind and known is holder:
                todo.append(holder)
    path = _shortest_path(origin.slot, behind)
    if path is None:
        return None
    members = frozenset(found[slot] for slot in found if slot == origin.slot or _leads_to(slot, origin.slot, behind))
    deepest = max(members, key=lambda one: (one.depth, one.slot))
    return CallCycle(tuple(found[slot].name for slot in path), members, deepest == origin)


def _shortest_path(
    start: tuple[int, int, int], behind: Mapping[tuple[int, int, int], list[tuple[int, int, int]]]
) -> list[tuple[int, int, int]] | None:
    """Path of waiting calls from a slot back to itself; None: there is none."""
    paths = [[start]]
    seen = set()
    while paths:
        longer = []
        for path in paths:
            for following in behind[path[-1]]:
                if following == start:
                    return [*path, start]
                if following not in seen:
                    seen.add(following)
                    longer.append([*path, following])
        paths = longer
    return None


def _leads_to(
    slot: tuple[int, int, int],
    wanted: tuple[int, int, int],
    behind: Mapping[tuple[int, int, int], list[tuple[int, int, int]]],
) -> bool:
    seen = {slot}
    todo = [slot]
    while todo:
        for following in behind[todo.pop()]:
            if following == wanted:
                return True
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return False
