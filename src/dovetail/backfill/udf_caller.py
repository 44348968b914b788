"""Call a UDF over rows: batch size, time limit, retries, failures of single rows.

A function of values is looped over by C code (`list.extend(map(...))`), so that the only cost per row is the call. When
a call raises, the results so far are in the list and the same iterator continues with the next row. When the time is
over, the watchdog empties the list of values, which ends the loop after the current row.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.failed_rows import capture_failure
from dovetail.backfill.failure_watch import FailureWatch
from dovetail.backfill.udf import takes_worker
from dovetail.backfill.value_conversion import ValueConverter
from dovetail.engines.call_retry import retry_call
from dovetail.engines.call_timeout import SoftTimeout, Watchdog
from dovetail.engines.exception_summary import is_worker_broken
from dovetail.engines.object_loader import bound_call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from dovetail.backfill.task import FailedRow
    from dovetail.backfill.udf import Udf
    from dovetail.engines.worker_context import Worker
    from dovetail.pipeline.error_policy import ErrorPolicy

__all__ = ["BatchResult", "UdfCaller"]

DEFAULT_ASYNC_SLOTS = 16
"""Concurrent rows of an async function by default."""
MAX_RESULT_BYTES = 64 << 20
"""`run` returns early when its results reach this size."""
SINGLE_ROW_CALLS = 2
"""Calls of one row before calls of many, if there is a timeout: the first may load data, the second measures the
rate."""
MAX_SLOWDOWN = 10
"""Time limit of a call of many rows: the timeout of one row plus this multiple of its expected duration."""


@dataclass(slots=True)
class BatchResult:
    rows: int
    arrays: list[Any]
    failures: list[FailedRow]
    stopped: bool
    """Whether the next row failed and ends the run."""
    broken: tuple[int, int] | None = None
    """Rows [start, stop) that may have broken the process: their call, and all later ones of this run, failed."""


@dataclass(slots=True)
class CallSizer:
    """Rows per call: few at first, then as many as take about `target_s`."""

    target_s: float = 0.1
    rows: int = 1
    most: int = 65_536
    row_s: float = 0.0
    """Seconds per row of the last call; 0: unknown."""
    calls: int = 0

    def next_rows(self, left_s: float) -> int:
        """Rows of the next call, limited by the remaining time."""
        return min(self.rows, max(1, int(left_s / self.row_s))) if self.row_s > 0 and left_s < 1e9 else self.rows

    def record(self, rows: int, seconds: float) -> None:
        self.calls += 1
        self.row_s = max(seconds, 1e-9) / max(1, rows)
        self.rows = max(1, min(int(self.target_s / self.row_s), max(rows, self.rows) * 4, self.most))


@dataclass(slots=True)
class ResultBuffer:
    """Results of a `run` so far: arrays in the order of the rows."""

    outputs: int
    pieces: list[list[Any]] = field(default_factory=list)
    failures: list[FailedRow] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    stopped: bool = False
    broken: tuple[int, int] | None = None

    def add(self, arrays: list[Any], rows: int) -> None:
        self.pieces.append(arrays)
        self.rows += rows
        self.nbytes += sum(array.nbytes for array in arrays)

    def to_result(self, types: Sequence[Any]) -> BatchResult:
        import pyarrow as pa

        joined = []
        for number, kind in enumerate(types):
            arrays = [piece[number] for piece in self.pieces if len(piece[number])]
            joined.append(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays) if arrays else pa.nulls(0, kind))
        return BatchResult(self.rows, joined, self.failures, self.stopped, self.broken)


class UdfCaller:
    """Calls one UDF in one worker. Thread: `run` is called by one thread."""

    def __init__(
        self,
        udf: Udf,
        types: Sequence[Any],
        on_error: ErrorPolicy,
        batch_size: int | None = None,
        timeout_s: float | None = None,
        slots: int = DEFAULT_ASYNC_SLOTS,
    ) -> None:
        self.udf = udf
        self.types = tuple(types)
        self.on_error = on_error
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self.slots = max(1, slots)
        self.kind = udf.kind
        names = [name for name, _ in udf.outputs()]
        self.converter = ValueConverter(types, names)
        self.watchdog = Watchdog()
        self.pace = CallSizer(0.25, 16) if self.kind == "scalar" else CallSizer()
        self._soft_timeout = SoftTimeout()
        self.watch = FailureWatch()
        self._single_rows_left = 0
        """Remaining rows of a failed call that are to be called one by one."""
        self._repeated = -1, 0
        """Rows [start, stop) of the last call of many rows that raised in this run."""
        self._target: Any = None
        self._call: Callable[..., Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- setup and teardown

    def setup(self, worker: Worker) -> None:
        """Create the object and call its `setup`, whose exceptions propagate."""
        target = self.udf.fn() if isinstance(self.udf.fn, type) else self.udf.fn
        setup = getattr(target, "setup", None) if self.udf.is_class else None
        if callable(setup):
            self._run_if_awaitable(setup(worker) if takes_worker(setup) else setup())
        self._target, self._call = target, bound_call(target)

    def clone_for_thread(self) -> UdfCaller:
        """Caller of the same object for another thread, with its own pace and watchdog; without setup and teardown."""
        other = UdfCaller(self.udf, self.types, self.on_error, self.batch_size, self.timeout_s, self.slots)
        other._target, other._call = self._target, self._call
        other.watch = self.watch.clone_for_thread()
        return other

    def teardown(self) -> None:
        """Call the object's `teardown`, whose exceptions propagate; a second call has no effect."""
        target, self._target, self._call = self._target, None, None
        try:
            teardown = getattr(target, "teardown", None) if self.udf.is_class and target is not None else None
            if callable(teardown):
                self._run_if_awaitable(teardown())
        finally:
            self.watchdog.close()
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of all coroutines, including those of `setup`."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

    @property
    def call(self) -> Callable[..., Any]:
        if self._call is None:
            from dovetail.engines.worker_context import Worker

            self.setup(Worker(0, self.udf.name))
        assert self._call is not None
        return self._call

    def _run_if_awaitable(self, given: Any) -> None:
        if inspect.isawaitable(given):
            self.loop.run_until_complete(_await_value(given))

    # --- calls

    def run(self, batch: Any, until: float, report_hang: Callable[[int], None]) -> BatchResult:
        """Call the function for the rows of a pyarrow RecordBatch, whose columns are its inputs, until all are done,
        `time.monotonic()` reaches `until`, or there are 64 MB of results. At least one call is made. `report_hang` is
        called with a row that hangs before the process is ended."""
        gathered = ResultBuffer(len(self.types))
        self.watchdog.report_hang = report_hang
        if self.udf.is_async:
            from dovetail.backfill.async_udf_caller import run_async

            run_async(self, batch, until, gathered)
            return gathered.to_result(self.types)
        do = self._call_values if self.kind == "scalar" else self._call_arrays
        if self.kind == "scalar" and self.timeout_s is not None:
            do = self._call_values_timed
        self.watch.begin(batch)
        self._repeated = -1, 0
        with self._soft_timeout if self.timeout_s is not None else NullContext():
            while gathered.rows < batch.num_rows and not gathered.stopped:
                late = time.monotonic() >= until
                if (late and gathered.rows) or gathered.nbytes >= MAX_RESULT_BYTES:
                    break
                do(batch, until, gathered, late)
            self.watch.count_passed_before(gathered.rows)
            can_end_broken = self.on_error.then != "fail" and not gathered.stopped
            if self.watch.end(self._call_again if can_end_broken else None):
                self._mark_streak_broken(gathered)
        return gathered.to_result(self.types)

    # --- functions of values

    def _call_values(self, batch: Any, until: float, gathered: ResultBuffer, late: bool) -> None:
        """Call a range of rows in a C loop."""
        start = gathered.rows
        began = time.perf_counter()
        piece = batch.slice(start, 1 if late else self._next_row_count(gathered))
        try:
            columns = [column.to_pylist() for column in piece.columns]
        except Exception:  # a value of some row has no Python equivalent: that row fails
            self._call_values_timed(batch, until, gathered, late)
            return
        results: list[Any] = []
        values = map(self.call, *columns)
        error: BaseException | None = None
        with self.watchdog.stop_at(until, columns[0]) if not late else NullContext():
            while True:
                try:
                    results.extend(values)
                    if len(results) == piece.num_rows or not columns[0]:
                        break
                    error = StopIteration("raised by the function")  # it ended the loop as if all rows were done
                except BaseException as raised:
                    error = raised  # SystemExit too is a failure of the row
                at = len(results)
                error = self._retry_row(batch, start + at, error, results)
                if error is not None:
                    gathered.failures.append(capture_failure(start + at, error))
                    if self.on_error.then == "fail" or self._is_broken(gathered, start + at, 1, error):
                        break
                    results.append(self.converter.null_result)
                    error = None
        if results:
            self.pace.record(len(results), time.perf_counter() - began)
        self._store_results(results, gathered, failed=error is not None)

    def _next_row_count(self, gathered: ResultBuffer) -> int:
        """Rows of the next range by their duration, fewer if results are large."""
        row_bytes = gathered.nbytes / gathered.rows if gathered.rows else 0
        return min(self.pace.rows, max(1, int(MAX_RESULT_BYTES / 4 / row_bytes))) if row_bytes else self.pace.rows

    def _call_values_timed(self, batch: Any, until: float, gathered: ResultBuffer, late: bool) -> None:
        """Call a range of rows one by one, each with a time limit."""
        start = gathered.rows
        began = time.perf_counter()
        results: list[Any] = []
        error: BaseException | None = None
        piece = batch.slice(start, 1 if late else self._next_row_count(gathered))
        call, given = self.call, _rows_as_arguments(piece)
        for at in range(piece.num_rows):
            if results and time.monotonic() >= until:
                break
            row = start + at
            try:
                args = self.row_arguments(batch, row) if given is None else given[at]
                results.append(self.call_timed(call, args, row, 1))
            except BaseException as raised:
                error = self._retry_row(batch, row, raised, results)
            if error is not None:
                gathered.failures.append(capture_failure(row, error))
                if self.on_error.then == "fail" or self._is_broken(gathered, row, 1, error):
                    break
                results.append(self.converter.null_result)
                error = None
        if results:
            self.pace.record(len(results), time.perf_counter() - began)
        self._store_results(results, gathered, failed=error is not None)

    def row_arguments(self, batch: Any, row: int) -> tuple[Any, ...]:
        """Arguments of the call for one row."""
        if self.kind == "scalar":
            return tuple(column[row].as_py() for column in batch.columns)
        piece = batch.slice(row, 1)
        return tuple(piece.columns) if self.kind == "arrays" else (piece,)

    def call_timed(self, call: Callable[..., Any], args: tuple[Any, ...], row: int, rows: int) -> Any:
        """Make a call with a time limit."""
        if self.timeout_s is None:
            return call(*args)
        allowed_s = self.allowed_s(self.timeout_s, rows)
        self.watchdog.begin(row, rows, allowed_s)
        try:
            return self._soft_timeout.call(call, args, allowed_s)
        finally:
            self.watchdog.end(row)

    def allowed_s(self, timeout_s: float, rows: int) -> float:
        """Time limit of a call of `rows` rows. It grows slower than the rows, so that one hanging row is detected
        early; a call that exceeds it is repeated row by row."""
        if rows == 1:
            return timeout_s
        return min(timeout_s * rows, timeout_s + MAX_SLOWDOWN * self.pace.row_s * rows)

    def _retry_row(self, batch: Any, row: int, error: BaseException, results: list[Any]) -> BaseException | None:
        """Retry a row as the error policy allows and add its result; returns the last exception if it still fails."""
        try:
            results.append(
                retry_call(
                    self.on_error,
                    error,
                    lambda: self.call_timed(self.call, self.row_arguments(batch, row), row, 1),
                    self.breaks_worker,
                )
            )
        except BaseException as last:
            return last
        return None

    def _store_results(self, results: list[Any], gathered: ResultBuffer, *, failed: bool) -> None:
        """Convert the results of a range of rows. `failed`: the row after them failed and ends the run."""
        if not results:
            gathered.stopped |= failed
            return
        arrays, wrong = self.converter.values(results)
        start, rows = gathered.rows, len(results)
        if wrong and self.on_error.then == "fail":
            rows = min(wrong)
            gathered.failures = [capture_failure(start + rows, wrong[rows])]
            failed, arrays = True, [array.slice(0, rows) for array in arrays]
        elif wrong:
            gathered.failures += [capture_failure(start + index, error) for index, error in wrong.items()]
            gathered.failures.sort(key=lambda failure: failure.offset)
        gathered.add(arrays, rows)
        gathered.stopped |= failed

    # --- functions of arrays and batches

    def rows_per_call(self, left_s: float) -> int:
        if self.timeout_s is not None and self.pace.calls < SINGLE_ROW_CALLS:
            return 1
        return self.batch_size or self.pace.next_rows(left_s)

    def _call_arrays(self, batch: Any, until: float, gathered: ResultBuffer, late: bool) -> None:  # noqa: ARG002
        """Make one call; if it raises, one call per row."""
        start = gathered.rows
        rows = 1 if self._single_rows_left else self.rows_per_call(until - time.monotonic())
        self._single_rows_left = max(0, self._single_rows_left - 1)
        piece = batch.slice(start, rows)
        args = tuple(piece.columns) if self.kind == "arrays" else (piece,)
        began = time.perf_counter()
        try:
            arrays = self.converter.arrays(self.call_timed(self.call, args, start, piece.num_rows), piece.num_rows)
        except BaseException as error:
            if piece.num_rows > 1:
                if self._is_broken(gathered, start, piece.num_rows, error):
                    return
                self._repeated = start, start + piece.num_rows
            self._call_rows_singly(batch, start, piece.num_rows, until, gathered, error)
        else:
            self.pace.record(piece.num_rows, time.perf_counter() - began)
            gathered.add(arrays, piece.num_rows)

    def _call_rows_singly(
        self, batch: Any, start: int, rows: int, until: float, gathered: ResultBuffer, error: BaseException
    ) -> None:
        for row in range(start, start + rows):
            if row > start and time.monotonic() >= until:
                self._single_rows_left = start + rows - row
                return
            try:
                arrays = self._call_one_row(batch, row, error if rows == 1 else None)
            except BaseException as last:
                gathered.failures.append(capture_failure(row, last))
                if self.on_error.then == "fail" or self._is_broken(gathered, row, 1, last):
                    gathered.stopped = True
                    return
                arrays = self.nulls(1)
            gathered.add(arrays, 1)

    def _call_one_row(self, batch: Any, row: int, error: BaseException | None) -> list[Any]:
        """Arrays of one row, retried as the error policy allows; `error`: the row was called already and raised it."""

        def call() -> list[Any]:
            return self.converter.arrays(self.call_timed(self.call, self.row_arguments(batch, row), row, 1), 1)

        if error is None:
            try:
                return call()
            except BaseException as raised:
                error = raised
        return retry_call(self.on_error, error, call, self.breaks_worker)

    def breaks_worker(self, error: BaseException) -> bool:
        """Whether this exception means that the process is broken."""
        return is_worker_broken(error, self.udf.options.failure_rules)

    def _is_broken(self, gathered: ResultBuffer, start: int, rows: int, error: BaseException) -> bool:
        """Whether this process is broken: by the exception, or because more rows fail in succession than bad rows
        explain. Then the run ends before these rows."""
        if self.on_error.then == "fail":
            return False
        if self.breaks_worker(error):
            self.watch.count_passed_before(start)
            self.watch.count_failed(start)
            gathered.broken = (start, start + rows)
            gathered.stopped = True
        elif rows == 1 and self.watch.is_broken(start, self._call_again):
            self._mark_streak_broken(gathered)
        return gathered.broken is not None

    def _call_again(self, batch: Any, row: int) -> object:
        """Call a row that passed before. If it hangs, the row that failed last is blamed."""
        return self.call_timed(self.call, self.row_arguments(batch, row), self.watch.last_failed, 1)

    def _mark_streak_broken(self, gathered: ResultBuffer) -> None:
        """The streak of failures is the fault of this process; the first row of it may have broken the process, or any
        row of a call of many rows that raised and was repeated row by row from there on."""
        first = self.watch.first_failed
        gathered.broken = (first, self._repeated[1] if first == self._repeated[0] else first + 1)
        gathered.stopped = True

    def nulls(self, rows: int) -> list[Any]:
        import pyarrow as pa

        return [pa.nulls(rows, kind) for kind in self.types]


class NullContext:
    """A context that does nothing; contextlib's is slower than the code it would surround."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _rows_as_arguments(piece: Any) -> list[tuple[Any, ...]] | None:
    """Arguments of the calls of these rows; None: a value cannot be converted."""
    try:
        return list(zip(*(column.to_pylist() for column in piece.columns), strict=True))
    except Exception:
        return None


async def _await_value(given: Any) -> Any:
    return await given
