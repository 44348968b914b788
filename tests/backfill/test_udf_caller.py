"""Calls of functions over rows: results like those of a plain loop, failures, timeouts and invalid results."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import threading
import time
from datetime import datetime  # noqa: TC003 - annotations of functions are read
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.backfill.udf import ErrorPolicy, udf
from dovetail.backfill.udf_caller import BatchResult, CallSizer, UdfCaller
from dovetail.engines.worker_context import Worker
from dovetail.streaming.broken_worker_rule import MIN_LATER_STREAK
from runtime.aids import Script

if TYPE_CHECKING:
    from collections.abc import Callable

FAIL, SKIP = ErrorPolicy("fail"), ErrorPolicy("skip")
FOREVER = math.inf


@pytest.fixture(autouse=True)
def _no_watchdog_ends_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the watchdog: a slow machine must not fail the test."""
    monkeypatch.setattr("dovetail.control.interruption_grace.MIN_INTERRUPTION_GRACE_S", 600.0)


def replace_clock(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """Replace functions of the clock, only in the modules that call user functions."""
    known = {"monotonic": time.monotonic, "perf_counter": time.perf_counter, "sleep": time.sleep}
    for name in ("backfill.udf_caller", "backfill.async_udf_caller", "engines.call_retry"):
        monkeypatch.setattr(f"dovetail.{name}.time", SimpleNamespace(**known | replaced))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a microsecond, so that pauses of the machine do not change the measured pace."""
    ticks = count()
    replace_clock(monkeypatch, perf_counter=lambda: next(ticks) / 1e6)


def fail_on_fatal_row(index: int) -> None:
    raise AssertionError(f"row {index} was reported as fatal")


def caller_of(
    fn: Any,
    on_error: ErrorPolicy = FAIL,
    types: Any = None,
    batch_size: int | None = None,
    timeout_s: float | None = None,
    slots: int = 16,
    **options: Any,
) -> UdfCaller:
    made = udf(fn, **options)
    kinds = types or [kind for _, kind in made.outputs()]
    return UdfCaller(made, kinds, on_error, batch_size, timeout_s, slots)


def numbers(count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(count), pa.int64())})


def run(caller: UdfCaller, batch: pa.RecordBatch, until: float = FOREVER) -> BatchResult:
    try:
        return caller.run(batch, until, fail_on_fatal_row)
    finally:
        caller.teardown()


def failure_offsets(found: BatchResult) -> list[tuple[int, str]]:
    return [(failure.offset, failure.error_type) for failure in found.failures]


# --- plain rows


def test_none_is_passed_and_stored_as_null() -> None:
    seen: list[Any] = []

    def odd(n: int | None, text: str) -> str | None:
        seen.append((n, text))
        return text * n if n else None

    batch = pa.record_batch({"n": pa.array([2, None, 0]), "text": pa.array(["a", "b", None])})
    found = run(caller_of(odd), batch)
    assert seen == [(2, "a"), (None, "b"), (0, None)]
    assert found.arrays[0].to_pylist() == ["aa", None, None]
    assert (found.rows, found.failures, found.stopped) == (3, [], False)


def test_no_rows_are_no_calls() -> None:
    found = run(caller_of(lambda n: 1 / 0, data_type="int8"), numbers(0))
    assert (found.rows, found.arrays[0].type, len(found.arrays[0])) == (0, pa.int8(), 0)


class Pair(NamedTuple):
    word: str | None
    count: int  # type: ignore[assignment]


def test_a_named_tuple_fills_several_columns() -> None:
    def pair(n: int) -> Pair | None:
        return Pair(str(n), n) if n % 3 else None

    found = run(caller_of(pair, data_type={"count": "int8"}), numbers(5))
    assert [array.to_pylist() for array in found.arrays] == [[None, "1", "2", None, "4"], [None, 1, 2, None, 4]]
    assert found.arrays[1].type == pa.int8()

    def wrong(n: int) -> Pair:
        return Pair("a", 300) if n == 1 else ("a",) if n == 2 else "ab" if n == 3 else Pair("b", n)  # type: ignore[return-value]

    found = run(caller_of(wrong, SKIP, data_type={"count": "int8"}), numbers(5))
    assert failure_offsets(found) == [(1, "ValueError"), (2, "ValueError"), (3, "TypeError")]
    assert "300" in found.failures[0].message
    assert "int8" in found.failures[0].message
    assert "returned 1 values, not 2 (word, count)" in found.failures[1].message
    assert [array.to_pylist() for array in found.arrays] == [["b", None, None, None, "b"], [0, None, None, None, 4]]


class One(NamedTuple):
    only: int


def test_a_named_tuple_of_one_field_is_opened() -> None:
    def one(n: int) -> One:
        return One(n + 1)

    assert run(caller_of(one), numbers(2)).arrays[0].to_pylist() == [1, 2]


def test_structures_and_numpy_values_are_converted() -> None:
    def vector(n: int) -> list[float]:
        return np.array([n, n + 0.5], np.float32)  # type: ignore[return-value]

    def matrix(n: int) -> list[list[float]]:
        return np.full((2, 2), n)  # type: ignore[return-value]

    def struct(n: int) -> list[Pair]:
        return [Pair("a", n)]

    assert run(caller_of(vector), numbers(2)).arrays[0].to_pylist() == [[0, 0.5], [1, 1.5]]
    assert run(caller_of(vector, types=[pa.list_(pa.float32(), 2)]), numbers(1)).arrays[0].to_pylist() == [[0, 0.5]]
    assert run(caller_of(matrix), numbers(2)).arrays[0].to_pylist()[1] == [[1, 1], [1, 1]]
    assert run(caller_of(struct), numbers(1)).arrays[0].to_pylist() == [[{"word": "a", "count": 0}]]

    def scalar(n: int) -> int:
        return np.int16(n)  # type: ignore[return-value]

    assert run(caller_of(scalar), numbers(2)).arrays[0].to_pylist() == [0, 1]


def test_a_value_that_does_not_fit_is_a_failure_of_its_row() -> None:
    def large(n: int) -> int:
        return 300 if n == 2 else "x" if n == 4 else n  # type: ignore[return-value]

    found = run(caller_of(large, SKIP, [pa.int8()]), numbers(6))
    assert found.arrays[0].to_pylist() == [0, 1, None, 3, None, 5]
    assert failure_offsets(found) == [(2, "ValueError"), (4, "TypeError")]
    assert "returned 300 of type int, which does not fit int8" in found.failures[0].message
    found = run(caller_of(large, FAIL, [pa.int8()]), numbers(6))
    assert (found.rows, found.stopped, failure_offsets(found)) == (2, True, [(2, "ValueError")])
    assert found.arrays[0].to_pylist() == [0, 1]


# --- failures


class OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def deep(n: int) -> int:
    if n == 3:
        raise KeyError("no such thing")
    if n == 5:
        raise OwnError(1, 2)
    return n * 2


def test_a_failure_has_the_users_traceback_and_exception() -> None:
    def outer(n: int) -> int:
        return deep(n)

    found = run(caller_of(outer, SKIP), numbers(7))
    assert found.arrays[0].to_pylist() == [0, 2, 4, None, 8, None, 12]
    assert failure_offsets(found) == [(3, "KeyError"), (5, "OwnError")]
    first, second = found.failures
    assert isinstance(cloudpickle.loads(first.exception), KeyError)
    assert first.traceback.splitlines()[1].strip().startswith(f'File "{__file__}"')
    assert "in outer" in first.traceback
    assert "in deep" in first.traceback
    assert "udf_caller.py" not in first.traceback.replace("test_udf_caller.py", "")
    kind, message, has = cloudpickle.loads(second.exception)  # it does not unpickle itself
    assert (kind.__name__, message, has) == ("OwnError", second.message, {}) == ("OwnError", "1 and 2", {})


def test_a_long_traceback_is_cut() -> None:
    def long(n: int) -> int:
        raise ValueError("x" * 100_000)

    (failure,) = run(caller_of(long), numbers(1)).failures
    assert len(failure.traceback) <= 4000
    assert len(failure.message) <= 2000


def test_fail_stops_at_the_first_row_that_fails() -> None:
    found = run(caller_of(deep, FAIL), numbers(10))
    assert (found.rows, found.stopped, failure_offsets(found)) == (3, True, [(3, "KeyError")])
    assert found.arrays[0].to_pylist() == [0, 2, 4]


@pytest.mark.parametrize(
    "raised", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, asyncio.CancelledError]
)
@pytest.mark.parametrize("how", ["scalar", "timed", "arrays", "async"])
def test_exceptions_that_end_processes_and_loops_are_failures_of_the_row(how: str, raised: type[BaseException]) -> None:
    def scalar(n: int) -> int:
        if n == 2:
            raise raised
        return n

    def arrays(n: pa.Array) -> pa.Int64Array:
        if 2 in n.to_pylist():
            raise raised
        return n

    async def awaited(n: int) -> int:
        await asyncio.sleep(0)
        return scalar(n)

    fn = {"scalar": scalar, "timed": scalar, "arrays": arrays, "async": awaited}[how]
    found = run(caller_of(fn, SKIP, timeout_s=60 if how == "timed" else None), numbers(5))
    assert found.arrays[0].to_pylist() == [0, 1, None, 3, 4]
    expected = "RuntimeError" if (how, raised) == ("async", StopIteration) else raised.__name__
    assert failure_offsets(found) == [(2, expected)]


@pytest.mark.parametrize("how", ["scalar", "arrays", "async"])
def test_a_row_is_tried_again_with_growing_waits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    tries: dict[int, int] = {}

    def scalar(n: int) -> int:
        tries[n] = tries.get(n, 0) + 1
        if n == 1 and tries[n] <= 2:
            raise ConnectionResetError("again")
        if n == 2:
            raise ValueError("never")
        if n == 3:
            raise ConnectionError("always")
        return n

    def arrays(n: pa.Array) -> list[int]:
        return [scalar(one) for one in n.to_pylist()]

    async def awaited(n: int) -> int:
        return scalar(n)

    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    replace_clock(monkeypatch, sleep=slept.append)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    how_to = ErrorPolicy("skip", ("ConnectionError",), times=2, backoff_s=0.5)
    fn = {"scalar": scalar, "arrays": arrays, "async": awaited}[how]
    found = run(caller_of(fn, how_to, batch_size=1, slots=1), numbers(5))
    assert found.arrays[0].to_pylist() == [0, 1, None, None, 4]
    assert failure_offsets(found) == [(2, "ValueError"), (3, "ConnectionError")]
    assert slept == [0.5, 1.0, 0.5, 1.0]
    assert tries == {0: 1, 1: 3, 2: 1, 3: 3, 4: 1}


@pytest.mark.parametrize("how", ["scalar", "timed", "async"])
def test_a_value_that_python_does_not_have_is_a_failure_of_its_row(how: str) -> None:
    def year(n: int, when: datetime) -> int:
        return when.year + n

    async def awaited(n: int, when: datetime) -> int:
        return when.year + n

    late = 253_402_300_800_000_000  # the year 10000
    times = pa.array([0] * 7 + [late] + [0] * 4, pa.timestamp("us"))
    batch = pa.record_batch({"n": pa.array(range(12)), "when": times})
    fn, timeout_s = awaited if how == "async" else year, 60 if how == "timed" else None
    found = run(caller_of(fn, SKIP, timeout_s=timeout_s), batch)
    assert found.arrays[0].to_pylist() == [None if n == 7 else 1970 + n for n in range(12)]
    assert failure_offsets(found) == [(7, "OverflowError")]
    found = run(caller_of(fn, FAIL, timeout_s=timeout_s), batch)
    assert (found.rows, found.stopped, failure_offsets(found)) == (7, True, [(7, "OverflowError")])


# --- workers in which all rows fail


class AcceleratorError(RuntimeError):
    """Stands in for torch.AcceleratorError."""


class FailsAfter:
    """Its object fails from row 10 on, whatever the row. `calls`: all rows in the order of their calls."""

    def __init__(self) -> None:
        self.broken = False
        self.calls: list[int] = []

    def __call__(self, n: int) -> int:
        self.calls.append(n)
        self.broken = self.broken or n == 10
        if self.broken:
            raise ValueError("no result")
        return n

    def arrays(self, n: pa.Array) -> pa.Array:
        return pa.array([self(value) for value in n.to_pylist()], pa.int64())

    async def awaited(self, n: int) -> int:
        return self(n)


def single_rows(caller: UdfCaller, first: int, stop: int) -> list[BatchResult]:
    """One run per row, as when the time of each run is over at once."""
    batches = [pa.record_batch({"n": pa.array([row], pa.int64())}) for row in range(first, stop)]
    return [caller.run(batch, 0.0, fail_on_fatal_row) for batch in batches]


@pytest.mark.parametrize("how", ["__call__", "arrays", "awaited"])
def test_a_run_that_ends_with_a_failed_row_shows_a_broken_worker(how: str) -> None:
    caller = caller_of(getattr(FailsAfter(), how), SKIP, data_type="int64", input_columns=["n"])
    assert [found.broken for found in single_rows(caller, 0, 10)] == [None] * 10
    assert [found.broken for found in single_rows(caller, 10, 13)] == [(0, 1)] * 3
    caller.teardown()


@pytest.mark.parametrize("how", ["__call__", "arrays", "awaited"])
def test_a_worker_in_which_no_row_has_passed_is_replaced_unless_others_were_before(how: str) -> None:
    for replaced, broken in [(0, True), (2, True), (3, False)]:
        caller = caller_of(getattr(FailsAfter(), how), SKIP, data_type="int64", input_columns=["n"])
        caller.watch.replaced_before = replaced
        assert [found.broken is not None for found in single_rows(caller, 10, 12)] == [broken] * 2
        assert all(found.broken is not None for found in single_rows(caller, 12, 12 + MIN_LATER_STREAK)[-2:])
        caller.teardown()


def test_all_rows_of_a_call_that_broke_its_worker_are_suspects() -> None:
    """Its rows are called again one by one: the first one that fails is not the one that broke it."""
    caller = caller_of(FailsAfter().arrays, SKIP, batch_size=8, data_type="int64", input_columns=["n"])
    assert run(caller, numbers(16)).broken == (8, 16)


def test_all_rows_in_flight_are_suspects() -> None:
    async def breaks(n: int) -> int:
        await asyncio.sleep(0.0 if n == 3 else 0.001)
        if n > 2:
            raise AcceleratorError("CUDA error")
        return n

    found = run(caller_of(breaks, SKIP, slots=4), numbers(100))
    assert found.broken == (0, 4)


@pytest.mark.parametrize("is_async", [True, False])
def test_on_failure_names_the_exceptions_that_mean_a_broken_process(is_async: bool) -> None:
    def at_three(n: int) -> int:
        if n == 3:
            raise AcceleratorError("engine lost")
        return n

    async def awaited(n: int) -> int:
        return at_three(n)

    for rules, broken in [({}, True), ({"RuntimeError": "retry"}, False), ({AcceleratorError: "restart"}, True)]:
        found = run(caller_of(awaited if is_async else at_three, SKIP, on_failure=rules), numbers(5))
        assert (found.broken is not None) == broken
    plain = run(caller_of(lambda n: 1 // (n - 3), SKIP, on_failure="restart", data_type="int64"), numbers(5))
    assert plain.broken == (3, 4)


def test_a_bad_row_in_a_slot_without_others_is_found_by_a_row_that_passed_in_another_slot() -> None:
    def odd(n: int) -> int:
        return 10 // (n % 2)

    caller = caller_of(odd, SKIP)
    single_rows(caller, 1, 2)
    other = caller.clone_for_thread()
    assert [found.broken for found in single_rows(other, 2, 3)] == [None]
    other.teardown()
    caller.teardown()


def test_a_bad_row_at_the_end_of_a_run_is_found_by_one_call_of_a_row_that_passed() -> None:
    calls: list[int] = []

    def odd(n: int) -> int:
        calls.append(n)
        return 10 // (n % 2)

    caller = caller_of(odd, SKIP)
    assert all(found.broken is None for found in single_rows(caller, 1, 5))
    assert calls == [1, 2, 1, 3, 4, 3]
    caller.teardown()


def test_a_function_that_fails_by_chance_breaks_no_worker() -> None:
    chance = random.Random(2)  # the first row passes

    def flaky(n: int) -> int:
        if chance.random() < 0.2:
            raise ValueError("by chance")
        return n

    caller = caller_of(flaky, SKIP)
    assert all(found.broken is None for found in single_rows(caller, 0, 500))
    caller.teardown()


# --- vectorised


@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "made",
    [
        lambda n: pc.add(n, 1),
        lambda n: pa.chunked_array([pc.add(n, 1)]),
        lambda n: n.to_numpy() + 1,
        lambda n: [one + 1 for one in n.to_pylist()],
        lambda n: pc.add(n, 1).cast(pa.int8()),
    ],
)
def test_results_may_be_any_kind_of_array(made: Callable[[Any], Any], batch_size: int | None) -> None:
    def arrays(n: pa.Array) -> pa.Int64Array:
        return made(n)

    def batches(batch: pa.RecordBatch) -> pa.Int64Array:
        return made(batch.column("n"))

    for fn in (arrays, batches):
        found = run(caller_of(fn, batch_size=batch_size), numbers(10))
        assert found.arrays[0].to_pylist() == list(range(1, 11))
        assert found.arrays[0].type == pa.int64()


@pytest.mark.parametrize(
    ("wrong", "kind", "expected_message"),
    [
        (lambda n: n.slice(1), "ValueError", "returned 0 values for 1 row"),
        (lambda n: [*n.to_pylist(), 1], "ValueError", "returned 2 values for 1 row"),
        (lambda n: None, "TypeError", "returned NoneType, not an Arrow array"),
        (lambda n: "a", "TypeError", "returned str, not"),
        (lambda n: 3, "TypeError", "returned int, not"),
        (lambda n: pa.array(["a"] * len(n)), "TypeError", "returned string, but the column is int8"),
        (lambda n: pa.array([300] * len(n)), "ValueError", "does not fit int8"),
        (lambda n: np.full(len(n), 300), "ValueError", "does not fit int8"),
        (lambda n: np.float64(3), "ValueError", "returned 0 values for 1 row"),
    ],
)
def test_a_wrong_result_is_found_row_by_row(wrong: Callable[[Any], Any], kind: str, expected_message: str) -> None:
    def arrays(n: pa.Array) -> pa.Int8Array:
        return wrong(n) if 3 in n.to_pylist() else n.cast(pa.int8())

    found = run(caller_of(arrays, SKIP, batch_size=4), numbers(6))
    assert found.arrays[0].to_pylist() == [0, 1, 2, None, 4, 5]
    assert failure_offsets(found) == [(3, kind)]
    assert expected_message in found.failures[0].message


def test_arrays_fill_several_columns() -> None:
    class Both(NamedTuple):
        low: pa.Int64Array
        high: pa.Array

    def both(n: pa.Array) -> Both:
        return Both(n, pc.multiply(n, 10))

    found = run(caller_of(both, data_type={"low": "int64", "high": "int32"}), numbers(5))
    assert [array.to_pylist() for array in found.arrays] == [[0, 1, 2, 3, 4], [0, 10, 20, 30, 40]]
    assert found.arrays[1].type == pa.int32()


@pytest.mark.processes
@pytest.mark.usefixtures("steady")
def test_calls_begin_with_one_row_and_grow_and_the_size_is_kept() -> None:
    sizes: list[int] = []

    def arrays(n: pa.Array) -> pa.Int64Array:
        sizes.append(len(n))
        return n

    caller = caller_of(arrays)
    caller.run(numbers(100), FOREVER, fail_on_fatal_row)
    assert sizes[0] == 1
    assert all(two <= 4 * one for one, two in pairwise(sizes))
    assert len(sizes) < 20
    last = max(sizes)
    sizes.clear()
    caller.run(numbers(100), FOREVER, fail_on_fatal_row)
    assert sizes[0] >= last
    caller.teardown()


def test_the_pace_goes_towards_the_time_of_a_call() -> None:
    pace = CallSizer()
    for _ in range(20):
        pace.record(pace.rows, pace.rows * 0.001)
    assert pace.rows == 100
    assert pace.next_rows(0.01) == 10
    assert pace.next_rows(0.0) == 1
    pace.record(100, 10.0)
    assert pace.rows == 1
    for _ in range(20):
        pace.record(pace.rows, 1e-9)
    assert pace.rows == 65_536


# --- time


@pytest.mark.parametrize("how", ["scalar", "timed", "arrays", "async"])
def test_one_call_is_made_even_when_the_time_is_over(how: str) -> None:
    def scalar(n: int) -> int:
        return n

    def arrays(n: pa.Array) -> pa.Int64Array:
        return n

    async def awaited(n: int) -> int:
        return n

    fn = {"scalar": scalar, "timed": scalar, "arrays": arrays, "async": awaited}[how]
    found = run(caller_of(fn, timeout_s=60 if how == "timed" else None, slots=1), numbers(5), time.monotonic() - 1)
    assert (found.rows, found.stopped) == (1, False)
    assert found.arrays[0].to_pylist() == [0]


@pytest.mark.processes
def test_a_loop_over_rows_stops_after_the_row_in_which_its_time_ends() -> None:
    """Quick rows make the stretches long, and then one takes all the time that is left."""
    seen: list[int] = []

    def sudden(n: int) -> int:
        seen.append(n)
        while n == 3_000 and caller.watchdog._values is not None:
            time.sleep(0.005)
        return n

    caller = caller_of(sudden)
    caller.run(numbers(20_000).slice(4_000), FOREVER, fail_on_fatal_row)
    seen.clear()
    found = caller.run(numbers(100_000), time.monotonic() + 1, fail_on_fatal_row)
    assert (found.rows, len(seen), found.stopped) == (3_001, 3_001, False)
    rest = caller.run(numbers(100_000).slice(found.rows, 10), FOREVER, fail_on_fatal_row)
    assert rest.arrays[0].to_pylist() == list(range(3_001, 3_011))
    caller.teardown()


def test_much_that_is_given_ends_a_run_early() -> None:
    def large(n: int) -> bytes:
        return b"x" * (1 << 20)

    found = run(caller_of(large), numbers(500))
    assert 64 <= found.rows <= 150


def test_a_call_that_takes_too_long_fails_its_row_only() -> None:
    def slow(n: int) -> int:
        while n == 2:
            time.sleep(0.01)
        return n

    def slow_arrays(n: pa.Array) -> pa.Int64Array:
        for one in n.to_pylist():
            slow(one)
        return n

    async def slow_async(n: int) -> int:
        while n == 2:
            await asyncio.sleep(0.01)
        return n

    for fn in (slow, slow_arrays, slow_async):
        found = run(caller_of(fn, SKIP, timeout_s=0.3, batch_size=3), numbers(5))
        assert found.arrays[0].to_pylist() == [0, 1, None, 3, 4]
        assert failure_offsets(found) == [(2, "TimeoutError")]
        assert found.failures[0].message == "no result within the timeout of 0.3 s"


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("how", ["arrays", "async"])
@pytest.mark.parametrize("batch_size", [None, 200])
def test_a_row_that_hangs_does_not_wait_for_the_time_of_all_rows_of_its_call(how: str, batch_size: int | None) -> None:
    sizes: list[int] = []

    def arrays(n: pa.Array) -> pa.Int64Array:
        sizes.append(len(n))
        while 150 in n.to_pylist():
            time.sleep(0.01)
        return n

    async def awaited(n: pa.Array) -> pa.Int64Array:
        sizes.append(len(n))
        while 150 in n.to_pylist():
            await asyncio.sleep(0.01)
        return n

    caller = caller_of(arrays if how == "arrays" else awaited, SKIP, timeout_s=1.0, batch_size=batch_size, slots=1)
    began = time.monotonic()
    found = run(caller, numbers(200))
    assert time.monotonic() - began < 30, "it was 1 s for each row of the call"
    assert found.arrays[0].to_pylist() == [None if n == 150 else n for n in range(200)]
    assert failure_offsets(found) == [(150, "TimeoutError")]
    assert found.failures[0].message == "no result within the timeout of 1 s"
    assert sizes[:2] == [1, 1], "the duration of the first rows is unknown"
    assert max(sizes) > 50


def test_a_call_of_many_rows_may_take_ten_times_its_expected_duration() -> None:
    caller = caller_of(lambda n: n, data_type="int64", timeout_s=2.0)
    caller.pace.record(100, 1.0)
    assert caller.allowed_s(2.0, 1) == 2.0
    assert caller.allowed_s(2.0, 100) == 12.0
    caller.pace.record(100, 1000.0)
    assert caller.allowed_s(2.0, 100) == 200.0, "never more than the time of all of its rows"


@pytest.mark.processes
def test_rows_of_a_call_that_failed_are_not_called_together_again_when_the_time_was_over() -> None:
    sizes: list[int] = []

    def arrays(n: pa.Array) -> pa.Int64Array:
        sizes.append(len(n))
        if 40 in n.to_pylist():
            raise ValueError("forty")
        return n

    caller = caller_of(arrays, SKIP, batch_size=50)
    got: list[Any] = []
    while len(got) < 100:
        got += caller.run(numbers(100).slice(len(got)), time.monotonic() - 1, fail_on_fatal_row).arrays[0].to_pylist()
    caller.teardown()
    assert got == [None if n == 40 else n for n in range(100)]
    repeated = 1  # of a row that passed, after the run that ended with row 40
    assert sizes == [50, *[1] * (50 + repeated), 50]


HANGS = """
import ctypes, sys, time, asyncio
import pyarrow as pa
from dovetail.backfill.udf_caller import UdfCaller
from dovetail.backfill.udf import ErrorPolicy, udf

def stubborn(n):
    while n == 3:
        try:
            time.sleep(60)
        except TimeoutError:
            pass
    return n

@udf
def scalar(n: int) -> int:
    return stubborn(n)

@udf
async def awaited(n: int) -> int:
    await asyncio.sleep(0)
    return stubborn(n)

@udf
def arrays(n: pa.Array) -> pa.Int64Array:
    for one in n.to_pylist():
        stubborn(one)
    return n

def condemn(index):
    print("condemned", index, flush=True)

caller = UdfCaller(NAME, [pa.int64()], ErrorPolicy("skip"), BATCH_SIZE, 0.2, 4)
caller.run(pa.record_batch({"n": pa.array(range(8))}), time.monotonic() + 100, condemn)
print("came back")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "batch_size", "message"),
    [("scalar", 1, "condemned 3"), ("awaited", 1, "condemned 3"), ("arrays", 1, "condemned 3"), ("arrays", 4, "")],
)
def test_a_call_that_does_not_return_ends_its_process(name: str, batch_size: int, message: str, tmp_path: Path) -> None:
    with Script(tmp_path, HANGS.replace("NAME", name).replace("BATCH_SIZE", str(batch_size)), warm=True) as script:
        assert (script.ended(), script.output.strip()) == (70, message)


