"""When did a process begin? Together with its number that tells it from any other, earlier or later."""

from __future__ import annotations

import os
from pathlib import Path

_STARTED = 19
"""The field of /proc/PID/stat, counted behind the name, which may hold anything."""


def process_started(pid: int) -> float | None:
    """Seconds since the epoch; None: there is no such process, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        booted = Path("/proc/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _by_psutil(pid)
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    since = next(int(line.split()[1]) for line in booted.splitlines() if line.startswith(b"btime"))
    return since + int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")


def _by_psutil(pid: int) -> float | None:
    import psutil  # late: it costs more than all else that a run imports for this

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
