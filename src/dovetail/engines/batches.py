"""What becomes of one message of items in a worker?

Breadth first: one tight loop per stage over all of them, which makes two looks at the clock per stage its exact time.
When a call of a fused stage raises, nobody knows whose row it was; then the message is run once more depth first, one
batch of the first stage after another through all stages, and those that fail are the ones to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dovetail.engines.awaited import run_step_async
from dovetail.engines.failures import Failures, let_go
from dovetail.engines.keys import NONE, after, join, slice_of
from dovetail.engines.loops import run_step
from dovetail.engines.worker import RUNNING, Call

if TYPE_CHECKING:
    from types import TracebackType

    from dovetail.control.events import Failure
    from dovetail.engines.keys import Keys
    from dovetail.engines.loops import Step
    from dovetail.engines.worker import Place

Fresh = Callable[[], list[Any]]
"""The message's items once more, as they came."""


@dataclass(slots=True)
class Outcome:
    keys: Keys
    items: list[Any]
    failures: list[Failure]
    seconds: float
    """In the user's code."""
    stages: list[tuple[int, int, float]]
    """Items in, items out, seconds; of what did not fail. (The seconds are of all, but of a message that was run twice
    only those of the second time.)"""


class Visit:
    """A message is inside: the crumb says so, and `item_keys` works in this thread or task."""

    __slots__ = ("_before", "_message", "call", "crumb")

    def __init__(self, crumb: Place, message: int) -> None:
        self.crumb = crumb
        self.call = Call(crumb)
        self._message = message
        self._before: Call | None = None

    def __enter__(self) -> Self:
        crumb = self.crumb
        crumb[1], crumb[2], crumb[3] = 0, 1, 0
        crumb[0] = self._message  # last: whoever reads it finds the rest in place
        self._before = RUNNING.get()
        RUNNING.set(self.call)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.crumb[0] = -1
        self.call.keys = NONE
        RUNNING.set(self._before)


def run_message(
    steps: Sequence[Step], keys: Keys, items: list[Any], batch_size: int, visit: Visit, fresh: Fresh | None = None
) -> Outcome:
    """`fresh` is asked for the items again if they are run twice: functions may have changed them in place."""
    sizes = [size_of(step, steps[0], batch_size, len(items)) for step in steps]
    if len(steps) == 1:
        return _single(steps[0], keys, items, sizes[0], visit)
    try:
        return _breadth_first(steps, keys, items, sizes, visit)
    except BaseException as error:  # the user's; it is looked at when it comes again
        let_go(error)
    return _depth_first(steps, keys, fresh() if fresh is not None else items, sizes, visit)


async def run_message_async(step: Step, keys: Keys, items: list[Any], batch_size: int, visit: Visit) -> Outcome:
    size = len(items) or 1 if step.barrier else max(1, batch_size)
    failures = Failures(keys)
    visit.call.keys, visit.call.size = keys, 1 if step.each else size
    began = perf_counter()
    out, changes = await run_step_async(step, keys, items, size, visit.crumb, failures.add)
    return _outcome(len(items), after(keys, changes), out, failures, perf_counter() - began)


def size_of(step: Step, head: Step, batch_size: int, items: int) -> int:
    """Items per call, if the first stage is to get so many: after running out of memory less than it asked for."""
    if step.barrier:
        return max(1, items)
    if step.each or (step is not head and step.batch_size == 1):
        return 1
    same = step is head or step.batch_size == head.batch_size
    return max(1, batch_size if same else min(step.batch_size, batch_size))


def _single(step: Step, keys: Keys, items: list[Any], size: int, visit: Visit) -> Outcome:
    """With one stage a failed call is known at once, and the others go on."""
    failures = Failures(keys)
    visit.call.keys, visit.call.size = keys, size
    began = perf_counter()
    out, changes = run_step(step, items, size, visit.crumb, failures.add)
    return _outcome(len(items), after(keys, changes), out, failures, perf_counter() - began)


def _outcome(items: int, keys: Keys, out: list[Any], failures: Failures, seconds: float) -> Outcome:
    good = items - sum([failure.stop - failure.start for failure in failures.found])
    return Outcome(keys, out, failures.found, seconds, [(good, len(out), seconds)])


def _breadth_first(steps: Sequence[Step], given: Keys, items: list[Any], sizes: Sequence[int], visit: Visit) -> Outcome:
    crumb, call, keys = visit.crumb, visit.call, given
    stages = []
    began = first = perf_counter()
    for position, step in enumerate(steps):
        if keys is not given:
            crumb[2] = 0  # rows are not those of the message any more
        crumb[3] = position
        call.keys, call.size = keys, sizes[position]
        out, changes = run_step(step, items, sizes[position], crumb, _raise)
        keys = after(keys, changes)
        ended = perf_counter()
        stages.append((len(items), len(out), ended - began))
        items, began = out, ended
    return Outcome(keys, items, [], began - first, stages)


def _depth_first(steps: Sequence[Step], keys: Keys, items: list[Any], sizes: Sequence[int], visit: Visit) -> Outcome:
    """The crumb stays on the batch of the first stage, wherever in it the call is: that is exact for all stages."""
    crumb = visit.crumb
    failures = Failures(keys)
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
            made_keys, made = _through(steps, slice_of(keys, start, stop), part, sizes, visit, passed, seconds)
        except BaseException as error:  # the user's
            failures.add(start, stop, error, steps[crumb[3]].name)
            continue
        out += made
        out_keys.append(made_keys)
        for position in range(len(steps)):
            counts[0][position] += passed[position]
            counts[1][position] += passed[position + 1]
    stages = list(zip(*counts, seconds, strict=True))
    return Outcome(join(out_keys), out, failures.found, sum(seconds), stages)


def _through(
    steps: Sequence[Step],
    keys: Keys,
    items: list[Any],
    sizes: Sequence[int],
    visit: Visit,
    passed: list[int],
    seconds: list[float],
) -> tuple[Keys, list[Any]]:
    """One batch through all stages; how many came out of each, and how long it took, is added."""
    call = visit.call
    call.crumb = place = [0, 0]
    for position, step in enumerate(steps):
        visit.crumb[3] = position
        call.keys, call.size = keys, sizes[position]
        began = perf_counter()
        try:
            items, changes = run_step(step, items, sizes[position], place, _raise)
        finally:
            seconds[position] += perf_counter() - began
        keys = after(keys, changes)
        passed.append(len(items))
    return keys, items


def _raise(_start: int, _stop: int, error: BaseException) -> NoReturn:
    raise error
