"""Specification of a worker process: hosted objects, seat, paths and limits."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.resources.seat import Seat


RAY_NAMESPACE_VARIABLE = "DOVETAIL_RAY_NAMESPACE"
"""Variable of the workers of a run on Ray: the namespace of the driver."""


class DriverContext(NamedTuple):
    """Context of the driver, sent to an engine on another machine."""

    path: tuple[str, ...]
    """Its sys.path."""
    folder: str
    """Its working folder."""
    variables: dict[str, str]
    """Environment variables that workers get from it."""


class HostedSpec(NamedTuple):
    """An object that the worker hosts."""

    name: str
    work: bytes
    """Pickled by cloudpickle: definitions of the user's script, and a tuple of stages, a class or a function."""
    slots: int
    writer: bytes = b""
    """Pickled writer of the results; empty: results are sent on."""


class WorkerSpec(NamedTuple):
    """Specification of one worker process; plain data, pickled once per process."""

    worker: int
    hosted: tuple[HostedSpec, ...]
    seat: Seat
    rank: int
    ranks: int
    local_rank: int
    gpus: tuple[int, ...]
    """Indices of its cards among those that the process sees."""
    path: tuple[str, ...]
    """sys.path of the driver."""
    folder: str
    """Working folder of the driver."""
    spool_folder: str
    """Folder for payloads that must not be in memory."""
    pool_bytes: int
    """Maximum shared memory that a worker keeps for reuse."""
    cpus: tuple[int, ...] = ()
    """CPUs to bind the process to; empty: not bound."""
    context: bytes = b""
    """See `StartWorker.context`."""

    def part_name(self) -> str:
        """A file name that no other process has ever used, not even one of an earlier session of the run."""
        return f"{self.worker}-{self.rank}-{os.getpid()}-{time.time_ns():x}"
