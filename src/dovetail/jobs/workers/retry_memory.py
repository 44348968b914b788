"""Memory that the next attempt of a job requests after it ran out of memory. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

MEMORY_GROWTH = 2
"""Factor on the requested memory after a job ran out of it."""
PEAK_HEADROOM_PERCENT = 150
"""Percentage of the peak that is requested if a job had requested no memory, or less."""


def next_shape(
    shape: Shape, peak_bytes: int | None = None, limit_bytes: int = 0, *, on_gpu: bool = False
) -> Shape | None:
    """Resources of the next attempt after one that ran out of memory; None: the same.

    Twice the requested memory, or one and a half times the peak if that is more, and at most what the worker has.
    """
    if on_gpu:
        if shape.kind is not ShapeKind.FRACTIONAL_GPU or not shape.gpu_memory_bytes:
            return None
        return replace(shape, gpu_memory_bytes=shape.gpu_memory_bytes * MEMORY_GROWTH)
    wanted = max(shape.memory_bytes * MEMORY_GROWTH, (peak_bytes or 0) * PEAK_HEADROOM_PERCENT // 100)
    if limit_bytes:
        wanted = min(wanted, limit_bytes)
    return replace(shape, memory_bytes=wanted) if wanted > shape.memory_bytes else None
