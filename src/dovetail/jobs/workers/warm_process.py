"""Isolation `warm_process`: a process that runs jobs one after another and keeps their models.

It is forked like the process of a single job (`job_process.py`), and ends when it is asked to, when a job has left a
process behind, has run out of memory or has broken CUDA, and whenever a job is ended by a signal.

Frames to the worker, besides those of `job_process.py`: ("next", CPU seconds) after the end of a job, if the process
can run another one; ("model", what, ...) to the ledger of models. Frames from the worker: ("run",) with a `JobCall` and
the descriptor of its log, ("end",), ("granted", number, reason of a refusal), ("evict", keys).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dovetail.engines.local.protocol import Channel, send_frame
from dovetail.jobs.job import Outcome
from dovetail.jobs.workers.batch_call import endings_of
from dovetail.jobs.workers.job_process import CANCEL, JobCall, JobLink, call_function, has_no_children
from dovetail.jobs.workers.model_cache import JobModels, ModelCache

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from dovetail.engines.local.protocol import Frame
    from dovetail.jobs.workers.job_ending import Ending

CUDA_BROKEN = ("CUDA error", "cudaError", "CUDNN_STATUS")
"""Texts in the error of a job after which CUDA may refuse all further work of this process."""
WORKER_GONE = "the worker has ended"


def run_jobs(sock: socket.socket, call: JobCall) -> None:
    """Run this job and later ones; returns when the process is to end."""
    worker = WorkerConnection(sock)
    cache = ModelCache(worker)
    worker.start(cache)
    next_call: JobCall | None = call
    while next_call is not None:
        if not _run_job(sock, worker, cache, next_call):
            return
        next_call = worker.next_call()
    cache.close()


def _run_job(sock: socket.socket, worker: WorkerConnection, cache: ModelCache, call: JobCall) -> bool:
    """Run one job. Returns False if the process is to end."""
    link = WarmJobLink(sock, worker.lock)
    worker.link = link
    began = time.process_time()
    ending = call_function(link, call, lambda: JobModels(cache))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    is_usable = has_no_children() and not any(map(_is_broken, endings_of(ending)))
    link.send_ending(ending)
    if is_usable:
        worker.send("next", time.process_time() - began)
    return is_usable


def _is_broken(ending: Ending) -> bool:
    return ending.outcome is Outcome.OUT_OF_MEMORY or any(text in ending.error for text in CUDA_BROKEN)


class WarmJobLink(JobLink):
    """What one job sends; the frames from the worker are read by `WorkerConnection`."""

    def __init__(self, sock: socket.socket, lock: threading.Lock) -> None:
        super().__init__(sock)
        self._lock = lock

    def report(self, fraction: float | None, message: str | None) -> None:
        if not self._is_over:  # otherwise a thread that the job has left would report progress for the next job
            super().report(fraction, message)

    def send_ending(self, ending: Ending) -> None:
        super().send_ending(ending)
        self._is_over = True
        if self._news is not None:
            self._news.set()  # end the thread that sends progress

    def on_request(self, kind: str) -> None:
        """Handle a request of the worker that the job end."""
        self._requests.add(kind)

    def _is_requested(self, kind: str) -> bool:
        if kind not in self._polled and not self._is_over:
            self._polled.add(kind)
            with self._lock, contextlib.suppress(OSError):
                send_frame(self._sock, ("polls", kind))
        return kind in self._requests


class WorkerConnection:
    """The socket to the worker: a thread reads it. It is the ledger of models, as the cache sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        """Lock of everything that is sent."""
        self.link: WarmJobLink | None = None
        """Link of the running job."""
        self._sock = sock
        self._calls: SimpleQueue[JobCall | None] = SimpleQueue()
        self._answers: dict[int, SimpleQueue[str]] = {}
        self._numbers = 0
        self._is_connected = True
        self._cache: ModelCache | None = None

    def start(self, cache: ModelCache) -> None:
        self._cache = cache
        threading.Thread(target=self._read, name="dovetail-worker-connection", daemon=True).start()

    def send(self, *head: object) -> None:
        with self.lock, contextlib.suppress(OSError):  # without the worker, the process is killed
            send_frame(self._sock, head)

    def next_call(self) -> JobCall | None:
        """Wait for the next job; None if the process is to end."""
        return self._calls.get()

    def _read(self) -> None:
        channel = Channel(self._sock)
        while self._is_connected:
            try:
                frames, self._is_connected = channel.receive()
            except OSError:
                self._is_connected = False
                break
            for frame in frames:
                self._on_frame(frame)
        if self.link is not None:
            self.link.on_request(CANCEL)  # the result is lost without the worker
        for answer in list(self._answers.values()):
            answer.put(WORKER_GONE)
        self._calls.put(None)

    def _on_frame(self, frame: Frame) -> None:
        match frame.head:
            case ("run",):
                self._use_log(frame.descriptors[0])
                self._calls.put(JobCall.unpack(bytes(frame.body)))
            case ("end",):
                self._calls.put(None)
            case ("cancel" | "checkpoint" as kind,) if self.link is not None:
                self.link.on_request(kind)
            case ("granted", number, reason):
                if number in self._answers:  # else its job was ended by a signal, and so is this process
                    self._answers[number].put(reason)
            case ("evict", keys) if self._cache is not None:
                self._cache.evict(keys)

    def _use_log(self, fd: int) -> None:
        for stream in (1, 2):
            os.dup2(fd, stream)
        os.close(fd)

    # --- ModelPort

    def reserve(self, key: str, device: int | None, size: int, *, can_wait: bool) -> str:
        answer: SimpleQueue[str] = SimpleQueue()
        with self.lock:
            self._numbers += 1
            number = self._numbers
            self._answers[number] = answer
        if not self._is_connected:
            return WORKER_GONE
        self.send("model", "reserve", key, device, size, can_wait, number)
        try:
            return answer.get()
        finally:
            del self._answers[number]

    def on_loaded(self, key: str, load_s: float) -> None:
        self.send("model", "loaded", key, load_s)

    def on_failed(self, key: str) -> None:
        self.send("model", "failed", key)

    def on_used(self, key: str) -> None:
        self.send("model", "used", key)

    def on_unpinned(self, keys: Sequence[str]) -> None:
        self.send("model", "unpinned", tuple(keys))

    def on_evicted(self, key: str) -> None:
        self.send("model", "evicted", key)

    def on_kept(self, key: str) -> None:
        self.send("model", "kept", key)
