"""Which stops turn out not to be needed once everybody sits, and which are needed after all?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.scheduling.replanning.rooms import Hold, with_sitter, without_sitter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replanning.rooms import Floor, Sitter


PASSES = 3


def undo_moves(floor: Floor) -> None:
    """A worker that was told to leave, and whose seat is free after all, stays instead of one that is to be started."""
    units = {sitter.unit for room in floor.rooms for sitter in room.gone if sitter.hold is Hold.OLD}
    for unit in sorted(units):
        for _ in range(PASSES):
            if not _undo_on_nodes(floor, unit) and not _undo_between_nodes(floor, unit):
                break


def _undo_on_nodes(floor: Floor, unit: int) -> bool:
    """Where one leaves and another of the same unit comes to the same node; whether any such move was undone."""
    undone = False
    for start in [room for room in floor.rooms if any(_is_new(sitter, unit) for sitter in room.present)]:
        room = start
        for sitter in start.gone:
            if sitter.unit != unit or sitter.hold is not Hold.OLD:
                continue
            for new in dict.fromkeys(s for s in room.present if _is_new(s, unit)):
                if with_sitter(without_sitter(room.free, new), sitter) is not None:
                    then = floor.house.changed(room, (new,), (sitter,))
                    floor.move(room, len(floor.rooms[room]), then)
                    room, undone = then, True
                    break
    return undone


def _undo_between_nodes(floor: Floor, unit: int) -> bool:
    """Where one leaves, its seat is free, and another of its unit comes to another node; whether any was undone."""
    started = [room for room in floor.rooms if any(_is_new(sitter, unit) for sitter in room.present)]
    undone = False
    for start in [room for room in floor.rooms if any(sitter.unit == unit for sitter in room.gone)]:
        if start in started:
            continue
        room = start
        for sitter in start.gone:
            if sitter.unit != unit or sitter.hold is not Hold.OLD or with_sitter(room.free, sitter) is None:
                continue
            while started and room in floor.rooms:
                other = started[-1]
                nodes = min(len(floor.rooms[room]), len(floor.rooms[other]))
                whole, all_of_other = nodes == len(floor.rooms[room]), nodes == len(floor.rooms[other])
                then = floor.house.changed(room, (), (sitter,))
                floor.move(room, nodes, then)
                new = next(s for s in other.present if _is_new(s, unit))
                fewer = floor.house.changed(other, (new,), ())
                floor.move(other, nodes, fewer)
                undone = True
                if all_of_other:
                    started.pop()
                if any(_is_new(s, unit) for s in fewer.present) and fewer not in started:
                    started.insert(0, fewer)
                if whole:
                    room = then
                    break
    return undone


def _is_new(sitter: Sitter, unit: int) -> bool:
    return sitter.unit == unit and sitter.hold is Hold.NEW


def keep_spares(floor: Floor, most: Sequence[float]) -> None:
    """Those who were told to leave and whose seat nobody took stay, as far as their unit may have them."""
    for room in list(floor.rooms):
        now = room
        for sitter in room.gone:
            if sitter.hold is not Hold.OLD or now not in floor.rooms or with_sitter(now.free, sitter) is None:
                continue
            nodes = len(floor.rooms[now])
            if floor.counts[sitter.unit] + nodes > most[sitter.unit]:
                nodes = max(0, int(most[sitter.unit]) - floor.counts[sitter.unit])
            if not nodes:
                continue
            whole = nodes == len(floor.rooms[now])
            then = floor.house.changed(now, (), (sitter,))
            floor.move(now, nodes, then)
            floor.counts[sitter.unit] += nodes
            if whole:
                now = then


def trim(floor: Floor, most: Sequence[float]) -> None:
    """Stops those above what their unit may have: on the nodes where the least is in use, the last of them first."""
    for unit, limit in enumerate(most):
        if floor.counts[unit] <= limit:
            continue
        holds = [room for room in floor.rooms if unit in room.has]
        holds.sort(key=lambda room: (room.free.cards.idle_milli, room.free.cpu_milli, floor.rooms[room][-1]))
        for start in reversed(holds):
            room = start
            for sitter in [s for s in reversed(start.present) if s.unit == unit and s.hold is Hold.OLD]:
                nodes = min(len(floor.rooms.get(room, ())), floor.counts[unit] - int(limit))
                if nodes <= 0:
                    break
                whole = nodes == len(floor.rooms[room])
                then = floor.house.changed(room, (sitter,), ())
                floor.move(room, nodes, then)
                floor.counts[unit] -= nodes
                room = then if whole else room
