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
    """A process, told apart from others that get its number later."""

    pid: int
    born: str
    """When it began, in the words of its machine."""
    space: str = ""
    """Where its number means anything: boot and process namespace."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run, cast or worker that shares a machine. At every moment the grants of all owners fit into it together."""

    id: str
    name: str
    process: ProcessId
    since: float
    need: Seats
    """Without this it cannot go on: its least workers, seated as if it were alone."""
    ideal: Seats | None = None
    """More than this it cannot use; None: all there is."""
    granted: Amounts = field(default_factory=dict)
    """What it may use until its workers have left: others plan around this."""
    limit: Amounts = field(default_factory=dict)
    """What it was last told to keep to."""
    held: Amounts = field(default_factory=dict)
    """What its workers sit on."""
    waiting: bool = True
    """It has not begun."""
    heartbeat: float = 0.0
    cap: Amounts | None = None
    """More than this it must not use, node by node; None: no such limit."""
    required_labels: tuple[str, ...] | None = None
    """Labels of nodes that its stages ask for: other nodes do if these are the same there. None: nobody knows which."""


PROC = Path("/proc")


def this_process() -> ProcessId:
    pid = os.getpid()
    return ProcessId(pid, _start_time(pid) or "", _pid_namespace())


def is_alive(process: ProcessId) -> bool | None:
    """None: its number means nothing here, because it is in another container; only its heartbeat can tell."""
    boot, _, names = process.space.partition(" ")
    here_boot, _, here_names = _pid_namespace().partition(" ")
    if boot != here_boot:
        return False  # of before the last start of this machine
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
    """When a process began; None if there is none."""
    started = process_start_time(pid)
    return None if started is None else f"{started:.2f}"
