"""How the call of a job ended: its result, or what it raised, classified. And the decoding of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.exception_summary import summarize_exception
from dovetail.errors import DovetailError
from dovetail.jobs.job import Outcome
from dovetail.jobs.payload_codec import decode_call, encode_result
from dovetail.jobs.workers.current_job import JobPreempted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.errors import Problem
    from dovetail.jobs.payload_codec import PayloadCodec

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

NULL_RESULT = b"null"


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
    return final_ending(error.problems[:1])


def final_ending(problems: Sequence[Problem]) -> Ending:
    lines = []
    for problem in problems:
        place = f"{problem.place}: " if problem.place else ""
        lines += [f"{place}{problem.message}", *(f"  fix  {fix}" for fix in problem.fix_texts)]
    return Ending(Outcome.ERROR, error="\n".join(lines), final=True)


def first_message(error: BaseException) -> str:
    if isinstance(error, DovetailError):
        return "; ".join(str(problem.message) for problem in error.problems)
    return summarize_exception(error, detailed=False).line
