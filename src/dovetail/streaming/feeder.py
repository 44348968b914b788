"""Input of a wave: pulls items from the source or the spool and cuts them into epochs.

The first wave pulls from the source, later waves read the spool.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Pull
from dovetail.control.payload import slice_items, total_bytes
from dovetail.streaming.epoch_size import MAX_EPOCH_ITEMS, MAX_OPEN_EPOCHS, EpochSize
from dovetail.streaming.epochs import Epoch, missing_ranges

if TYPE_CHECKING:
    from dovetail.control.events import InputEnded, ItemsArrived
    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.streaming.epochs import EpochTracker
    from dovetail.streaming.state import StreamState, UnitState

UNLIMITED_POSITION = 1 << 62
RESTART_PIECES = 4
"""Number of epochs that a restarted epoch is split into."""
TARGET_UPDATE_S = 0.25
"""Seconds between two updates of the target size of the epoch that is being filled."""
MIN_SOURCE_TIME_S, MIN_SOURCE_ITEMS, MIN_SOURCE_WAIT_SHARE = 0.2, 8, 0.5
"""The rate of the source is known after that many seconds of waiting for it, items, and share of the time."""


class Feeder:
    """Reads the input of the current wave and adds it to epochs."""

    def __init__(self, state: StreamState, epoch_tracker: EpochTracker) -> None:
        self.state = state
        self.epoch_tracker = epoch_tracker
        self.epoch_size = EpochSize(state)
        self.entry_units: list[UnitState] = []
        """Units that get input directly."""
        self.later_units: list[str] = []
        """Units of later waves that get source items."""
        self.has_barrier = False
        """The wave contains a barrier: its whole input is one epoch."""
        self.filling_epoch: Epoch | None = None
        self.items_requested = 0
        self._requested_at = 0.0
        self._source_waited_s = 0.0
        self._first_answer_at = self._answered_at = 0.0
        self._timed_items = 0
        self._timed_s = 0.0
        """Items and time of all requests but the first, which contains the opening of the source."""
        self._item_bytes = 0.0
        """Bytes per item of the last source segment."""
        self.gaps: list[tuple[int, int]] = []
        """Ranges before `position` that a resumed run still has to read."""
        self.position = 0
        self.stopped = False
        """No further input is requested in this wave."""
        self.spooled_input: list[tuple[str, SegmentSlice]] | None = None
        """Input of a later wave, in order; None: the input is pulled from the source."""
        self._fed_items = 0
        """Input of this wave that was added to epochs."""
        self.next_spooled = 0
        self._target_update_at = 0.0

    def begin_source_wave(self, entries: list[UnitState], later: list[str], done: list[tuple[int, int]]) -> None:
        """Begin the first wave. `done`: ranges that an earlier run finished."""
        self.entry_units, self.later_units = entries, later
        self._fed_items = 0
        self._detect_barriers()
        self.epoch_size.set_input_shares(dict.fromkeys((unit.name for unit in entries), 1.0))
        self.gaps, self.position = missing_ranges(done)

    def begin_spooled_wave(
        self, entries: list[UnitState], spool: list[tuple[str, Segment]], done: list[tuple[int, int]]
    ) -> None:
        """Begin a wave that reads the spool. `first` and `last` of its epochs count items of the spool."""
        self.entry_units, self.later_units = entries, []
        self._fed_items = 0
        self._detect_barriers()
        counts: dict[str, int] = {}
        for name, segment in spool:
            counts[name] = counts.get(name, 0) + segment.items
        self.epoch_size.set_input_shares({name: count / sum(counts.values()) for name, count in counts.items()})
        self.spooled_input = []
        self.next_spooled = 0
        self.position = 0
        self.stopped = False
        missing, reached = missing_ranges(done)
        missing.append((reached, UNLIMITED_POSITION))
        number = behind = 0
        self.gaps = []
        for name, segment in spool:
            end = number + segment.items
            while missing[behind][1] <= number:
                behind += 1
            for first, last in missing[behind:]:
                if first >= end:
                    break
                begin, stop = max(first, number), min(last, end)
                self.spooled_input.append((name, (segment, begin - number, stop - number)))
                self.gaps.append((begin, stop))
            number = end

    def _detect_barriers(self) -> None:
        self.has_barrier = any(unit.spec.barrier for unit in self.state.units)

    def feed(self) -> None:
        """Request input from the source, or take it from the spool, as far as the queues have space."""
        if self.stopped:
            return
        if self.state.options.serving and self.filling_epoch is not None and not any(self.filling_epoch.pending):
            self._close_filling_epoch()  # everything in it is done: requests whose items were dropped are answered now
        if self.spooled_input is not None:
            self._feed_from_spool()
        elif self.items_requested == 0 and self._has_space():
            self._pull()
        if self._holds_too_many_bytes():
            self._flush_tails_if_stalled()

    def _flush_tails_if_stalled(self) -> None:
        """If epochs with incomplete batches hold all the bytes that may be held, no input can fill these batches."""
        units = self.state.units
        if any(unit.queue.tails for unit in units) and not any(unit.can_proceed for unit in units):
            for unit in units:
                unit.flush_tails()

    def _has_space(self) -> bool:
        if not self.has_barrier:
            for unit in self.entry_units:
                full = unit.queue.items > unit.max_queued_items // 2 or not unit.has_space()
                if full and not unit.waits_for_seats:
                    return False
        return not self._has_too_many_open_epochs()

    def _has_too_many_open_epochs(self) -> bool:
        """Whether open epochs must finish first: by number for ordered output, by items while a speed is unknown, by
        bytes in any case."""
        state, options = self.state, self.state.options
        if any(unit.waits_for_seats for unit in state.units):
            return False  # it gets seats when the units upstream are finished, for which all input must be read
        if self._holds_too_many_bytes():
            return True
        if self.epoch_size.has_unknown_speed() and self._items_allowed_in_epochs() <= 0:
            return True
        return options.ordered and len(state.epochs) + len(self.epoch_tracker.undelivered) > options.max_open_epochs

    def _holds_too_many_bytes(self) -> bool:
        state = self.state
        return state.held_bytes >= state.options.byte_budget and any(epoch.closed for epoch in state.epochs.values())

    def source_wait_s(self) -> float:
        """Total time that requested items were outstanding."""
        return self._source_waited_s + (self.state.now - self._requested_at if self.items_requested else 0.0)

    def source_rate(self) -> float | None:
        """Items per second that the source delivers; None if the run did not wait for it much of the time, because
        short requests of a fast source tell nothing about its rate."""
        least_s = max(MIN_SOURCE_TIME_S, MIN_SOURCE_WAIT_SHARE * (self._answered_at - self._first_answer_at))
        is_measured = self._timed_s >= least_s and self._timed_items >= MIN_SOURCE_ITEMS
        return self._timed_items / self._timed_s if is_measured else None

    def _pull(self) -> None:
        served = [unit for unit in self.entry_units if not unit.waits_for_seats]
        waiting = max((unit.queue.items for unit in served), default=0)
        items = max(1, min((unit.max_queued_items for unit in served), default=MAX_EPOCH_ITEMS) - waiting)
        items = min(items, MAX_EPOCH_ITEMS)
        if self.gaps:
            first, last = self.gaps[0]
            items = min(items, last - first)
        else:
            first = self.position
        if self._item_bytes:
            # half of what a queue may hold in bytes at most, so that one request cannot overfill it
            max_bytes = self.state.options.byte_budget // len(self.state.units) // 2
            items = min(items, max(1, int(max_bytes / self._item_bytes)))
        if self.epoch_size.has_unknown_speed():
            items = min(items, max(1, self._items_allowed_in_epochs()))
        max_segment_items = self._target_epoch_items()
        segment_items = min(min((unit.message_items for unit in served), default=items), max_segment_items)
        self.items_requested = items
        self._requested_at = self.state.now
        self.state.emit(Pull(first, items, segment_items, max_segment_items))

    def on_items_arrived(self, event: ItemsArrived) -> None:
        number = event.first
        for segment in event.segments:
            self._item_bytes = segment.size_bytes / max(1, segment.items)
            self.state.count_read(segment.items)
            self._count_answered(segment.items)
            segment.default_first((number,))
            self._add_source_segment(segment, number)
            number += segment.items
        if self.gaps and event.first == self.gaps[0][0]:
            last = self.gaps.pop(0)[1]
            if number < last:
                self.gaps.insert(0, (number, last))
        else:
            self.position = max(self.position, number)

    def _add_source_segment(self, segment: Segment, number: int) -> None:
        """Add a segment to one or several epochs; to one if it is also the input of a later wave."""
        begin = 0
        while begin < segment.items:
            is_whole = self.has_barrier or self.later_units
            end = segment.items if is_whole else min(segment.items, begin + self._items_to_fill())
            self._add_part("", (segment, begin, end), number + begin)
            begin = end

    def _count_answered(self, items: int) -> None:
        """Count items that arrived, and the time since the request or the arrival before them."""
        if not self.items_requested:
            return
        now = self.state.now
        if self._source_waited_s:
            self._timed_items += items
            self._timed_s += now - max(self._requested_at, self._answered_at)
        self._answered_at = now
        self.items_requested = max(0, self.items_requested - items)
        if not self.items_requested:
            self._end_request()

    def _end_request(self) -> None:
        if not self._source_waited_s:
            self._first_answer_at = self.state.now
        self._source_waited_s += self.state.now - self._requested_at

    def on_input_ended(self, event: InputEnded) -> None:
        if self.spooled_input is not None or self.stopped:
            return
        if self.items_requested:
            self.items_requested = 0
            self._end_request()
        if self.gaps:
            # the resumed source ended inside a gap: ranges beyond its end cannot be read
            self.gaps = [gap for gap in self.gaps if gap[0] < event.items]
            if self.gaps:
                return
        self.state.set_total_items(event.items)
        self.end_input()

    def end_input(self) -> None:
        """Stop reading input for this wave."""
        self.stopped = True
        epoch, self.filling_epoch = self.filling_epoch, None
        self.epoch_tracker.end_input(epoch)

    def discard_unfinished_barrier(self) -> None:
        """Drop the incomplete input of a barrier, which takes all or nothing: a resumed run reads it again."""
        epoch = self.filling_epoch
        if epoch is not None and self.has_barrier:
            self.filling_epoch = None
            self.epoch_tracker.discard_epoch(epoch)

    def discard_waiting_epochs(self) -> bool:
        """After the end of the input: drop the last epochs, as far as the slowest unit and those after it have taken
        nothing of them; a resumed run reads them again. Returns whether there were any."""
        if self.has_barrier:
            return False
        slowest = self.epoch_size.slowest_units()
        done = max(self.epoch_tracker.undelivered, default=-1)  # finished, and waits for those before it
        waiting = []
        for epoch in sorted(self.state.epochs.values(), key=lambda epoch: epoch.first, reverse=True):
            if epoch.has_begun_in(slowest) or epoch.mixed or epoch.first < done:
                break
            waiting.append(epoch)
        for epoch in waiting:
            self.epoch_tracker.discard_epoch(epoch)
        self.epoch_tracker.finish_units()
        return bool(waiting)

    def _feed_from_spool(self) -> None:
        assert self.spooled_input is not None
        while self.next_spooled < len(self.spooled_input):
            name, (segment, begin, end) = self.spooled_input[self.next_spooled]
            unit = self.state.units_by_name[name]
            if not self.has_barrier and (self._has_too_many_open_epochs() or not unit.has_space()):
                return
            number, last = self.gaps[self.next_spooled]
            items = end - begin if self.has_barrier else min(end - begin, self._items_to_fill())
            self._add_part(name, (segment, begin, begin + items), number)
            if begin + items == end:
                self.next_spooled += 1
            else:
                self.spooled_input[self.next_spooled] = (name, (segment, begin + items, end))
                self.gaps[self.next_spooled] = (number + items, last)
        self.end_input()

    def _target_epoch_items(self, filled_items: int = 0) -> int:
        return self.epoch_size.target_items(self._processed_items(), filled_items)

    def _items_allowed_in_epochs(self) -> int:
        """Items that open epochs may still get while the speed of a unit is unknown."""
        return self.epoch_size.max_unmeasured_items(self._processed_items()) - self._open_items()

    def _open_items(self) -> int:
        """Items of open epochs, without those that only wait until more input fills their last batch."""
        waiting: dict[int, int] = {}
        for unit in self.state.units:
            tails = {} if unit.queue.has_mixed_batch else unit.queue.tails
            for number, tail in tails.items():
                waiting[number] = waiting.get(number, 0) + tail.items
        return sum(
            epoch.last - epoch.first
            for number, epoch in self.state.epochs.items()
            if number not in waiting or not epoch.closed or sum(epoch.pending) > waiting[number]
        )

    def _processed_items(self) -> int:
        return self._fed_items - self._open_items()

    def _items_to_fill(self) -> int:
        """Items until the epoch that is being filled, or else the next one, is full."""
        epoch = self.filling_epoch
        return self._target_epoch_items() if epoch is None else max(1, epoch.first + epoch.target_items - epoch.last)

    def _add_part(self, name: str, part: SegmentSlice, number: int) -> None:
        """Add input to the epoch that is being filled, and close the epoch when it is large enough."""
        items = part[2] - part[1]
        epoch = self.filling_epoch
        if epoch is not None and epoch.last != number:
            self._close_filling_epoch()
            epoch = None
        if epoch is None:
            epoch = self.open_epoch(number)
            self.filling_epoch = epoch
        epoch.extend_to(number + items)
        self._fed_items += items
        self.add_input(epoch, name, part)
        if self.state.now >= self._target_update_at:
            # the throughput may have changed since the epoch was opened; it still ends with full batches
            self._target_update_at = self.state.now + TARGET_UPDATE_S
            epoch.lower_target(self._target_epoch_items(epoch.last - epoch.first))
        is_full = (
            epoch.last - epoch.first >= epoch.target_items
            or epoch.read_bytes >= self.state.options.byte_budget // MAX_OPEN_EPOCHS
        )
        if is_full and not self.has_barrier:
            self._close_filling_epoch()

    def open_epoch(self, first: int) -> Epoch:
        epoch = Epoch(self.state.next_id(), first, len(self.state.units), self._target_epoch_items())
        self.state.add_epoch(epoch)
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
        """Add input to an epoch: to one unit, or to all entry units if `name` is empty."""
        size = total_bytes([part])
        keep = not self.state.options.payloads_survive
        epoch.add_input(name, part, size, keep=keep)
        if keep:
            self.state.add_held_bytes(size)
        units = [self.state.units_by_name[name]] if name else self.entry_units
        for unit in units:
            unit.queue.add_part(epoch.id, part, self.state.now)
            epoch.add_pending(unit.index, part[2] - part[1])
            unit.mark_dirty()
        if not name:
            for later in self.later_units:
                epoch.add_spooled(later, part[0])

    def _close_filling_epoch(self) -> None:
        epoch, self.filling_epoch = self.filling_epoch, None
        if epoch is not None:
            self.epoch_tracker.close_epoch(epoch)

    def _on_epoch_age(self, epoch: Epoch, wait_s: float) -> None:
        """When serving, close an epoch as soon as that costs nothing, because requests whose items were dropped are
        answered then. While its items wait for busy workers, later items may still complete their batches."""
        if self.filling_epoch is not epoch:
            return
        if self.state.options.max_wait_s is not None and any(_is_busy_with(unit, epoch) for unit in self.state.units):
            self.state.call_at(self.state.now + wait_s, partial(self._on_epoch_age, epoch, wait_s))
        else:
            self._close_filling_epoch()

    def refeed(self, epoch: Epoch) -> None:
        """Feed the input of a discarded epoch again, in new epochs: source items in several smaller ones, so that the
        next loss affects fewer items. A spool is not split."""
        assert not self.state.options.payloads_survive, f"{epoch} restarts, and its input was not kept"
        was_filling = self.filling_epoch is epoch
        self.filling_epoch = None if was_filling else self.filling_epoch
        items = epoch.last - epoch.first
        can_split = not (self.has_barrier or self.later_units or self.spooled_input is not None)
        size = max(1, -(-items // (RESTART_PIECES if can_split else 1)))
        parts = [part for _, part in epoch.kept_input]
        opened = []
        for begin in range(0, items, size):
            end = min(begin + size, items)
            again = self.open_epoch(epoch.first + begin)
            again.extend_to(epoch.first + end)
            inside = [("", part) for part in slice_items(parts, begin, end)] if can_split else epoch.kept_input
            for name, part in inside:
                self.add_input(again, name, part)
            opened.append(again)
        if was_filling and opened:
            self.filling_epoch = opened.pop()
        for again in opened:
            self.epoch_tracker.close_epoch(again)


def _is_busy_with(unit: UnitState, epoch: Epoch) -> bool:
    """Whether items of the epoch wait at the unit and none of its workers is idle."""
    waiting = unit.queue.by_epoch.get(epoch.id)
    return waiting is not None and bool(waiting.items) and not unit.pool.by_load[0]
