"""Admission of jobs by the free resources of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.jobs.job import NO_RESOURCES
from dovetail.resources.fit import Fit

if TYPE_CHECKING:
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

SHAPES_CACHED = 10_000


class Admission:
    """Takes jobs from free resources, each by the first assignment of its shape. Results are cached per shape."""

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
