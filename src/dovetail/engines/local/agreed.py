"""What have driver and workers agreed on? The numbers in messages and crumbs, and how values are pickled in calls."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING

from dovetail.engines.local.pool import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE, SHARED, IN_FILE, WRITTEN = 0, 1, 2, 3
"""How a payload travels: in the body, as a descriptor of memory, as a place in a file; or not, because it is written
where it belongs."""
SPILL, NO_MEMORY_FILES, SPOOL, NO_OUTPUT = 1, 2, 4, 8
"""Flags of a message: shared memory is full; descriptors are; the output is for a later wave; another rank gives it."""
CELL = 8
"""Numbers per crumb: 64 bytes, so that no two workers write to one cache line."""
BEGUN = 4
"""Which number of a cell says what has begun of all that was sent in advance."""


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def reading_of_file(path: str, offset: int, sizes: Sequence[int]) -> Reading:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Reading(fd, sizes, offset)
    finally:
        os.close(fd)


def dumps(value: object) -> bytes:
    """By pickle, and what it cannot do by cloudpickle."""
    try:
        return pickle.dumps(value, 5)
    except Exception:
        import cloudpickle

        found: bytes = cloudpickle.dumps(value, 5)
        return found
