"""Handles of the client: `Job` (status, result, logs, cancellation), `JobSchedule` and pages of jobs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, overload

from dovetail.documents.fields import is_finite, is_number
from dovetail.errors import (
    UNSET,
    Call,
    Change,
    ConfigError,
    Given,
    JobError,
    JobTimeoutError,
    Problem,
    Text,
)
from dovetail.jobs.finished_waiter import Reconnecting
from dovetail.jobs.job import FINISHED, JobState
from dovetail.jobs.job_logs import default_log_folder
from dovetail.jobs.payload_codec import decode_result
from dovetail.jobs.payload_files import LocalFiles, log_name
from dovetail.text_format import format_duration

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from dovetail.errors import Fix
    from dovetail.jobs.job import Attempt, JobRecord
    from dovetail.jobs.queue import Queue
    from dovetail.jobs.store import Schedule

UNKNOWN_JOB = "DT612"
JOB_FAILED = "DT613"
JOB_NOT_FINISHED = "DT614"
WAIT_SLICE_S = 60.0
"""Maximum duration of a single wait in the store, so that a broken connection is noticed."""
TRACEBACK_LINES = 12
"""Maximum number of lines of the traceback in a message; `JobError.traceback` has all."""


class Job:
    """A job in a queue. Every property reads the store; `record()` reads all of them at once. Thread-safe."""

    __slots__ = ("__weakref__", "_queue", "_snapshot", "created", "id")

    def __init__(self, queue: Queue, job_id: str, *, created: bool = True, snapshot: JobRecord | None = None) -> None:
        self.id = job_id
        self.created = created
        """False: `submit` found a job with the same idempotency key."""
        self._queue = queue
        self._snapshot = snapshot

    def record(self) -> JobRecord:
        """All data of the job in the store. Raises ConfigError if it was purged."""
        [found] = self._queue.store.get([self.id])
        if found is None:
            raise unknown_jobs([self.id])
        self._snapshot = found
        return found

    @property
    def snapshot(self) -> JobRecord:
        """The latest record that was read, such as by a list. Does not read the store again."""
        return self._snapshot or self.record()

    @property
    def status(self) -> JobState:
        return self.record().state

    @property
    def progress(self) -> float | None:
        """From 0 to 1, as the job reported; 1 after success."""
        found = self.record()
        return 1.0 if found.state is JobState.SUCCEEDED else found.progress

    @property
    def message(self) -> str:
        """Text of the latest progress report."""
        return self.record().message

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Attempts that have ended, oldest first."""
        return self.record().attempts

    @property
    def error(self) -> str:
        """Why it failed, died or was cancelled."""
        return self.record().error

    def wait(self, timeout: float | None = None) -> JobState:
        """Wait until the job is finished, at most `timeout` seconds. Returns its state."""
        self._wait(_checked_timeout(timeout))
        return self.status

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job and return its result.

        Raises JobError if it failed, died or was cancelled, with the traceback of the worker; JobTimeoutError (a
        TimeoutError) if it is not finished after `timeout` seconds. The job then continues.
        """
        self._wait(_checked_timeout(timeout))
        return self._result(timeout)

    async def aresult(self, timeout: float | None = None) -> Any:
        """`result` for asyncio: it does not block the event loop."""
        limit = _checked_timeout(timeout)
        record = await asyncio.to_thread(self.record)
        if record.state not in FINISHED:
            try:
                async with asyncio.timeout(limit):
                    await self._queue.waiter.future(self.id)
            except TimeoutError:
                pass
        return await asyncio.to_thread(self._result, timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        """`await job` is `await job.aresult()`."""
        return self.aresult().__await__()

    def logs(self, attempt: int | None = None, rank: int = 0) -> str:
        """The output of one attempt; by default of all, with a line before each if there are several. Of a gang, that
        of one rank.

        It is among the files of the queue. If the queue was opened without `files`, only the output of workers of this
        machine is found.
        """
        numbers = range(1, self.record().attempt + 1) if attempt is None else [attempt]
        texts = {number: text for number in numbers if (text := self._log(number, rank)) is not None}
        if len(texts) < 2:
            return "".join(texts.values())
        return "".join(f"--- attempt {number}\n{text}" for number, text in texts.items())

    def _log(self, attempt: int, rank: int) -> str | None:
        files = self._queue.files or LocalFiles(default_log_folder())
        try:
            return files.read(log_name(self.id, attempt, rank)).decode(errors="replace")
        except ConfigError:
            return None

    def cancel(self, reason: str = "") -> JobState:
        """Cancel the job, and return its state: a running job stays "leased" until its worker has stopped it."""
        return self._queue.cancel(self, reason)[0]

    def requeue(self) -> JobState:
        """Run a failed, dead or cancelled job again, with all its retries."""
        return self._queue.requeue(self)[0]

    def problem(self) -> Problem | None:
        """The reason why no running worker can run a waiting job; None if one can, or if the job does not wait."""
        record = self.record()
        if record.state not in (JobState.READY, JobState.SCHEDULED, JobState.BLOCKED):
            return None
        return self._queue.placement_problem(record.spec.queue, record.shape)

    def _wait(self, limit: float | None) -> None:
        deadline = None if limit is None else time.monotonic() + limit
        wait = Reconnecting(self._queue.store.wait_finished)
        while True:
            rest = WAIT_SLICE_S if deadline is None else max(0.0, deadline - time.monotonic())
            if wait([self.id], min(rest, WAIT_SLICE_S)) or rest <= 0:
                return

    def _result(self, timeout: float | None) -> Any:
        record = self.record()
        match record.state:
            case JobState.SUCCEEDED:
                assert record.result is not None, record
                return decode_result(record.result, record.result_encoding, self._queue.codec)
            case JobState.FAILED | JobState.DEAD | JobState.CANCELLED:
                raise job_error(record)
        running = f", attempt {record.attempt} on {record.worker}" if record.worker else ""
        message = f"job {self.id} is not finished after {format_duration(timeout or 0)}: it is {record.state}{running}"
        problem = self.problem()
        evidence = (problem.message, *problem.evidence) if problem is not None else ()
        fixes: tuple[Fix, ...] = (Change({"timeout": UNSET}, note="wait without a limit"),)
        raise JobTimeoutError(Problem(JOB_NOT_FINISHED, message, evidence, fixes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        known = f" {self._snapshot.spec.function}, {self._snapshot.state}" if self._snapshot is not None else ""
        return f"<job {self.id}{known}>"


@dataclass(frozen=True, slots=True)
class JobPage:
    """A part of a list of jobs, newest first."""

    jobs: tuple[Job, ...]
    next_id: str | None
    """Pass it as `before` to get the next page; None if this is the last one."""

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, index: int | slice) -> Job | tuple[Job, ...]:
        return self.jobs[index]


class JobSchedule:
    """A job that is submitted at the times of a cron expression, until it is removed."""

    __slots__ = ("_queue", "_schedule")

    def __init__(self, queue: Queue, schedule: Schedule) -> None:
        self._queue = queue
        self._schedule = schedule

    @property
    def name(self) -> str:
        return self._schedule.name

    @property
    def cron(self) -> str:
        return self._schedule.cron

    @property
    def timezone(self) -> str:
        return self._schedule.timezone

    @property
    def function(self) -> str:
        return self._schedule.template.function

    @property
    def next_time(self) -> datetime:
        """The next fire time, as of when the schedule was read."""
        return datetime.fromtimestamp(self._schedule.next_ms / 1000, UTC)

    def jobs(self, limit: int = 100) -> JobPage:
        """The jobs that it has submitted, newest first."""
        return self._queue.list(schedule=self.name, limit=limit)

    def remove(self) -> bool:
        """Remove the schedule; its jobs stay. Returns False if it was removed already."""
        return self._queue.remove_schedule(self.name)

    def __repr__(self) -> str:
        return f"<schedule {self.name!r}, {self.cron} {self.timezone}, next {self.next_time:%Y-%m-%d %H:%M} UTC>"


def job_error(record: JobRecord) -> JobError:
    """The error of a job that ended without success."""
    ended = {
        JobState.FAILED: "failed",
        JobState.DEAD: "is dead: all retries are used up",
        JobState.CANCELLED: "was cancelled",
    }
    message = f"job {record.id} ({record.spec.function}) {ended[record.state]}"
    message += f": {record.error}" if record.error else ""
    last = record.attempts[-1] if record.attempts else None
    traceback = last.traceback if last is not None else ""
    evidence = []
    if last is not None:
        count = len(record.attempts)
        evidence.append(f"attempt {last.number} of {count}" * (count > 1) or "one attempt")
        evidence[-1] += f", on worker {last.worker}, ended as {last.outcome}"
    lines = traceback.rstrip().splitlines()
    if len(lines) > TRACEBACK_LINES:
        lines = [lines[0], f"  ... {len(lines) - TRACEBACK_LINES} lines ...", *lines[1 - TRACEBACK_LINES :]]
    fixes = (Call("job.logs", note="its output"), Call("job.requeue", note="run it again"))
    problem = Problem(JOB_FAILED, message, (*evidence, *lines), fixes)
    return JobError(problem, record.id, record.state.value, traceback)


def unknown_jobs(ids: Sequence[str]) -> ConfigError:
    """The error for jobs that a queue does not have."""
    fix = "list the jobs of the queue: dovetail jobs ls"
    return ConfigError(
        Problem(
            UNKNOWN_JOB, f"the queue has no job {job_id}: it was purged, or is in another queue's store", fixes=(fix,)
        )
        for job_id in ids[:10]
    )


def _checked_timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if not is_number(timeout) or not is_finite(timeout) or timeout < 0:
        text = Text(Given("timeout", timeout), " is not a number of seconds")
        raise ConfigError(Problem("DT602", text, fixes=(Change({"timeout": 60}), Change({"timeout": UNSET}))))
    return float(timeout)