@pytest.mark.processes
def test_outside_of_the_main_thread_calls_are_only_watched() -> None:
    def quick(n: int) -> int:
        return n

    found: list[BatchResult] = []
    caller = caller_of(quick, timeout_s=60)
    thread = threading.Thread(target=lambda: found.append(caller.run(numbers(5), FOREVER, fail_on_fatal_row)))
    thread.start()
    thread.join()
    assert found[0].rows == 5
    caller.teardown()


# --- async


def test_as_many_rows_as_slots_are_under_way_and_no_more() -> None:
    under = most = 0

    async def counted(n: int) -> int:
        nonlocal under, most
        under += 1
        most = max(most, under)
        await asyncio.sleep(0.001 * (n % 3))
        under -= 1
        return n

    found = run(caller_of(counted, slots=7), numbers(100))
    assert found.arrays[0].to_pylist() == list(range(100))
    assert most == 7


def test_an_async_failure_waits_for_earlier_rows_and_cancels_later_ones() -> None:
    ended: list[int] = []
    cancelled: list[int] = []

    async def mixed(n: int) -> int:
        try:
            if n == 2:
                await asyncio.sleep(0)
                raise ValueError("two")
            await asyncio.sleep(0.05 if n < 2 else 60)
        except asyncio.CancelledError:
            cancelled.append(n)
            if n == 4:
                raise KeyError("while it was cancelled") from None
            raise
        ended.append(n)
        return n

    found = run(caller_of(mixed, slots=5), numbers(20))
    assert (found.rows, found.stopped, failure_offsets(found)) == (2, True, [(2, "ValueError")])
    assert found.arrays[0].to_pylist() == [0, 1]
    assert sorted(ended) == [0, 1]
    assert sorted(cancelled) == [3, 4]


