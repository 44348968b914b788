"""Children, orphans and descriptors of processes on Linux. Imports little: guard, supervisor and fork server load it
before anything else."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_KILL_ROUNDS = 1000


def kill_children() -> None:
    """Kill and reap children until none is left, including those that are adopted meanwhile. Processes of other users,
    which this one may not signal, are left."""
    for _ in range(MAX_KILL_ROUNDS):
        pids = child_pids()
        if pids and not _kill_each(pids):
            return
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill_each(pids: list[int]) -> int:
    """Kill children; returns how many could be signalled."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def child_pids() -> list[int]:
    """Children of this process, with those that it has adopted."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children") as file:  # noqa: PTH123 - pathlib is not loaded
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without this file
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent_pid(pid) == own]  # noqa: PTH208


def _parent_pid(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process exits, even if others hold its sockets; -1 if not
    supported."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def become_subreaper() -> None:
    """Adopt processes that descendants leave behind, so that they can be killed. Not inherited by a fork."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing in a Python without libffi."""
    libc = load_libc()
    if libc is not None:
        libc.prctl(option, value)


@functools.cache
def load_libc() -> Any:
    """The C library; None in a Python without libffi."""
    try:
        import ctypes  # late: the driver needs nothing of it

        return ctypes.CDLL(None)
    except (ImportError, OSError):
        return None
