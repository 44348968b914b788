"""CPU and time of a worker of a job queue, ours or a peer's, measured from outside.

Used in the environments of peers too, so it imports neither dovetail nor another module of this folder.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STAMPS = "JOB_STAMPS"
"""Variable with the address of the socket that jobs report to."""
START_LIMIT_S = 60.0
STAMP_LIMIT_S = 30.0
POLL_S = 0.01
SETTLE_S = 0.3
"""After the last job, for what a worker does later: acknowledgements, prefetching. It cancels out at the margin."""
LATENCY_PAUSE_S = 0.01
"""Between two jobs whose pickup is timed: the worker waits again."""


class JobQueue(NamedTuple):
    """A queue with a worker, as it is measured."""

    command: Sequence[str]
    """Starts the worker."""
    enqueue: Callable[[int], None]
    """Submits this number of no-op jobs."""
    stamp: Callable[[float], None]
    """Submits a job that calls `send_stamp` with this value."""
    left: Callable[[], int]
    """Number of jobs that have not ended."""
    pause: Callable[[], None] | None = None
    """Makes the worker claim nothing; None: its processes are suspended."""
    resume: Callable[[], None] = lambda: None


def send_stamp(sent: float) -> None:
    """Report the seconds since a time of this machine's monotonic clock. Called in jobs."""
    seconds = time.monotonic() - sent
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(repr(seconds).encode(), os.environ[STAMPS])


class Stamps:
    """Receives what jobs report."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stamps-")
        self.address = f"{self._folder.name}/socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)

    def receive(self, limit_s: float = STAMP_LIMIT_S) -> float:
        self._socket.settimeout(limit_s)
        return float(self._socket.recv(100))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._folder.cleanup()


class WorkerProcess:
    """A worker and all of its processes."""

    def __init__(self, command: Sequence[str], stamps: Stamps, folder: str | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=os.environ | {STAMPS: stamps.address},
            cwd=folder,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all processes."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def kill_only(self) -> None:
        """SIGKILL to the worker itself."""
        self._process.kill()

    def send(self, number: int) -> None:
        for process in self._tree():
            with suppress(psutil.Error):
                process.send_signal(number)

    def cpu_s(self) -> float:
        """User and system time, with that of children that have ended."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.Error):
                used = process.cpu_times()
                total += used.user + used.system + used.children_user + used.children_system
        return total

    def check(self) -> None:
        if self._process.poll() is not None:
            self._errors.seek(0)
            raise ChildProcessError(f"the worker ended with {self._process.returncode}:\n{self._errors.read()[-3000:]}")

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []


class Drained(NamedTuple):
    """Cost of a number of jobs that were in the queue."""

    cpu_s: float
    wall_s: float
    server_cpu_s: float


def wait_until_ready(queue: JobQueue, worker: WorkerProcess, stamps: Stamps) -> None:
    """Until the worker has run a job."""
    queue.stamp(time.monotonic())
    until = time.monotonic() + START_LIMIT_S
    while True:
        worker.check()
        try:
            stamps.receive(1.0)
        except TimeoutError:
            if time.monotonic() > until:
                worker.send(signal.SIGABRT)
                raise
        else:
            return


def drain(
    queue: JobQueue, worker: WorkerProcess, jobs: int, limit_s: float, server_cpu_s: Callable[[], float]
) -> Drained:
    """The worker takes nothing until all jobs are submitted, so that its batches do not depend on the submitter."""
    server_s = server_cpu_s()
    pause = queue.pause or (lambda: worker.send(signal.SIGSTOP))
    resume = queue.resume if queue.pause else (lambda: worker.send(signal.SIGCONT))
    pause()
    try:
        queue.enqueue(jobs)
        spent_s = worker.cpu_s()
    finally:
        began = time.monotonic()
        resume()
    while queue.left():
        if time.monotonic() > began + limit_s:
            worker.check()
            raise TimeoutError(f"{queue.left()} of {jobs} jobs have not ended after {limit_s:g} s")
        time.sleep(POLL_S)
    wall_s = time.monotonic() - began
    time.sleep(SETTLE_S)
    return Drained(worker.cpu_s() - spent_s, wall_s, server_cpu_s() - server_s)


def cost_per_job(
    queue: JobQueue,
    worker: WorkerProcess,
    sizes: tuple[int, int],
    repeat: int,
    limit_s: float,
    server_cpu_s: Callable[[], float] = lambda: 0.0,
) -> dict[str, float]:
    """Medians of what a job more costs, between a small and a large number of jobs. One warm worker."""
    small, large = sizes
    drain(queue, worker, small, limit_s, server_cpu_s)
    pairs = [
        (
            drain(queue, worker, small, limit_s, server_cpu_s),
            drain(queue, worker, large, limit_s, server_cpu_s),
        )
        for _ in range(repeat)
    ]
    cpu_s, wall_s, server_s = (
        statistics.median(most[figure] - least[figure] for least, most in pairs) / (large - small)
        for figure in range(3)
    )
    return {"cpu_us": 1e6 * cpu_s, "jobs_per_s": 1 / max(wall_s, 1e-9), "server_us": 1e6 * server_s}


def pickup_ms(kinds: Sequence[Callable[[float], None]], stamps: Stamps, count: int) -> list[list[float]]:
    """Milliseconds from a submission to the start of its function on an idle queue; the kinds take turns."""
    found: list[list[float]] = [[] for _ in kinds]
    for _ in range(count):
        for kind, times in zip(kinds, found, strict=True):
            time.sleep(LATENCY_PAUSE_S)
            kind(time.monotonic())
            times.append(1e3 * stamps.receive())
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
