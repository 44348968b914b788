"""Breadcrumbs: a shared-memory table in which each slot records the call it is running."""

from __future__ import annotations

import os
from mmap import mmap

from dovetail.control.events import Breadcrumb
from dovetail.engines.local.protocol import BEGUN_WORD, BREADCRUMB_WORDS
from dovetail.errors import EngineError, Problem

MAX_CELLS = 1 << 14
"""More slots than processes run on one machine."""
NO_MESSAGE = -1


class BreadcrumbTable:
    """Memory shared by all workers of an engine, divided into cells of 64 bytes."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dovetail-crumbs", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, MAX_CELLS * BREADCRUMB_WORDS * 8)
        self._map = mmap(self.fd, 0)
        self._numbers = memoryview(self._map).cast("q")
        self._free = list(range(MAX_CELLS - 1, -1, -1))

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate a cell for each slot of a worker."""
        if count > len(self._free):
            message = f"{MAX_CELLS} slots per machine are in use; {count} more requested"
            raise EngineError(Problem("DT334", message, fixes=("slots=64 or less, or fewer workers",)))
        found = tuple(self._free.pop() for _ in range(count))
        for cell in found:
            self._numbers[cell * BREADCRUMB_WORDS] = NO_MESSAGE
            self._numbers[cell * BREADCRUMB_WORDS + BEGUN_WORD] = 0
        return found

    def last_begun(self, cells: tuple[int, ...]) -> int:
        """Number of the last prefetched message that has started."""
        return self._numbers[cells[0] * BREADCRUMB_WORDS + BEGUN_WORD]

    def release(self, cells: tuple[int, ...]) -> None:
        self._free += cells

    def read(self, cells: tuple[int, ...]) -> tuple[Breadcrumb, ...]:
        """Breadcrumbs of all running calls."""
        found = []
        for cell in cells:
            message, index, exact = self._numbers[cell * BREADCRUMB_WORDS : cell * BREADCRUMB_WORDS + 3]
            if message != NO_MESSAGE:
                found.append(Breadcrumb(message, index, bool(exact)))
        return tuple(found)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
        os.close(self.fd)
