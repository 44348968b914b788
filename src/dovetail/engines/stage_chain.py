"""Run the items of one message through a chain of fused stages, and attribute failures to items.

Execution is breadth first: one loop per stage over all items, so two clock reads per stage measure its time exactly.
When a call of a fused stage raises, the failing item is unknown; the message then runs again depth first, one batch of
the first stage at a time through all stages, and the batches that fail are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dovetail.engines.call_retry import retry_call
from dovetail.engines.epoch_starts import join_starts
from dovetail.engines.exception_summary import FailureCollector, drop_traceback, is_worker_broken
from dovetail.engines.item_keys import NO_KEYS, derive_keys, join_keys, slice_keys
from dovetail.engines.result_stream import ResultStream, StoredPiece, StreamedCounts, stored_positions
from dovetail.engines.stage_calls import run_step, run_step_async
from dovetail.engines.worker_context import CURRENT_CALL, CallContext

if TYPE_CHECKING:
    from types import TracebackType

    from dovetail.control.events import CallFailure
    from dovetail.engines.epoch_starts import EpochStarts
    from dovetail.engines.item_keys import CountChange, Keys
    from dovetail.engines.result_stream import StorePiece
    from dovetail.engines.stage_calls import OnCallError, Step, StepResult
    from dovetail.engines.worker_context import BreadcrumbCell
    from dovetail.pipeline.error_policy import ErrorPolicy

ReloadItems = Callable[[], list[Any]]
"""Loads the items of the message again, unmodified."""


@dataclass(slots=True)
class MessageOutcome:
    keys: Keys
    items: list[Any]
    failures: list[CallFailure]
    seconds: float
    """Seconds in user code."""
    stages: list[tuple[int, int, float]]
    """Per stage: items in, items out, seconds, without failed items. (The seconds include failed items; for a message
    that ran twice they are those of the second run.)"""
    epoch_starts: EpochStarts | None = None
    """Among the results; None: the items are of one epoch."""


class ActiveMessage:
    """Context manager around a message: sets the breadcrumb, and makes `item_keys` available in this thread or task."""

    __slots__ = ("_message", "_previous_call", "breadcrumb", "call")

    def __init__(self, breadcrumb: BreadcrumbCell, message: int) -> None:
        self.breadcrumb = breadcrumb
        self.call = CallContext(breadcrumb)
        self._message = message
        self._previous_call: CallContext | None = None

    def __enter__(self) -> Self:
        breadcrumb = self.breadcrumb
        breadcrumb[1], breadcrumb[2], breadcrumb[3] = 0, 1, 0
        breadcrumb[0] = self._message  # last: a reader that sees the message finds the other words set
        self._previous_call = CURRENT_CALL.get()
        CURRENT_CALL.set(self.call)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.breadcrumb[0] = -1
        self.call.keys = NO_KEYS
        CURRENT_CALL.set(self._previous_call)


def run_message(
    steps: Sequence[Step],
    keys: Keys,
    items: list[Any],
    batch_size: int,
    active: ActiveMessage,
    fresh: ReloadItems | None = None,
    starts: EpochStarts | None = None,
    store: StorePiece | None = None,
) -> MessageOutcome:
    """`fresh` reloads the items before a second run: functions may have modified them in place. `starts`: where
    further epochs begin. `store` takes large results of a call while it is running."""
    sizes = [call_size(step, steps[0], batch_size, len(items)) for step in steps]
    if store is not None:
        rest = _StagesBehind(steps, sizes, active) if len(steps) > 1 else None
        active.call.results = ResultStream(store, len(steps), rest)
    if len(steps) == 1:
        return _run_single_stage(steps[0], keys, items, sizes[0], active, fresh, starts)
    try:
        return _run_breadth_first(steps, keys, items, sizes, active, starts)
    except BaseException as error:  # user code; it is examined when it raises again
        drop_traceback(error)
    if active.call.results is not None:
        active.call.results.counts = StreamedCounts(len(steps))
    return _run_depth_first(steps, keys, fresh() if fresh is not None else items, sizes, active, starts)


async def run_message_async(
    step: Step,
    keys: Keys,
    items: list[Any],
    batch_size: int,
    active: ActiveMessage,
    fresh: ReloadItems | None = None,
    starts: EpochStarts | None = None,
    store: StorePiece | None = None,
) -> MessageOutcome:
    active.call.results = ResultStream(store) if store is not None else None
    size = len(items) or 1 if step.barrier else max(1, batch_size)
    failures = FailureCollector(keys, step.failure_rules)
    active.call.keys, active.call.size = keys, 1 if step.each else size
    began = perf_counter()
    out, changes = await run_step_async(step, keys, items, size, active.breadcrumb, failures.add, fresh)
    if starts is not None:
        starts.apply_call(changes, items, out)
    return _single_stage_outcome(keys, changes, out, failures, perf_counter() - began, starts, active)


def call_size(step: Step, head: Step, batch_size: int, items: int) -> int:
    """Items per call for each stage when the first stage gets `size`: fewer than configured after running out of
    memory."""
    if step.barrier:
        return max(1, items)
    if step.each or (step is not head and step.batch_size == 1):
        return 1
    same = step is head or step.batch_size == head.batch_size
    return max(1, batch_size if same else min(step.batch_size, batch_size))


def _run_single_stage(
    step: Step,
    keys: Keys,
    items: list[Any],
    size: int,
    active: ActiveMessage,
    fresh: ReloadItems | None,
    starts: EpochStarts | None,
) -> MessageOutcome:
    """With one stage the failed call is known at once, and the loop continues with the others."""
    failures = FailureCollector(keys, step.failure_rules)
    on_error: OnCallError = failures.add
    if step.retry is not None:
        on_error = _CallRetrier(step, step.retry, keys, fresh or (lambda: items), active, failures)
    active.call.keys, active.call.size = keys, size
    began = perf_counter()
    out, changes = run_step(step, items, size, active.breadcrumb, on_error)
    if starts is not None:
        starts.apply_call(changes, items, out)
    return _single_stage_outcome(keys, changes, out, failures, perf_counter() - began, starts, active)


class _CallRetrier:
    """Error handler of `run_step` that retries the call in place, and collects the calls that keep failing."""

    def __init__(
        self,
        step: Step,
        policy: ErrorPolicy,
        keys: Keys,
        reload: ReloadItems,
        active: ActiveMessage,
        failures: FailureCollector,
    ) -> None:
        self._step, self._policy, self._keys = step, policy, keys
        self._reload, self._visit, self._failures = reload, active, failures

    def __call__(self, start: int, stop: int, error: BaseException) -> StepResult | None:
        call = self._visit.call
        previous = call.keys, call.size, call.breadcrumb
        # the breadcrumb of the message stays at `start`, which is exact; the retried call counts its items from 0
        cell = [0, 0]
        call.keys, call.size, call.breadcrumb = slice_keys(self._keys, start, stop), stop - start, cell
        try:
            return retry_call(
                self._policy,
                error,
                lambda: run_step(self._step, self._reload()[start:stop], stop - start, cell, _raise),
                lambda raised: is_worker_broken(raised, self._step.failure_rules),
            )
        except BaseException as last:  # user code may raise anything
            self._failures.add(start, stop, last)
            return None
        finally:
            call.keys, call.size, call.breadcrumb = previous


def _single_stage_outcome(
    keys: Keys,
    changes: list[CountChange],
    out: list[Any],
    failures: FailureCollector,
    seconds: float,
    starts: EpochStarts | None,
    active: ActiveMessage,
) -> MessageOutcome:
    good = len(keys) - sum([failure.stop - failure.start for failure in failures.found])
    out_keys = derive_keys(keys, changes)
    stages = _with_stored([(good, _count_unstored(active, out), seconds)], active)
    return MessageOutcome(out_keys, out, failures.found, seconds, stages, starts)


def _count_unstored(active: ActiveMessage, items: list[Any]) -> int:
    stream = active.call.results
    return len(items) if stream is None or not stream.is_used else len(items) - len(stored_positions(items))


def _with_stored(stages: list[tuple[int, int, float]], active: ActiveMessage) -> list[tuple[int, int, float]]:
    """Add items and seconds of results that were stored while their call was running."""
    stream = active.call.results
    if stream is None or not stream.is_used:
        return stages
    counts = zip(stream.counts.items_in, stream.counts.items_out, stream.counts.seconds, strict=True)
    return [
        (taken + more_in, given + more_out, seconds + more_s)
        for (taken, given, seconds), (more_in, more_out, more_s) in zip(stages, counts, strict=True)
    ]


def _run_between_stored(
    step: Step, keys: Keys, items: list[Any], size: int, cell: BreadcrumbCell, active: ActiveMessage
) -> StepResult:
    """Run a stage behind the first one; what is stored has passed it already."""
    call = active.call
    places = [] if call.results is None or not call.results.is_used else stored_positions(items)
    if not places:
        call.keys = keys
        return run_step(step, items, size, cell, _raise)
    out: list[Any] = []
    changes: list[CountChange] = []
    begin = 0
    for end in (*places, len(items)):
        if begin < end:
            call.keys = slice_keys(keys, begin, end)
            results, counts = run_step(step, items[begin:end], size, cell, _raise)
            out += results
            changes += [(begin + start, begin + stop, count) for start, stop, count in counts]
        out += items[end : end + 1]
        begin = end + 1
    return out, changes


class _StagesBehind:
    """Passes a piece of the results of one call through the stages that are fused behind the stage of the call."""

    def __init__(self, steps: Sequence[Step], sizes: Sequence[int], active: ActiveMessage) -> None:
        self._steps = steps
        self._sizes = sizes
        self._active = active

    def __call__(self, call: CallContext, position: int, keys: Keys, items: list[Any]) -> list[StoredPiece]:
        active, stream = self._active, call.results
        assert stream is not None
        previous = call.keys, call.size, call.breadcrumb
        call.breadcrumb = cell = [0, 0]  # the breadcrumb of the message stays on the call that returned the items
        try:
            for later in range(position + 1, len(self._steps)):
                stream.position = active.breadcrumb[3] = later
                call.size = self._sizes[later]
                began = perf_counter()
                out, changes = _run_between_stored(self._steps[later], keys, items, call.size, cell, active)
                stream.counts.seconds[later] += perf_counter() - began
                stream.counts.items_in[later] += _count_unstored(active, items)
                stream.counts.items_out[later] += _count_unstored(active, out)
                keys, items = derive_keys(keys, changes), out
            stored = stream.store(keys, items)
        finally:
            call.keys, call.size, call.breadcrumb = previous
        active.breadcrumb[3] = position  # after a failure, it names the stage that failed
        return stored


def _run_breadth_first(
    steps: Sequence[Step],
    given: Keys,
    items: list[Any],
    sizes: Sequence[int],
    active: ActiveMessage,
    given_starts: EpochStarts | None,
) -> MessageOutcome:
    breadcrumb, call, keys = active.breadcrumb, active.call, given
    starts = None if given_starts is None else given_starts.inside(0, len(items))
    stages: list[tuple[int, int, float]] = []
    began = first = perf_counter()
    for position, step in enumerate(steps):
        if keys is not given:
            breadcrumb[2] = 0  # rows no longer correspond to those of the message
        _set_position(active, position)
        call.size = sizes[position]
        out, changes = _run_between_stored(step, keys, items, sizes[position], breadcrumb, active)
        keys = derive_keys(keys, changes)
        if starts is not None:
            starts.apply_call(changes, items, out)
        ended = perf_counter()
        stages.append((_count_unstored(active, items), _count_unstored(active, out), ended - began))
        items, began = out, ended
    return MessageOutcome(keys, items, [], began - first, _with_stored(stages, active), starts)


def _set_position(active: ActiveMessage, position: int) -> None:
    active.breadcrumb[3] = position
    if active.call.results is not None:
        active.call.results.position = position


def _run_depth_first(
    steps: Sequence[Step],
    keys: Keys,
    items: list[Any],
    sizes: Sequence[int],
    active: ActiveMessage,
    starts: EpochStarts | None,
) -> MessageOutcome:
    """The breadcrumb stays on the batch of the first stage, which is exact for all stages."""
    breadcrumb = active.breadcrumb
    failures = FailureCollector(keys, steps[0].failure_rules)
    out: list[Any] = []
    out_keys: list[Keys] = []
    counts = [[0] * len(steps), [0] * len(steps)]
    seconds = [0.0] * len(steps)
    pieces: list[tuple[int, int, EpochStarts, int]] = []
    chunk = max(sizes)
    breadcrumb[1], breadcrumb[2] = 0, 1
    for start in range(0, len(items), chunk):
        breadcrumb[1] = start
        part = items[start : start + chunk]
        stop = start + len(part)
        passed = [len(part)]
        inside = None if starts is None else starts.inside(start, stop)
        stream = active.call.results
        stored_counts = stream.counts.copy() if stream is not None else None
        try:
            made_keys, made = _run_one_batch(
                steps, slice_keys(keys, start, stop), part, sizes, active, passed, seconds, inside
            )
        except BaseException as error:  # raised by user code
            failures.add(start, stop, error, steps[breadcrumb[3]].name)
            if stream is not None and stored_counts is not None:
                stream.counts = stored_counts
            if starts is not None:
                pieces.append((start, stop, _without_results(starts.inside(start, stop)), 0))
            continue
        if inside is not None:
            pieces.append((start, stop, inside, len(made)))
        out += made
        out_keys.append(made_keys)
        for position in range(len(steps)):
            counts[0][position] += passed[position]
            counts[1][position] += passed[position + 1]
    stages = _with_stored(list(zip(*counts, seconds, strict=True)), active)
    out_starts = None if starts is None else join_starts(starts, pieces)
    return MessageOutcome(join_keys(out_keys), out, failures.found, sum(seconds), stages, out_starts)


def _without_results(starts: EpochStarts) -> EpochStarts:
    starts.keep(())
    return starts


def _run_one_batch(
    steps: Sequence[Step],
    keys: Keys,
    items: list[Any],
    sizes: Sequence[int],
    active: ActiveMessage,
    passed: list[int],
    seconds: list[float],
    starts: EpochStarts | None,
) -> tuple[Keys, list[Any]]:
    """Run one batch through all stages; adds item counts and seconds of each stage."""
    call = active.call
    call.breadcrumb = place = [0, 0]
    for position, step in enumerate(steps):
        _set_position(active, position)
        call.size = sizes[position]
        began = perf_counter()
        try:
            out, changes = _run_between_stored(step, keys, items, sizes[position], place, active)
        finally:
            seconds[position] += perf_counter() - began
        keys = derive_keys(keys, changes)
        if starts is not None:
            starts.apply_call(changes, items, out)
        items = out
        passed.append(_count_unstored(active, items))
    return keys, items


def _raise(_start: int, _stop: int, error: BaseException) -> NoReturn:
    raise error
