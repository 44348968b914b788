"""What becomes of the work when a call raises or a worker dies?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver, SetAside
from dovetail.control.events import AGAIN, ASIDE, FATAL, Cause
from dovetail.control.segments import cut
from dovetail.resources.sizes import about_size
from dovetail.streaming.messages import Suspect
from dovetail.streaming.retries import after_a_blind_death, after_failure, after_out_of_memory, all_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.events import Crumb, Failure, WorkerLost
    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.messages import Message
    from dovetail.streaming.workers import Worker

MEMORY_MARGIN = 1.25


class Losses:
    """Charges suspects, tries them again smaller, and gives up what cannot be done."""

    def __init__(self, board: Board, fail: Callable[[str, str], None]) -> None:
        self.board = board
        self.fail = fail

    def raised(self, lane: Lane, message: Message, failure: Failure, peak: int) -> int:
        """A call raised. Returns how many of its items were given up; the others are tried again."""
        if failure.verdict == FATAL:
            self.fail(failure.error, failure.detail)
            return 0
        parts = cut(message.parts, failure.start, failure.stop)
        size = failure.stop - failure.start
        charged = message.suspect.charged if message.suspect is not None else 0
        suspect = Suspect(message.epoch, parts, size, min(message.batch_size, size), charged)
        suspect.error, suspect.detail, suspect.keys = failure.error, failure.detail, failure.keys
        if failure.verdict == AGAIN:
            lane.suspects.append(suspect)
            return 0
        if failure.verdict == ASIDE:
            return self._set_aside(lane, suspect, whatever=True)
        # a card's memory is no matter of the host's: smaller batches help, a larger worker does not
        peak = -1 if failure.on_gpu else peak
        return self._again_or_aside(lane, suspect, failure.out_of_memory, blind=False, peak=peak)

    def died(self, lane: Lane, worker: Worker, event: WorkerLost) -> bool:
        """The worker is gone; its messages go back, and the suspect is charged. Whether there was a suspect."""
        messages = list(worker.messages.values())
        worker.messages.clear()
        blamed = False
        crumbs = {crumb.message: crumb for crumb in event.crumbs}
        for position, message in enumerate(messages):
            self._no_longer_in_flight(lane, message)
            if message.epoch.dead:
                continue
            # without a crumb, those that its slots held may have been running
            crumb = crumbs.get(message.id)
            is_suspect = crumb is not None if crumbs else position < lane.work.slots
            never_began = message.cancelled and crumb is None
            if event.cause is Cause.NODE_LOST or never_began or not is_suspect:
                self._back(lane, message)
                continue
            blamed = True
            self._blame(lane, message, worker, event, crumb)
        return blamed

    def _blame(self, lane: Lane, message: Message, worker: Worker, event: WorkerLost, crumb: Crumb | None) -> None:
        exact = crumb is not None and crumb.exact and crumb.index < message.items
        start, stop = 0, message.items
        if exact and crumb is not None:
            start = crumb.index - crumb.index % message.batch_size
            stop = min(start + message.batch_size, message.items)
        charged = message.suspect.charged if message.suspect is not None else 0
        for begin, end in ((0, start), (stop, message.items)):
            if begin < end:
                self._part_back(lane, message, begin, end)
        items = stop - start
        suspect = Suspect(
            message.epoch, cut(message.parts, start, stop), items, min(message.batch_size, items), charged
        )
        why = worker.reason or f"the worker died ({event.cause.value})"
        suspect.error, suspect.detail = why, event.detail
        blind = not exact and message.items > 1
        oom = event.cause is Cause.OUT_OF_MEMORY
        message.epoch.pending[lane.index] -= self._again_or_aside(lane, suspect, oom, blind, event.peak_bytes)

    def _back(self, lane: Lane, message: Message) -> None:
        """Uncharged, as it was."""
        if message.suspect is not None:
            lane.suspects.append(message.suspect)
        else:
            lane.queue.put_back(message.epoch.id, message.parts, self.board.now)

    def _part_back(self, lane: Lane, message: Message, start: int, stop: int) -> None:
        parts = cut(message.parts, start, stop)
        old = message.suspect
        if old is None:
            lane.queue.put_back(message.epoch.id, parts, self.board.now)
            return
        items = stop - start
        lane.suspects.append(
            Suspect(message.epoch, parts, items, min(old.batch_size, items), old.charged, old.halves, old.error)
        )

    def _no_longer_in_flight(self, lane: Lane, message: Message) -> None:
        lane.in_flight -= message.items
        self.board.fewer_coming(lane, message.expected_bytes)

    def _again_or_aside(self, lane: Lane, suspect: Suspect, oom: bool, blind: bool, peak: int) -> int:
        retries = lane.work.retries
        lane.retries += 1
        if lane.work.barrier:
            again = all_again(suspect, retries)
        elif oom:
            again = after_out_of_memory(suspect, retries)
            if suspect.items == 1 and peak >= 0:
                self._grow(lane, again, peak)
        elif blind:
            again = after_a_blind_death(suspect, retries)
        else:
            again = after_failure(suspect, retries)
        lane.suspects.extend(again)
        if again:
            return 0
        return self._set_aside(lane, suspect)

    def _grow(self, lane: Lane, again: list[Suspect], peak: int) -> None:
        """One item alone does not fit: it is tried once more by a worker that gets what was measured (twice what was
        asked for, if nothing was), and if that helps, so do all others."""
        asked = lane.work.shape.memory_bytes
        need = int(peak * MEMORY_MARGIN) or 2 * asked
        if not again:
            self._shrink_back(lane)
            return
        if need > lane.shape.memory_bytes and lane.may_grow(need):
            lane.grow(need)
            text = (
                f"{lane.name}: one item alone does not fit into {about_size(asked)}; one with {about_size(need)} tries"
            )
            self.board.note("decision", text, unit=lane.name, memory_bytes=need, was=asked)
        if lane.shape.memory_bytes > asked:
            again[0].memory_bytes = lane.shape.memory_bytes

    def _shrink_back(self, lane: Lane) -> None:
        """More memory did not help: it was the item."""
        before = lane.shape_before
        if before is not None:
            lane.shape, lane.shape_before = before, None
            lane.grown = True
            text = f"{lane.name}: more memory did not help; workers get {about_size(before.memory_bytes)} again"
            self.board.note("decision", text, unit=lane.name, memory_bytes=before.memory_bytes)

    def _set_aside(self, lane: Lane, suspect: Suspect, *, whatever: bool = False) -> int:
        """How many items are settled by that: none if the run fails of them, or their epoch would count as finished.
        `whatever`: the stage has no say in it."""
        board = self.board
        what = "item" if suspect.items == 1 else f"{suspect.items} items"
        lane.aside += suspect.items
        board.aside += suspect.items
        if not (lane.work.skips or whatever):
            self.fail(f"{lane.name}: {what} failed: {suspect.error}", suspect.detail)
            return 0
        keys = iter(suspect.keys)
        for segment, start, stop in suspect.parts:
            for item in range(start, stop):
                aside = SetAside(lane.name, (segment, item, item + 1), suspect.error, suspect.detail)
                aside.attempts = suspect.charged + 1
                aside.key = next(keys, None)
                suspect.epoch.aside.append(aside)
        if board.options.serving:  # somebody waits for each of them
            epoch = suspect.epoch
            board.out.append(Deliver(board.wave, epoch.id, epoch.first, epoch.first, {}, aside=epoch.aside))
            epoch.aside = []
        board.note("error", f"{lane.name}: {what} set aside: {suspect.error}", unit=lane.name, items=suspect.items)
        limit = board.options.max_aside
        if limit is not None and board.aside > limit:
            many = "1 item was" if board.aside == 1 else f"{board.aside} items were"
            self.fail(f"{many} set aside, more than {limit}; the last: {suspect.error}", "")
        return suspect.items
