"""Call loops: call the function of one stage on all items of a message (sync and async) and check what it returns.

These are the hot loops: per call they store the item index in the breadcrumb, call, and check the type of the result.
Changes of the item count are recorded as `CountChange`, so keys cost nothing where counts do not change.

Calls run one after another; with `dt.each`, the items of one batch run concurrently. Cancelling or closing the task
ends the message; user code that raises CancelledError itself is a failed call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.engines.call_retry import retry_call_async
from dovetail.engines.call_timeout import call_with_timeout_async
from dovetail.engines.exception_summary import is_worker_broken
from dovetail.engines.item_keys import slice_keys
from dovetail.engines.result_stream import StoredPiece, collect_results, collect_results_async
from dovetail.engines.worker_context import CURRENT_CALL, CallContext
from dovetail.errors import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.item_keys import CountChange, Keys
    from dovetail.engines.worker_context import BreadcrumbCell
    from dovetail.pipeline.error_policy import ErrorPolicy
    from dovetail.pipeline.failure_rules import FailureRules

NOT_BATCH_TYPES = (str, bytes, bytearray, dict)
MAX_SINGLE_TYPES = 1000
RETURN_FIX = "return a list ([] drops the items); to map one item to one item, use dt.each"
LIST_HINT = "hint: the function is called with a list of items; decorate it with @dt.each to get one item at a time"
ASYNC_FIX = "its function must itself be `async def`, so that the call is awaited"


def results_as_list(returned: Any, stage: str) -> list[Any]:
    """The items that a function of lists returned. A generator is consumed here; large results are stored."""
    results = results_iterator(returned, stage)
    return collect_results(results) if results is returned else list(results)


def results_iterator(returned: Any, stage: str) -> Iterator[Any]:
    """An iterator over the items that a function of lists returned."""
    if isinstance(returned, NOT_BATCH_TYPES):
        raise _return_type_error(returned, stage)
    try:
        return iter(returned)
    except TypeError:
        raise _return_type_error(returned, stage) from None


def expand_iterator(returned: Any, single: set[type], stage: str) -> list[Any] | None:
    """The iterator that a `dt.each` function returned; None: the result is one item, and so are all results of its
    type."""
    kind = type(returned)
    if hasattr(kind, "__next__"):
        return collect_results(returned)
    if _is_coroutine(returned):
        raise _return_type_error(returned, stage)
    if len(single) >= MAX_SINGLE_TYPES:
        single.clear()  # code that creates a class per item must not fill the memory
    single.add(kind)
    return None


def _return_type_error(returned: Any, stage: str) -> TypeError:
    kind = type(returned).__name__
    what = "None" if returned is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} ({short_repr(returned)})"
    how = ASYNC_FIX if _is_coroutine(returned) else RETURN_FIX
    if inspect.iscoroutine(returned):
        returned.close()
    return TypeError(f"stage {stage!r} returned {what}; {how}")


def _is_coroutine(returned: Any) -> bool:
    return inspect.iscoroutine(returned) or inspect.isasyncgen(returned)


StepResult = tuple[list[Any], "list[CountChange]"]
OnCallError = Callable[[int, int, BaseException], StepResult | None]
"""Called with items [start, stop) whose call raised. Returns the result of a retry that succeeded (its count changes
start at 0), or None: the loop continues without these items."""


class Step:
    """A stage inside a worker: its callable and batch size."""

    __slots__ = ("barrier", "batch_size", "each", "failure_rules", "fn", "name", "retry", "single", "timeout_s")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        each: bool = False,
        batch_size: int = 1,
        barrier: bool = False,
        retry: ErrorPolicy | None = None,
        timeout_s: float | None = None,
        failure_rules: FailureRules = (),
    ) -> None:
        self.name = name
        self.fn = fn
        self.each = each
        self.batch_size = batch_size
        self.barrier = barrier
        self.retry = retry
        """Policy of calls that are retried in the worker; None: failures are reported at once."""
        self.timeout_s = timeout_s
        self.failure_rules = failure_rules
        """Exceptions that mean a broken worker, besides those that always do."""
        self.single: set[type] = set()
        """Types whose results are one item each."""


def run_step(step: Step, items: list[Any], size: int, breadcrumb: BreadcrumbCell, failed: OnCallError) -> StepResult:
    """Run the step on all items, in calls of `size` items."""
    if step.each:
        return _call_each(step, items, breadcrumb, failed)
    return (
        _call_with_one(step, items, breadcrumb, failed)
        if size == 1
        else _call_with_batch(step, items, size, breadcrumb, failed)
    )


def with_list_hint(error: BaseException) -> BaseException:
    """Add a hint to an error that a function raises if it expects one item and gets a list."""
    with suppress(Exception):  # a user's exception can be anything
        text = str(error) if isinstance(error, TypeError | AttributeError) else ""
        if "list" in text and "dt.each" not in text:
            error.add_note(LIST_HINT)
    return error


def _call_each(step: Step, items: list[Any], breadcrumb: BreadcrumbCell, failed: OnCallError) -> StepResult:
    out: list[Any] = []
    changes: list[CountChange] = []
    add, fn, single = out.append, step.fn, step.single
    for index, item in enumerate(items):
        breadcrumb[1] = index
        try:
            result = fn(item)
            if type(result) not in single:
                if result is None:
                    changes.append((index, index + 1, 0))
                    continue
                given = expand_iterator(result, single, step.name)
                if given is not None:
                    out += given
                    changes.append((index, index + 1, len(given)))
                    continue
        except BaseException as error:  # user code: SystemExit is a failed call, too
            _add_retried(out, changes, index, index + 1, failed(index, index + 1, error))
            continue
        add(result)
    return out, changes


def _call_with_one(step: Step, items: list[Any], breadcrumb: BreadcrumbCell, failed: OnCallError) -> StepResult:
    out: list[Any] = []
    changes: list[CountChange] = []
    add, fn = out.append, step.fn
    for index, item in enumerate(items):
        breadcrumb[1] = index
        try:
            result = fn([item])
            if type(result) is not list:
                result = results_as_list(result, step.name)
        except BaseException as error:  # raised by user code
            _add_retried(out, changes, index, index + 1, failed(index, index + 1, with_list_hint(error)))
            continue
        if len(result) == 1:
            add(result[0])
        else:
            out += result
            changes.append((index, index + 1, len(result)))
    return out, changes


def _call_with_batch(
    step: Step, items: list[Any], size: int, breadcrumb: BreadcrumbCell, failed: OnCallError
) -> StepResult:
    out: list[Any] = []
    changes: list[CountChange] = []
    fn = step.fn
    for start in range(0, len(items), size):
        breadcrumb[1] = start
        batch = items[start : start + size]
        stop = start + len(batch)  # before the call: the function owns the list and may clear it
        try:
            result = fn(batch)
            stored = False
            if type(result) is not list:
                result = results_as_list(result, step.name)
                stored = is_stored(result)
        except BaseException as error:  # raised by user code
            _add_retried(out, changes, start, stop, failed(start, stop, with_list_hint(error)))
            continue
        out += result
        if len(result) != stop - start or stored:
            changes.append((start, stop, len(result)))
    return out, changes


def is_stored(results: list[Any]) -> bool:
    """Whether the results of a call are stored; each piece then stands for several."""
    return len(results) > 0 and type(results[0]) is StoredPiece


def _add_retried(out: list[Any], changes: list[CountChange], start: int, stop: int, retried: StepResult | None) -> None:
    """Add the result of a retry of items [start, stop); None: they failed."""
    if retried is None:
        changes.append((start, stop, 0))
        return
    results, count_changes = retried
    out += results
    changes += [(start + first, start + last, count) for first, last, count in count_changes]


CallResult = tuple[list[Any], bool] | BaseException
"""Results of a call and whether they correspond one to one to its items; or the exception that it raised."""


async def run_step_async(
    step: Step,
    keys: Keys,
    items: list[Any],
    size: int,
    breadcrumb: BreadcrumbCell,
    failed: OnCallError,
    reload: Callable[[], list[Any]] | None = None,
) -> StepResult:
    """Results of the step for all items, in calls of `size`; with `dt.each`, `size` calls run at once.

    `reload` returns the items unchanged for a retry, in case the function changed them in place."""
    out: list[Any] = []
    changes: list[CountChange] = []
    again = reload or (lambda: items)
    for start in range(0, len(items), size):
        breadcrumb[1] = start
        stop = min(start + size, len(items))
        count = 1 if step.each else stop - start
        if step.each and stop - start > 1:
            calls = await _call_concurrently(step, slice_keys(keys, start, stop), start, items, again)
        else:
            calls = [await _call_async(step, start if step.each else slice(start, stop), items, again)]
        for number, came in enumerate(calls):
            first = start + number * count
            if isinstance(came, BaseException):
                failed(first, first + count, came)
            given, same = ([], False) if isinstance(came, BaseException) else came
            out += given
            if not same:
                changes.append((first, first + count, len(given)))
    return out, changes


async def _call_concurrently(
    step: Step, keys: Keys, start: int, items: list[Any], reload: Callable[[], list[Any]]
) -> list[CallResult]:
    import asyncio  # not every worker needs it

    outer = CURRENT_CALL.get()
    results = outer.results if outer is not None else None

    async def one(index: int) -> CallResult:
        CURRENT_CALL.set(
            CallContext([0, index], keys, results=results)
        )  # gather gives each a task, and so a context, of its own
        return await _call_async(step, start + index, items, reload)

    return await asyncio.gather(*[one(index) for index in range(len(keys))])


async def _call_async(step: Step, place: int | slice, items: list[Any], reload: Callable[[], list[Any]]) -> CallResult:
    """One call with the item or the items at `place`, retried as the step's policy allows."""
    try:
        try:
            return await _await_call(step, items[place])
        except BaseException as error:
            if step.retry is None:
                raise
            failure = error
        return await retry_call_async(
            step.retry,
            failure,
            lambda: _await_call(step, reload()[place]),
            lambda raised: _is_final(raised) or is_worker_broken(raised, step.failure_rules),
        )
    except BaseException as error:  # user code may raise anything; inside a task SystemExit would end the whole loop
        if _is_final(error):
            raise
        return error


async def _await_call(step: Step, argument: Any) -> tuple[list[Any], bool]:
    count = 1 if step.each else len(argument)
    if step.timeout_s is None:
        result = await _await_result(step.fn(argument))
    else:
        result = await call_with_timeout_async(lambda: _await_result(step.fn(argument)), step.timeout_s)
    if step.each:
        given = [] if result is None else expand_iterator(result, step.single, step.name)
        return ([result], True) if given is None else (given, False)
    given = results_as_list(result, step.name)
    return given, len(given) == count and not is_stored(given)


async def _await_result(made: Any) -> Any:
    if hasattr(made, "__await__"):
        made = await made
    return iter(await collect_results_async(made)) if hasattr(made, "__anext__") else made


def _is_final(error: BaseException) -> bool:
    """Whether the slot is closed (nothing can be awaited any more) or its task is cancelled."""
    import asyncio

    if isinstance(error, GeneratorExit):
        return True

    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
