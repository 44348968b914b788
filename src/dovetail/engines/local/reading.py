"""How does a worker read large payloads: mapped where they lie, or copied because its function writes into them?

A mapping costs nothing until it is written to; then every page is a fault and a copy of its own, four times as dear as
one copy of everything into memory that is there already. Which of the two a function does is looked up now and then in
the page tables.
"""

from __future__ import annotations

import mmap
import os
from array import array
from threading import Lock
from typing import TYPE_CHECKING

from dovetail.engines.local.payload import extent, split
from dovetail.engines.local.pool import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_EVERY = 16
"""Messages between two looks, after the first few."""
WRITES = 0.5
"""A function that touches this share of the pages writes in place."""
WARM = 8
"""Buffers that are kept."""
PRESENT, OF_A_FILE = 1 << 63, 1 << 61
_TAKING = Lock()


class Reader:
    """The payloads of one worker."""

    def __init__(self) -> None:
        self._copies = False
        self._messages = 0
        self._warm: list[mmap.mmap] = []
        self._pagemap = -2

    def read(self, fd: int, lengths: Sequence[int], offset: int = 0) -> Reading | Copied:
        if self._copies:
            return Copied(fd, lengths, offset, self._warm)
        return Reading(fd, lengths, offset)

    def look(self, readings: Sequence[Reading | Copied]) -> None:
        """After a message, before its payloads are closed: does the function write into them?"""
        self._messages += 1
        if self._messages > 4 and self._messages % LOOK_EVERY:
            return
        if self._copies:
            self._copies = self._messages % (LOOK_EVERY * 16) != 0  # map the next ones, to see whether it still does
            return
        mapped = [reading for reading in readings if isinstance(reading, Reading)]
        pages = sum(reading.pages for reading in mapped)
        self._copies = bool(pages) and sum(map(self._written, mapped)) >= WRITES * pages

    def _written(self, reading: Reading) -> int:
        """Pages of a private mapping that are copies by now; 0 if that cannot be known."""
        if self._pagemap == -2:
            try:
                self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._pagemap = -1
        if self._pagemap < 0:
            return 0
        entries = array("Q")
        try:
            entries.frombytes(os.pread(self._pagemap, 8 * reading.pages, reading.address // mmap.PAGESIZE * 8))
        except (OSError, ValueError):
            return 0
        return sum(1 for entry in entries if entry & PRESENT and not entry & OF_A_FILE)


class Copied:
    """A payload in memory of our own. Whoever keeps a view of it has it to himself."""

    __slots__ = ("_memory", "_warm", "_whole", "buffers", "stream")

    def __init__(self, fd: int, lengths: Sequence[int], offset: int, warm: list[mmap.mmap]) -> None:
        size = extent(lengths)
        self._warm = warm
        self._memory = self._take(size)
        self._whole = memoryview(self._memory)[:size]
        done = 0
        while done < size:
            count = os.preadv(fd, [self._whole[done:]], offset + done)
            if not count:
                raise EOFError(f"a payload of {size} bytes has only {done}")
            done += count
        self.stream, self.buffers = split(self._whole, lengths)

    def _take(self, size: int) -> mmap.mmap:
        with _TAKING:
            fitting = [memory for memory in self._warm if size <= len(memory) <= 2 * size]
            if fitting:
                best = min(fitting, key=len)
                self._warm.remove(best)
                return best
        # private: a process that user code forks has its own
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def close(self) -> bool:
        """Always: nobody else is concerned. Kept for the next one, unless somebody keeps a view."""
        try:
            for view in (self.stream, *self.buffers, self._whole):
                view.release()
            self._memory.resize(len(self._memory))  # refuses while there are views
        except (BufferError, OSError, SystemError):
            return True
        with _TAKING:
            if len(self._warm) < WARM:
                self._warm.append(self._memory)
                return True
        self._memory.close()
        return True
