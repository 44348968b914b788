"""Placement of a gang: rank 0 on the worker that claims it, the others there and on offers of others. Pure.

All ranks are placed, or none. The claiming worker takes as many ranks as fit, then the worker that fits most of them
(of several, the one with the smallest id), and so on. The ranks of one worker follow each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.admission import Admission, FreeCapacity
    from dovetail.resources.shape import Shape


class GangPlacement(NamedTuple):
    """Where the ranks of a gang run, and what they leave."""

    workers: tuple[str, ...]
    """The worker of each rank."""
    rooms: dict[str, FreeCapacity]
    """Remaining room of each of these workers."""


def place_gang(
    admission: Admission, shape: Shape, worker: str, room: FreeCapacity, others: Sequence[tuple[str, FreeCapacity]]
) -> GangPlacement | None:
    """Place all ranks; None: they do not fit, or none fits on the claiming worker. `room`: of the claiming worker."""
    rank, missing = shape.rank, shape.ranks
    own = rooms_after(admission, rank, room, missing)
    if not own:
        return None
    missing -= len(own)
    chosen = [(worker, own)]
    if missing:
        fitting = [(name, rooms_after(admission, rank, offered, missing)) for name, offered in others]
        for name, rooms in sorted(fitting, key=_most_first):
            taken = rooms[:missing]
            if taken:
                chosen.append((name, taken))
                missing -= len(taken)
    if missing:
        return None
    workers = tuple(name for name, rooms in chosen for _ in rooms)
    return GangPlacement(workers, {name: rooms[-1] for name, rooms in chosen})


def rooms_after(admission: Admission, rank: Shape, room: FreeCapacity, most: int) -> list[FreeCapacity]:
    """The room after one rank has started, after two, and so on."""
    found: list[FreeCapacity] = []
    left = room.after_start(rank, admission)
    while left is not None and len(found) < most:
        found.append(left)
        left = left.after_start(rank, admission)
    return found


def _most_first(item: tuple[str, list[FreeCapacity]]) -> tuple[int, str]:
    return -len(item[1]), item[0]
