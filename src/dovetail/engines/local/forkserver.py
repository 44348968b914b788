"""Fork server process: forks workers, reaps them and kills them when the driver, the guard or the
supervisor exits.

It imports what workers need once; forking it takes a few milliseconds and imports nothing again. What a forked process
runs is a `ChildProgram`: the worker of a run (`worker_main`), or a job (`jobs/job_process`).
"""

from __future__ import annotations

# signal.signal makes enumerations, whose pages each process would copy: 0.2 ms
import _signal  # type: ignore[import-not-found]
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from importlib import import_module
from os import close, dup2, setsid  # a forked process finds globals at once: an attribute of a module costs it a page
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from dovetail.engines.local.protocol import Channel, encode_frame
from dovetail.machine.linux_processes import PR_SET_PDEATHSIG, child_pids, kill_children, prctl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.protocol import Frame


_SIGCHLD, _SIGINT, _SIG_DFL = int(signal.SIGCHLD), int(signal.SIGINT), int(signal.SIG_DFL)
_SIGKILL = int(signal.SIGKILL)
_set_signal, _set_wakeup_fd, _default_int_handler = _signal.signal, _signal.set_wakeup_fd, signal.default_int_handler
_unfreeze, _enable_gc = gc.unfreeze, gc.enable
_FORK_HOOKS = (("threading", "_after_fork"), ("logging", "_after_at_fork_child_reinit_locks"), ("random", "seed"))
"""Modules, and their functions that Python runs in every forked process."""
_WARM_UP_CALLS = 20


class ChildProgram(Protocol):
    """Module whose `main` forked processes run."""

    __name__: str
    CLEAN_EXIT_CODE: int | None
    """Exit code of a process that has left no other process behind. After any other end, everything is killed that the
    process had started in sessions of its own; it adopts what loses its parent (`become_subreaper`). None: such
    processes run until the fork server ends."""

    def prepare(self, body: bytes) -> None:
        """Import what all processes need; in the fork server."""

    def main(self, sock: socket.socket, breadcrumbs_fd: int, cells: tuple[int, ...], spec: bytes) -> int:
        """Run a process; returns its exit code."""


class ForkServer:
    """State of the process: its children by number."""

    def __init__(self, sock: socket.socket, breadcrumbs_fd: int, watched: Sequence[int], program: ChildProgram) -> None:
        """`watched`: pidfds of driver, guard and supervisor, as far as there are any. All workers end when one of
        them exits."""
        self._program = program
        self._channel = Channel(sock)
        self._breadcrumbs_fd = breadcrumbs_fd
        self._numbers: dict[int, int] = {}
        """Pid -> the number that the driver assigned."""
        self._pids: dict[int, int] = {}
        self._child_sock: socket.socket | None = None
        """Socket of a forked process, which stays open until it exits. Closing it would print a warning."""
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched = watched
        self._own_fds = (self._channel.fileno(), self._wake_read, self._wake_write, *watched)
        """Closed in forked processes, which never use or collect the objects that hold them."""

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
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
                    # guard or supervisor exited, or the driver, although one of its children holds the socket
                    connected = False
        self.kill_all()

    def _on_frame(self, frame: Frame) -> None:
        match frame.head:
            case ("spawn", number, environment, fresh, cells):
                if environment is not None:
                    _set_environment(environment)
                self._spawn(number, bytes(frame.body), frame.descriptors, cells, fresh=fresh or _thread_count() != 1)
            case ("kill", number, how) if number in self._pids:
                _kill(self._pids[number], how)
            case ("prepare",):
                self._prepare(bytes(frame.body))

    def _prepare(self, body: bytes) -> None:
        error = ""
        try:
            self._program.prepare(body)
        except BaseException as reason:
            error = "".join(traceback.format_exception_only(reason)).strip() or "failed"
        if _thread_count() == 1:
            _warm_up_fork(self._channel.fileno())
        gc.collect()
        gc.freeze()
        self._send("prepared", os.getpid(), error)

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
            _set_wakeup_fd(-1)
            _set_signal(_SIGCHLD, _SIG_DFL)
            _set_signal(_SIGINT, _default_int_handler)
            setsid()
            prctl(PR_SET_PDEATHSIG, _SIGKILL)
            sock, log = descriptors
            dup2(log, 1)
            dup2(log, 2)
            close(log)
            for fd in self._own_fds:
                close(fd)
            if fresh:
                _exec_interpreter(self._program, (sock, self._breadcrumbs_fd), cells, spec, dict(os.environ))
            _unfreeze()
            _enable_gc()
            self._child_sock = socket.socket(fileno=sock)
            code = self._program.main(self._child_sock, self._breadcrumbs_fd, cells, spec)
        except BaseException:
            report_crash()
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
            self._kill_left_behind(None if number is None else status)
            if number is not None:
                del self._pids[number]
                seconds = usage.ru_utime + usage.ru_stime
                self._send("exited", number, status, "", usage.ru_maxrss << 10, seconds)

    def _kill_left_behind(self, status: int | None) -> None:
        """Kill everything that was adopted from a process that has ended with this status (None: from an adopted one,
        whose reaping calls this again)."""
        clean = self._program.CLEAN_EXIT_CODE
        if clean is None or (status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == clean):
            return
        for pid in child_pids():
            if pid not in self._numbers:
                _kill(pid, signal.SIGKILL)

    def _send(self, *what: object) -> None:
        with contextlib.suppress(OSError):
            self._channel.sock.sendall(encode_frame(what)[0])

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


