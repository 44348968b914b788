"""The status and the kind of a run, from its header (run.json)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from dovetail.machine.processes import process_start_time

LOST_AFTER_S = 10.0
KNOWN_STATUS = frozenset({"running", "finished", "drained", "failed", "cancelled"})
RUN_KINDS = ("pipeline", "recipe", "backfill", "service")
RECIPE_FILE_KEY = "recipe_file"
"""Key of the file of a recipe in the headers of its runs."""
SERVICE = "dt.serve"
"""What started a service, as its header says."""


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


def run_kind(header: Mapping[str, Any]) -> str:
    """One of RUN_KINDS."""
    more = header.get("more")
    recorded = more if isinstance(more, Mapping) else {}
    if recorded.get("column"):
        return "backfill"
    if recorded.get(RECIPE_FILE_KEY):
        return "recipe"
    return "service" if header.get("what") == SERVICE else "pipeline"


def _is_alive(header: Mapping[str, Any]) -> bool | None:
    """Whether the same process, not a later one with the same pid, is alive; None: not on this machine."""
    pid, started = header.get("pid"), header.get("pid_started")
    if header.get("host") != socket.gethostname() or not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    if pid == os.getpid():
        return True
    there = process_start_time(pid) if 0 < pid < 1 << 31 else None
    return there is not None and abs(there - started) < 1.0
