"""The job that runs in this context: `dt.current_job()`, its progress and whether it should stop."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from dovetail.documents.fields import is_finite, is_number
from dovetail.errors import Change, ConfigError, Given, Problem, Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token

    from dovetail.jobs.workers.model_cache import JobModels

NO_CURRENT_JOB = "DT615"
MESSAGE_LIMIT_CHARS = 1_000


def _ignore(_fraction: float | None, _message: str | None) -> None:
    """Ignore progress: for a job without a worker."""


def _never() -> bool:
    return False


class JobPreempted(Exception):
    """Raise this in a job after `checkpoint_requested`, once its state is saved: the attempt ends as preempted, and the
    job runs again when there is room for it."""


class CurrentJob:
    """A running attempt of a job, as its own code sees it. Thread-safe.

    The runner of the worker makes it, with callbacks: `report` gets what `progress` was given and must not block;
    `is_cancelled` returns whether the job should stop, `is_checkpoint_requested` whether it should make room;
    `make_models` makes its view of the models of the process.
    """

    __slots__ = (
        "_is_cancelled",
        "_is_checkpoint_requested",
        "_make_models",
        "_models",
        "_report",
        "attempt",
        "id",
        "queue",
        "rank",
        "ranks",
        "token",
        "worker",
    )

    def __init__(
        self,
        id: str,  # noqa: A002 - the name of the attribute
        attempt: int,
        token: int,
        queue: str,
        worker: str,
        report: Callable[[float | None, str | None], None] = _ignore,
        is_cancelled: Callable[[], bool] = _never,
        is_checkpoint_requested: Callable[[], bool] = _never,
        make_models: Callable[[], JobModels] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.id = id
        self.attempt = attempt
        """Number of the attempt, from 1."""
        self.token = token
        """Fencing token: larger for each later attempt. A system that refuses writes with a smaller token than the
        largest it has seen is safe from attempts whose lease expired."""
        self.queue = queue
        self.worker = worker
        self._report = report
        self.rank = rank
        """Rank of this process in its gang, from 0."""
        self.ranks = ranks
        """Number of ranks of the job; 1 if it is not a gang."""
        self._is_cancelled = is_cancelled
        self._is_checkpoint_requested = is_checkpoint_requested
        self._make_models = make_models
        self._models: JobModels | None = None

    def progress(self, fraction: float | None = None, message: str | None = None) -> None:
        """Report progress from 0 to 1, and a text. It is shown within a third of a lease; the latest report counts."""
        if fraction is not None and not (is_number(fraction) and is_finite(fraction) and 0 <= fraction <= 1):
            text = Text(Given("progress", fraction), " is not a number from 0 to 1")
            raise ConfigError(Problem("DT602", text, fixes=(Change({"progress": 0.5}),)))
        self._report(
            None if fraction is None else float(fraction),
            None if message is None else str(message)[:MESSAGE_LIMIT_CHARS],
        )

    @property
    def cancelled(self) -> bool:
        """Whether the job should stop: a user cancelled it, or its lease was lost.

        A job in a process that has checked it gets no SIGTERM before `--kill-grace` is over."""
        return self._is_cancelled()

    @property
    def checkpoint_requested(self) -> bool:
        """Whether the job should save its state and raise `dt.JobPreempted`: a job of higher priority needs the room.

        Only jobs with `preemptible=True` are asked. A job that has checked it has its `preemption_grace` before it gets
        SIGTERM; another one gets SIGTERM at once, and SIGKILL after the grace."""
        return self._is_checkpoint_requested()

    @property
    def models(self) -> JobModels:
        """Models that stay loaded for later jobs: `models.get("resnet50", load, bytes="1GB")`. For jobs with isolation
        "warm_process", "thread" or "async"."""
        if self._models is None:
            if self._make_models is None:
                from dovetail.jobs.workers.model_cache import NoModels

                self._make_models = NoModels
            self._models = self._make_models()
        return self._models

    def release_models(self) -> None:
        """Called by its runner when it has ended."""
        if self._models is not None:
            self._models.release_all()

    def __repr__(self) -> str:
        return f"<current job {self.id}, attempt {self.attempt}, worker {self.worker}>"


_CURRENT: ContextVar[CurrentJob | None] = ContextVar("dovetail_current_job", default=None)


def current_job() -> CurrentJob:
    """The job that runs in this context. Raises ConfigError outside of a job, and in threads that a job has started.

    A thread that a job starts gets it as an argument, or runs in a copy of the context:
    `contextvars.copy_context().run(function)`.
    """
    job = _CURRENT.get()
    if job is None:
        fixes = (
            "call it in a function that a worker runs",
            "in a thread of a job: pass the object that dt.current_job() returned to the thread",
        )
        raise ConfigError(Problem(NO_CURRENT_JOB, "dt.current_job() was called outside of a job", fixes=fixes))
    return job


class running_job:  # noqa: N801 - used as a function; a generator costs several times as much
    """Make a job the current one of this context, while its function runs."""

    __slots__ = ("_job", "_mark")

    def __init__(self, job: CurrentJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._mark: Token[CurrentJob | None] = _CURRENT.set(self._job)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._mark)
