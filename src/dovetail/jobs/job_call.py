"""The call of a job's function: decode the arguments, call, encode the result, and classify what it raised."""

from __future__ import annotations

from inspect import CO_COROUTINE
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.exception_summary import summarize_exception
from dovetail.errors import DovetailError
from dovetail.jobs.current_job import JobPreempted, running_job
from dovetail.jobs.job import Outcome
from dovetail.jobs.payload_codec import NO_CALL, decode_call, encode_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from dovetail.errors import Problem
    from dovetail.jobs.current_job import CurrentJob
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.payload_codec import PayloadCodec

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

NULL_RESULT = b"null"


class JobStopped(BaseException):
    """The job process was asked to end: timeout, cancellation, or the end of its worker."""


class FinalError(Exception):
    """Raised by a job function of Dovetail: another attempt would end in the same way."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem.message) for problem in problems))
        self.problems = tuple(problems)


class Ending(NamedTuple):
    """How the call of a job ended."""

    outcome: Outcome
    result: bytes | None = None
    encoding: str = ""
    error: str = ""
    traceback: str = ""
    final: bool = False
    """Another attempt would end in the same way."""
    on_gpu: bool = False
    """It was the memory of a GPU that ran out."""


NO_RESULT = Ending(Outcome.SUCCEEDED, NULL_RESULT, "json")


def call_job(function: JobFunction, payload: bytes, encoding: str, codec: PayloadCodec, job: CurrentJob) -> Ending:
    """Run a job in this thread. Only `JobStopped` is raised."""
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
        return _final_ending(error.problems)
    except BaseException as error:
        return failure_ending(error)
    return NO_RESULT if value is None else result_ending(value, codec.of_job(job.id))


async def call_async_job(
    function: JobFunction, payload: bytes, encoding: str, codec: PayloadCodec, job: CurrentJob
) -> Ending:
    """Run a job in this event loop. `CancelledError` is raised if the task is cancelled."""
    import asyncio

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


def run_coroutine(awaitable: Awaitable[Any]) -> Any:
    """The value of a coroutine, in an event loop of its own."""
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def decode_arguments(payload: bytes, encoding: str, codec: PayloadCodec) -> Arguments | Ending:
    try:
        return decode_call(payload, encoding, codec)
    except Exception as error:
        return Ending(Outcome.ERROR, error=f"its arguments cannot be decoded: {first_message(error)}", final=True)


def result_ending(value: object, codec: PayloadCodec) -> Ending:
    try:
        result, encoding = encode_result(value, codec)
    except Exception as error:
        # the same function returns the same type the next time
        return Ending(Outcome.ERROR, error=f"its result cannot be kept: {first_message(error)}", final=True)
    return Ending(Outcome.SUCCEEDED, result, encoding)


def failure_ending(error: BaseException) -> Ending:
    """The end of an attempt whose function raised."""
    if isinstance(error, JobPreempted):
        return Ending(Outcome.PREEMPTED)
    summary = summarize_exception(error)
    outcome = Outcome.OUT_OF_MEMORY if summary.out_of_memory else Outcome.ERROR
    return Ending(outcome, error=summary.line, traceback=summary.detail, on_gpu=summary.on_gpu)


def refusal_ending(error: DovetailError) -> Ending:
    """The end of an attempt whose function may not run here."""
    return _final_ending(error.problems[:1])


def _final_ending(problems: Sequence[Problem]) -> Ending:
    lines = []
    for problem in problems:
        place = f"{problem.place}: " if problem.place else ""
        lines += [f"{place}{problem.message}", *(f"  fix  {fix}" for fix in problem.fix_texts)]
    return Ending(Outcome.ERROR, error="\n".join(lines), final=True)


def first_message(error: BaseException) -> str:
    if isinstance(error, DovetailError):
        return "; ".join(str(problem.message) for problem in error.problems)
    return summarize_exception(error, detailed=False).line
