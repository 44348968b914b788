"""Where does a payload lie? What `Segment.ref` is on this engine; its lifetime is the payload's."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

End = tuple[int, int, bool, int]
"""Of a payload in shared memory: owner, buffer, kept, size."""
SPILLED = -1
"""The owner of what lies in a file."""


class Freed(Protocol):
    """Who is told of ends, in whichever thread they come."""

    def append(self, end: End, /) -> None: ...


class Inline:
    """In the driver's memory, unopened."""

    __slots__ = ("data", "sizes")

    def __init__(self, data: bytes, sizes: Sizes) -> None:
        self.data = data
        self.sizes = sizes


class Shared:
    """In memory that a process wrote and everybody can map. Tells its end, so that the writer can use it again."""

    __slots__ = ("_freed", "buffer", "fd", "kept", "owner", "size", "sizes")

    def __init__(self, fd: int, sizes: Sizes, size: int, owner: int, buffer: int, freed: Freed) -> None:
        self.fd = fd
        self.sizes = sizes
        self.size = size
        self.owner = owner
        """The process that wrote it; 0: the driver."""
        self.buffer = buffer
        self.kept = False
        """Whether somebody keeps a view of it: then it must not be written again."""
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append((self.owner, self.buffer, self.kept, self.size))


class Spilled:
    """In a file without a name."""

    __slots__ = ("_freed", "fd", "sizes")

    def __init__(self, fd: int, sizes: Sizes, freed: Freed) -> None:
        self.fd = fd
        self.sizes = sizes
        self._freed = freed

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._freed.append((SPILLED, 0, False, 0))


class InFile:
    """At a place of a spool's part file."""

    __slots__ = ("offset", "path", "sizes")

    def __init__(self, path: str, offset: int, sizes: Sizes) -> None:
        self.path = path
        self.offset = offset
        self.sizes = sizes
