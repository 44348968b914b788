"""Process of a job: forked by the fork server, calls the function, sends the outcome over a socket and exits.

Frames to the worker: ("progress", fraction, message), ("ended", outcome, encoding, error, traceback, final, on GPU)
with the result as body, and ("polls", KIND) when the job first checks for a request. Frames from the worker are these
requests: ("cancel",), ("checkpoint",).
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import sys
import threading
import time
from os import WNOHANG
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dovetail.engines.local.protocol import DONT_WAIT, Channel, encode_frame, send_frame
from dovetail.engines.local.timestamped_output import TimestampedOutput
from dovetail.engines.local.worker_environment import THREAD_VARIABLES
from dovetail.errors import DovetailError
from dovetail.jobs.application import Application
from dovetail.jobs.job import Outcome
from dovetail.jobs.job_function import JobFunction
from dovetail.jobs.payload_codec import NO_CALL, PayloadCodec
from dovetail.jobs.workers.current_job import CurrentJob
from dovetail.jobs.workers.job_call import JobStopped, call_job
from dovetail.jobs.workers.job_ending import Ending, refusal_ending
from dovetail.machine.linux_processes import become_subreaper, load_libc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.workers.model_cache import JobModels

    ThreadSetter = Callable[[int], object]

CANCEL, CHECKPOINT = "cancel", "checkpoint"
"""Kinds of requests of the worker."""
CLEAN_EXIT_CODE = 0
LEFT_PROCESSES_EXIT_CODE = 72
WARM_UP_CALLS, WARM_UP_REPLY_BYTES = 20, 4096
PROGRESS_INTERVAL_S = 0.2
"""Minimum time between two frames of progress; the latest report is always sent."""


class ProcessSetup(NamedTuple):
    """Settings that all job processes of a worker share."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    """Module search path of the worker."""
    folder: str
    """Working folder of the worker."""
    worker: str
    allow_pickle: bool
    files: str | None
    """Location of the files of large payloads."""
    inline_limit_bytes: int

    def pack(self) -> bytes:
        return marshal.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> ProcessSetup:
        return cls(*marshal.loads(data))  # noqa: S302 - from our own process


class JobCall(NamedTuple):
    """The attempt to run."""

    setup: bytes
    """`ProcessSetup`, for a process that the fork server could not prepare."""
    function: str
    payload: bytes
    encoding: str
    id: str
    attempt: int
    token: int
    queue: str
    threads: int
    """Number of threads for libraries with thread pools: the CPUs of its seat."""
    is_warm: bool = False
    """Whether the process waits for another job afterwards (`warm_process.py`)."""
    rank: int = 0
    ranks: int = 1

    def pack(self) -> bytes:
        return marshal.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> JobCall:
        return cls(*marshal.loads(data))  # noqa: S302


class _Prepared(NamedTuple):
    setup: ProcessSetup
    application: Application
    codec: PayloadCodec
    thread_setters: tuple[ThreadSetter, ...]
    """Functions that set the number of threads of the loaded libraries, which start with one."""


_PREPARED: list[_Prepared] = []
"""The application that `prepare` has imported; at most one entry, inherited by forked processes."""


def prepare(body: bytes) -> None:
    """Import the modules of the application: in the fork server, or in a job process that was not forked from one."""
    # here, not in each process: this one writes nothing, and they inherit the objects
    if sys.stdout is not None:
        sys.stdout = TimestampedOutput(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = TimestampedOutput(sys.stderr)
    setup = ProcessSetup.unpack(body)
    with contextlib.suppress(OSError):
        os.chdir(setup.folder)
    sys.path[:] = list(setup.path)
    sys.argv = [""]
    if setup.allow_pickle:
        import cloudpickle  # noqa: F401 - payloads need it; not in each process
    files = None
    if setup.files is not None:
        from dovetail.jobs.payload_files import open_files

        files = open_files(setup.files)
    codec = PayloadCodec(setup.allow_pickle, files, setup.inline_limit_bytes)
    signal.signal(signal.SIGTERM, _on_terminate)  # inherited; it also ends the fork server
    application = Application.load(setup.modules)
    _PREPARED[:] = [_Prepared(setup, Application(functions={"": JobFunction(_do_nothing, "")}), codec, ())]
    _warm_up(JobCall(body, "", NO_CALL, "json", "", 1, 1, "", 1))
    _PREPARED[:] = [_Prepared(setup, application, codec, _thread_setters())]


def _do_nothing() -> None:
    """The job of `_warm_up`."""


def _warm_up(call: JobCall) -> None:
    """Run what each process runs. It fills caches of the interpreter, which processes would fill one by one, each time
    copying the pages of memory that they write to."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(WARM_UP_CALLS):
            link = JobLink(ours)
            link.send_ending(call_function(link, JobCall.unpack(call.pack())))
            theirs.recv(WARM_UP_REPLY_BYTES)
    getattr(load_libc(), "waitpid", None)  # for `has_no_children`: found once, and kept


