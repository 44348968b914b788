"""Retry of failed items: isolation, halving, memory growth, and giving up (table below).

| what happened | first | then | at last |
|---|---|---|---|
| a call raised, or the worker died in it | that batch alone | its items one by one | the item is given up |
| the worker died, and nobody knows where | halves of what it had | ... down to one item | the item is given up |
| out of memory | halves, as smaller batches | ... down to one item | more memory, then given up |
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver, FailedItem
from dovetail.control.events import VERDICT_FATAL, VERDICT_RETRY, VERDICT_SKIP, LossCause
from dovetail.control.payload import slice_items
from dovetail.pipeline.error_policy import ErrorBudget
from dovetail.resources.sizes import format_size
from dovetail.streaming.worker_pool import HalvedBatch, Suspect

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.events import Breadcrumb, CallFailure, WorkerLost
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Message, Worker


def retry_whole_input(failed: Suspect, retries: int) -> list[Suspect]:
    """For a barrier, which cannot have less than everything; empty: give it up."""
    charged = failed.failed_attempts + 1
    return [replace(failed, failed_attempts=charged)] if charged < retries else []


def retry_after_failure(failed: Suspect, retries: int) -> list[Suspect]:
    """What to try next with items whose call raised or killed its worker; empty: give them up."""
    if failed.items > failed.batch_size:  # not one call, but all of a message: nobody knows which
        return _split_in_half(replace(failed, halved_batch=None), failed.batch_size)
    charged = failed.failed_attempts + 1
    if not retries or (failed.items == 1 and charged >= retries):
        return []
    batch_size = 1 if charged >= retries - 1 else failed.items
    return [replace(failed, failed_attempts=charged, batch_size=batch_size, halved_batch=None)]


def retry_after_unlocated_death(failed: Suspect, retries: int) -> list[Suspect]:
    """The same when it is not known which of these items was to blame."""
    if failed.items == 1 or (not retries and failed.items <= failed.batch_size):
        return retry_after_failure(failed, retries)
    charged = min(failed.failed_attempts + 1, max(0, retries - 1))
    return _split_in_half(
        replace(failed, failed_attempts=charged, halved_batch=None), min(failed.batch_size, (failed.items + 1) // 2)
    )


def retry_after_out_of_memory(failed: Suspect, retries: int) -> list[Suspect]:
    """Smaller batches, without blame; a single item that does not fit is charged."""
    if failed.items == 1:
        return retry_after_failure(failed, max(1, retries))
    half = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        return _split_in_half(failed, failed.batch_size)
    return _split_in_half(replace(failed, halved_batch=HalvedBatch(half)), half)


def _split_in_half(failed: Suspect, batch_size: int) -> list[Suspect]:
    """Two suspects; cut at a batch if there are several, else in the middle."""
    middle = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        middle = max(failed.batch_size, middle - middle % failed.batch_size)
    return [
        replace(failed, parts=slice_items(failed.parts, start, stop), items=stop - start, batch_size=batch_size)
        for start, stop in ((0, middle), (middle, failed.items))
    ]


MEMORY_MARGIN_FACTOR = 1.25
MIN_ITEMS_FOR_SHARE = 1000
"""A percentage of fewer items says little while more are to come."""


class FailureHandler:
    """Charges suspects, tries them again smaller, and gives up what cannot be done."""

    def __init__(self, board: StreamState, fail: Callable[[str, str], None]) -> None:
        self.state = board
        self.fail = fail

    def on_call_failed(self, lane: UnitState, message: Message, failure: CallFailure, peak: int) -> int:
        """A call raised. Returns how many of its items were given up; the others are tried again."""
        if failure.verdict == VERDICT_FATAL:
            self.fail(failure.error, failure.detail)
            return 0
        parts = slice_items(message.parts, failure.start, failure.stop)
        size = failure.stop - failure.start
        charged = message.suspect.failed_attempts if message.suspect is not None else 0
        suspect = Suspect(message.epoch, parts, size, min(message.batch_size, size), charged)
        suspect.error, suspect.detail, suspect.keys = failure.error, failure.detail, failure.keys
        if failure.verdict == VERDICT_RETRY:
            lane.suspects.append(suspect)
            return 0
        if failure.verdict == VERDICT_SKIP:
            return self._fail_items(lane, suspect, whatever=True)
        # a card's memory is no matter of the host's: smaller batches help, a larger worker does not
        peak = -1 if failure.on_gpu else peak
        return self._retry_or_fail(lane, suspect, failure.out_of_memory, blind=False, peak=peak, raised=True)

    def on_worker_died(self, lane: UnitState, worker: Worker, event: WorkerLost) -> bool:
        """The worker is gone; its messages go back, and the suspect is charged. Whether there was a suspect."""
        messages = list(worker.messages.values())
        worker.messages.clear()
        blamed = False
        crumbs = {crumb.message: crumb for crumb in event.breadcrumbs}
        for position, message in enumerate(messages):
            self._end_flight(lane, message)
            if message.epoch.discarded:
                continue
            # without a crumb, those that its slots held may have been running
            crumb = crumbs.get(message.id)
            is_suspect = crumb is not None if crumbs else position < lane.spec.slots
            never_began = message.cancelled and crumb is None
            if event.cause is LossCause.NODE_LOST or never_began or not is_suspect:
                self._put_back(lane, message)
                continue
            blamed = True
            self._blame(lane, message, worker, event, crumb)
        return blamed

    def _blame(
        self, lane: UnitState, message: Message, worker: Worker, event: WorkerLost, crumb: Breadcrumb | None
    ) -> None:
        exact = crumb is not None and crumb.exact and crumb.index < message.items
        start, stop = 0, message.items
        if exact and crumb is not None:
            start = crumb.index - crumb.index % message.batch_size
            stop = min(start + message.batch_size, message.items)
        charged = message.suspect.failed_attempts if message.suspect is not None else 0
        for begin, end in ((0, start), (stop, message.items)):
            if begin < end:
                self._put_slice_back(lane, message, begin, end)
        items = stop - start
        suspect = Suspect(
            message.epoch, slice_items(message.parts, start, stop), items, min(message.batch_size, items), charged
        )
        why = worker.stop_reason or f"the worker died ({event.cause.value})"
        suspect.error, suspect.detail = why, event.detail
        blind = not exact and message.items > 1
        oom = event.cause is LossCause.OUT_OF_MEMORY
        message.epoch.pending[lane.index] -= self._retry_or_fail(lane, suspect, oom, blind, event.peak_bytes)

    def _put_back(self, lane: UnitState, message: Message) -> None:
        """Uncharged, as it was."""
        if message.suspect is not None:
            lane.suspects.append(message.suspect)
        else:
            lane.queue.put_back(message.epoch.id, message.parts, self.state.now)

    def _put_slice_back(self, lane: UnitState, message: Message, start: int, stop: int) -> None:
        parts = slice_items(message.parts, start, stop)
        old = message.suspect
        if old is None:
            lane.queue.put_back(message.epoch.id, parts, self.state.now)
            return
        items = stop - start
        lane.suspects.append(
            Suspect(
                message.epoch,
                parts,
                items,
                min(old.batch_size, items),
                old.failed_attempts,
                old.halved_batch,
                old.error,
            )
        )

    def _end_flight(self, lane: UnitState, message: Message) -> None:
        lane.items_in_flight -= message.items
        self.state.release_incoming(lane, message.expected_bytes)

    def _retry_or_fail(
        self, lane: UnitState, suspect: Suspect, oom: bool, blind: bool, peak: int, *, raised: bool = False
    ) -> int:
        """`raised`: the call raised an exception; its worker already retried it if the unit says so."""
        retries = lane.spec.retries
        if raised and lane.spec.retries_in_worker:
            retries = min(retries, 1)  # only to try the items of the batch one by one
        lane.retries += 1
        if lane.spec.barrier:
            again = retry_whole_input(suspect, retries)
        elif oom:
            again = retry_after_out_of_memory(suspect, retries)
            if suspect.items == 1 and peak >= 0:
                self._grow_memory(lane, again, peak)
        elif blind:
            again = retry_after_unlocated_death(suspect, retries)
        else:
            again = retry_after_failure(suspect, retries)
        lane.suspects.extend(again)
        if again:
            return 0
        return self._fail_items(lane, suspect)

    def _grow_memory(self, lane: UnitState, again: list[Suspect], peak: int) -> None:
        """One item alone does not fit: it is tried once more by a worker that gets what was measured (twice what was
        asked for, if nothing was), and if that helps, so do all others."""
        asked = lane.spec.shape.memory_bytes
        need = int(peak * MEMORY_MARGIN_FACTOR) or 2 * asked
        if not again:
            self._undo_growth(lane)
            return
        if need > lane.shape.memory_bytes and lane.can_grow(need):
            lane.grow_memory(need)
            text = (
                f"{lane.name}: one item alone does not fit into {format_size(asked)}; one with "
                f"{format_size(need)} tries"
            )
            self.state.add_note("decision", text, unit=lane.name, memory_bytes=need, was=asked)
        if lane.shape.memory_bytes > asked:
            again[0].memory_bytes = lane.shape.memory_bytes

    def _undo_growth(self, lane: UnitState) -> None:
        """More memory did not help: it was the item."""
        before = lane.shape_before_growth
        if before is not None:
            lane.shape, lane.shape_before_growth = before, None
            lane.shape_changed = True
            text = f"{lane.name}: more memory did not help; workers get {format_size(before.memory_bytes)} again"
            self.state.add_note("decision", text, unit=lane.name, memory_bytes=before.memory_bytes)

    def _fail_items(self, lane: UnitState, suspect: Suspect, *, whatever: bool = False) -> int:
        """How many items are settled by that: none if the run fails of them, or their epoch would count as finished.
        `whatever`: the stage has no say in it."""
        board = self.state
        what = "item" if suspect.items == 1 else f"{suspect.items} items"
        lane.items_failed += suspect.items
        board.items_failed += suspect.items
        if not (lane.spec.skip_failed or whatever):
            self.fail(f"{lane.name}: {what} failed: {suspect.error}", suspect.detail)
            return 0
        keys = iter(suspect.keys)
        for segment, start, stop in suspect.parts:
            for item in range(start, stop):
                aside = FailedItem(lane.name, (segment, item, item + 1), suspect.error, suspect.detail)
                aside.attempts = suspect.failed_attempts + 1
                aside.key = next(keys, None)
                suspect.epoch.failed_items.append(aside)
        if board.options.serving:  # somebody waits for each of them
            epoch = suspect.epoch
            board.commands.append(
                Deliver(board.wave, epoch.id, epoch.first, epoch.first, {}, failed_items=epoch.failed_items)
            )
            epoch.failed_items = []
        board.add_note("error", f"{lane.name}: {what} set aside: {suspect.error}", unit=lane.name, items=suspect.items)
        self.check_error_budget(suspect.error)
        return suspect.items

    def check_error_budget(self, last_error: str = "") -> None:
        """Fail the run if more items failed than `max_errors` allows. A percentage is of the items read so far; until
        the source has ended, of at least MIN_ITEMS_FOR_SHARE items."""
        board = self.state
        budget = ErrorBudget(board.options.max_failed_items)
        items = board.items_read if board.total_items is not None else max(board.items_read, MIN_ITEMS_FOR_SHARE)
        if budget.is_exceeded(board.items_failed, items):
            many = "1 item failed" if board.items_failed == 1 else f"{board.items_failed} items failed"
            last = f"; the last error: {last_error}" if last_error else ""
            self.fail(f"{many}, more than max_errors allows ({budget.text(items)}){last}", "")
