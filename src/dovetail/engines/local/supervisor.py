"""Supervisor process: parent of the fork server. Everything that workers started ends when the driver or the fork
server exits.

Supervisor and fork server are both subreapers and watch the driver and each other: a process that loses its parent is
adopted by the nearest of them, whatever session it is in and whatever its environment is. Whichever of the two is left
kills its children until it has none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_KILL_ROUNDS = 1000


def main() -> NoReturn:
    """Entry point: `python -c ... SOCKET BREADCRUMBS DRIVER PROGRAM`, descriptors inherited from the driver.

    BREADCRUMBS is -1 if the processes need none, DRIVER is its pidfd, or -1 where there are none, PROGRAM is the module
    that forked processes run.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a driver that blocks SIGCHLD passes its signal mask on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, breadcrumbs_fd, driver = map(int, sys.argv[1:4])
    become_subreaper()
    supervisor = _fork_under_supervisor(driver, (sock, breadcrumbs_fd)) if driver >= 0 else -1
    from dovetail.engines.local.forkserver import serve  # late: the supervisor needs nothing of it

    serve(sock, breadcrumbs_fd, [fd for fd in (driver, supervisor) if fd >= 0], sys.argv[4])
    if supervisor >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(supervisor, signal.SIGCONT)  # a stopped supervisor would stay
    os._exit(0)


def _fork_under_supervisor(driver: int, others: tuple[int, ...]) -> int:
    """Continue in a child of this process, which becomes the supervisor; returns its pidfd in the child. Without enough
    processes or descriptors there is no supervisor: -1."""
    supervisor = open_pidfd(os.getpid())
    try:
        pid = os.fork()
    except OSError:
        return -1
    if pid:
        for fd in (supervisor, *others):
            if fd >= 0:
                os.close(fd)
        _supervise(driver, open_pidfd(pid))
    os.setsid()  # a signal to the group of one does not end both
    become_subreaper()
    return supervisor


def _supervise(driver: int, fork_server: int) -> NoReturn:
    """Wait until one of the two exits or SIGTERM arrives, then end everything."""
    signal.signal(signal.SIGTERM, lambda *_: _end())
    exits = select.poll()
    for fd in (driver, fork_server):
        if fd >= 0:
            exits.register(fd, select.POLLIN)
    exits.poll()
    _end()


def _end() -> NoReturn:
    kill_children()
    os._exit(0)


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