def main(sock: socket.socket, breadcrumbs_fd: int, cells: Sequence[int], spec: bytes) -> int:  # noqa: ARG001 - of ChildProgram
    """Run one job; returns the exit code."""
    if not _PREPARED:
        signal.signal(signal.SIGTERM, _on_terminate)
    try:
        become_subreaper()
        call = JobCall.unpack(spec)
        if call.is_warm:
            from dovetail.jobs.workers.warm_process import run_jobs

            run_jobs(sock, call)
        else:
            link = JobLink(sock)
            link.send_ending(call_function(link, call))
    except JobStopped:
        pass
    return CLEAN_EXIT_CODE if has_no_children() else LEFT_PROCESSES_EXIT_CODE


def call_function(link: JobLink, call: JobCall, make_models: Callable[[], JobModels] | None = None) -> Ending:
    """Run a job in this process."""
    try:
        if not _PREPARED:
            prepare(call.setup)
        prepared = _PREPARED[0]
        function = prepared.application.find(call.function)
    except DovetailError as error:
        return refusal_ending(error)
    if call.threads != 1:
        for set_threads in prepared.thread_setters:
            with contextlib.suppress(Exception):
                set_threads(call.threads)
    job = CurrentJob(
        call.id,
        call.attempt,
        call.token,
        call.queue,
        prepared.setup.worker,
        link.report,
        link.is_cancelled,
        link.is_checkpoint_requested,
        make_models,
        rank=call.rank,
        ranks=call.ranks,
    )
    try:
        return call_job(function, call.payload, call.encoding, prepared.codec, job)
    finally:
        job.release_models()