def test_async_functions_of_arrays_overlap_too() -> None:
    under = most = 0

    async def arrays(n: pa.Array) -> pa.Int64Array:
        nonlocal under, most
        under += 1
        most = max(most, under)
        await asyncio.sleep(0)
        under -= 1
        if 5 in n.to_pylist():
            raise ValueError("five")
        return n

    found = run(caller_of(arrays, SKIP, batch_size=2, slots=3), numbers(9))
    assert found.arrays[0].to_pylist() == [0, 1, 2, 3, 4, None, 6, 7, 8]
    assert failure_offsets(found) == [(5, "ValueError")]
    assert most == 3


# --- classes


@pytest.mark.processes
def test_a_class_is_set_up_once_and_torn_down() -> None:
    calls: list[Any] = []

    class Model:
        def setup(self, worker: Worker) -> None:
            calls.append(worker.id)

        def __call__(self, n: int) -> int:
            return n + len(calls)

        def teardown(self) -> None:
            calls.append("over")

    caller = caller_of(Model)
    caller.setup(Worker(7, "fill"))
    assert caller.run(numbers(2), FOREVER, fail_on_fatal_row).arrays[0].to_pylist() == [1, 2]
    assert caller.run(numbers(2), FOREVER, fail_on_fatal_row).arrays[0].to_pylist() == [1, 2]
    caller.teardown()
    caller.teardown()
    assert calls == [7, "over"]


