"""Guard and supervisor: the processes above the fork server. Everything that workers started ends when the driver or
any of these processes exits.

    driver ── guard ── supervisor ── fork server ── workers

Each is the parent of the next. Guard, supervisor and fork server are subreapers and watch the driver and each other:
a process that loses its parent is adopted by the nearest of them, whatever session it is in and whatever its
environment is. Any of the three that is left kills its children until it has none. None of them kills another one that
may be doing so: the guard may be killed at any moment, as Ray kills the children of an actor that exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from dovetail.machine.linux_processes import become_subreaper, kill_children, open_pidfd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    driver_pidfds = [driver] if driver >= 0 else []
    ancestor_pidfds: list[int] = []  # of the guard and of the supervisor
    for program in (_guard, _supervise) if driver_pidfds else ():
        pidfd = _become_child_of(program, [*driver_pidfds, *ancestor_pidfds], (sock, breadcrumbs_fd))
        ancestor_pidfds += [pidfd] if pidfd >= 0 else []
    from dovetail.engines.local.forkserver import serve  # late: guard and supervisor need nothing of it

    serve(sock, breadcrumbs_fd, [*driver_pidfds, *ancestor_pidfds], sys.argv[4])
    _send_sigcont(ancestor_pidfds)
    os._exit(0)


def _become_child_of(
    program: Callable[[Sequence[int], int], NoReturn], watched_pidfds: Sequence[int], unused_fds: Sequence[int]
) -> int:
    """Fork. The parent closes `unused_fds` and runs `program`, which does not return; the child continues here, with
    the pidfd of the parent. Without enough processes or descriptors there is no child: -1."""
    own = open_pidfd(os.getpid())
    try:
        pid = os.fork()
    except OSError:
        if own >= 0:
            os.close(own)
        return -1
    if pid:
        for fd in (own, *unused_fds):
            if fd >= 0:
                os.close(fd)
        program(watched_pidfds, pid)
    os.setsid()  # a signal to the group of one does not end several
    become_subreaper()
    return own


def _guard(watched_pidfds: Sequence[int], supervisor_pid: int) -> NoReturn:
    """Wait until the driver or the supervisor exits, then until the others have killed everything, or do it.

    SIGTERM is passed on: the supervisor stays if the guard is killed meanwhile."""
    supervisor = open_pidfd(supervisor_pid)

    def on_terminate(*_: object) -> None:
        if supervisor < 0 or _wait_for_exits([supervisor], 0):
            _kill_children_and_exit()
        _send_signal(supervisor, signal.SIGTERM)
        _send_signal(supervisor, signal.SIGCONT)

    signal.signal(signal.SIGTERM, on_terminate)
    _wait_for_exits([*watched_pidfds, supervisor])
    _send_sigcont([supervisor])
    _wait_for_children(GUARD_GRACE_S)
    _kill_children_and_exit()


def _supervise(watched_pidfds: Sequence[int], fork_server_pid: int) -> NoReturn:
    """Wait until the fork server, the guard or the driver exits or SIGTERM arrives, then end everything."""

    def kill_all_and_exit(*_: object) -> NoReturn:
        kill_children()
        _send_sigcont(watched_pidfds[1:])  # the guard
        os._exit(0)

    fork_server = open_pidfd(fork_server_pid)
    signal.signal(signal.SIGTERM, kill_all_and_exit)
    if fork_server not in _wait_for_exits([*watched_pidfds, fork_server]):
        _send_sigcont([fork_server])
        _wait_for_exits([fork_server], FORK_SERVER_GRACE_S)
    kill_all_and_exit()


def _wait_for_exits(pidfds: Sequence[int], timeout_s: float | None = None) -> list[int]:
    """Wait until one of the processes exits; returns those that have."""
    exits = select.poll()
    for fd in pidfds:
        if fd >= 0:
            exits.register(fd, select.POLLIN)
    return [fd for fd, _ in exits.poll(None if timeout_s is None else timeout_s * 1000)]


def _send_sigcont(pidfds: Sequence[int]) -> None:
    """Continue processes that are to end: stopped ones would stay."""
    for fd in pidfds:
        _send_signal(fd, signal.SIGCONT)


def _send_signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, number)


def _wait_for_children(timeout_s: float) -> None:
    """Reap children until none is left or the time is over."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(REAP_INTERVAL_S)


def _kill_children_and_exit() -> NoReturn:
    kill_children()
    os._exit(0)
