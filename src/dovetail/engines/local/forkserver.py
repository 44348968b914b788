"""Fork server process: forks workers, reaps them and kills them when the driver or the supervisor exits.

It imports what workers need once; forking it takes a few milliseconds and imports nothing again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

import cloudpickle  # noqa: F401 - every worker needs it, and only here it costs once

from dovetail.engines.local import worker_main
from dovetail.engines.local.protocol import Channel, send_frame
from dovetail.engines.local.supervisor import PR_SET_PDEATHSIG, kill_children, prctl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engines.local.protocol import Frame


class ForkServer:
    """State of the process: its children by number."""

    def __init__(self, sock: socket.socket, breadcrumbs_fd: int, watched: Sequence[int]) -> None:
        """`watched`: pidfds of driver and supervisor, as far as there are any. All workers end when one of the two
        exits."""
        self._channel = Channel(sock)
        self._breadcrumbs_fd = breadcrumbs_fd
        self._numbers: dict[int, int] = {}
        """Pid -> the number that the driver assigned."""
        self._pids: dict[int, int] = {}
        self._environment: dict[str, str] = dict(os.environ)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched = watched

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for fd in (self._channel.fileno(), self._wake_read, *self._watched):
            poll.register(fd, select.POLLIN)
        connected = True
        while connected:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    self._reap()
                elif fd == self._channel.fileno():
                    frames, connected = self._channel.receive()
                    for frame in frames:
                        self._on_frame(frame)
                else:
                    # the supervisor exited, or the driver, although one of its children holds the socket
                    connected = False
        self.kill_all()

    def _on_frame(self, frame: Frame) -> None:
        match frame.head:
            case ("spawn", number, environment, fresh, cells):
                if environment is not None:
                    self._environment = environment
                self._spawn(number, bytes(frame.body), frame.descriptors, cells, fresh=fresh or _thread_count() != 1)
            case ("kill", number, how) if number in self._pids:
                _kill(self._pids[number], how)

    def _spawn(
        self, number: int, spec: bytes, descriptors: tuple[int, ...], cells: tuple[int, ...], *, fresh: bool
    ) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            for fd in descriptors:
                os.close(fd)
            self._send("exited", number, -1, f"cannot start a process: {error}", 0, 0.0)
            return
        if not pid:
            self._in_child(spec, descriptors, cells, fresh=fresh)
        for fd in descriptors:
            os.close(fd)
        self._numbers[pid] = number
        self._pids[number] = pid
        self._send("forked", number, pid)

    def _in_child(self, spec: bytes, descriptors: tuple[int, ...], cells: tuple[int, ...], *, fresh: bool) -> NoReturn:
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            sock, log = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            self._channel.sock.close()
            for fd in (self._wake_read, self._wake_write, *self._watched):
                os.close(fd)
            if fresh:
                _exec_interpreter((sock, self._breadcrumbs_fd), cells, spec, self._environment)
            os.environ.clear()
            os.environ.update(self._environment)
            gc.unfreeze()
            gc.enable()
            code = worker_main.main(socket.socket(fileno=sock), self._breadcrumbs_fd, cells, spec)
        except BaseException:
            worker_main.report_crash()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Reap all children that exited, including adopted ones."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._numbers:
                _kill(pid, signal.SIGKILL)  # the rest of its process group, before the pid can be reused
            _, status, usage = os.wait4(pid, 0)
            number = self._numbers.pop(pid, None)
            if number is not None:
                del self._pids[number]
                seconds = usage.ru_utime + usage.ru_stime
                self._send("exited", number, status, "", usage.ru_maxrss << 10, seconds)

    def _send(self, *what: object) -> None:
        with contextlib.suppress(OSError):
            send_frame(self._channel.sock, what)

    def kill_all(self) -> None:
        """Kill until no child is left: process groups first, then adopted processes that left their group."""
        for pid in self._numbers:
            _kill(pid, signal.SIGKILL)
        kill_children()


def _kill(pid: int, how: int) -> None:
    """Signal an unreaped child and its process group; a very young child may not have a group yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, how)


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - pathlib is not loaded
    except OSError:
        return 1


def _exec_interpreter(
    descriptors: tuple[int, ...], cells: tuple[int, ...], spec: bytes, environment: dict[str, str]
) -> NoReturn:
    """Replace the process by a new interpreter, for variables that are read only at interpreter start."""
    box = os.memfd_create("spec", 0)
    with os.fdopen(os.dup(box), "wb") as file:
        file.write(spec)
    for fd in (*descriptors, box):
        os.set_inheritable(fd, True)
    numbers = ",".join(map(str, (*descriptors, box, *cells)))
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from dovetail.engines.local.worker_main import "
        f"main_after_exec; main_after_exec({numbers})"
    )
    os.execve(sys.executable, [sys.executable, "-P", "-c", code], environment)  # noqa: S606


def serve(sock: int, breadcrumbs_fd: int, watched: Sequence[int]) -> None:
    """Serve the driver at the other end of the socket; returns when all workers have ended."""
    gc.disable()
    gc.freeze()
    server = ForkServer(socket.socket(fileno=sock), breadcrumbs_fd, watched)
    try:
        server.run()
    finally:
        server.kill_all()
