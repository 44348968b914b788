"""Run the items of one message through a chain of fused stages, and attribute failures to items.

Breadth first: one tight loop per stage over all of them, which makes two looks at the clock per stage its exact time.
When a call of a fused stage raises, nobody knows whose row it was; then the message is run once more depth first, one
batch of the first stage after another through all stages, and those that fail are the ones to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dovetail.engines.exception_summary import FailureCollector, drop_traceback
from dovetail.engines.item_keys import NO_KEYS, derive_keys, join_keys, slice_keys
from dovetail.engines.stage_calls import run_step, run_step_async
from dovetail.engines.worker_context import CURRENT_CALL, CallContext

if TYPE_CHECKING:
    from types import TracebackType

    from dovetail.control.events import CallFailure
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.stage_calls import Step
    from dovetail.engines.worker_context import BreadcrumbCell

ReloadItems = Callable[[], list[Any]]
"""The message's items once more, as they came."""


@dataclass(slots=True)
class MessageOutcome:
    keys: Keys
    items: list[Any]
    failures: list[CallFailure]
    seconds: float
    """In the user's code."""
    stages: list[tuple[int, int, float]]
    """Items in, items out, seconds; of what did not fail. (The seconds are of all, but of a message that was run twice
    only those of the second time.)"""


class ActiveMessage:
    """A message is inside: the crumb says so, and `item_keys` works in this thread or task."""

    __slots__ = ("_message", "_previous_call", "breadcrumb", "call")

    def __init__(self, crumb: BreadcrumbCell, message: int) -> None:
        self.breadcrumb = crumb
        self.call = CallContext(crumb)
        self._message = message
        self._previous_call: CallContext | None = None

    def __enter__(self) -> Self:
        crumb = self.breadcrumb
        crumb[1], crumb[2], crumb[3] = 0, 1, 0
        crumb[0] = self._message  # last: whoever reads it finds the rest in place
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
    visit: ActiveMessage,
    fresh: ReloadItems | None = None,
) -> MessageOutcome:
    """`fresh` is asked for the items again if they are run twice: functions may have changed them in place."""
    sizes = [call_size(step, steps[0], batch_size, len(items)) for step in steps]
    if len(steps) == 1:
        return _run_single_stage(steps[0], keys, items, sizes[0], visit)
    try:
        return _run_breadth_first(steps, keys, items, sizes, visit)
    except BaseException as error:  # the user's; it is looked at when it comes again
        drop_traceback(error)
    return _run_depth_first(steps, keys, fresh() if fresh is not None else items, sizes, visit)


async def run_message_async(
    step: Step, keys: Keys, items: list[Any], batch_size: int, visit: ActiveMessage
) -> MessageOutcome:
    size = len(items) or 1 if step.barrier else max(1, batch_size)
    failures = FailureCollector(keys)
    visit.call.keys, visit.call.size = keys, 1 if step.each else size
    began = perf_counter()
    out, changes = await run_step_async(step, keys, items, size, visit.breadcrumb, failures.add)
    return _single_stage_outcome(len(items), derive_keys(keys, changes), out, failures, perf_counter() - began)


def call_size(step: Step, head: Step, batch_size: int, items: int) -> int:
    """Items per call, if the first stage is to get so many: after running out of memory less than it asked for."""
    if step.barrier:
        return max(1, items)
    if step.each or (step is not head and step.batch_size == 1):
        return 1
    same = step is head or step.batch_size == head.batch_size
    return max(1, batch_size if same else min(step.batch_size, batch_size))


def _run_single_stage(step: Step, keys: Keys, items: list[Any], size: int, visit: ActiveMessage) -> MessageOutcome:
    """With one stage a failed call is known at once, and the others go on."""
    failures = FailureCollector(keys)
    visit.call.keys, visit.call.size = keys, size
    began = perf_counter()
    out, changes = run_step(step, items, size, visit.breadcrumb, failures.add)
    return _single_stage_outcome(len(items), derive_keys(keys, changes), out, failures, perf_counter() - began)


def _single_stage_outcome(
    items: int, keys: Keys, out: list[Any], failures: FailureCollector, seconds: float
) -> MessageOutcome:
    good = items - sum([failure.stop - failure.start for failure in failures.found])
    return MessageOutcome(keys, out, failures.found, seconds, [(good, len(out), seconds)])


def _run_breadth_first(
    steps: Sequence[Step], given: Keys, items: list[Any], sizes: Sequence[int], visit: ActiveMessage
) -> MessageOutcome:
    crumb, call, keys = visit.breadcrumb, visit.call, given
    stages = []
    began = first = perf_counter()
    for position, step in enumerate(steps):
        if keys is not given:
            crumb[2] = 0  # rows are not those of the message any more
        crumb[3] = position
        call.keys, call.size = keys, sizes[position]
        out, changes = run_step(step, items, sizes[position], crumb, _raise)
        keys = derive_keys(keys, changes)
        ended = perf_counter()
        stages.append((len(items), len(out), ended - began))
        items, began = out, ended
    return MessageOutcome(keys, items, [], began - first, stages)


def _run_depth_first(
    steps: Sequence[Step], keys: Keys, items: list[Any], sizes: Sequence[int], visit: ActiveMessage
) -> MessageOutcome:
    """The crumb stays on the batch of the first stage, wherever in it the call is: that is exact for all stages."""
    crumb = visit.breadcrumb
    failures = FailureCollector(keys)
    out: list[Any] = []
    out_keys: list[Keys] = []
    counts = [[0] * len(steps), [0] * len(steps)]
    seconds = [0.0] * len(steps)
    chunk = max(sizes)
    crumb[1], crumb[2] = 0, 1
    for start in range(0, len(items), chunk):
        crumb[1] = start
        part = items[start : start + chunk]
        stop = start + len(part)
        passed = [len(part)]
        try:
            made_keys, made = _run_one_batch(steps, slice_keys(keys, start, stop), part, sizes, visit, passed, seconds)
        except BaseException as error:  # the user's
            failures.add(start, stop, error, steps[crumb[3]].name)
            continue
        out += made
        out_keys.append(made_keys)
        for position in range(len(steps)):
            counts[0][position] += passed[position]
            counts[1][position] += passed[position + 1]
    stages = list(zip(*counts, seconds, strict=True))
    return MessageOutcome(join_keys(out_keys), out, failures.found, sum(seconds), stages)


def _run_one_batch(
    steps: Sequence[Step],
    keys: Keys,
    items: list[Any],
    sizes: Sequence[int],
    visit: ActiveMessage,
    passed: list[int],
    seconds: list[float],
) -> tuple[Keys, list[Any]]:
    """One batch through all stages; how many came out of each, and how long it took, is added."""
    call = visit.call
    call.breadcrumb = place = [0, 0]
    for position, step in enumerate(steps):
        visit.breadcrumb[3] = position
        call.keys, call.size = keys, sizes[position]
        began = perf_counter()
        try:
            items, changes = run_step(step, items, sizes[position], place, _raise)
        finally:
            seconds[position] += perf_counter() - began
        keys = derive_keys(keys, changes)
        passed.append(len(items))
    return keys, items


def _raise(_start: int, _stop: int, error: BaseException) -> NoReturn:
    raise error
