"""Local engine whose workers are threads of this process, for tests of logic.

The controller, the engine, the worker code, payloads, sources and sinks are those of every local run; only the fork
server is replaced. A worker shares memory, environment variables, working folder and signals with the test, so tests
that kill a worker, limit its memory, set its variables or read its log need real processes.
"""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import suppress
from mmap import mmap
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.protocol import BREADCRUMB_WORDS, Channel, send_frame
from dovetail.engines.local.worker_main import WorkerProcess
from dovetail.engines.worker_context import BreadcrumbCell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.protocol import Frame

KILLED_STATUS = 9
"""Wait status of a process that SIGKILL ended."""
JOIN_S = 2.0


class WorkerExitError(SystemExit):
    """Ends the thread of a worker. `threading` ignores SystemExit."""


class ThreadCell:
    """A breadcrumb cell that stops writing to the shared table when its worker is killed."""

    def __init__(self, words: memoryview) -> None:
        self._words: memoryview | list[int] = words

    def __getitem__(self, number: int, /) -> int:
        return self._words[number]

    def __setitem__(self, number: int, value: int, /) -> None:
        self._words[number] = value

    def detach(self) -> None:
        self._words = list(self._words)


class WorkerThread(WorkerProcess):
    """The code of a worker process, in a thread. A killed worker ends when the call that it runs returns."""

    def exit(self, code: int) -> NoReturn:
        raise WorkerExitError(code)

    def install_definitions(self, defined: dict[str, dict[str, object]]) -> None:
        """The definitions are in this process already."""

    def close(self) -> None:
        self.close_threads()
        if self._standby is not None:  # it ends with a process, and would read closed sockets in a thread
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RD)
            self._standby.join(JOIN_S)
        for slots in self.async_slots.values():
            slots.stop_loop()
            slots._thread.join(JOIN_S)
            if not slots._thread.is_alive() and not slots._running:
                slots._loop.close()  # a process ends with its loop, and a thread does not
        self.runner.close()
        if self.runner.links is not None:
            self.runner.links.close()


class ThreadServer:
    """Starts workers as threads; see `ProcessServer`."""

    def __init__(self, breadcrumbs_fd: int, environment: Mapping[str, str] | None = None) -> None:
        assert environment is None, "threads cannot have an environment of their own"
        ours, self._reports = socket.socketpair()
        ours.setblocking(False)
        self.channel = Channel(ours)
        self.pids: dict[int, int] = {}
        """Always empty: no worker is a process."""
        self._words = memoryview(mmap(breadcrumbs_fd, 0)).cast("q")
        self._lock = Lock()
        self._running: dict[int, tuple[Thread, socket.socket, list[ThreadCell]]] = {}

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
        sock = socket.socket(fileno=os.dup(descriptors[0]))
        own = [ThreadCell(self._words[cell * BREADCRUMB_WORDS : (cell + 1) * BREADCRUMB_WORDS]) for cell in cells]
        thread = Thread(target=self._run, args=(number, spec, sock, own), name=f"worker-{number}", daemon=True)
        with self._lock:
            self._running[number] = thread, sock, own
        thread.start()

    def _run(self, number: int, spec: bytes, sock: socket.socket, cells: list[ThreadCell]) -> None:
        worker = WorkerThread(Channel(sock), pickle.loads(spec), list[BreadcrumbCell](cells))
        code = 70
        try:
            code = worker.run()
        except WorkerExitError as end:
            code = int(end.code or 0)
        finally:
            worker.close()
            self._report_exit(number, code << 8)
            sock.close()

    def _report_exit(self, number: int, status: int) -> None:
        with self._lock, suppress(OSError):
            if self._running.pop(number, None) is not None:
                send_frame(self._reports, ("exited", number, status, "", 0, 0.0))

    def kill(self, number: int) -> None:
        with self._lock:
            _, sock, cells = self._running.get(number, (None, None, ()))
        for cell in cells:
            cell.detach()
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._report_exit(number, KILLED_STATUS)

    def flush(self) -> None:
        """No requests wait: threads are started and killed at once."""

    def receive(self) -> tuple[list[Frame], bool]:
        with suppress(BlockingIOError):
            return self.channel.receive()
        return [], True

    @property
    def has_frames(self) -> bool:
        return False

    @property
    def busy(self) -> int:
        """Number of workers that were neither stopped nor killed."""
        return len(self._running)

    def kill_orphans(self) -> None:
        raise AssertionError("a server in this process does not die")

    def close(self) -> None:
        idle = [thread for thread, _, cells in self._running.values() if all(cell[0] < 0 for cell in cells)]
        for number in list(self._running):
            self.kill(number)
        for thread in idle:
            thread.join(JOIN_S)
        self._reports.close()
        self.channel.close()


class InProcessEngine(LocalEngine):
    """See the module."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, start_server=ThreadServer, **settings)