class JobLink:
    """The socket to the worker. `report`, `is_cancelled` and `is_checkpoint_requested` may be called by any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._requests: set[str] = set()
        """Kinds of requests that the worker has sent."""
        self._polled: set[str] = set()
        """Kinds of requests for which the job has checked at least once."""
        self._progress: tuple[float | None, str | None] | None = None
        self._reporter: threading.Thread | None = None
        self._news: threading.Event | None = None
        self._is_over = False

    def send_ending(self, ending: Ending) -> None:
        head = (
            "ended",
            str.__str__(ending.outcome),
            ending.encoding,
            ending.error,
            ending.traceback,
            ending.final,
            ending.on_gpu,
        )
        with self._lock:
            self._send_progress()
            for part in encode_frame(head, [ending.result] if ending.result is not None else ()):
                self._sock.sendall(part)

    def report(self, fraction: float | None, message: str | None) -> None:
        """Store the latest progress; a thread sends it, so that frequent reports cost little."""
        with self._lock:
            before = self._progress or (None, None)
            self._progress = (
                before[0] if fraction is None else fraction,
                before[1] if message is None else message,
            )
            if self._news is None or self._reporter is None or not self._reporter.is_alive():
                self._news = threading.Event()
                self._reporter = threading.Thread(
                    target=self._send_reports, args=(self._news,), name="dovetail-progress", daemon=True
                )
                self._reporter.start()
            self._news.set()

    def _send_reports(self, news: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while news.wait() and not self._is_over:
                news.clear()
                with self._lock:
                    self._send_progress()
                time.sleep(PROGRESS_INTERVAL_S)

    def _send_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            send_frame(self._sock, ("progress", *progress))

    def is_cancelled(self) -> bool:
        return self._is_requested(CANCEL)

    def is_checkpoint_requested(self) -> bool:
        return self._is_requested(CHECKPOINT)

    def _is_requested(self, kind: str) -> bool:
        with self._lock:
            if kind not in self._requests:
                if kind not in self._polled:
                    self._polled.add(kind)
                    with contextlib.suppress(OSError):
                        send_frame(self._sock, ("polls", kind))
                if self._channel is None:
                    self._channel = Channel(self._sock)
                with contextlib.suppress(BlockingIOError):
                    frames, is_connected = self._channel.receive(DONT_WAIT)
                    self._requests.update(str(frame.head[0]) for frame in frames)
                    if not is_connected:  # the result is lost without the worker
                        self._requests.add(CANCEL)
            return kind in self._requests


def ending_from_frame(head: Sequence[object], body: memoryview) -> Ending:
    """The inverse of `JobLink.send_ending`, in the worker."""
    _, outcome, encoding, error, traceback, final, on_gpu = head
    return Ending(
        Outcome(str(outcome)),
        bytes(body) if outcome == Outcome.SUCCEEDED else None,
        str(encoding),
        str(error),
        str(traceback),
        bool(final),
        bool(on_gpu),
    )


def _on_terminate(*_: object) -> NoReturn:
    """Raise `JobStopped` in the running code, so that its `finally` blocks run. A second signal ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise JobStopped


def has_no_children() -> bool:
    """Whether the job has left no child process. This process adopts its orphans, whatever their session."""
    libc = load_libc()
    if libc is not None:  # without the exception of `os.waitpid`, whose text alone costs 0.05 ms
        while (found := libc.waitpid(-1, None, WNOHANG)) > 0:
            pass
        return bool(found < 0)
    try:
        while os.waitpid(-1, WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


_THREAD_SETTERS = {
    "openblas": (
        "openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "scipy_openblas_set_num_threads64_",
    ),
    "libgomp": ("omp_set_num_threads",),
    "libiomp": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
    "mkl_rt": ("MKL_Set_Num_Threads",),
}


def _thread_setters() -> tuple[ThreadSetter, ...]:
    """Functions that set the number of threads of the libraries that are loaded now. Libraries that are loaded later
    read the variables. The fork server looks for them once: it takes a millisecond."""
    found: list[ThreadSetter] = []
    torch = sys.modules.get("torch")
    if torch is not None:
        found.append(torch.set_num_threads)
    with contextlib.suppress(Exception):
        import ctypes

        with open("/proc/self/maps") as maps:  # noqa: PTH123
            libraries = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
        for path in libraries:
            names = [
                name for part, names in _THREAD_SETTERS.items() if part in path.rpartition("/")[2] for name in names
            ]
            library = ctypes.CDLL(path) if names else None
            found += [getattr(library, name) for name in names if hasattr(library, name)]
    return tuple(found)


def server_environment(plain: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of a fork server: that of a job without resources, so that its process has little to change.

    Libraries that the application imports start no threads, and see the cards of the worker: a module may ask at its
    import whether there are any. PyTorch answers that without CUDA, which would not survive the fork.
    """
    found = {**plain, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | dict.fromkeys(THREAD_VARIABLES, "1")
    found.pop("CUDA_VISIBLE_DEVICES", None)
    if "CUDA_VISIBLE_DEVICES" in inherited:
        found["CUDA_VISIBLE_DEVICES"] = inherited["CUDA_VISIBLE_DEVICES"]
    return found


__all__ = [
    "JobCall",
    "JobLink",
    "ProcessSetup",
    "call_function",
    "ending_from_frame",
    "has_no_children",
    "main",
    "prepare",
    "server_environment",
]
