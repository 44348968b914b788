"""`dt.Queue`: submit jobs, list, cancel, requeue and purge them, pause queues, and see workers and schedules."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, overload

from dovetail.documents.configuration import configured
from dovetail.errors import (
    UNSET,
    Change,
    ConfigError,
    DovetailError,
    InfeasibleError,
    Problem,
    argument_problem,
    short_repr,
)
from dovetail.jobs.batch import unmarked_shape
from dovetail.jobs.finished_waiter import FinishedWaiter
from dovetail.jobs.job import DEFAULT_QUEUE, FINISHED, NO_RESOURCES, JobState
from dovetail.jobs.job_handle import Job, JobPage, JobSchedule, unknown_jobs
from dovetail.jobs.payload_codec import FILE, INLINE_LIMIT_BYTES, PayloadCodec
from dovetail.jobs.payload_files import open_files
from dovetail.jobs.placement_problem import placement_problem
from dovetail.jobs.queue_arguments import (
    BAD_FILTER,
    LIMIT,
    age_ms_of,
    job_filter,
    limit_of,
    queue_name,
    size_of,
    split_options,
    with_keys,
)
from dovetail.jobs.run_submission import (
    BACKFILL_FUNCTION,
    DEFAULT_RESOURCES,
    RUN_FUNCTION,
    backfill_call,
    run_call,
)
from dovetail.jobs.schedule import next_fire
from dovetail.jobs.store import JobFilter, Purged, Schedule
from dovetail.jobs.stores.store_url import checked_scheme, open_store, shown_url, sqlite_path
from dovetail.jobs.submission import prepare, too_large_for_schedule
from dovetail.jobs.submit_options import NAME, is_job_id
from dovetail.jobs.worker_liveness import live_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Token
    from datetime import datetime
    from os import PathLike

    from dovetail.jobs.job import JobRecord, JobSpec, Retries
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.payload_files import PayloadFiles
    from dovetail.jobs.store import QueueStats, Receipt, Store, WorkerInfo
    from dovetail.resources.resources import Resources
    from dovetail.resources.shape import Shape

BAD_QUEUE = "DT601"
BAD_OPTION = "DT602"
UNKNOWN_DEPENDENCY = "DT611"
NO_CURRENT_QUEUE = "DT617"
BATCH_JOBS = 1_000
"""Jobs per round trip of `submit_many`."""
PAGE_JOBS = 1_000
REASON_LIMIT_CHARS = 1_000
INLINE_LIMIT_WITHOUT_FILES_BYTES = 4 << 20
WORKERS_FRESH_S = 10.0
"""Time for which a list of workers is used to check submissions."""
EXPIRING = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States to which `result_ttl` and `result_bytes` apply. Dead letters are kept until they are requeued or purged."""
IF_NO_WORKER = ("warn", "refuse", "ignore")

States = list[JobState]
Jobs = list[Job]
Ids = list[str]


class NoWorkerWarning(UserWarning):
    """A job was submitted that no running worker can run."""