def test_an_async_setup_runs_in_the_same_event_loop_as_calls() -> None:
    class Client:
        async def setup(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def __call__(self, n: int) -> bool:
            return asyncio.get_running_loop() is self.loop

    assert run(caller_of(Client), numbers(2)).arrays[0].to_pylist() == [True, True]


# --- all together


@pytest.mark.processes
@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.one_of(st.none(), st.integers(-100, 100)), max_size=60),
    bad=st.sets(st.integers(0, 59), max_size=8),
    kind=st.sampled_from(["scalar", "timed", "arrays", "batch", "async", "async arrays"]),
    budgets=st.lists(st.sampled_from([-1.0, 0.0001, 0.001, 100.0]), min_size=1, max_size=6),
    then=st.sampled_from(["fail", "skip"]),
    batch_size=st.sampled_from([None, 1, 3, 64]),
    slots=st.integers(1, 5),
)
def test_successive_runs_return_the_results_of_a_plain_loop(
    values: list[int | None],
    bad: set[int],
    kind: str,
    budgets: list[float],
    then: str,
    batch_size: int | None,
    slots: int,
) -> None:
    calls: dict[int, int] = {}

    def one(n: int | None, row: int) -> int | None:
        calls[row] = calls.get(row, 0) + 1
        if row in bad:
            raise ValueError(f"row {row}")
        return None if n is None else n * 2

    def scalar(n: int, row: int) -> int:
        return one(n, row)  # type: ignore[return-value]

    def arrays(n: pa.Array, row: pa.Array) -> pa.Int64Array:
        return [one(a, b) for a, b in zip(n.to_pylist(), row.to_pylist(), strict=True)]

    def batches(batch: pa.RecordBatch) -> pa.Int64Array:
        return arrays(*batch.columns)

    async def awaited(n: int, row: int) -> int:
        await asyncio.sleep(0)
        return one(n, row)  # type: ignore[return-value]

    async def awaited_arrays(n: pa.Array, row: pa.Array) -> pa.Int64Array:
        await asyncio.sleep(0)
        return arrays(n, row)

    fn: Any = {"scalar": scalar, "timed": scalar, "arrays": arrays, "batch": batches, "async": awaited}.get(
        kind, awaited_arrays
    )
    on_error = ErrorPolicy("skip" if then == "skip" else "fail")
    caller = caller_of(fn, on_error, batch_size=batch_size, slots=slots, timeout_s=60 if kind == "timed" else None)
    whole = pa.record_batch({"n": pa.array(values, pa.int64()), "row": pa.array(range(len(values)), pa.int64())})
    good = pa.record_batch({"n": pa.array([0], pa.int64()), "row": pa.array([-1], pa.int64())})
    assert caller.run(good, FOREVER, fail_on_fatal_row).rows == 1  # the first rows of a worker may have broken it
    got: list[Any] = []
    failed: list[int] = []
    turn = 0
    ends_with_failure = 0
    while len(got) < len(values):
        found = caller.run(whole.slice(len(got)), time.monotonic() + budgets[turn % len(budgets)], fail_on_fatal_row)
        turn += 1
        ends_with_failure += bool(found.failures) and found.failures[-1].offset == found.rows - 1
        assert all(len(array) == found.rows for array in found.arrays)
        failed += [len(got) + failure.offset for failure in found.failures]
        got += found.arrays[0].to_pylist()
        assert found.rows or found.stopped
        if found.stopped:
            assert found.failures[-1].offset == found.rows
            got.append(None)  # the caller skips it and continues behind it
    caller.teardown()
    assert got == [None if n is None or row in bad else n * 2 for row, n in enumerate(values)]
    assert failed == sorted(row for row in bad if row < len(values))
    if kind in ("scalar", "timed"):
        assert calls.keys() == {-1, *range(len(values))}
        assert all(calls[row] == 1 for row in failed), "only rows that passed are called again"
        assert sum(calls.values()) <= 1 + len(values) + ends_with_failure


def shout(text: str) -> str:
    return text.upper()


@pytest.mark.processes
def test_a_loop_over_many_rows_costs_little_more_than_a_list_comprehension() -> None:
    rows = 200_000
    column = pa.array([f"row number {n}" for n in range(rows)])
    batch = pa.record_batch({"text": column})

    def plain() -> pa.Array:
        return pa.array([shout(value) for value in column.to_pylist()])

    def ours() -> pa.Array:
        caller = caller_of(shout)
        try:
            return caller.run(batch, time.monotonic() + 1e6, fail_on_fatal_row).arrays[0]
        finally:
            caller.teardown()

    def cpu(work: Callable[[], pa.Array]) -> float:
        began = time.process_time()
        assert len(work()) == rows
        return time.process_time() - began

    pairs = [(cpu(plain), cpu(ours)) for _ in range(5)]
    simple, called = min(one for one, _ in pairs), min(two for _, two in pairs)
    assert called <= 1.6 * simple, f"{called:.3f} s against {simple:.3f} s"


@pytest.mark.processes
def test_the_module_of_a_worker_needs_no_lance() -> None:
    code = "import sys, dovetail.backfill.udf_caller; print('lance' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "False False"
