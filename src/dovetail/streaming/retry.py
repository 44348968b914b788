"""Retry of failed items: isolation, halving, memory growth, and giving up (table below).

| failure | first | then | finally |
|---|---|---|---|
| a call raised, or the worker died in it | that batch alone | its items one by one | the item fails |
| the worker died, the call is unknown | halves of the message | ... down to one item | the item fails |
| out of memory | halves, as smaller batches | ... down to one item | more memory, then the item fails |

Exceptions and deaths of workers are charged apart. Failures of a batch are charged to its items only as long as each
of them keeps one retry of its own. Which worker runs a retry, and when, is decided in `broken_workers`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver, FailedItem, ReportFailure
from dovetail.control.events import VERDICT_FATAL, VERDICT_RETRY, VERDICT_SKIP, FailureCause, LossCause, RunFailure
from dovetail.control.payload import slice_items
from dovetail.pipeline.error_policy import ErrorBudget
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.sizes import format_size
from dovetail.streaming.worker_pool import HalvedBatch, Suspect

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.events import Breadcrumb, CallFailure, WorkerLost
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Message, Worker


def retry_whole_input(failed: Suspect, retries: int, *, death: bool = False) -> list[Suspect]:
    """Retry for a barrier, which always gets its whole input; empty: the items fail."""
    charged = _charges(failed, death) + 1
    return [_with_charges(failed, charged, death)] if charged <= retries else []


def retry_after_failure(failed: Suspect, retries: int, *, death: bool = False) -> list[Suspect]:
    """Retry for items whose call raised or killed its worker (`death`); empty: the items fail."""
    if failed.items > failed.batch_size:  # a message of several calls: it is unknown which one failed
        return _split_in_half(replace(failed, halved_batch=None), failed.batch_size)
    charged = _charges(failed, death) + 1
    if charged > retries:
        return []
    batch_size = failed.items
    if failed.items > 1 and charged >= max(1, retries - 1):
        batch_size, charged = 1, min(charged, retries - 1)
    return [replace(_with_charges(failed, charged, death), batch_size=batch_size, halved_batch=None)]


def retry_after_unlocated_death(failed: Suspect, retries: int) -> list[Suspect]:
    """Retry for items of a worker that died in an unknown call; empty: the items fail."""
    if failed.items == 1 or (not retries and failed.items <= failed.batch_size):
        return retry_after_failure(failed, retries, death=True)
    charged = min(failed.deaths + 1, max(0, retries - 1))
    return _split_in_half(
        replace(failed, deaths=charged, halved_batch=None), min(failed.batch_size, (failed.items + 1) // 2)
    )


def retry_after_out_of_memory(failed: Suspect, retries: int, *, death: bool = False) -> list[Suspect]:
    """Retry in smaller batches without charging the items; a single item that does not fit is charged."""
    if failed.items == 1:
        return retry_after_failure(failed, retries, death=death)
    half = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        return _split_in_half(failed, failed.batch_size)
    return _split_in_half(replace(failed, halved_batch=HalvedBatch(half)), half)


def _charges(failed: Suspect, death: bool) -> int:
    return failed.deaths if death else failed.failed_attempts


def _with_charges(failed: Suspect, charged: int, death: bool) -> Suspect:
    return replace(failed, deaths=charged) if death else replace(failed, failed_attempts=charged)


def _split_in_half(failed: Suspect, batch_size: int) -> list[Suspect]:
    """Split into two suspects, between batches if there are several, else in the middle of the batch."""
    middle = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        middle = max(failed.batch_size, middle - middle % failed.batch_size)
    return [
        replace(failed, parts=slice_items(failed.parts, start, stop), items=stop - start, batch_size=batch_size)
        for start, stop in ((0, middle), (middle, failed.items))
    ]


MEMORY_MARGIN_FACTOR = 1.25
"""Memory of a worker for an item that ran out of memory, as a multiple of the measured peak."""
MIN_ITEMS_FOR_SHARE = 1000
"""A percentage applies to at least this many items while the source has more."""


def _suspect(part: Message, message: Message, halved: HalvedBatch | None, error: str, detail: str) -> Suspect:
    """A part of a message as a suspect, with what its items were charged with before."""
    old = message.suspect
    return Suspect(
        part.epoch,
        part.parts,
        part.items,
        min(message.batch_size, part.items),
        0 if old is None else old.failed_attempts,
        halved,
        deaths=0 if old is None else old.deaths,
        error=error,
        detail=detail,
    )


def suspects_of_failure(message: Message, failure: CallFailure, worker: int) -> list[Suspect]:
    """The items of a call that raised, by epoch, with what they were charged with before."""
    parts = message.by_epoch(failure.start, failure.stop)
    halved = _parts_of_batch(parts, failure.stop - failure.start) if failure.out_of_memory else None
    return [
        replace(
            _suspect(part, message, halved, failure.error, failure.detail),
            stage=failure.stage,
            place=failure.place,
            keys=failure.keys[start - failure.start : start - failure.start + part.items],
            failed_on=worker,
        )
        for start, part in parts
    ]


class FailureHandler:
    """Charges suspects with failures, retries them in smaller groups, and fails items that used up their retries."""

    def __init__(self, state: StreamState, fail: Callable[[RunFailure], None]) -> None:
        self.state = state
        self.fail = fail

    def on_verdict(self, unit: UnitState, suspect: Suspect, failure: CallFailure) -> int:
        """Handle a failed call whose worker knows what to do. Returns how many of its items failed for good."""
        if failure.verdict == VERDICT_FATAL:
            self.fail(RunFailure(failure.error, failure.detail, code=failure.code, fix=failure.fix))
        elif failure.verdict == VERDICT_RETRY:
            unit.add_suspects([suspect])
        else:
            assert failure.verdict == VERDICT_SKIP, failure.verdict
            return self.fail_items(unit, suspect, skip=True)
        return 0

    def on_out_of_memory(self, unit: UnitState, suspect: Suspect, failure: CallFailure, peak: int) -> int:
        """Retry items whose call ran out of memory. Returns how many of them failed for good."""
        if suspect.halved_batch is not None:
            unit.add_suspects([suspect])  # its part of a batch of several epochs
            return 0
        # out of GPU memory: smaller batches help, more host memory does not
        return self._retry_or_fail(unit, suspect, oom=True, blind=False, peak=-1 if failure.on_gpu else peak)

    def charge(self, unit: UnitState, suspect: Suspect) -> int:
        """Retry items whose call raised, as often as their stage allows. Returns how many failed for good."""
        return self._retry_or_fail(unit, suspect, oom=False, blind=False, peak=-1)

    def on_worker_died(self, unit: UnitState, worker: Worker, event: WorkerLost) -> bool:
        """Put the messages of a lost worker back and charge the suspects. Returns whether there was a suspect."""
        messages = worker.take_messages()
        blamed = False
        breadcrumbs = {crumb.message: crumb for crumb in event.breadcrumbs}
        for position, message in enumerate(messages):
            unit.end_flight(message)
            if message.is_discarded:
                continue
            # without breadcrumbs, every message in a slot may have been running
            crumb = breadcrumbs.get(message.id)
            is_suspect = crumb is not None if breadcrumbs else position < unit.spec.slots
            never_began = message.cancelled and crumb is None
            if event.cause in (LossCause.NODE_LOST, LossCause.SERVER_LOST) or never_began or not is_suspect:
                self.put_back(unit, message)
                continue
            blamed = True
            self._blame(unit, message, worker, event, crumb)
        return blamed

    def _blame(
        self, unit: UnitState, message: Message, worker: Worker, event: WorkerLost, crumb: Breadcrumb | None
    ) -> None:
        exact = crumb is not None and crumb.exact and crumb.index < message.items
        start, stop = 0, message.items
        if exact and crumb is not None:
            start = crumb.index - crumb.index % message.batch_size
            stop = min(start + message.batch_size, message.items)
        old = message.suspect
        for begin, end in ((0, start), (stop, message.items)):
            if begin < end:
                self._put_slice_back(unit, message, begin, end)
        blind = not exact and message.items > 1
        oom = event.cause is LossCause.OUT_OF_MEMORY
        parts = message.by_epoch(start, stop)
        halved = _parts_of_batch(parts, stop - start) if oom else None
        for _, part in parts:
            error = worker.stop_reason or f"the worker died ({event.cause.value})"
            broke_worker = old is not None and old.broke_worker
            suspect = replace(_suspect(part, message, halved, error, event.detail), broke_worker=broke_worker)
            if halved is not None:
                unit.add_suspects([suspect])
                continue
            failed = self._retry_or_fail(unit, suspect, oom, blind, event.peak_bytes, death=True)
            part.epoch.settle(unit.index, failed)

    def put_back(self, unit: UnitState, message: Message) -> None:
        """Queue a message again, without charging its items."""
        if message.suspect is not None:
            unit.add_suspects([message.suspect])
            return
        for _, part in message.by_epoch():
            unit.queue.put_back(part.epoch.id, part.parts, self.state.now)

    def _put_slice_back(self, unit: UnitState, message: Message, start: int, stop: int) -> None:
        old = message.suspect
        if old is None:
            for _, part in message.by_epoch(start, stop):
                unit.queue.put_back(part.epoch.id, part.parts, self.state.now)
            return
        parts = slice_items(message.parts, start, stop)
        items = stop - start
        batch_size = min(old.batch_size, items)
        rest = replace(old, parts=parts, items=items, batch_size=batch_size, keys=(), trial=None)
        unit.add_suspects([rest])

    def _retry_or_fail(
        self, unit: UnitState, suspect: Suspect, oom: bool, blind: bool, peak: int, *, death: bool = False
    ) -> int:
        """Queue the items again, or fail them. Returns how many failed. `death`: the worker died in the call; otherwise
        the call raised, and its worker already retried it if the unit is configured so."""
        spec = unit.spec
        retries = spec.death_retries if death else spec.retries
        if not death and spec.retries_in_worker:
            retries = min(retries, 1) if suspect.items > 1 else 0  # only to try the items of a batch one by one
        unit.count_retry()
        if spec.barrier:
            again = retry_whole_input(suspect, retries, death=death)
        elif oom:
            again = retry_after_out_of_memory(suspect, retries, death=death)
            if suspect.items == 1 and peak >= 0:
                self._grow_memory(unit, again, peak)
        elif blind:
            again = retry_after_unlocated_death(suspect, retries)
        else:
            again = retry_after_failure(suspect, retries, death=death)
        if not again:
            return self.fail_items(unit, suspect, skip=spec.skip_deaths if death else spec.skip_failed)
        if death and spec.death_backoff_s:
            wait_s = spec.death_backoff_s * 2.0 ** min(suspect.deaths, 20)
            self.state.call_at(self.state.now + wait_s, partial(self._add_later, unit, again))
        else:
            unit.add_suspects(again)
        return 0

    def _add_later(self, unit: UnitState, suspects: list[Suspect]) -> None:
        unit.add_suspects(suspect for suspect in suspects if not suspect.epoch.discarded)
        unit.mark_dirty()

    def _grow_memory(self, unit: UnitState, again: list[Suspect], peak: int) -> None:
        """Retry a single item that ran out of memory on a worker with more: the measured peak with a margin, or twice
        the configured memory if nothing was measured. If that succeeds, all workers of the unit get as much."""
        configured = unit.spec.plan.shape.memory_bytes
        need = int(peak * MEMORY_MARGIN_FACTOR) or 2 * configured
        if not again:
            self._undo_growth(unit)
            return
        if need > unit.shape.memory_bytes and unit.can_grow(need):
            unit.grow_memory(need)
            text = (
                f"{unit.name}: a single item ran out of memory with {format_size(configured)}; "
                f"retrying it with {format_size(need)}"
            )
            self.state.add_note("decision", text, unit=unit.name, memory_bytes=need, was=configured)
        if unit.shape.memory_bytes > configured:
            again[0].require_memory(unit.shape.memory_bytes)

    def _undo_growth(self, unit: UnitState) -> None:
        """Return to the configured memory: the item failed with more memory too."""
        before = unit.undo_growth()
        if before is not None:
            text = f"{unit.name}: more memory did not help; back to {format_size(before.memory_bytes)} per worker"
            self.state.add_note("decision", text, unit=unit.name, memory_bytes=before.memory_bytes)

    def fail_items(self, unit: UnitState, suspect: Suspect, *, skip: bool) -> int:
        """Fail items for good: skip them, or fail the run. Returns how many were skipped; none if the run fails, or
        their epoch would count as finished."""
        state, epoch = self.state, suspect.epoch
        what = "item" if suspect.items == 1 else f"{suspect.items} items"
        error = f"{suspect.stage or short_unit_name(unit.name)}: {what} failed: {suspect.error}"
        if not skip:
            self.fail_run(unit, suspect, error, FailureCause.ITEM)
            return 0
        items = _failed_items(unit, suspect)
        unit.count_failed(suspect.items)
        state.count_failed(suspect.items)
        epoch.add_failed_items(items)
        if state.options.serving:  # a request waits for each of them
            failed_items = epoch.take_failed_items()
            state.emit(Deliver(state.wave, epoch.id, epoch.first, epoch.first, {}, failed_items=failed_items))
        state.add_note("error", error, unit=unit.name, items=suspect.items)
        self.check_error_budget(suspect.error)
        return suspect.items

    def fail_run(self, unit: UnitState, suspect: Suspect, error: str, cause: FailureCause) -> None:
        """Fail the run with the failure of these items."""
        items = _failed_items(unit, suspect)
        self.state.emit(ReportFailure(items))
        self.fail(RunFailure(error, suspect.detail, cause, items=tuple(items)))

    def check_error_budget(self, last_error: str = "") -> None:
        """Fail the run if more items failed than `max_errors` allows. A percentage is of the items read so far; until
        the source has ended, of at least MIN_ITEMS_FOR_SHARE items."""
        state = self.state
        budget = ErrorBudget(state.options.max_failed_items)
        items = state.items_read if state.total_items is not None else max(state.items_read, MIN_ITEMS_FOR_SHARE)
        if budget.is_exceeded(state.items_failed, items):
            count = "1 item failed" if state.items_failed == 1 else f"{state.items_failed} items failed"
            last = f"; the last error: {last_error}" if last_error else ""
            error = f"{count}, more than max_errors allows ({budget.text(items)}){last}"
            self.fail(RunFailure(error, cause=FailureCause.ERROR_LIMIT))


def _parts_of_batch(parts: list[tuple[int, Message]], items: int) -> HalvedBatch | None:
    """If a batch of several epochs ran out of memory, each epoch's part is tried alone; None: it was of one epoch."""
    largest = max((part.items for _, part in parts), default=items)
    return HalvedBatch(largest, parts=len(parts)) if largest < items else None


def _failed_items(unit: UnitState, suspect: Suspect) -> list[FailedItem]:
    keys, attempts = iter(suspect.keys), suspect.failed_attempts + suspect.deaths + 1
    return [
        FailedItem(
            unit.name,
            (segment, item, item + 1),
            suspect.error,
            suspect.detail,
            next(keys, None),
            attempts,
            suspect.stage,
            suspect.place,
        )
        for segment, start, stop in suspect.parts
        for item in range(start, stop)
    ]
