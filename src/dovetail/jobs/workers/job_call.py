"""The call of a job's function, or of the function of a batch of jobs (`batch_call.py`)."""

from __future__ import annotations

from inspect import CO_COROUTINE
from typing import TYPE_CHECKING, Any

from dovetail.jobs.payload_codec import NO_CALL
from dovetail.jobs.workers.batch_call import BATCH, BatchCall
from dovetail.jobs.workers.current_job import running_job
from dovetail.jobs.workers.job_ending import (
    NO_RESULT,
    Ending,
    decode_arguments,
    failure_ending,
    final_ending,
    result_ending,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from dovetail.errors import Problem
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.payload_codec import PayloadCodec
    from dovetail.jobs.workers.current_job import CurrentJob


class JobStopped(BaseException):
    """Raised in a job process that is asked to end: timeout, cancellation, or the end of its worker."""


class FinalError(Exception):
    """Error after which a retry is pointless. Raised by job functions of Dovetail."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem.message) for problem in problems))
        self.problems = tuple(problems)


def call_job(function: JobFunction, payload: bytes, encoding: str, codec: PayloadCodec, job: CurrentJob) -> Ending:
    """Run a job, or a batch, in this thread. Only `JobStopped` is raised."""
    if encoding == BATCH:
        return _call_batch(function, payload, codec, job)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if payload != NO_CALL:
        arguments = decode_arguments(payload, encoding, codec)
        if isinstance(arguments, Ending):
            return arguments
        args, kwargs = arguments
    try:
        with running_job(job):
            value = function.function(*args, **kwargs)
            if function.function.__code__.co_flags & CO_COROUTINE:
                value = run_coroutine(value)
    except JobStopped:
        raise
    except FinalError as error:
        return final_ending(error.problems)
    except BaseException as error:
        return failure_ending(error)
    return NO_RESULT if value is None else result_ending(value, codec.of_job(job.id))


async def call_async_job(
    function: JobFunction, payload: bytes, encoding: str, codec: PayloadCodec, job: CurrentJob
) -> Ending:
    """Run a job, or a batch, in this event loop. `CancelledError` is raised if the task is cancelled."""
    import asyncio

    if encoding == BATCH:
        return await _call_async_batch(function, payload, codec, job)
    arguments = decode_arguments(payload, encoding, codec)
    if isinstance(arguments, Ending):
        return arguments
    args, kwargs = arguments
    try:
        with running_job(job):
            value = await function.function(*args, **kwargs)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return failure_ending(error)
    return result_ending(value, codec.of_job(job.id))


def _call_batch(function: JobFunction, payload: bytes, codec: PayloadCodec, job: CurrentJob) -> Ending:
    """Only `JobStopped` is raised."""
    batch = BatchCall(function, payload, codec)
    while group := batch.next_group():
        try:
            with running_job(job):
                values = function.function(**batch.keywords(group))
                if function.is_async:
                    values = run_coroutine(values)
        except JobStopped:
            raise
        except BaseException as error:
            batch.on_error(group, error, can_split=not job.cancelled)
        else:
            batch.on_values(group, values)
    return batch.ending()


async def _call_async_batch(function: JobFunction, payload: bytes, codec: PayloadCodec, job: CurrentJob) -> Ending:
    import asyncio

    batch = BatchCall(function, payload, codec)
    while group := batch.next_group():
        try:
            with running_job(job):
                values = await function.function(**batch.keywords(group))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            batch.on_error(group, error, can_split=not job.cancelled)
        else:
            batch.on_values(group, values)
    return batch.ending()


def run_coroutine(awaitable: Awaitable[Any]) -> Any:
    """The value of a coroutine, in an event loop of its own."""
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())
