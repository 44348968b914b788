"""How does a worker call a UDF over rows: how many at a time, until when, and what if one fails?

A function of values is looped over by C code (`list.extend(map(...))`): what is done per row is the call. When one
raises, the results so far are in the list and the same iterator goes on behind it; when the time is over, the watchdog
empties the list of values, which ends the loop after the row it is in.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.converting import Converter
from dovetail.backfill.row_failures import RowFailure, failure_of
from dovetail.backfill.udf import takes_worker
from dovetail.backfill.watchdog import Soft, Watchdog
from dovetail.engines.targets import called

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from dovetail.backfill.on_error import OnError
    from dovetail.backfill.udf import Udf
    from dovetail.engines.worker import Worker

__all__ = ["Called", "Caller", "RowFailure"]

SLOTS = 16
"""Rows at once of an async function, unless somebody says how many."""
RESULT_BYTES = 64 << 20
"""A `run` ends early with that much in hand."""
TRIED = 2
"""Calls of one row before those of many, if there is a timeout: the first may load things, the next tells the pace."""
SLOWER = 10
"""So many times the seconds that its rows took before a call of many may take beside the timeout of one row."""


@dataclass(slots=True)
class Called:
    rows: int
    arrays: list[Any]
    failures: list[RowFailure]
    stopped: bool
    """By a row that failed, which is the next one."""


@dataclass(slots=True)
class Pace:
    """How many rows go into one call: few at first, then as many as take about `target_s`."""

    target_s: float = 0.1
    rows: int = 1
    most: int = 65_536
    row_s: float = 0.0
    """What one row takes, as far as is known."""
    calls: int = 0

    def next(self, left_s: float) -> int:
        """No more than fit into the time that is left."""
        return min(self.rows, max(1, int(left_s / self.row_s))) if self.row_s > 0 and left_s < 1e9 else self.rows

    def took(self, rows: int, seconds: float) -> None:
        self.calls += 1
        self.row_s = max(seconds, 1e-9) / max(1, rows)
        self.rows = max(1, min(int(self.target_s / self.row_s), max(rows, self.rows) * 4, self.most))


@dataclass(slots=True)
class Gathered:
    """What a `run` has so far: pieces of arrays, in the order of the rows."""

    outputs: int
    pieces: list[list[Any]] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    stopped: bool = False

    def add(self, arrays: list[Any], rows: int) -> None:
        self.pieces.append(arrays)
        self.rows += rows
        self.nbytes += sum(array.nbytes for array in arrays)

    def called(self, types: Sequence[Any]) -> Called:
        import pyarrow as pa

        joined = []
        for number, kind in enumerate(types):
            arrays = [piece[number] for piece in self.pieces if len(piece[number])]
            joined.append(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays) if arrays else pa.nulls(0, kind))
        return Called(self.rows, joined, self.failures, self.stopped)


class Caller:
    """One UDF in one worker. `run` may be called any number of times, by one thread."""

    def __init__(
        self,
        udf: Udf,
        types: Sequence[Any],
        on_error: OnError,
        batch_size: int | None = None,
        timeout_s: float | None = None,
        slots: int = SLOTS,
    ) -> None:
        self.udf = udf
        self.types = tuple(types)
        self.on_error = on_error
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self.slots = max(1, slots)
        self.kind = udf.kind
        names = [name for name, _ in udf.outputs()]
        self.converter = Converter(types, names)
        self.watchdog = Watchdog()
        self.pace = Pace(0.25, 16) if self.kind == "scalar" else Pace()
        self._soft = Soft()
        self._singly = 0
        """Rows to come of a call that failed, when there was no time to go through them one by one."""
        self._target: Any = None
        self._call: Callable[..., Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # life

    def setup(self, worker: Worker) -> None:
        """Raises what a user's `setup` raises."""
        target = self.udf.fn() if isinstance(self.udf.fn, type) else self.udf.fn
        setup = getattr(target, "setup", None) if self.udf.is_class else None
        if callable(setup):
            self._finished(setup(worker) if takes_worker(setup) else setup())
        self._target, self._call = target, called(target)

    def beside(self) -> Caller:
        """For another thread: the same object, with a pace and a watchdog of its own. It is not set up or torn down."""
        other = Caller(self.udf, self.types, self.on_error, self.batch_size, self.timeout_s, self.slots)
        other._target, other._call = self._target, self._call
        return other

    def teardown(self) -> None:
        """Raises what a user's `teardown` raises; twice does nothing."""
        target, self._target, self._call = self._target, None, None
        try:
            teardown = getattr(target, "teardown", None) if self.udf.is_class and target is not None else None
            if callable(teardown):
                self._finished(teardown())
        finally:
            self.watchdog.close()
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Of everything that is awaited: what a setup opened lives in it."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

    @property
    def call(self) -> Callable[..., Any]:
        if self._call is None:
            from dovetail.engines.worker import Worker

            self.setup(Worker(0, self.udf.name))
        assert self._call is not None
        return self._call

    def _finished(self, given: Any) -> None:
        if inspect.isawaitable(given):
            self.loop.run_until_complete(_awaited(given))

    # rows

    def run(self, batch: Any, until: float, condemn: Callable[[int], None]) -> Called:
        """Calls it for the rows of a pyarrow RecordBatch, whose columns are its inputs, until all are done, or
        `time.monotonic()` is `until`, or 64 MB of results are there. One call at least is made."""
        gathered = Gathered(len(self.types))
        self.watchdog.condemn = condemn
        if self.udf.is_async:
            from dovetail.backfill.calling_async import run_async

            run_async(self, batch, until, gathered)
            return gathered.called(self.types)
        do = self._some_values if self.kind == "scalar" else self._some_arrays
        if self.kind == "scalar" and self.timeout_s is not None:
            do = self._some_timed
        with self._soft if self.timeout_s is not None else Nothing():
            while gathered.rows < batch.num_rows and not gathered.stopped:
                late = time.monotonic() >= until
                if (late and gathered.rows) or gathered.nbytes >= RESULT_BYTES:
                    break
                do(batch, until, gathered, late)
        return gathered.called(self.types)

    # functions of values

    def _some_values(self, batch: Any, until: float, gathered: Gathered, late: bool) -> None:
        """A stretch of rows, as fast as Python loops."""
        start = gathered.rows
        began = time.perf_counter()
        piece = batch.slice(start, 1 if late else self._rows_next(gathered))
        try:
            columns = [column.to_pylist() for column in piece.columns]
        except Exception:  # of some row there is no such value in Python: that row's failure
            self._some_timed(batch, until, gathered, late)
            return
        results: list[Any] = []
        values = map(self.call, *columns)
        error: BaseException | None = None
        with self.watchdog.stop_at(until, columns[0]) if not late else Nothing():
            while True:
                try:
                    results.extend(values)
                    if len(results) == piece.num_rows or not columns[0]:
                        break
                    error = StopIteration("raised by the function")  # which ends the loop as if all were done
                except BaseException as raised:
                    error = raised  # also SystemExit: it is the row's
                at = len(results)
                error = self._again(batch, start + at, error, results)
                if error is not None:
                    gathered.failures.append(failure_of(start + at, error))
                    if self.on_error.then == "fail":
                        break
                    results.append(self.converter.nothing)
                    error = None
        if results:
            self.pace.took(len(results), time.perf_counter() - began)
        self._keep(results, gathered, failed=error is not None)

    def _rows_next(self, gathered: Gathered) -> int:
        """By the time they take, and few if they are large."""
        row_bytes = gathered.nbytes / gathered.rows if gathered.rows else 0
        return min(self.pace.rows, max(1, int(RESULT_BYTES / 4 / row_bytes))) if row_bytes else self.pace.rows

    def _some_timed(self, batch: Any, until: float, gathered: Gathered, late: bool) -> None:
        """The same, row by row, with each call watched."""
        start = gathered.rows
        began = time.perf_counter()
        results: list[Any] = []
        error: BaseException | None = None
        piece = batch.slice(start, 1 if late else self._rows_next(gathered))
        call, given = self.call, _values_of(piece)
        for at in range(piece.num_rows):
            if results and time.monotonic() >= until:
                break
            row = start + at
            try:
                args = self.args_of(batch, row) if given is None else given[at]
                results.append(self.timed(call, args, row, 1))
            except BaseException as raised:
                error = self._again(batch, row, raised, results)
            if error is not None:
                gathered.failures.append(failure_of(row, error))
                if self.on_error.then == "fail":
                    break
                results.append(self.converter.nothing)
                error = None
        if results:
            self.pace.took(len(results), time.perf_counter() - began)
        self._keep(results, gathered, failed=error is not None)

    def args_of(self, batch: Any, row: int) -> tuple[Any, ...]:
        """What is given to the call for one row."""
        if self.kind == "scalar":
            return tuple(column[row].as_py() for column in batch.columns)
        piece = batch.slice(row, 1)
        return tuple(piece.columns) if self.kind == "arrays" else (piece,)

    def timed(self, call: Callable[..., Any], args: tuple[Any, ...], row: int, rows: int) -> Any:
        """A call, ended when it takes too long."""
        if self.timeout_s is None:
            return call(*args)
        allowed_s = self.allowed_s(self.timeout_s, rows)
        self.watchdog.begin(row, rows, allowed_s)
        try:
            return self._soft.call(call, args, allowed_s)
        finally:
            self.watchdog.end(row)

    def allowed_s(self, timeout_s: float, rows: int) -> float:
        """One row that hangs must not wait for the time of all others; what is too slow so is tried one by one."""
        if rows == 1:
            return timeout_s
        return min(timeout_s * rows, timeout_s + SLOWER * self.pace.row_s * rows)

    def _again(self, batch: Any, row: int, error: BaseException, results: list[Any]) -> BaseException | None:
        """Tries a row again that failed, if its exception is one to try again; its result is then added. Else what it
        failed with last."""
        tried = 0
        while tried < self.on_error.retries(error):
            time.sleep(self.on_error.wait_s(tried))
            tried += 1
            try:
                results.append(self.timed(self.call, self.args_of(batch, row), row, 1))
            except BaseException as raised:
                error = raised
            else:
                return None
        return error

    def _keep(self, results: list[Any], gathered: Gathered, *, failed: bool) -> None:
        """Converts what a stretch of rows gave. `failed`: its last row did, and ends the run."""
        if not results:
            gathered.stopped |= failed
            return
        arrays, wrong = self.converter.values(results)
        start, rows = gathered.rows, len(results)
        if wrong and self.on_error.then == "fail":
            rows = min(wrong)
            gathered.failures = [failure_of(start + rows, wrong[rows])]
            failed, arrays = True, [array.slice(0, rows) for array in arrays]
        elif wrong:
            gathered.failures += [failure_of(start + index, error) for index, error in wrong.items()]
            gathered.failures.sort(key=lambda failure: failure.index)
        gathered.add(arrays, rows)
        gathered.stopped |= failed

    # functions of arrays and batches

    def rows_per_call(self, left_s: float) -> int:
        if self.timeout_s is not None and self.pace.calls < TRIED:
            return 1
        return self.batch_size or self.pace.next(left_s)

    def _some_arrays(self, batch: Any, until: float, gathered: Gathered, late: bool) -> None:  # noqa: ARG002
        """One call; if it raises, one for each of its rows."""
        start = gathered.rows
        rows = 1 if self._singly else self.rows_per_call(until - time.monotonic())
        self._singly = max(0, self._singly - 1)
        piece = batch.slice(start, rows)
        args = tuple(piece.columns) if self.kind == "arrays" else (piece,)
        began = time.perf_counter()
        try:
            arrays = self.converter.arrays(self.timed(self.call, args, start, piece.num_rows), piece.num_rows)
        except BaseException as error:
            self._one_by_one(batch, start, piece.num_rows, until, gathered, error)
        else:
            self.pace.took(piece.num_rows, time.perf_counter() - began)
            gathered.add(arrays, piece.num_rows)

    def _one_by_one(
        self, batch: Any, start: int, rows: int, until: float, gathered: Gathered, error: BaseException
    ) -> None:
        for row in range(start, start + rows):
            if row > start and time.monotonic() >= until:
                self._singly = start + rows - row
                return
            found: BaseException | None = error if rows == 1 else None
            arrays: list[Any] = []
            tried = 0
            while not arrays and (found is None or tried < self.on_error.retries(found)):
                if found is not None:
                    time.sleep(self.on_error.wait_s(tried))
                    tried += 1
                try:
                    arrays = self.converter.arrays(self.timed(self.call, self.args_of(batch, row), row, 1), 1)
                except BaseException as raised:
                    found = raised
            if not arrays and found is not None:
                gathered.failures.append(failure_of(row, found))
                if self.on_error.then == "fail":
                    gathered.stopped = True
                    return
            gathered.add(arrays or self.nulls(1), 1)

    def nulls(self, rows: int) -> list[Any]:
        import pyarrow as pa

        return [pa.nulls(rows, kind) for kind in self.types]


class Nothing:
    """A context that does nothing; contextlib's is slower than what it surrounds here."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _values_of(piece: Any) -> list[tuple[Any, ...]] | None:
    """What is given to the calls of these rows; None: some value cannot be made."""
    try:
        return list(zip(*(column.to_pylist() for column in piece.columns), strict=True))
    except Exception:
        return None


async def _awaited(given: Any) -> Any:
    return await given
