"""Which workers start, stop or stay between the floor as it is and the floor as it should be, and why?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.scheduling.replanning.rooms import Hold
from dovetail.scheduling.snapshot import Start, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.scheduling.replanning.present import Present
    from dovetail.scheduling.replanning.rooms import Floor, Gang, Sitter
    from dovetail.scheduling.replanning.wants import Want


class Differences:
    """Compares seats with seats, so that a stop and a start of the same seat are neither."""

    def __init__(self, here: Present, wants: Sequence[Want], floor: Floor, gangs: Sequence[Gang], rate: float) -> None:
        self.here = here
        self.wants = wants
        self.counts = floor.counts
        self.gangs = gangs
        self.rate = rate
        self.names = [node.name for node in here.snapshot.cluster.nodes]
        self.left = {key: list(workers) for key, workers in here.workers.items()}
        """Who sat there and was not found again."""
        self.kept: list[int] = []
        self.new: list[tuple[int, Sitter]] = []
        house = floor.house
        for position, present in sorted((p, room.present) for room, there in floor.rooms.items() for p in there):
            for sitter in present:
                self._found(position, sitter, house.sitter(sitter.unit, sitter.seats, _was(sitter)))
        self.comes = self._who_comes()

    def _found(self, position: int, sitter: Sitter, was: Sitter) -> None:
        same = self.left.get((position, was), [])
        if sitter.hold is Hold.OUTGROWN:
            return  # stopped, although nobody wants its seat
        if same:
            worker = same.pop(0)
            if sitter.hold is Hold.TAKEN_BACK:
                self.kept.append(worker)
        elif was.hold is Hold.OLD:
            self.new.append((position, sitter))

    def _who_comes(self) -> dict[str, list[str]]:
        """Node -> the units that get a new worker there."""
        comes: dict[str, list[str]] = {}
        for position, sitter in self.new:
            comes.setdefault(self.names[position], []).append(self.wants[sitter.unit].unit.name)
        for gang in self.gangs:
            for position, _ in gang.seats:
                comes.setdefault(self.names[position], []).append(self.wants[gang.unit].unit.name)
        return comes

    def starts(self) -> Iterator[Start]:
        for position, sitter in self.new:
            seats = tuple(seat._replace(node=self.names[position]) for seat in sitter.seats)
            yield Start(self.wants[sitter.unit].unit.name, seats, self._why_start(sitter.unit))
        for gang in self.gangs:
            seats = tuple(seat._replace(node=self.names[position]) for position, seat in gang.seats)
            yield Start(self.wants[gang.unit].unit.name, seats, self._why_start(gang.unit))

    def _why_start(self, unit: int) -> str:
        want, before, after = self.wants[unit], self.here.floor.counts[unit], self.counts[unit]
        if after <= before:
            return f"{want.unit.name} keeps {after} workers: one moves here"
        if not want.limits:
            return f"{want.unit.name} goes from {before} to {after} workers without a rate"
        each = want.demand.speed
        return (
            f"{want.unit.name} goes from {before} to {after} workers of {each:.4g} items/s for {self.rate:.4g} items/s"
        )

    def stops(self) -> Iterator[Stop]:
        found = dict(self.here.must_stop)
        for (position, sitter), workers in self.left.items():
            if sitter.hold in (Hold.OLD, Hold.OUTGROWN):
                found |= {worker: self._why_stop(position, sitter) for worker in workers}
        yield from (Stop(worker, found[worker]) for worker in sorted(found))

    def _why_stop(self, position: int, sitter: Sitter) -> str:
        want = self.wants[sitter.unit]
        name, node = want.unit.name, self.names[position]
        if sitter.hold is Hold.OUTGROWN:
            return f"its seat on {node} no longer suits {name} ({want.unit.shape.describe()})"
        before, after = self.here.floor.counts[sitter.unit], self.counts[sitter.unit]
        comes = sorted(set(self.comes.get(node, ())))
        if after >= want.most and before > after:
            return f"{name} may have {after} workers and has {before}"
        if not comes:
            return f"{name} goes from {before} to {after} workers"
        if after >= before:
            return f"one of {name} moves away from {node} to make room for {', '.join(comes)}"
        return f"{name} can do with {after} of {before} workers; its seat on {node} goes to {', '.join(comes)}"

    def keeps(self) -> Iterator[int]:
        yield from sorted(self.kept)


def _was(sitter: Sitter) -> Hold:
    """How it held its seat when the replan began, if it sat there."""
    match sitter.hold:
        case Hold.NEW:
            return Hold.OLD
        case Hold.TAKEN_BACK:
            return Hold.DRAINING
        case other:
            return other