class Queue:
    """A durable queue of jobs: `dt.Queue("sqlite:///jobs.db")`, "redis://localhost:6379/0" or "memory:".

    - `allow_pickle`: pickle arguments and results that are not JSON. Use it only if all submitters are trusted.
    - `files`: folder or URL for large arguments and results and for the output of jobs; by default beside a SQLite
      file.
    - `result_ttl`, `result_bytes`: how long, and up to which total size, finished jobs are kept, dead letters excepted.
    - `queue`: name of the queue of jobs that name none.
    - `if_no_worker`: what `submit` does if workers are running but none of them can ever run the job: "warn", "refuse"
      or "ignore".

    Thread-safe. As a context manager it is the current queue (`train.submit(...)`), and is closed at the end.
    """

    def __init__(
        self,
        url: str | Store,
        *,
        allow_pickle: bool = False,
        files: str | PathLike[str] | None = None,
        result_ttl: str | float | None = "7d",
        result_bytes: str | None = None,
        queue: str = DEFAULT_QUEUE,
        if_no_worker: str = "warn",
    ) -> None:
        problems, scheme = self._problems(url, allow_pickle, files, queue, if_no_worker)
        self.result_ttl_ms = age_ms_of("result_ttl", result_ttl, problems)
        self.result_bytes = size_of("result_bytes", result_bytes, problems)
        if problems:
            raise ConfigError(problems)
        self.url = url if isinstance(url, str) else f"{type(url).__name__}()"
        self.default_queue = queue
        self._if_no_worker = if_no_worker
        self._temporary = ""
        self.files = self._open_files(scheme, files)
        """Files of large data and of the output of jobs; None if the queue has none."""
        inline_limit = INLINE_LIMIT_BYTES if self.files is not None else INLINE_LIMIT_WITHOUT_FILES_BYTES
        self.codec = PayloadCodec(allow_pickle, self.files, inline_limit)
        self.store: Store = open_store(url) if isinstance(url, str) else url
        self.waiter = FinishedWaiter(self.store)
        self._marks: list[Token[Queue | None]] = []
        self._workers: tuple[float, list[WorkerInfo]] | None = None
        self._warned: set[tuple[str, Shape]] = set()

    @staticmethod
    def _problems(
        url: object, allow_pickle: object, files: object, queue: object, if_no_worker: object
    ) -> tuple[list[Problem], str]:
        problems: list[Problem] = []
        scheme = "memory"
        if not hasattr(url, "exchange"):
            try:
                scheme = checked_scheme(url)
            except ConfigError as error:
                problems += error.problems
        if not isinstance(allow_pickle, bool):
            problems.append(argument_problem(BAD_QUEUE, "allow_pickle", allow_pickle, "True or False", True, False))
        if files is not None and not (isinstance(files, str | os.PathLike) and os.fspath(files)):
            kind = "a folder or a URL"
            problems.append(argument_problem(BAD_QUEUE, "files", files, kind, "job-files", "s3://bucket/jobs"))
        if not NAME.accepts(queue):
            problems.append(argument_problem(BAD_QUEUE, "queue", queue, NAME.text, "gpu"))
        if if_no_worker not in IF_NO_WORKER:
            kind = f"one of {', '.join(IF_NO_WORKER)}"
            problems.append(argument_problem(BAD_QUEUE, "if_no_worker", if_no_worker, kind, "warn"))
        return problems, scheme

    def _open_files(self, scheme: str, files: str | PathLike[str] | None) -> PayloadFiles | None:
        if files is not None:
            return open_files(files)
        if scheme == "sqlite":
            return open_files(f"{sqlite_path(self.url)}.files")
        if scheme == "memory":
            self._temporary = os.path.join(tempfile.gettempdir(), f"dovetail-jobs-{secrets.token_hex(8)}")  # noqa: PTH118
            return open_files(self._temporary)
        return None

    # --- submission

    @overload
    def submit(
        self,
        function: Callable[..., Any] | JobFunction | str,
        /,
        *args: Any,
        cron: str,
        timezone: str | None = ...,
        resources: Resources | Mapping[str, Any] | None = ...,
        queue: str | None = ...,
        priority: str | int | None = ...,
        timeout: str | float | None = ...,
        retries: int | Retries | Mapping[str, Any] | None = ...,
        key: str | None = ...,
        isolation: str | None = ...,
        preemptible: bool | None = ...,
        preemption_grace: str | float | None = ...,
        ranks: int | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **named: Any,
    ) -> JobSchedule: ...
    @overload
    def submit(
        self,
        function: Callable[..., Any] | JobFunction | str,
        /,
        *args: Any,
        resources: Resources | Mapping[str, Any] | None = ...,
        queue: str | None = ...,
        priority: str | int | None = ...,
        timeout: str | float | None = ...,
        retries: int | Retries | Mapping[str, Any] | None = ...,
        key: str | None = ...,
        cron: None = ...,
        timezone: None = ...,
        after: Job | str | Sequence[Job | str] | None = ...,
        if_dependency_fails: str | None = ...,
        at: datetime | str | float | None = ...,
        delay: str | float | None = ...,
        isolation: str | None = ...,
        preemptible: bool | None = ...,
        preemption_grace: str | float | None = ...,
        ranks: int | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **named: Any,
    ) -> Job: ...

    def submit(
        self,
        function: Any,
        /,
        *args: Any,
        resources: Any = UNSET,
        queue: Any = UNSET,
        priority: Any = UNSET,
        timeout: Any = UNSET,
        retries: Any = UNSET,
        key: Any = UNSET,
        after: Any = UNSET,
        if_dependency_fails: Any = UNSET,
        at: Any = UNSET,
        delay: Any = UNSET,
        cron: Any = UNSET,
        timezone: Any = UNSET,
        isolation: Any = UNSET,
        preemptible: Any = UNSET,
        preemption_grace: Any = UNSET,
        ranks: Any = UNSET,
        kwargs: Any = None,
        **named: Any,
    ) -> Any:
        """Submit a job and return its handle; with `cron`, add a schedule that submits jobs, and return the schedule.

        `function`: a function with `@dt.job`, or "pkg.module:name", or "/path/script.py:name". Options that are not
        given, or None, are those of its declaration. A keyword that is both an option and a parameter of the function
        is refused: pass arguments of the function by `kwargs={...}`.

        - `resources`: `dt.Resources` of one attempt; without it, one slot of a worker.
        - `priority`: "high", "normal", "low" or a number; one step is worth 60 s of waiting.
        - `timeout`: time limit of one attempt.
        - `retries`: a number for every cause, or `{"error": 5, "lost": 1, "backoff": "10s"}`.
        - `key`: idempotency key: while the queue keeps a job with it, that job is returned (`job.created` is False).
        - `after`: jobs that must have succeeded; `if_dependency_fails`: "cancel" or "block".
        - `at`: datetime (without zone: local time), ISO text or Unix seconds. `delay`: duration.
        - `cron`: five fields or @daily, in `timezone` (default UTC). A function has one schedule, which another
          submission replaces, unless `key` names another one.
        - `isolation`: "process", "warm_process", "thread" or "async".
        - `preemptible`: allow ending the job for one of higher priority, without using a retry, after
          `preemption_grace` (duration) to save its state.
        - `ranks`: number of processes of a gang, which run at once on one or several workers; each needs `resources`.
        """
        given = {
            "resources": resources,
            "queue": queue,
            "priority": priority,
            "timeout": timeout,
            "retries": retries,
            "key": key,
            "after": after,
            "if_dependency_fails": if_dependency_fails,
            "at": at,
            "delay": delay,
            "cron": cron,
            "timezone": timezone,
            "isolation": isolation,
            "preemptible": preemptible,
            "preemption_grace": preemption_grace,
            "ranks": ranks,
        }
        options = {name: value for name, value in given.items() if value is not UNSET}
        submission, keywords = prepare(function, options, named, self.default_queue, (args, kwargs), self.codec)
        self._check_placement(submission.template)
        spec = submission.spec(args, keywords, self.codec)
        if submission.cron is not None:
            return self._put_schedule(spec, submission.cron, submission.timezone)
        return self._jobs([spec], self.store.submit([spec]))[0]

    def submit_run(
        self,
        file: str | PathLike[str],
        /,
        *,
        source: str | Sequence[str] | None = None,
        sink: str | None = None,
        limit: int | None = None,
        engine: str | None = None,
        **options: Any,
    ) -> Any:
        """Submit a run of a pipeline or recipe file, or an actor system; workers with `--runs` run it.

        `source`, `sink` and `limit` replace those of the file; `engine`: "local", "ray" or "ray:auto". The run uses
        what the job requests (`resources`, default 1 CPU). Other options are those of `submit`. An attempt after a lost
        worker resumes the run. Cancelling the job drains it.
        """
        named = run_call(file, source, sink, limit, engine)
        return self._submit_run(RUN_FUNCTION, named, options)

    def submit_backfill(
        self, table: str | PathLike[str], column: str | Sequence[str], udf: str, /, **options: Any
    ) -> Any:
        """Submit a backfill of a column of a Lance table; workers with `--runs` run it.

        `udf`: "module:name" of a module in the current folder. Options are those of `submit`, and of `Table.backfill`:
        where, workers, batch_size, slots, on_error, max_errors, row_timeout (its `timeout`), commit_every, recompute,
        engine.
        """
        known, own = split_options(options)
        return self._submit_run(BACKFILL_FUNCTION, backfill_call(os.fspath(table), column, udf, **own), known)

    def _submit_run(self, function: str, call: dict[str, Any], options: dict[str, Any]) -> Any:
        given = {"resources": DEFAULT_RESOURCES, "isolation": "process", **options}
        if given["isolation"] != "process":
            kind = "possible: a run has a process of its own"
            raise ConfigError(argument_problem(BAD_OPTION, "isolation", given["isolation"], kind, "process"))
        return self.submit(function, kwargs=call, **given)

    def submit_many(
        self,
        function: Callable[..., Any] | JobFunction | str,
        items: Iterable[Any],
        /,
        *,
        keys: Iterable[str] | None = None,
        **options: Any,
    ) -> Jobs:
        """Submit one job per item, in one round trip per 1,000.

        A tuple has the positional arguments of its job; any other item is the one argument. `keys`: an idempotency key
        per item. The options of `submit` apply to all jobs, `kwargs=` to every call.
        """
        for name in ("key", "cron", "timezone"):
            if name in options:
                fix = "keys=[...], one per item" if name == "key" else "submit one schedule with submit()"
                raise ConfigError(Problem(BAD_OPTION, f"submit_many() has no {name}", fixes=(fix,)))
        kwargs = options.pop("kwargs", None)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            kind = "a mapping of names to arguments"
            raise ConfigError(argument_problem(BAD_OPTION, "kwargs", kwargs, kind, {"epochs": 3}))
        known, named = split_options(options)
        submission, keywords = prepare(function, known, {**named, **(kwargs or {})}, self.default_queue)
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            message = f"submit_many() needs a list of items, not {short_repr(items)}"
            raise ConfigError(Problem(BAD_OPTION, message, fixes=("submit_many(train, [config1, config2])",)))
        self._check_placement(submission.template)
        pairs = with_keys(items, keys)
        jobs: list[Job] = []
        while batch := list(islice(pairs, BATCH_JOBS)):
            specs: list[JobSpec] = []
            try:
                for key, item in batch:
                    args = item if isinstance(item, tuple) else (item,)
                    specs.append(submission.checked_spec(args, keywords, self.codec, key))
            except DovetailError:
                self._delete_files(specs)
                raise
            jobs += self._jobs(specs, self.store.submit(specs))
        return jobs

    def _jobs(self, specs: Sequence[JobSpec], receipts: Sequence[Receipt]) -> Jobs:
        """Handles of the submitted jobs. Raises ConfigError if any of them depends on unknown jobs."""
        unused = [
            spec for spec, receipt in zip(specs, receipts, strict=True) if not receipt.created and receipt.id != spec.id
        ]
        missing = {job_id: None for receipt in receipts for job_id in receipt.missing}
        self._delete_files(unused + [spec for spec, receipt in zip(specs, receipts, strict=True) if receipt.missing])
        if missing:
            fixes = ("submit the job that it waits for first, to the same queue's store", Change({"after": UNSET}))
            raise ConfigError(
                Problem(UNKNOWN_DEPENDENCY, f"after: the queue has no job {job_id}", fixes=fixes)
                for job_id in list(missing)[:10]
            )
        return [Job(self, receipt.id, created=receipt.created) for receipt in receipts]

    def _put_schedule(self, spec: JobSpec, cron: str, timezone: str) -> JobSchedule:
        error = too_large_for_schedule(spec)
        if error is not None:
            self._delete_files([spec])
            raise error
        name = spec.key or spec.function
        template = replace(spec, id="", key=None, schedule=name)
        self.store.put_schedule(
            Schedule(name, cron, timezone, template, next_fire(cron, timezone, self.store.now_ms()))
        )
        kept = next(one for one in self.store.schedules() if one.name == name)
        return JobSchedule(self, kept)

    def _check_placement(self, spec: JobSpec) -> None:
        """Warn about, or refuse, a job that no running worker can ever run."""
        if self._if_no_worker == "ignore" or (
            unmarked_shape(spec.shape) == NO_RESOURCES and spec.queue == DEFAULT_QUEUE
        ):
            return
        if self._if_no_worker == "warn" and (spec.queue, spec.shape) in self._warned:
            return
        workers = self._fresh_workers()
        if not workers:
            return
        problem = placement_problem(spec.queue, spec.shape, workers)
        if problem is None:
            return
        if self._if_no_worker == "refuse":
            raise InfeasibleError(problem)
        self._warned.add((spec.queue, spec.shape))
        warnings.warn(problem.render(), NoWorkerWarning, stacklevel=3)

    def _fresh_workers(self) -> list[WorkerInfo]:
        now = time.monotonic()
        if self._workers is None or now - self._workers[0] > WORKERS_FRESH_S:
            self._workers = (now, live_workers(self.store.workers(), self.store.now_ms()))
        return self._workers[1]

    def placement_problem(self, queue: str, shape: Shape) -> Problem | None:
        """The reason why no running worker can run such a job; None if one can."""
        return placement_problem(queue, shape, live_workers(self.store.workers(), self.store.now_ms()))

    # --- jobs

    def get(self, job_id: str) -> Job:
        """The job with this id. Raises ConfigError if there is none."""
        found = self.store.get([job_id])[0] if is_job_id(job_id) else None
        if found is None:
            raise unknown_jobs([short_repr(job_id)])
        return Job(self, found.id, snapshot=found)

    def find_key(self, key: str) -> Job | None:
        """The job with this idempotency key."""
        found = self.store.id_of_key(key)
        return None if found is None else Job(self, found, created=False)

    def list(
        self,
        *,
        state: str | JobState | Iterable[str] | None = None,
        queue: str | None = None,
        function: Callable[..., Any] | JobFunction | str | None = None,
        schedule: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> JobPage:
        """A page of jobs, newest first; `before` is `next_id` of the page before. `job.snapshot` has what was read."""
        problems: list[Problem] = []
        if not LIMIT.accepts(limit):
            problems.append(argument_problem(BAD_FILTER, "limit", limit, LIMIT.text, 100))
        chosen = job_filter(state, queue, function, schedule, problems)
        if before is not None and not is_job_id(before):
            problems.append(argument_problem(BAD_FILTER, "before", before, "the id of a job", UNSET))
        if problems:
            raise ConfigError(problems)
        page = self.store.find(chosen, limit, before)
        return JobPage(tuple(Job(self, record.id, snapshot=record) for record in page.jobs), page.next_id)

    def dead(self, *, queue: str | None = None, limit: int = 100, before: str | None = None) -> JobPage:
        """A page of dead letters: jobs whose retries are used up."""
        return self.list(state=JobState.DEAD, queue=queue, limit=limit, before=before)

    def cancel(self, jobs: Job | str | Iterable[Job | str], reason: str = "") -> States:
        """Cancel jobs, and return their states. A running job stays "leased" until its worker has stopped it."""
        return self._change(jobs, partial(self.store.cancel, reason=str(reason)[:REASON_LIMIT_CHARS]))

    def requeue(self, jobs: Job | str | Iterable[Job | str]) -> States:
        """Run failed, dead or cancelled jobs again, with all their retries, and return the states of the jobs. Jobs in
        other states do not change."""
        return self._change(jobs, self.store.requeue)

    def _change(
        self, jobs: Job | str | Iterable[Job | str], change: Callable[[Sequence[str]], Sequence[JobState | None]]
    ) -> States:
        items = [jobs] if isinstance(jobs, Job | str) else jobs
        ids = [item.id if isinstance(item, Job) else str(item) for item in items]
        states: list[JobState] = []
        unknown: list[str] = []
        for start in range(0, len(ids), BATCH_JOBS):
            part = ids[start : start + BATCH_JOBS]
            for job_id, state in zip(part, change(part), strict=True):
                if state is None:
                    unknown.append(job_id)
                else:
                    states.append(state)
        if unknown:
            raise unknown_jobs(unknown)
        return states

    def purge(
        self,
        *,
        older_than: str | float | None = None,
        keep_bytes: str | None = None,
        state: str | JobState | Iterable[str] | None = None,
        queue: str | None = None,
        function: Callable[..., Any] | JobFunction | str | None = None,
    ) -> Purged:
        """Remove finished jobs, with their files and output, those that finished first first.

        `older_than`: only jobs that finished this long ago. `keep_bytes`: only until the arguments and results of those
        that are left are at most this size. `state`, `queue`, `function`: only these. At least one is needed.
        """
        problems: list[Problem] = []
        if older_than is None and keep_bytes is None and state is None and queue is None and function is None:
            message = "purge() needs at least one of its arguments"
            problems.append(
                Problem(BAD_FILTER, message, fixes=(Change({"older_than": "7d"}), Change({"state": "dead"})))
            )
        age_ms = age_ms_of("older_than", older_than, problems)
        size = size_of("keep_bytes", keep_bytes, problems)
        chosen = job_filter(state, queue, function, None, problems)
        if problems:
            raise ConfigError(problems)
        return self._purge(chosen, age_ms, size)

    def expire_results(self) -> Purged:
        """Remove finished jobs that are older than `result_ttl`, and those above `result_bytes`. Workers call it."""
        chosen = JobFilter(states=EXPIRING)
        found = Purged(0, 0)
        if self.result_ttl_ms is not None:
            found = self._purge(chosen, self.result_ttl_ms, None)
        if self.result_bytes is not None:
            more = self._purge(chosen, None, self.result_bytes)
            found = Purged(found.jobs + more.jobs, found.bytes + more.bytes)
        return found

    def _purge(self, chosen: JobFilter, age_ms: int | None, keep_bytes: int | None) -> Purged:
        if age_ms is not None:
            chosen = replace(chosen, finished_before_ms=self.store.now_ms() - age_ms + 1)
        files = self.files if self.files is not None and self.files.may_have_files() else None
        candidates = self._jobs_with_files(chosen) if files is not None else []
        jobs = size = 0
        while True:
            part = self.store.purge(chosen, keep_bytes=keep_bytes)
            jobs, size = jobs + part.jobs, size + part.bytes
            if not part.jobs:
                break
        if jobs and files is not None:
            for start in range(0, len(candidates), PAGE_JOBS):
                ids = candidates[start : start + PAGE_JOBS]
                gone = [job_id for job_id, found in zip(ids, self.store.get(ids), strict=True) if found is None]
                files.delete_of(gone)
        return Purged(jobs, size)

    def _jobs_with_files(self, chosen: JobFilter) -> Ids:
        """Ids of finished jobs that may have files: large data, or output of an attempt."""
        chosen_states = (chosen.states or FINISHED) & FINISHED
        found: list[str] = []
        before: str | None = None
        while chosen_states:
            page = self.store.find(replace(chosen, states=chosen_states), PAGE_JOBS, before)
            found += [record.id for record in page.jobs if _may_have_files(record)]
            if page.next_id is None:
                break
            before = page.next_id
        return found

    # --- queues, workers, schedules

    def pause(self, queue: str | None = None) -> None:
        """Stop giving jobs of a queue to workers. It accepts jobs; running jobs continue."""
        self.store.set_paused(queue_name(queue, self.default_queue), True)

    def resume(self, queue: str | None = None) -> None:
        """Give jobs of a paused queue to workers again."""
        self.store.set_paused(queue_name(queue, self.default_queue), False)

    def configure(self, queue: str | None = None, *, weight: Any = UNSET, max_running: Any = UNSET) -> None:
        """Set the weight of a queue, its share of running jobs in proportion to other queues, and how many of its jobs
        run at once at most. None removes a limit; what is not given stays. Running jobs continue."""
        name = queue_name(queue, self.default_queue)
        before = next((one for one in self.store.stats() if one.queue == name), None)
        new_weight = None if before is None else before.weight
        new_limit = None if before is None else before.max_running
        if weight is not UNSET:
            new_weight = limit_of("weight", weight)
        if max_running is not UNSET:
            new_limit = limit_of("max_running", max_running)
        self.store.set_limits(name, new_weight, new_limit)

    def stats(self) -> Sequence[QueueStats]:
        """Counts by state of all queues that have jobs, are paused or have limits."""
        return self.store.stats()

    def workers(self) -> Sequence[WorkerInfo]:
        """All registered workers, also those that have stopped sending heartbeats."""
        return self.store.workers()

    def schedules(self) -> Sequence[JobSchedule]:
        return [JobSchedule(self, schedule) for schedule in self.store.schedules()]

    def remove_schedule(self, name: str) -> bool:
        """Remove a schedule; the jobs that it has submitted stay. Returns False if there is none of this name."""
        return self.store.remove_schedule(name)

    # --- the queue itself

    def use(self) -> Self:
        """Make it the current queue of this process: `train.submit(...)` goes to it."""
        global _used_queue
        _used_queue = self
        return self

    def close(self) -> None:
        """Release connections. Jobs continue."""
        self.store.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        self._marks.append(_CURRENT.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._marks.pop())
        self.close()

    def __repr__(self) -> str:
        return f"<queue {shown_url(self.url)}>"

    def _delete_files(self, specs: Iterable[JobSpec]) -> None:
        """Delete the files of jobs that were not submitted."""
        ids = [spec.id for spec in specs if spec.encoding.endswith(FILE)]
        if ids and self.files is not None:
            self.files.delete_of(ids)


def _may_have_files(record: JobRecord) -> bool:
    return bool(record.attempts) or record.spec.encoding.endswith(FILE) or record.result_encoding.endswith(FILE)


# --- the current queue

_CURRENT: ContextVar[Queue | None] = ContextVar("dovetail_current_queue", default=None)
_used_queue: Queue | None = None
_configured_queues: dict[tuple[int, str], Queue] = {}
_configured_lock = threading.Lock()


def current_queue() -> Queue:
    """The queue of `with dt.Queue(url):`, of `queue.use()`, or of the variable DOVETAIL_QUEUE or the project file."""
    found = _CURRENT.get() or _used_queue
    if found is not None:
        return found
    url = configured("queue")
    if url is None:
        fixes = (
            'dt.Queue("sqlite:///jobs.db").use()',
            "DOVETAIL_QUEUE=sqlite:///jobs.db",
            "queue.submit(function, ...)",
        )
        raise ConfigError(Problem(NO_CURRENT_QUEUE, "no queue is given to submit to", fixes=fixes))
    mark = (os.getpid(), str(url))  # connections do not survive a fork
    with _configured_lock:
        queue = _configured_queues.get(mark)
        if queue is None:
            queue = _configured_queues[mark] = Queue(str(url))
        return queue


__all__ = ["NoWorkerWarning", "Queue", "current_queue"]
