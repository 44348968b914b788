"""Guard and supervisor: the processes above the fork server. Everything that workers started ends when the driver or
any of these processes exits.

Guard, supervisor and fork server are subreapers, each the parent of the next, and watch the driver and each other: a
process that loses its parent is adopted by the nearest of them, whatever session it is in and whatever its environment
is. Any of the three that is left kills its children until it has none. None of them kills another one that may be
doing so: the guard may be killed at any moment, as Ray kills the children of an actor that exits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_KILL_ROUNDS = 1000
FORK_SERVER_GRACE_S = 1.0
"""Time for a fork server to kill its workers, before the supervisor does it."""
GUARD_GRACE_S = 2.0
"""Time for a supervisor and a fork server to exit, before the guard kills them and everything else."""
REAP_INTERVAL_S = 0.005


def main() -> NoReturn:
    """Entry point: `python -c ... SOCKET BREADCRUMBS DRIVER PROGRAM`, descriptors inherited from the driver.

    BREADCRUMBS is -1 if the processes need none, DRIVER is its pidfd, or -1 where there are none, PROGRAM is the module
    that forked processes run.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a driver that blocks SIGCHLD passes its signal mask on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, breadcrumbs_fd, driver = map(int, sys.argv[1:4])
    become_subreaper()
    watched = [driver] if driver >= 0 else []
    above: list[int] = []
    for program in (_guard, _supervise) if watched else ():
        pidfd = _fork_under(program, [*watched, *above], (sock, breadcrumbs_fd))
        above += [pidfd] if pidfd >= 0 else []
    from dovetail.engines.local.forkserver import serve  # late: guard and supervisor need nothing of it

    serve(sock, breadcrumbs_fd, [*watched, *above], sys.argv[4])
    _continue(above)
    os._exit(0)


def _fork_under(
    program: Callable[[Sequence[int], int], NoReturn], watched: Sequence[int], others: Sequence[int]
) -> int:
    """Continue in a child of this process, which runs `program`; returns the pidfd of this process in the child.
    Without enough processes or descriptors there is no child: -1."""
    own = open_pidfd(os.getpid())
    try:
        pid = os.fork()
    except OSError:
        if own >= 0:
            os.close(own)
        return -1
    if pid:
        for fd in (own, *others):
            if fd >= 0:
                os.close(fd)
        program(watched, pid)
    os.setsid()  # a signal to the group of one does not end several
    become_subreaper()
    return own


def _guard(watched: Sequence[int], pid: int) -> NoReturn:
    """Wait until the driver or the supervisor exits, then until the others have killed everything, or do it.

    SIGTERM is passed on: the supervisor stays if the guard is killed meanwhile."""
    supervisor = open_pidfd(pid)

    def on_terminate(*_: object) -> None:
        if supervisor < 0 or _first_exits([supervisor], 0):
            _end()
        _signal(supervisor, signal.SIGTERM)
        _signal(supervisor, signal.SIGCONT)

    signal.signal(signal.SIGTERM, on_terminate)
    _first_exits([*watched, supervisor])
    _continue([supervisor])
    _wait_for_children(GUARD_GRACE_S)
    _end()


def _supervise(watched: Sequence[int], pid: int) -> NoReturn:
    """Wait until the fork server, the guard or the driver exits or SIGTERM arrives, then end everything."""

    def end(*_: object) -> NoReturn:
        kill_children()
        _continue(watched[1:])
        os._exit(0)

    fork_server = open_pidfd(pid)
    signal.signal(signal.SIGTERM, end)
    if fork_server not in _first_exits([*watched, fork_server]):
        _continue([fork_server])
        _first_exits([fork_server], FORK_SERVER_GRACE_S)
    end()


def _first_exits(pidfds: Sequence[int], timeout_s: float | None = None) -> list[int]:
    """Wait until one of the processes exits; returns those that have."""
    exits = select.poll()
    for fd in pidfds:
        if fd >= 0:
            exits.register(fd, select.POLLIN)
    return [fd for fd, _ in exits.poll(None if timeout_s is None else timeout_s * 1000)]


def _continue(pidfds: Sequence[int]) -> None:
    """Continue processes that end next: stopped ones would stay."""
    for fd in pidfds:
        _signal(fd, signal.SIGCONT)


def _signal(pidfd: int, how: int) -> None:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, how)


def _wait_for_children(timeout_s: float) -> None:
    """Reap children until none is left or the time is over."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(REAP_INTERVAL_S)


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
