"""What does a worker process get to know when it starts?"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.resources.seat import Seat


class Home(NamedTuple):
    """The driver's place, as an engine on another machine is told of it."""

    path: tuple[str, ...]
    """Its sys.path."""
    folder: str
    """Its working folder."""
    variables: dict[str, str]
    """What workers get of its environment."""


class Guest(NamedTuple):
    """An object that the worker hosts."""

    name: str
    work: bytes
    """By cloudpickle: what the user's script defines, and a tuple of stages, a class or a function."""
    slots: int
    writer: bytes = b""
    """By pickle: who writes its results where they belong; empty: they are sent on."""


class Spec(NamedTuple):
    """Plain data, pickled once per process."""

    worker: int
    guests: tuple[Guest, ...]
    seat: Seat
    rank: int
    ranks: int
    local_rank: int
    path: tuple[str, ...]
    """sys.path of the driver."""
    folder: str
    """The working folder of the driver."""
    spill: str
    """Where payloads go that must not lie in memory."""
    pool_bytes: int
    """Shared memory that a worker keeps warm, at most."""
    cpus: tuple[int, ...] = ()
    """The CPUs it is bound to; none: it is not."""

    def part_name(self) -> str:
        """For a file that no other process ever had: not of a run that was killed and goes on, either."""
        return f"{self.worker}-{self.rank}-{os.getpid()}-{time.time_ns():x}"
