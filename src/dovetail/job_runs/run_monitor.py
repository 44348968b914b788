"""Monitor of the runs in the process of a job: their progress becomes that of the job, and its end theirs.

A job that is cancelled, or is to make room for others, drains its runs. SIGTERM drains them, too: it comes at a
timeout, at the end of the worker, and `--kill-grace` after a cancellation, when it stops them at once. What is then
still running is killed by the worker.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from dovetail.jobs.workers.current_job import JobPreempted
from dovetail.jobs.workers.job_call import JobStopped
from dovetail.runtime.admission import print_stderr
from dovetail.runtime.run_handle import Run, RunProgress, active_runs

if TYPE_CHECKING:
    from dovetail.jobs.workers.current_job import CurrentJob

CHECK_S = 0.25
REASON = "its job is stopped"


class RunMonitor:
    """Active within a `with` block, in the main thread of the process."""

    def __init__(self, job: CurrentJob) -> None:
        self._job = job
        self.is_stopping = False
        """Whether the runs are to be drained."""
        self.is_preempted = False
        """Whether that is to make room for another job."""
        self.is_urgent = False
        """Whether they are to end at once."""
        self._ended = threading.Event()
        self._drained: set[int] = set()
        self._shown: RunProgress | None = None
        self._thread = threading.Thread(target=self._watch, name="dovetail-run-monitor", daemon=True)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._on_terminate)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._before)

    def _on_terminate(self, *_: object) -> None:
        self.is_urgent = self.is_stopping
        self.is_stopping = True
        if not active_runs():
            raise JobStopped

    def raise_if_stopping(self) -> None:
        """JobPreempted or JobStopped if the runs were to end before they had finished."""
        if self.is_preempted:
            raise JobPreempted
        if self.is_stopping:
            raise JobStopped

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_S):
            self.is_preempted = self.is_preempted or self._job.checkpoint_requested
            self.is_stopping = self.is_stopping or self.is_preempted or self._job.cancelled
            for run in active_runs():
                if self.is_urgent:
                    run.cancel(REASON)
                if not isinstance(run, Run):
                    continue
                if self.is_stopping and id(run) not in self._drained:
                    self._drained.add(id(run))
                    run.drain(REASON)
                    print_stderr("the job is being stopped: the run finishes the work in flight")
                self._report(run)

    def _report(self, run: Run) -> None:
        progress = run.progress
        if progress != self._shown and progress.text:
            self._shown = progress
            with suppress(OSError):  # the worker has ended
                self._job.progress(*progress)
