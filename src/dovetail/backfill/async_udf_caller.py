"""Call an async UDF with several rows in flight on one event loop.

One consumer task per slot takes the next rows in order. When a row ends the run, calls of later rows are cancelled and
calls of earlier rows are awaited, so that the result is always a prefix of the rows. Rows count as passed or failed in
the order in which their calls end; which row left a process broken is unknown if several were in flight.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.failed_rows import capture_failure
from dovetail.engines.call_retry import retry_call_async
from dovetail.engines.call_timeout import call_with_timeout_async

if TYPE_CHECKING:
    from dovetail.backfill.task import FailedRow
    from dovetail.backfill.udf_caller import ResultBuffer, UdfCaller

MAX_RESULT_BYTES = 64 << 20


@dataclass(slots=True)
class _AsyncBatch:
    """State of one `run`."""

    batch: Any
    until: float
    next: int = 0
    done: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """First row -> number of rows and their result: a value, or arrays."""
    failures: dict[int, FailedRow] = field(default_factory=dict)
    consumers: dict[asyncio.Task[None], int] = field(default_factory=dict)
    """Consumer -> first row of its call."""
    failed_row: int | None = None
    """The first row that ends the run."""
    result_bytes: int = 0
    streak: list[int] = field(default_factory=list)
    """Rows that failed in succession."""
    suspicious: bool = False
    """Whether more rows fail in succession than bad rows explain: no more are called."""
    broken: tuple[int, int] | None = None
    """Rows [start, stop) whose calls were in flight when an exception meant a broken process; they are cancelled."""


def run_async(caller: UdfCaller, batch: Any, until: float, gathered: ResultBuffer) -> None:
    _ = caller.call  # runs setup outside of this loop
    loop = caller.loop
    state = _AsyncBatch(batch, until)

    def running() -> int | None:
        task = asyncio.current_task(loop)
        return state.consumers.get(task) if task is not None else None

    caller.watchdog.running = running
    caller.watch.begin(batch)
    loop.run_until_complete(_run_consumers(caller, state))
    gathered.broken = state.broken

    def call_again(batch: Any, row: int) -> object:
        return loop.run_until_complete(_call_row(caller, batch, row, blamed=caller.watch.last_failed))

    can_end_broken = caller.on_error.then != "fail" and state.broken is None
    if caller.watch.end(call_again if can_end_broken else None):
        gathered.broken = min(state.streak), state.next
    elif state.suspicious:
        caller.watch.clear_streak()
    _collect_results(caller, state, gathered)
    gathered.stopped |= gathered.broken is not None


async def _run_consumers(caller: UdfCaller, state: _AsyncBatch) -> None:
    consumers = [asyncio.ensure_future(_consume(caller, state)) for _ in range(min(caller.slots, state.batch.num_rows))]
    if consumers:
        await asyncio.wait(consumers)
    for consumer in consumers:
        if not consumer.cancelled() and consumer.exception() is not None:
            raise consumer.exception()  # type: ignore[misc]  # an internal error: exceptions of rows are collected


async def _consume(caller: UdfCaller, state: _AsyncBatch) -> None:
    task = asyncio.current_task()
    assert task is not None
    while not _is_ending(state) and state.next < state.batch.num_rows and state.result_bytes < MAX_RESULT_BYTES:
        left = state.until - time.monotonic()
        if state.next and left <= 0:
            return
        row = state.next
        rows = 1 if caller.kind == "scalar" else min(caller.rows_per_call(left), state.batch.num_rows - row)
        state.next += rows
        state.consumers[task] = row
        try:
            await _call_rows(caller, state, row, rows)
        finally:
            state.consumers.pop(task, None)


async def _call_rows(caller: UdfCaller, state: _AsyncBatch, row: int, rows: int) -> None:
    """Make one call; if it raises, one call per row."""
    began = time.perf_counter()
    try:
        result = await _call_once(caller, state, row, rows)
    except BaseException as error:
        if _is_cancelled(state, row):
            return
        if rows == 1:
            await _retry_row(caller, state, row, error)
            return
    else:
        caller.pace.record(rows, time.perf_counter() - began)
        _on_rows_done(caller, state, row, rows, result)
        return
    for single in range(row, row + rows):
        if _is_cancelled(state, single):
            return
        await _retry_row(caller, state, single, None)


async def _retry_row(caller: UdfCaller, state: _AsyncBatch, row: int, error: BaseException | None) -> None:
    """Call one row until it succeeds or the error policy gives up; `error`: what its first call raised."""

    async def call() -> None:
        _on_rows_done(caller, state, row, 1, await _call_once(caller, state, row, 1))

    try:
        if error is None:
            try:
                return await call()
            except BaseException as raised:
                error = raised
        await retry_call_async(
            caller.on_error, error, call, lambda raised: _is_cancelled(state, row) or caller.breaks_worker(raised)
        )
    except BaseException as last:
        if not _is_cancelled(state, row):
            _on_row_failed(caller, state, row, last)


async def _call_once(caller: UdfCaller, state: _AsyncBatch, row: int, rows: int) -> Any:
    """Result of a call; arrays for vectorised functions."""
    if caller.kind == "scalar" or rows == 1:
        result = await _call_row(caller, state.batch, row, blamed=row)
    else:
        piece = state.batch.slice(row, rows)
        args = tuple(piece.columns) if caller.kind == "arrays" else (piece,)
        result = await _call_timed(caller, args, row, rows)
    return result if caller.kind == "scalar" else caller.converter.arrays(result, rows)


async def _call_row(caller: UdfCaller, batch: Any, row: int, *, blamed: int) -> Any:
    """Call one row; if it hangs, the row `blamed` of the current run is to blame."""
    return await _call_timed(caller, caller.row_arguments(batch, row), blamed, 1)


async def _call_timed(caller: UdfCaller, args: tuple[Any, ...], row: int, rows: int) -> Any:
    if caller.timeout_s is None:
        return await caller.call(*args)
    allowed_s = caller.allowed_s(caller.timeout_s, rows)
    caller.watchdog.begin(row, rows, allowed_s)
    try:
        return await call_with_timeout_async(lambda: caller.call(*args), allowed_s)
    finally:
        caller.watchdog.end(row)


def _on_rows_done(caller: UdfCaller, state: _AsyncBatch, row: int, rows: int, result: Any) -> None:
    state.done[row] = (rows, result)
    state.streak.clear()
    caller.watch.count_passed(row, rows)
    scalar = caller.kind == "scalar"
    state.result_bytes += sys.getsizeof(result, 0) if scalar else sum(array.nbytes for array in result)


def _on_row_failed(caller: UdfCaller, state: _AsyncBatch, row: int, error: BaseException) -> None:
    state.failures[row] = capture_failure(row, error)
    if caller.on_error.then == "skip":
        state.done[row] = (1, caller.converter.null_result if caller.kind == "scalar" else caller.nulls(1))
        if caller.breaks_worker(error):
            caller.watch.count_failed(row)
            state.broken = min(row, *state.consumers.values()), state.next
            for consumer, other in list(state.consumers.items()):
                if other != row:
                    consumer.cancel()
            return
        state.streak.append(row)
        caller.watch.count_failed(row)
        state.suspicious = state.suspicious or caller.watch.is_suspicious
    elif state.failed_row is None or row < state.failed_row:
        state.failed_row = row
        for consumer, other in list(state.consumers.items()):
            if other > row:
                consumer.cancel()


def _is_ending(state: _AsyncBatch) -> bool:
    return state.failed_row is not None or state.suspicious or state.broken is not None


def _is_cancelled(state: _AsyncBatch, row: int) -> bool:
    """Whether the row was cancelled because an earlier row ends the run, or because the process is broken."""
    return state.broken is not None or (state.failed_row is not None and row > state.failed_row)


def _collect_results(caller: UdfCaller, state: _AsyncBatch, gathered: ResultBuffer) -> None:
    """Collect the results in order, up to the row that ends the run."""
    end = state.next if state.failed_row is None else state.failed_row
    kept = sorted(row for row in state.done if row < end)
    gathered.failures = [state.failures[row] for row in sorted(state.failures) if row <= end]
    if caller.kind == "scalar":
        caller._store_results([state.done[row][1] for row in kept], gathered, failed=state.failed_row is not None)  # noqa: SLF001
        return
    for row in kept:
        rows, arrays = state.done[row]
        gathered.add(arrays, rows)
    gathered.stopped = state.failed_row is not None
