"""Difference between two layouts as workers to start, to stop and to keep, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.scheduling.replan.layout import OccupantStatus
from dovetail.scheduling.replan.snapshot import PlannedStart, PlannedStop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.scheduling.replan.layout import InitialLayout, Layout, NewGang, Occupant
    from dovetail.scheduling.replan.targets import UnitTarget


class LayoutDiff:
    """Compares seats with seats, so that a stop and a start of the same seat are neither."""

    def __init__(
        self, here: InitialLayout, wants: Sequence[UnitTarget], floor: Layout, gangs: Sequence[NewGang], rate: float
    ) -> None:
        self.initial = here
        self.targets = wants
        self.counts = floor.counts
        self.gangs = gangs
        self.rate = rate
        self.names = [node.name for node in here.snapshot.cluster.nodes]
        self.unmatched = {key: list(workers) for key, workers in here.workers.items()}
        """Who sat there and was not found again."""
        self.drains_cancelled: list[int] = []
        self.started: list[tuple[int, Occupant]] = []
        house = floor.interner
        for position, present in sorted((p, room.occupants) for room, there in floor.groups.items() for p in there):
            for sitter in present:
                self._match_occupant(
                    position, sitter, house.occupant(sitter.unit, sitter.seats, _initial_status(sitter))
                )
        self.starting_units = self._units_starting_by_node()

    def _match_occupant(self, position: int, sitter: Occupant, was: Occupant) -> None:
        same = self.unmatched.get((position, was), [])
        if sitter.status is OccupantStatus.MISFIT:
            return  # stopped, although nobody wants its seat
        if same:
            worker = same.pop(0)
            if sitter.status is OccupantStatus.DRAIN_CANCELLED:
                self.drains_cancelled.append(worker)
        elif was.status is OccupantStatus.RUNNING:
            self.started.append((position, sitter))

    def _units_starting_by_node(self) -> dict[str, list[str]]:
        """Node -> the units that get a new worker there."""
        comes: dict[str, list[str]] = {}
        for position, sitter in self.started:
            comes.setdefault(self.names[position], []).append(self.targets[sitter.unit].unit.name)
        for gang in self.gangs:
            for position, _ in gang.seats:
                comes.setdefault(self.names[position], []).append(self.targets[gang.unit].unit.name)
        return comes

    def starts(self) -> Iterator[PlannedStart]:
        for position, sitter in self.started:
            seats = tuple(seat._replace(node=self.names[position]) for seat in sitter.seats)
            yield PlannedStart(self.targets[sitter.unit].unit.name, seats, self._start_reason(sitter.unit))
        for gang in self.gangs:
            seats = tuple(seat._replace(node=self.names[position]) for position, seat in gang.seats)
            yield PlannedStart(self.targets[gang.unit].unit.name, seats, self._start_reason(gang.unit))

    def _start_reason(self, unit: int) -> str:
        want, before, after = self.targets[unit], self.initial.layout.counts[unit], self.counts[unit]
        if after <= before:
            return f"{want.unit.name} keeps {after} workers: one moves here"
        if not want.limits_rate:
            return f"{want.unit.name} goes from {before} to {after} workers without a rate"
        each = want.demand.speed
        return (
            f"{want.unit.name} goes from {before} to {after} workers of {each:.4g} items/s for {self.rate:.4g} items/s"
        )

    def stops(self) -> Iterator[PlannedStop]:
        found = dict(self.initial.must_stop)
        for (position, sitter), workers in self.unmatched.items():
            if sitter.status in (OccupantStatus.RUNNING, OccupantStatus.MISFIT):
                found |= {worker: self._stop_reason(position, sitter) for worker in workers}
        yield from (PlannedStop(worker, found[worker]) for worker in sorted(found))

    def _stop_reason(self, position: int, sitter: Occupant) -> str:
        want = self.targets[sitter.unit]
        name, node = want.unit.name, self.names[position]
        if sitter.status is OccupantStatus.MISFIT:
            return f"its seat on {node} no longer suits {name} ({want.unit.shape.describe()})"
        before, after = self.initial.layout.counts[sitter.unit], self.counts[sitter.unit]
        comes = sorted(set(self.starting_units.get(node, ())))
        if after >= want.max_workers and before > after:
            return f"{name} may have {after} workers and has {before}"
        if not comes:
            return f"{name} goes from {before} to {after} workers"
        if after >= before:
            return f"one of {name} moves away from {node} to make room for {', '.join(comes)}"
        return f"{name} can do with {after} of {before} workers; its seat on {node} goes to {', '.join(comes)}"

    def cancelled_drains(self) -> Iterator[int]:
        yield from sorted(self.drains_cancelled)


def _initial_status(sitter: Occupant) -> OccupantStatus:
    """How it held its seat when the replan began, if it sat there."""
    match sitter.status:
        case OccupantStatus.NEW:
            return OccupantStatus.RUNNING
        case OccupantStatus.DRAIN_CANCELLED:
            return OccupantStatus.DRAINING
        case other:
            return other
