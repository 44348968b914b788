"""What was a dead worker doing? A few numbers in shared memory, that it leaves before every call of the user's code."""

from __future__ import annotations

import os
from mmap import mmap

from dovetail.control.events import Crumb
from dovetail.engines.local.agreed import BEGUN, CELL
from dovetail.errors import EngineError, Problem

CELLS = 1 << 14
"""More slots than one machine runs processes."""
NOTHING = -1


class Crumbs:
    """The memory that all workers of an engine share, cut into cells of 64 bytes."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dovetail-crumbs", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, CELLS * CELL * 8)
        self._map = mmap(self.fd, 0)
        self._numbers = memoryview(self._map).cast("q")
        self._free = list(range(CELLS - 1, -1, -1))

    def take(self, count: int) -> tuple[int, ...]:
        """Cells for the slots of a worker."""
        if count > len(self._free):
            message = f"{CELLS} slots on one machine are taken; {count} more are too many"
            raise EngineError(Problem("DT334", message, fixes=("slots=64 or less, or fewer workers",)))
        found = tuple(self._free.pop() for _ in range(count))
        for cell in found:
            self._numbers[cell * CELL] = NOTHING
            self._numbers[cell * CELL + BEGUN] = 0
        return found

    def begun(self, cells: tuple[int, ...]) -> int:
        """The last of the messages sent in advance that has begun."""
        return self._numbers[cells[0] * CELL + BEGUN]

    def give_back(self, cells: tuple[int, ...]) -> None:
        self._free += cells

    def read(self, cells: tuple[int, ...]) -> tuple[Crumb, ...]:
        """Of every call that was running."""
        found = []
        for cell in cells:
            message, index, exact = self._numbers[cell * CELL : cell * CELL + 3]
            if message != NOTHING:
                found.append(Crumb(message, index, bool(exact)))
        return tuple(found)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
        os.close(self.fd)
