"""Is that process still there? Its number and its beginning tell it from one that got the number later."""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.claims.owner import Process
from dovetail.machine.processes import process_started

PROC = Path("/proc")


def this_process() -> Process:
    pid = os.getpid()
    return Process(pid, _born(pid) or "", _space())


def is_there(process: Process) -> bool | None:
    """None: its number means nothing here, because it is in another container; only its heartbeat can tell."""
    boot, _, names = process.space.partition(" ")
    here_boot, _, here_names = _space().partition(" ")
    if boot != here_boot:
        return False  # of before the last start of this machine
    if names != here_names:
        return None
    return _born(process.pid) == process.born


def _space() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """When a process began; None if there is none."""
    started = process_started(pid)
    return None if started is None else f"{started:.2f}"
