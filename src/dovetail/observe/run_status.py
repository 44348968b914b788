"""Status of a run by its header: what run.json says, or lost if the heartbeat stopped."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from dovetail.machine.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

KNOWN_STATUS = frozenset({"running", "finished", "drained", "failed", "cancelled"})
LOST_AFTER_S = 10.0
"""Age of the heartbeat after which a run on another machine counts as lost."""


def run_status(header: Mapping[str, Any], wall: float) -> str:
    """running, finished, drained, failed, cancelled; or lost: the heartbeat stopped and no process claims the run."""
    status = header.get("status")
    if status not in KNOWN_STATUS:
        return "lost"
    if status != "running":
        return str(status)
    beat = header.get("heartbeat")
    alive = _is_alive(header)
    if alive is None:  # on another machine: only the heartbeat is known
        alive = isinstance(beat, int | float) and wall - beat <= LOST_AFTER_S
    return "running" if alive else "lost"


def _is_alive(header: Mapping[str, Any]) -> bool | None:
    """Whether the same process, not a later one with the same pid, is alive; None: not on this machine."""
    pid, started = header.get("pid"), header.get("pid_started")
    if header.get("host") != socket.gethostname() or not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    if pid == os.getpid():
        return True
    there = process_start_time(pid) if 0 < pid < 1 << 31 else None
    return there is not None and abs(there - started) < 1.0
