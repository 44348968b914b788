"""Owner of a claim: one run with its minimum, grant, limit and held amounts, and the identity and liveness check of
its process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dovetail.machine.processes import process_start_time

if TYPE_CHECKING:
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.seat import Seats


class ProcessId(NamedTuple):
    """Identity of a process that stays unique when its pid is reused."""

    pid: int
    born: str
    """Start time, as its machine reports it."""
    space: str = ""
    """Boot id and pid namespace in which the pid is valid."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run that shares a machine or cluster. The grants of all owners together never exceed it."""

    id: str
    name: str
    process: ProcessId
    since: float
    need: Seats
    """Minimum: the minimum number of workers of every unit, seated as if the run were alone."""
    ideal: Seats | None = None
    """Maximum that it can use; None: no maximum."""
    granted: Amounts = field(default_factory=dict)
    """Amounts that it may use until its workers have stopped; not available to others."""
    limit: Amounts = field(default_factory=dict)
    """Limit that was last posted to the run."""
    held: Amounts = field(default_factory=dict)
    """Amounts of its workers."""
    waiting: bool = True
    """Whether it waits to begin."""
    heartbeat: float = 0.0
    cap: Amounts | None = None
    """Maximum that it may use, per node (`share=`); None: no cap."""
    required_labels: tuple[str, ...] | None = None
    """Node labels that its stages require: nodes with the same values are equivalent. None: not known."""


PROC = Path("/proc")


def this_process() -> ProcessId:
    pid = os.getpid()
    return ProcessId(pid, _start_time(pid) or "", _pid_namespace())


def is_alive(process: ProcessId) -> bool | None:
    """None: the process is in another pid namespace (container), and only its heartbeat shows whether it is alive."""
    boot, _, names = process.space.partition(" ")
    here_boot, _, here_names = _pid_namespace().partition(" ")
    if boot != here_boot:
        return False  # from before the last boot
    if names != here_names:
        return None
    return _start_time(process.pid) == process.born


def _pid_namespace() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Start time of a process; None if it does not exist."""
    started = process_start_time(pid)
    return None if started is None else f"{started:.2f}"
