"""Measurement of a job function at several numbers of slots, by a real worker, and the choice among them.

Each setting has a worker and a store of its own, in memory. All jobs of a setting are submitted at once, after one that
only warms the worker up, so that the worker is never idle.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from dovetail.errors import InfeasibleError, Problem, RunError
from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.queue import Queue
from dovetail.jobs.workers.worker import Worker
from dovetail.machine.processes import tree_bytes
from dovetail.text_format import cut_text, format_count, format_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.jobs.application import Application
    from dovetail.jobs.job import Attempt, JobRecord
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.job_handle import Job

NO_MEASUREMENT = "DT638"
TOLERANCE = 0.05
"""Maximum relative difference from the best rate at which a setting counts as equally fast."""
MIN_JOBS_PER_SLOT = 4
"""Minimum number of jobs per slot of a setting, so that start and end are a small part of the measurement."""
MIN_SECONDS = 2.0
"""Duration of a setting below which differences of a few percent are noise."""
MEMORY_INTERVAL_S = 0.1
ERROR_CHARS = 60
CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class ArgumentSample:
    """Arguments of one job."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TunedFunction:
    """The job function to measure, and how."""

    function: JobFunction
    application: Application
    samples: Sequence[ArgumentSample]
    options: Mapping[str, Any]
    """Options of `Queue.submit`."""


@dataclass(frozen=True, slots=True)
class SlotMeasurement:
    """Figures for one number of slots."""

    slots: int
    jobs: int
    """Number of jobs that succeeded."""
    failed: int
    seconds: float
    """From the start of the first job to the end of the last one."""
    rate: float
    """Jobs per second."""
    p95_s: float
    """95th percentile of the time of a job."""
    cpu_s: float | None
    """Mean CPU seconds of a job; None if its isolation does not measure them."""
    peak_bytes: int
    """Maximum memory of the worker and its jobs."""
    concurrency: int
    """Maximum number of jobs that ran at the same time; less than the slots if no more fit."""
    error: str = ""
    """Error of the first job that failed."""


@dataclass(frozen=True, slots=True)
class SlotRecommendation:
    slots: int
    reason: str
    notes: tuple[str, ...] = ()


def default_jobs(slots: int, samples: int) -> int:
    """Number of jobs of a setting: every sample once, and enough to fill the slots several times."""
    return max(samples, MIN_JOBS_PER_SLOT * slots)


def measure(tuned: TunedFunction, slots: int, jobs: int, worker_options: Mapping[str, Any]) -> SlotMeasurement:
    """Run jobs with this number of slots. Raises RunError if no worker can run them, or all of them fail."""
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-tune-") as logs,
        Queue("memory:", if_no_worker="ignore") as queue,
    ):
        worker = Worker(queue, app=tuned.application, slots=slots, log_dir=logs, **worker_options)
        try:
            worker.start()
            samples = cycle(tuned.samples)
            _wait(queue, worker, _submit(queue, tuned, islice(samples, 1)))
            peak = _MemoryPeak()
            with peak:
                found = _submit(queue, tuned, islice(samples, jobs))
                _wait(queue, worker, found)
        finally:
            worker.stop_now()
        return figures([job.record() for job in found], slots, peak.bytes)


def _submit(queue: Queue, tuned: TunedFunction, samples: Any) -> list[Job]:
    """One job per sample. They are not retried: a failure would change the figures."""
    options = {**tuned.options, "retries": 0}
    return [
        queue.submit(tuned.function, *sample.args, kwargs=dict(sample.kwargs or {}), **options) for sample in samples
    ]


def _wait(queue: Queue, worker: Worker, jobs: Sequence[Job]) -> None:
    """Wait until all of these jobs have ended."""
    left = {job.id for job in jobs}
    while left:
        left -= set(queue.store.wait_finished(sorted(left), CHECK_S))
        if worker.wait(0):
            raise worker.error or RunError(Problem(NO_MEASUREMENT, "the worker has ended"))
        problem = jobs[0].problem() if len(left) == len(jobs) else None
        if problem is not None and worker.get_status()["state"] == "running":
            raise InfeasibleError(problem)


