"""Admission of jobs by the free resources of a worker. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.job import NO_RESOURCES
from dovetail.resources.fit import Fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seat
    from dovetail.resources.shape import Shape

SHAPES_CACHED = 10_000


class Admission:
    """Subtracts jobs from free resources, each by the first assignment of its shape. Results are cached per shape."""

    def __init__(self) -> None:
        self._fits: dict[Shape, Fit] = {}

    def take(self, shape: Shape, free: FreeResources) -> FreeResources | None:
        """The free resources after a job of this shape has started; None if it does not fit."""
        if shape is NO_RESOURCES or shape == NO_RESOURCES:
            return free
        fit = self._fits.get(shape)
        if fit is None:
            if len(self._fits) >= SHAPES_CACHED:
                self._fits.clear()
            fit = self._fits[shape] = Fit(shape)
        ways = fit.assignments(free)
        return free.taken(fit.seat("", ways[0])) if ways else None


class FreeCapacity(NamedTuple):
    """Free slots and resources of a worker, now or later."""

    slots: int
    free: FreeResources

    def after_start(self, shape: Shape, admission: Admission) -> FreeCapacity | None:
        """The room after a job of this shape has started; None if it does not fit."""
        left = admission.take(shape, self.free) if self.slots > 0 else None
        return None if left is None else FreeCapacity(self.slots - 1, left)

    def after_end(self, seats: Sequence[Seat], slots: int) -> FreeCapacity:
        """The room after a job with these seats and slots has ended."""
        free = self.free
        for seat in seats:
            free = free.given_back(seat)
        return FreeCapacity(self.slots + slots, free)