def _set_environment(environment: Mapping[str, str]) -> None:
    """Change the variables of this process, which forked ones inherit: setting them in each of those would copy pages
    of memory."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _ignore(*_: object) -> None:
    """Handler of SIGCHLD; the wake-up descriptor reports it."""


def _warm_up_fork(sock: int) -> None:
    """Run here what every forked process runs first: it fills caches of the interpreter and of the dynamic linker,
    which each process would fill again, each time copying the pages of memory that it writes to. Only without other
    threads, which `threading` would take for ended."""
    for module, name in _FORK_HOOKS:
        hook = getattr(sys.modules.get(module), name, None)
        if hook is not None:
            with contextlib.suppress(Exception):
                for _ in range(_WARM_UP_CALLS):
                    hook()
    for _ in range(_WARM_UP_CALLS):
        socket.socket(fileno=os.dup(sock)).close()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    dup2(sock, sock)
    gc.enable()
    gc.disable()


def report_crash() -> None:
    """Print an internal error to the log of the process."""
    with contextlib.suppress(Exception):
        traceback.print_exc()


def _exec_interpreter(
    program: ChildProgram,
    descriptors: tuple[int, ...],
    cells: tuple[int, ...],
    spec: bytes,
    environment: dict[str, str],
) -> NoReturn:
    """Replace the process by a new interpreter, for variables that are read only at interpreter start."""
    box = os.memfd_create("spec", 0)
    with os.fdopen(os.dup(box), "wb") as file:
        file.write(spec)
    for fd in (*descriptors, box):
        if fd >= 0:
            os.set_inheritable(fd, True)
    numbers = ",".join(map(str, (*descriptors, box, *cells)))
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from dovetail.engines.local.forkserver import "
        f"main_after_exec; main_after_exec({program.__name__!r}, {numbers})"
    )
    os.execve(sys.executable, [sys.executable, "-P", "-c", code], environment)  # noqa: S606


def main_after_exec(program: str, sock: int, breadcrumbs: int, box: int, *cells: int) -> None:
    """Entry point of a process with its own interpreter."""
    code = 70
    try:
        spec = os.pread(box, os.fstat(box).st_size, 0)
        os.close(box)
        for fd in (sock, breadcrumbs):
            if fd >= 0:
                os.set_inheritable(fd, False)
        code = _load_program(program).main(socket.socket(fileno=sock), breadcrumbs, cells, spec)
    except BaseException:
        report_crash()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _load_program(name: str) -> ChildProgram:
    return cast("ChildProgram", import_module(name))


def serve(sock: int, breadcrumbs_fd: int, watched: Sequence[int], program: str) -> None:
    """Serve the driver at the other end of the socket; returns when all processes have ended."""
    loaded = _load_program(program)
    gc.disable()
    gc.freeze()
    server = ForkServer(socket.socket(fileno=sock), breadcrumbs_fd, watched, loaded)
    try:
        server.run()
    finally:
        server.kill_all()