class _MemoryPeak:
    """Maximum memory of this process and everything below it, within a `with` block."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dovetail-memory-peak", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, tree_bytes(os.getpid()))
            if self._ended.wait(MEMORY_INTERVAL_S):
                return


# --- figures


def figures(records: Sequence[JobRecord], slots: int, peak_bytes: int) -> SlotMeasurement:
    """The figures of jobs that have ended. Raises RunError if none has succeeded."""
    attempts = [record.attempts[-1] for record in records if record.attempts]
    done = [attempt for attempt in attempts if attempt.outcome is Outcome.SUCCEEDED]
    failed = [record for record in records if record.state is not JobState.SUCCEEDED]
    if not done:
        message = f"all {format_count(len(records), 'job')} failed with {format_count(slots, 'slot')}"
        evidence = tuple(line for record in failed[:1] for line in record.error.splitlines())
        fixes = ("correct the function or its arguments, and run one of them: dovetail jobs submit ... --wait",)
        raise RunError(Problem(NO_MEASUREMENT, message, evidence, fixes))
    seconds = (max(one.ended_ms for one in attempts) - min(one.started_ms for one in attempts)) / 1000
    times = sorted((one.ended_ms - one.started_ms) / 1000 for one in done)
    cpu_ms = [one.cpu_ms for one in done if one.cpu_ms is not None]
    return SlotMeasurement(
        slots=slots,
        jobs=len(done),
        failed=len(failed),
        seconds=seconds,
        rate=len(done) / max(seconds, 0.001),
        p95_s=times[math.ceil(0.95 * len(times)) - 1],
        cpu_s=sum(cpu_ms) / len(cpu_ms) / 1000 if len(cpu_ms) == len(done) else None,
        peak_bytes=peak_bytes,
        concurrency=max_concurrency(attempts),
        error=failed[0].error.partition("\n")[0] if failed else "",
    )


def max_concurrency(attempts: Sequence[Attempt]) -> int:
    """Maximum number of attempts that ran at the same time."""
    steps = sorted(step for one in attempts for step in ((one.started_ms, 1), (one.ended_ms, -1)))
    running = most = 0
    for _, change in steps:
        running += change
        most = max(most, running)
    return most


def recommend(measured: Sequence[SlotMeasurement]) -> SlotRecommendation:
    """The smallest number of slots whose rate is within `TOLERANCE` of the best one, among settings without failures
    if there are any."""
    sound = [one for one in measured if not one.failed]
    considered = sorted(sound or measured, key=lambda one: one.slots)
    best = max(considered, key=lambda one: one.rate)
    chosen = next(one for one in considered if one.rate >= (1 - TOLERANCE) * best.rate)
    notes = [
        f"{one.slots} slots: {format_count(one.failed, 'job')} failed: {cut_text(one.error, ERROR_CHARS)}"
        for one in measured
        if one.failed
    ]
    if sound and len(sound) < len(measured):
        notes.append("settings with failed jobs are not recommended")
    notes += [
        f"{one.slots} slots: only {one.concurrency} ran at the same time: no more fit, or they are short"
        for one in measured
        if one.concurrency < one.slots
    ]
    shortest = min(one.seconds for one in considered)
    if shortest < MIN_SECONDS:
        notes.append(f"the shortest setting took {shortest:.1f} s: for reliable figures, use more --jobs")
    return SlotRecommendation(chosen.slots, _reason(chosen, best, considered), tuple(notes))


def _reason(chosen: SlotMeasurement, best: SlotMeasurement, considered: Sequence[SlotMeasurement]) -> str:
    rate = f"{format_number(chosen.rate)} jobs/s"
    if len(considered) == 1:
        return f"{rate}; nothing to compare it with"
    if chosen is not best:
        lead = f"at most {100 * TOLERANCE:.0f} % below the best ({format_number(best.rate)} jobs/s with {best.slots})"
        return f"{rate}, {lead}, with fewer slots"
    if chosen is considered[-1]:
        return f"{rate} is the best, with the most slots that were measured: more may be faster"
    return f"{rate} is the best: more slots are not faster"
