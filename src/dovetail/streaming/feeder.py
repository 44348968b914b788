"""Input of a wave: pulls items from the source or the spool and cuts them into epochs.

The first wave pulls from the source, later ones from what was spooled. An epoch is made of whole segments.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Pull
from dovetail.control.payload import slice_items, total_bytes
from dovetail.streaming.dispatch import has_space
from dovetail.streaming.epochs import Epoch, missing_ranges

if TYPE_CHECKING:
    from dovetail.control.events import ItemsArrived
    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.streaming.epochs import EpochTracker
    from dovetail.streaming.state import StreamState, UnitState

MAX_EPOCH_ITEMS = 1_000_000
RESTART_PIECES = 4
"""Into how many an epoch is cut that begins again."""
FIRST_EPOCH_ITEMS = 64
"""Items of an epoch, if that is more than its batches, while the speed of some unit is not known."""
MIN_BATCHES_PER_EPOCH = 4
"""Full batches of every unit that an epoch has in any case: its end costs about half a batch of each."""
TARGET_UPDATE_S = 0.25
"""How often it is looked at whether an epoch is large enough after all."""
MAX_OPEN_EPOCHS = 8
"""Epochs that the work in hand should be spread over, at most about so many."""


class Feeder:
    """Where the input of the wave that runs stands."""

    def __init__(self, board: StreamState, progress: EpochTracker) -> None:
        self.state = board
        self.epoch_tracker = progress
        self.entry_units: list[UnitState] = []
        """Lanes that get input directly."""
        self.later_units: list[str] = []
        """Units of later waves that get source items."""
        self.has_barrier = False
        """A barrier's input is one epoch."""
        self.filling_epoch: Epoch | None = None
        self._shares: dict[str, float] = {}
        self.items_requested = 0
        self._requested_at = 0.0
        self._source_waited_s = 0.0
        self._item_bytes = 0.0
        """Of the source's last items."""
        self.gaps: list[tuple[int, int]] = []
        """What a resumed run still has to read, before `position`."""
        self.position = 0
        self.stopped = False
        """The source is asked for nothing more."""
        self.spooled_input: list[tuple[str, Segment]] | None = None
        """Input of a later wave, in order; None: the source is pulled."""
        self.next_spooled = 0
        self._target_update_at = 0.0

    def begin_source_wave(self, entries: list[UnitState], later: list[str], done: list[tuple[int, int]]) -> None:
        """The first wave."""
        self.entry_units, self.later_units = entries, later
        self._detect_barriers()
        self._shares = dict.fromkeys((lane.name for lane in entries), 1.0)
        self.gaps, self.position = missing_ranges(done)

    def begin_spooled_wave(
        self, entries: list[UnitState], spool: list[tuple[str, Segment]], done: list[tuple[int, int]]
    ) -> None:
        """A later wave. The numbers of an epoch count the items of the spool."""
        self.entry_units, self.later_units = entries, []
        self._detect_barriers()
        counts: dict[str, int] = {}
        for name, segment in spool:
            counts[name] = counts.get(name, 0) + segment.items
        self._shares = {name: count / sum(counts.values()) for name, count in counts.items()}
        self.spooled_input = []
        self.next_spooled = 0
        self.position = 0
        self.stopped = False
        missing, reached = missing_ranges(done)
        missing.append((reached, MAX_EPOCH_ITEMS**3))
        number = behind = 0
        self.gaps = []
        for name, segment in spool:
            while missing[behind][1] <= number:
                behind += 1
            if missing[behind][0] <= number:
                self.spooled_input.append((name, segment))
                self.gaps.append((number, number + segment.items))
            number += segment.items

    def _detect_barriers(self) -> None:
        self.has_barrier = any(lane.spec.barrier for lane in self.state.units)

    def input_share(self, lane: UnitState) -> float:
        """Items that a lane gets directly per item of the wave's input: all of the source, or its part of the spool."""
        return self._shares.get(lane.name, 0.0)

    def feed(self) -> None:
        """Asks for more, or takes more from the spool, as far as there is room."""
        if self.stopped:
            return
        if self.state.options.serving and self.filling_epoch is not None and not any(self.filling_epoch.pending):
            self._close_filling_epoch()  # all that came is done: whoever waits for what was dropped hears of it now
        if self.spooled_input is not None:
            self._feed_from_spool()
        elif self.items_requested == 0 and self._has_space():
            self._pull()

    def _has_space(self) -> bool:
        if not self.has_barrier:
            for lane in self.entry_units:  # mostly there is none, and this runs for every event
                full = lane.queue.items > lane.max_queued_items // 2 or not has_space(self.state, lane)
                if full and not lane.waits_for_seats:
                    return False
        return not self._has_too_many_open_epochs()

    def _has_too_many_open_epochs(self) -> bool:
        """Whether what is begun should be finished first: with ordered output by number, and always by bytes."""
        board, options = self.state, self.state.options
        if any(lane.waits_for_seats for lane in board.units):
            return False  # it gets them when those before it are finished, and they are when all is read
        if board.held_bytes >= options.byte_budget and any(epoch.closed for epoch in board.epochs.values()):
            return True
        return options.ordered and len(board.epochs) + len(self.epoch_tracker.undelivered) > options.max_open_epochs

    def source_wait_s(self) -> float:
        """For how long, in all, the source was asked for items that it had not given yet."""
        return self._source_waited_s + (self.state.now - self._requested_at if self.items_requested else 0.0)

    def _pull(self) -> None:
        served = [lane for lane in self.entry_units if not lane.waits_for_seats]
        waiting = max((lane.queue.items for lane in served), default=0)
        items = max(1, min((lane.max_queued_items for lane in served), default=MAX_EPOCH_ITEMS) - waiting)
        items = min(items, MAX_EPOCH_ITEMS)
        if self.gaps:
            first, last = self.gaps[0]
            items = min(items, last - first)
        else:
            first = self.position
        if self._item_bytes:
            # what a queue may hold in bytes is never asked for twice over
            room = self.state.options.byte_budget // len(self.state.units) // 2
            items = min(items, max(1, int(room / self._item_bytes)))
        cut = min((lane.message_items for lane in served), default=items)
        self.items_requested = items
        self._requested_at = self.state.now
        self.state.commands.append(Pull(first, items, cut))

    def on_items_arrived(self, event: ItemsArrived) -> None:
        number = event.first
        for segment in event.segments:
            self._item_bytes = segment.size_bytes / max(1, segment.items)
            self.state.items_read += segment.items
            self._count_answered(segment.items)
            segment.first = segment.first or (number,)
            self._add_segment("", segment, number)
            number += segment.items
        if self.gaps and event.first == self.gaps[0][0]:
            last = self.gaps.pop(0)[1]
            if number < last:
                self.gaps.insert(0, (number, last))
        else:
            self.position = max(self.position, number)

    def _count_answered(self, items: int) -> None:
        if self.items_requested and self.items_requested <= items:
            self._source_waited_s += self.state.now - self._requested_at
        self.items_requested = max(0, self.items_requested - items)

    def on_input_ended(self, items: int) -> None:
        """The source has no more."""
        if self.spooled_input is not None or self.stopped:
            return
        self._count_answered(self.items_requested)
        if self.gaps:
            # a resumed source that ended inside a gap; what lies behind it cannot be had
            self.gaps = [gap for gap in self.gaps if gap[0] < items]
            if self.gaps:
                return
        self.state.total_items = items
        self.end_input()

    def end_input(self) -> None:
        """No more input for this wave."""
        self.stopped = True
        if self.filling_epoch is not None:
            epoch, self.filling_epoch = self.filling_epoch, None
            self.epoch_tracker.input_ended = True
            self.epoch_tracker.close_epoch(epoch)
        self.epoch_tracker.input_ended = True
        self.epoch_tracker.finish_units()

    def discard_unfinished_barrier(self) -> None:
        """A barrier gets everything or nothing: what was read for one before a drain is left for whoever resumes."""
        epoch = self.filling_epoch
        if epoch is not None and self.has_barrier:
            self.filling_epoch = None
            epoch.discarded = True
            self.state.held_bytes -= epoch.held_bytes
            del self.state.epochs[epoch.id]
            for lane in self.state.units:
                lane.queue.remove_epoch(epoch.id)

    def _feed_from_spool(self) -> None:
        assert self.spooled_input is not None
        while self.next_spooled < len(self.spooled_input):
            name, segment = self.spooled_input[self.next_spooled]
            lane = self.state.units_by_name[name]
            if not self.has_barrier and (self._has_too_many_open_epochs() or not has_space(self.state, lane)):
                return
            self._add_segment(name, segment, self.gaps[self.next_spooled][0])
            self.next_spooled += 1
        self.end_input()

    def _add_segment(self, name: str, segment: Segment, number: int) -> None:
        """Into the epoch that is being filled; it is closed when it has enough."""
        epoch = self.filling_epoch
        if epoch is not None and epoch.last != number:
            self._close_filling_epoch()
            epoch = None
        if epoch is None:
            epoch = self.open_epoch(number)
            self.filling_epoch = epoch
        epoch.last = number + segment.items
        self.add_input(epoch, name, (segment, 0, segment.items))
        if self.state.now >= self._target_update_at:
            # what was thought of the speed when it was opened may be wrong by now
            self._target_update_at = self.state.now + TARGET_UPDATE_S
            epoch.target_items = min(epoch.target_items, self.target_epoch_items())
        enough = (
            epoch.last - epoch.first >= epoch.target_items
            or epoch.read_bytes >= self.state.options.byte_budget // MAX_OPEN_EPOCHS
        )
        if enough and not self.has_barrier:
            self._close_filling_epoch()

    def open_epoch(self, first: int) -> Epoch:
        epoch = Epoch(self.state.next_id(), first, len(self.state.units), self.state.now)
        epoch.target_items = self.target_epoch_items()
        self.state.epochs[epoch.id] = epoch
        options = self.state.options
        if options.serving:
            wait_s = (
                options.target_epoch_s
                if options.max_wait_s is None
                else min(options.target_epoch_s, options.max_wait_s)
            )
            self.state.call_at(self.state.now + wait_s, partial(self._on_epoch_age, epoch, wait_s))
        return epoch

    def add_input(self, epoch: Epoch, name: str, part: SegmentSlice) -> None:
        """Input of an epoch, to whom it belongs."""
        size = total_bytes([part])
        if not self.state.options.payloads_survive:
            epoch.kept_input.append((name, part))
            epoch.held_bytes += size
            self.state.held_bytes += size
        epoch.read_bytes += size
        lanes = [self.state.units_by_name[name]] if name else self.entry_units
        for lane in lanes:
            lane.queue.add_part(epoch.id, part, self.state.now)
            epoch.pending[lane.index] += part[2] - part[1]
            self.state.dirty[lane.index] = True
        if not name:
            for later in self.later_units:
                epoch.spooled.setdefault(later, []).append(part[0])

    def _close_filling_epoch(self) -> None:
        epoch, self.filling_epoch = self.filling_epoch, None
        if epoch is not None:
            self.epoch_tracker.close_epoch(epoch)

    def _on_epoch_age(self, epoch: Epoch, wait_s: float) -> None:
        """With serving it is closed as soon as that costs nothing: who asked for something that was dropped waits for
        it. While items of it wait for workers that are busy, they may still become full batches with what comes."""
        if self.filling_epoch is not epoch:
            return
        if self.state.options.max_wait_s is not None and any(_is_busy_with(lane, epoch) for lane in self.state.units):
            self.state.call_at(self.state.now + wait_s, partial(self._on_epoch_age, epoch, wait_s))
        else:
            self._close_filling_epoch()

    def refeed(self, epoch: Epoch) -> None:
        """An epoch of which something was lost: its input comes again, under new numbers, and of the source in smaller
        pieces, so that the next loss touches less of it. (A spool is resumed by whole segments, so it is not cut.)"""
        assert not self.state.options.payloads_survive, f"{epoch} begins again, and nobody kept its input"
        was_filling = self.filling_epoch is epoch
        self.filling_epoch = None if was_filling else self.filling_epoch
        items = epoch.last - epoch.first
        may_cut = not (self.has_barrier or self.later_units or self.spooled_input is not None)
        size = max(1, -(-items // (RESTART_PIECES if may_cut else 1)))
        parts = [part for _, part in epoch.kept_input]
        opened = []
        for begin in range(0, items, size):
            end = min(begin + size, items)
            again = self.open_epoch(epoch.first + begin)
            again.last = epoch.first + end
            inside = [("", part) for part in slice_items(parts, begin, end)] if may_cut else epoch.kept_input
            for name, part in inside:
                self.add_input(again, name, part)
            opened.append(again)
        if was_filling and opened:
            self.filling_epoch = opened.pop()
        for again in opened:
            self.epoch_tracker.close_epoch(again)

    def target_epoch_items(self) -> int:
        """About `epoch_s` of source work, at least some full batches of every unit, and a fair share of what is in
        hand: a thousand workers must not have hundreds of epochs open."""
        options = self.state.options
        least = few = 1.0
        unknown = False
        in_hand = 0.0
        rate = math.inf
        per_item = {lane.name: self.input_share(lane) for lane in self.entry_units}
        for lane in self.state.units:
            items = per_item.get(lane.name, 0.0)
            for child in lane.children:
                per_item[child.name] = per_item.get(child.name, 0.0) + items * lane.throughput.returns
            if not items:
                continue
            least = max(least, options.target_epoch_batches * lane.batch_size / items)
            batches = min(MIN_BATCHES_PER_EPOCH, options.target_epoch_batches) if lane.batch_size > 1 else 1
            few = max(few, batches * lane.batch_size / items)
            in_hand = max(in_hand, lane.max_queued_items / items)
            seconds = lane.throughput.seconds_per_item
            if seconds is None:
                unknown = True
            elif seconds:
                rate = min(rate, max(1, len(lane.workers)) * lane.spec.slots / (seconds * items))
        if unknown and rate < math.inf:
            # the quick ones are measured first, and would make far too much of it
            return int(min(max(least, FIRST_EPOCH_ITEMS), MAX_EPOCH_ITEMS))
        if rate == math.inf:
            return int(min(max(least, in_hand / MAX_OPEN_EPOCHS), MAX_EPOCH_ITEMS))
        goal = max(
            min(least, max(few, options.max_epoch_s * rate)),
            in_hand / MAX_OPEN_EPOCHS,
            options.target_epoch_s * rate,
            1.0,
        )
        return int(min(goal, MAX_EPOCH_ITEMS))


def _is_busy_with(lane: UnitState, epoch: Epoch) -> bool:
    """Whether items of the epoch wait there, and nobody is idle."""
    waiting = lane.queue.by_epoch.get(epoch.id)
    return waiting is not None and bool(waiting.items) and not lane.pool.by_load[0]
