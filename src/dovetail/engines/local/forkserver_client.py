"""Driver side of the fork server: start it, request processes, kill them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dovetail.engines.local.protocol import Channel
from dovetail.errors import EngineError, Problem
from dovetail.machine.linux_processes import open_pidfd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.protocol import Frame

PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
BOOTSTRAP_CODE = "import sys; sys.path[:0] = [it for it in sys.argv[5:] if it not in sys.path]; " + (
    "from dovetail.engines.local.supervisor import main; main()"
)
"""Imports Dovetail and cloudpickle from the driver's installation, and nothing else from the user's folders."""
EXIT_TIMEOUT_S = 10.0
WORKER_PROGRAM = "dovetail.engines.local.worker_main"
NO_BREADCRUMBS = -1


class ProcessServer(Protocol):
    """What the local engine needs of whatever starts and ends its workers, each known by a number.

    The frames it sends: ("forked", number, pid), and ("exited", number, wait status, reason or "", peak memory in
    bytes, CPU seconds) once for each worker.
    """

    channel: Channel
    pids: dict[int, int]

    def spawn(
        self,
        number: int,
        spec: bytes,
        descriptors: Sequence[int],
        cells: tuple[int, ...],
        environment: dict[str, str],
        *,
        fresh: bool,
    ) -> None: ...

    def kill(self, number: int) -> None: ...

    def flush(self) -> None: ...

    def receive(self) -> tuple[list[Frame], bool]: ...

    @property
    def has_frames(self) -> bool: ...

    def kill_orphans(self) -> None: ...

    def close(self) -> None: ...


class ForkServerClient:
    """A fork server process below its guard and supervisor, and the pids of its children."""

    def __init__(
        self, breadcrumbs_fd: int, environment: Mapping[str, str] | None = None, program: str = WORKER_PROGRAM
    ) -> None:
        """`environment`: that of the fork server, if it differs from this process; workers get the variables of their
        seats. `program`: the module that forked processes run (`forkserver.ChildProgram`)."""
        if not sys.executable:
            message = "the local engine starts Python processes, but sys.executable is not set"
            raise EngineError(Problem("DT334", message, fixes=("start it with a python command",)))
        ours, theirs = socket.socketpair()
        driver = open_pidfd(os.getpid())
        arguments = [
            sys.executable,
            "-P",
            "-c",
            BOOTSTRAP_CODE,
            str(theirs.fileno()),
            str(breadcrumbs_fd),
            str(driver),
            program,
            *_import_paths(),
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own code
                arguments,
                pass_fds=[fd for fd in (theirs.fileno(), breadcrumbs_fd, driver) if fd >= 0],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            ours.close()
            message = f"the local engine cannot start a process: {error}"
            fixes = ("check ulimit -u, ulimit -n and free memory",)
            raise EngineError(Problem("DT334", message, fixes=fixes)) from None
        finally:
            theirs.close()
            if driver >= 0:
                os.close(driver)
        ours.setblocking(False)
        self.channel = Channel(ours)
        self._frames: list[Frame] = []
        self._is_alive = True
        self.pids: dict[int, int] = {}
        """Number of a requested process -> its pid, when known."""

    def prepare(self, body: bytes) -> None:
        """Have the program import what all its processes need.

        Answered by the frame ("prepared", pid of the fork server, error or ""). If the imports have started threads in
        the fork server, later processes get interpreters of their own.
        """
        self.channel.put(("prepare",), [body])

    def spawn(
        self,
        number: int,
        spec: bytes,
        descriptors: Sequence[int],
        cells: tuple[int, ...],
        environment: dict[str, str],
        *,
        fresh: bool,
    ) -> None:
        """Request a process. The descriptors must stay open until the channel is flushed."""
        self.channel.put(("spawn", number, environment, fresh, cells), [spec], descriptors)

    def kill(self, number: int, how: int = signal.SIGKILL) -> None:
        """Signal the process group of a worker. The fork server does it, because it reaps the process: the pid cannot
        be reused."""
        self.channel.put(("kill", number, int(how)))

    def flush(self) -> None:
        """Send all requests. Rarely blocks: the fork server only reads and forks. Frames that arrive meanwhile are
        kept."""
        both = select.poll()
        both.register(self.channel.fileno(), select.POLLIN | select.POLLOUT)
        while self._is_alive and not self.channel.flush():
            if any(what & ~select.POLLOUT for _, what in both.poll()):
                self._read()

    def receive(self) -> tuple[list[Frame], bool]:
        """Received frames, and whether the fork server is alive."""
        self._read()
        frames, self._frames = self._frames, []
        return frames, self._is_alive

    def _read(self) -> None:
        try:
            frames, self._is_alive = self.channel.receive()
        except BlockingIOError:
            return
        self._frames += frames

    @property
    def has_frames(self) -> bool:
        """Whether frames arrived that were not taken yet."""
        return bool(self._frames) or not self._is_alive

    def kill_orphans(self) -> None:
        """The fork server died or does not answer: its supervisor, or the guard, kills everything that it started.
        Without them the process groups of workers are killed by pid."""
        self.channel.close()
        self._process.terminate()
        if not self._has_exited() or self._process.returncode:
            for pid in self.pids.values():
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the channel; the fork server kills and reaps its children, then exits, then supervisor and guard."""
        self.channel.close()
        if not self._has_exited():
            self.kill_orphans()

    def _has_exited(self) -> bool:
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _import_paths() -> list[str]:
    import cloudpickle

    return list(dict.fromkeys((PACKAGE_ROOT, str(Path(cloudpickle.__file__).resolve().parents[1]))))
