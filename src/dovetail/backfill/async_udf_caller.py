"""Call an async UDF with several rows in flight on one event loop.

As many lanes as slots take the next rows each, in order, on one event loop. When one fails that ends the run, those
behind it are cancelled and those before it are waited for, so that what is done is always the rows up to some place.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.failed_rows import CallFailure, capture_failure
from dovetail.engines.call_retry import retry_call_async
from dovetail.engines.call_timeout import call_with_timeout_async

if TYPE_CHECKING:
    from dovetail.backfill.udf_caller import ResultBuffer, UdfCaller

MAX_RESULT_BYTES = 64 << 20


@dataclass(slots=True)
class _AsyncBatch:
    """What is under way in one `run`."""

    batch: Any
    until: float
    next: int = 0
    done: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """First row -> rows, what they gave: values, or arrays."""
    failures: dict[int, CallFailure] = field(default_factory=dict)
    consumers: dict[asyncio.Task[None], int] = field(default_factory=dict)
    """Lane -> the first row of its call."""
    failed_row: int | None = None
    """The first row that ends the run."""
    result_bytes: int = 0


def run_async(caller: UdfCaller, batch: Any, until: float, gathered: ResultBuffer) -> None:
    _ = caller.call  # its setup is not for this loop to wait in
    loop = caller.loop
    under = _AsyncBatch(batch, until)

    def running() -> int | None:
        task = asyncio.current_task(loop)
        return under.consumers.get(task) if task is not None else None

    caller.watchdog.running = running
    loop.run_until_complete(_run_consumers(caller, under))
    _collect_results(caller, under, gathered)


async def _run_consumers(caller: UdfCaller, under: _AsyncBatch) -> None:
    lanes = [asyncio.ensure_future(_consume(caller, under)) for _ in range(min(caller.slots, under.batch.num_rows))]
    if lanes:
        await asyncio.wait(lanes)
    for lane in lanes:
        if not lane.cancelled() and lane.exception() is not None:
            raise lane.exception()  # type: ignore[misc]  # ours: those of rows are kept


async def _consume(caller: UdfCaller, under: _AsyncBatch) -> None:
    task = asyncio.current_task()
    assert task is not None
    while under.failed_row is None and under.next < under.batch.num_rows and under.result_bytes < MAX_RESULT_BYTES:
        left = under.until - time.monotonic()
        if under.next and left <= 0:
            return
        row = under.next
        rows = 1 if caller.kind == "scalar" else min(caller.rows_per_call(left), under.batch.num_rows - row)
        under.next += rows
        under.consumers[task] = row
        try:
            await _call_rows(caller, under, row, rows)
        finally:
            under.consumers.pop(task, None)


async def _call_rows(caller: UdfCaller, under: _AsyncBatch, row: int, rows: int) -> None:
    """One call; several rows are tried one by one if it raises."""
    began = time.perf_counter()
    try:
        result = await _call_once(caller, under, row, rows)
    except BaseException as error:
        if _is_cancelled(under, row):
            return
        if rows == 1:
            await _retry_row(caller, under, row, error)
            return
    else:
        caller.pace.record(rows, time.perf_counter() - began)
        _on_rows_done(caller, under, row, rows, result)
        return
    for single in range(row, row + rows):
        if _is_cancelled(under, single):
            return
        await _retry_row(caller, under, single, None)


async def _retry_row(caller: UdfCaller, under: _AsyncBatch, row: int, error: BaseException | None) -> None:
    """Call one row until it succeeds or the error policy gives up; `error`: what its first call raised."""

    async def call() -> None:
        _on_rows_done(caller, under, row, 1, await _call_once(caller, under, row, 1))

    try:
        if error is None:
            try:
                return await call()
            except BaseException as raised:
                error = raised
        await retry_call_async(caller.on_error, error, call, lambda _error: _is_cancelled(under, row))
    except BaseException as last:
        if not _is_cancelled(under, row):
            _on_row_failed(caller, under, row, last)


async def _call_once(caller: UdfCaller, under: _AsyncBatch, row: int, rows: int) -> Any:
    """What a call gives; of vectorised functions as arrays."""
    if caller.kind == "scalar" or rows == 1:
        args = caller.row_arguments(under.batch, row)
    else:
        piece = under.batch.slice(row, rows)
        args = tuple(piece.columns) if caller.kind == "arrays" else (piece,)
    if caller.timeout_s is None:
        result = await caller.call(*args)
    else:
        allowed_s = caller.allowed_s(caller.timeout_s, rows)
        caller.watchdog.begin(row, rows, allowed_s)
        try:
            result = await call_with_timeout_async(lambda: caller.call(*args), allowed_s)
        finally:
            caller.watchdog.end(row)
    return result if caller.kind == "scalar" else caller.converter.arrays(result, rows)


def _on_rows_done(caller: UdfCaller, under: _AsyncBatch, row: int, rows: int, result: Any) -> None:
    under.done[row] = (rows, result)
    scalar = caller.kind == "scalar"
    under.result_bytes += sys.getsizeof(result, 0) if scalar else sum(array.nbytes for array in result)


def _on_row_failed(caller: UdfCaller, under: _AsyncBatch, row: int, error: BaseException) -> None:
    under.failures[row] = capture_failure(row, error)
    if caller.on_error.then == "skip":
        under.done[row] = (1, caller.converter.null_result if caller.kind == "scalar" else caller.nulls(1))
    elif under.failed_row is None or row < under.failed_row:
        under.failed_row = row
        for lane, other in list(under.consumers.items()):
            if other > row:
                lane.cancel()


def _is_cancelled(under: _AsyncBatch, row: int) -> bool:
    """By us, because a row before it ends the run."""
    return under.failed_row is not None and row > under.failed_row


def _collect_results(caller: UdfCaller, under: _AsyncBatch, gathered: ResultBuffer) -> None:
    """What is done, in order; behind the row that ends the run nothing counts."""
    end = under.next if under.failed_row is None else under.failed_row
    kept = sorted(row for row in under.done if row < end)
    gathered.failures = [under.failures[row] for row in sorted(under.failures) if row <= end]
    if caller.kind == "scalar":
        caller._store_results([under.done[row][1] for row in kept], gathered, failed=under.failed_row is not None)  # noqa: SLF001
        return
    for row in kept:
        rows, arrays = under.done[row]
        gathered.add(arrays, rows)
    gathered.stopped = under.failed_row is not None
