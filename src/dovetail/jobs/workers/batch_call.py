"""The call of a function for the jobs of a batch, and its parts when it raises.

If a call for several jobs raises, it is repeated for its halves, down to single jobs. So a job that makes the call
raise fails alone, after about `2 x log2(jobs)` more calls.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.errors import short_repr
from dovetail.jobs.job import Outcome
from dovetail.jobs.workers.job_ending import NO_RESULT, Ending, decode_arguments, failure_ending, result_ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.payload_codec import PayloadCodec

BATCH = "batch"
"""Encoding of the payload and the result of a batch."""


class BatchItem(NamedTuple):
    """The arguments of a job in a batch."""

    id: str
    payload: bytes
    encoding: str


def pack_items(items: Sequence[BatchItem]) -> bytes:
    return marshal.dumps([tuple(item) for item in items])


def unpack_items(data: bytes) -> list[BatchItem]:
    return [BatchItem(*item) for item in marshal.loads(data)]  # noqa: S302 - from our own process


def endings_of(ending: Ending) -> list[Ending]:
    """How the jobs of a call have ended; of a call for one job, that itself."""
    if ending.encoding != BATCH or ending.result is None:
        return [ending]
    return [Ending(Outcome(item[0]), *item[1:]) for item in marshal.loads(ending.result)]  # noqa: S302


class BatchCall:
    """State of the calls for a batch:

    while group := batch.next_group():
        call the function with `batch.keywords(group)`, then `batch.on_values` or `batch.on_error`
    """

    def __init__(self, function: JobFunction, payload: bytes, codec: PayloadCodec) -> None:
        declared = function.defaults.batch
        assert declared is not None
        self._key = declared.key
        self._codec = codec
        self._name = function.function.__name__
        self._items = unpack_items(payload)
        self._arguments: list[dict[str, Any]] = []
        self._endings: list[Ending | None] = [None] * len(self._items)
        for place, item in enumerate(self._items):
            found = decode_arguments(item.payload, item.encoding, codec)
            try:
                self._arguments.append({} if isinstance(found, Ending) else function.arguments(*found))
            except TypeError as error:  # submitted for another version of the function
                self._arguments.append({})
                found = failure_ending(error)
            self._endings[place] = found if isinstance(found, Ending) else None
        fitting = [place for place, ending in enumerate(self._endings) if ending is None]
        self._groups = [fitting] if fitting else []

    def next_group(self) -> list[int] | None:
        """Jobs to call the function for, by their places in the batch; None: all have ended."""
        return self._groups.pop() if self._groups else None

    def keywords(self, group: Sequence[int]) -> dict[str, Any]:
        """The arguments of a call."""
        first = self._arguments[group[0]]
        return {
            name: value if name == self._key else [self._arguments[place][name] for place in group]
            for name, value in first.items()
        }

    def on_values(self, group: Sequence[int], values: object) -> None:
        """The function has returned. An exception in the place of a result is the failure of that job."""
        if not isinstance(values, list | tuple) or len(values) != len(group):
            what = f"{len(values)} results" if isinstance(values, list | tuple) else short_repr(values)
            message = f"{self._name}() returned {what} for {len(group)} jobs: a list with a result for each is needed"
            for place in group:
                self._endings[place] = Ending(Outcome.ERROR, error=message, final=True)
            return
        for place, value in zip(group, values, strict=True):
            if isinstance(value, BaseException):
                self._endings[place] = failure_ending(value)
            else:
                codec = self._codec.of_job(self._items[place].id)
                self._endings[place] = NO_RESULT if value is None else result_ending(value, codec)

    def on_error(self, group: Sequence[int], error: BaseException, *, can_split: bool) -> None:
        """The function has raised."""
        if len(group) > 1 and can_split:
            middle = len(group) // 2
            self._groups += [list(group[middle:]), list(group[:middle])]
            return
        for place in group:
            self._endings[place] = failure_ending(error)

    def ending(self) -> Ending:
        """The ends of all jobs, as the end of one call."""
        found = [ending for ending in self._endings if ending is not None]
        assert len(found) == len(self._items), "a job of the batch has not ended"
        rows = [(str.__str__(ending.outcome), *ending[1:]) for ending in found]
        return Ending(Outcome.SUCCEEDED, marshal.dumps(rows), BATCH)
