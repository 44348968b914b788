"""How does input enter a wave, and how is it cut into epochs?

The first wave pulls from the source, later ones from what was spooled. An epoch is made of whole segments.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Pull
from dovetail.control.segments import bytes_in, cut
from dovetail.streaming.backpressure import has_room
from dovetail.streaming.epochs import Epoch, gaps_of

if TYPE_CHECKING:
    from dovetail.control.events import ItemsArrived
    from dovetail.control.segments import Part, Segment
    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.progress import Progress

EPOCH_LIMIT = 1_000_000
PIECES = 4
"""Into how many an epoch is cut that begins again."""
AT_FIRST = 64
"""Items of an epoch, if that is more than its batches, while the speed of some unit is not known."""
FEW = 4
"""Full batches of every unit that an epoch has in any case: its end costs about half a batch of each."""
GOAL_EVERY_S = 0.25
"""How often it is looked at whether an epoch is large enough after all."""
OPEN_AT_ONCE = 8
"""Epochs that the work in hand should be spread over, at most about so many."""


class Feeder:
    """Where the input of the wave that runs stands."""

    def __init__(self, board: Board, progress: Progress) -> None:
        self.board = board
        self.progress = progress
        self.entries: list[Lane] = []
        """Lanes that get input directly."""
        self.later: list[str] = []
        """Units of later waves that get source items."""
        self.waits_for_all = False
        """A barrier's input is one epoch."""
        self.filling: Epoch | None = None
        self._shares: dict[str, float] = {}
        self.asked = 0
        self._asked_at = 0.0
        self._awaited_s = 0.0
        self._item_bytes = 0.0
        """Of the source's last items."""
        self.gaps: list[tuple[int, int]] = []
        """What a resumed run still has to read, before `position`."""
        self.position = 0
        self.stopped = False
        """The source is asked for nothing more."""
        self.spooled: list[tuple[str, Segment]] | None = None
        """Input of a later wave, in order; None: the source is pulled."""
        self.next_spooled = 0
        self._goal_due = 0.0

    def begin(self, entries: list[Lane], later: list[str], done: list[tuple[int, int]]) -> None:
        """The first wave."""
        self.entries, self.later = entries, later
        self._look_for_barriers()
        self._shares = dict.fromkeys((lane.name for lane in entries), 1.0)
        self.gaps, self.position = gaps_of(done)

    def begin_spooled(self, entries: list[Lane], spool: list[tuple[str, Segment]], done: list[tuple[int, int]]) -> None:
        """A later wave. The numbers of an epoch count the items of the spool."""
        self.entries, self.later = entries, []
        self._look_for_barriers()
        counts: dict[str, int] = {}
        for name, segment in spool:
            counts[name] = counts.get(name, 0) + segment.items
        self._shares = {name: count / sum(counts.values()) for name, count in counts.items()}
        self.spooled = []
        self.next_spooled = 0
        self.position = 0
        self.stopped = False
        missing, reached = gaps_of(done)
        missing.append((reached, EPOCH_LIMIT**3))
        number = behind = 0
        self.gaps = []
        for name, segment in spool:
            while missing[behind][1] <= number:
                behind += 1
            if missing[behind][0] <= number:
                self.spooled.append((name, segment))
                self.gaps.append((number, number + segment.items))
            number += segment.items

    def _look_for_barriers(self) -> None:
        self.waits_for_all = any(lane.work.barrier for lane in self.board.lanes)

    def share_of(self, lane: Lane) -> float:
        """Items that a lane gets directly per item of the wave's input: all of the source, or its part of the spool."""
        return self._shares.get(lane.name, 0.0)

    def feed(self) -> None:
        """Asks for more, or takes more from the spool, as far as there is room."""
        if self.stopped:
            return
        if self.board.options.serving and self.filling is not None and not any(self.filling.pending):
            self._close_filling()  # all that came is done: whoever waits for what was dropped hears of it now
        if self.spooled is not None:
            self._feed_from_spool()
        elif self.asked == 0 and self._room():
            self._pull()

    def _room(self) -> bool:
        if not self.waits_for_all:
            for lane in self.entries:  # mostly there is none, and this runs for every event
                full = lane.queue.items > lane.cap // 2 or not has_room(self.board, lane)
                if full and not lane.waits_for_seats:
                    return False
        return not self._too_many_open()

    def _too_many_open(self) -> bool:
        """Whether what is begun should be finished first: with ordered output by number, and always by bytes."""
        board, options = self.board, self.board.options
        if any(lane.waits_for_seats for lane in board.lanes):
            return False  # it gets them when those before it are finished, and they are when all is read
        if board.held_bytes >= options.byte_budget and any(epoch.closed for epoch in board.epochs.values()):
            return True
        return options.ordered and len(board.epochs) + len(self.progress.held) > options.open_epochs

    def awaited_s(self) -> float:
        """For how long, in all, the source was asked for items that it had not given yet."""
        return self._awaited_s + (self.board.now - self._asked_at if self.asked else 0.0)

    def _pull(self) -> None:
        served = [lane for lane in self.entries if not lane.waits_for_seats]
        waiting = max((lane.queue.items for lane in served), default=0)
        items = max(1, min((lane.cap for lane in served), default=EPOCH_LIMIT) - waiting)
        items = min(items, EPOCH_LIMIT)
        if self.gaps:
            first, last = self.gaps[0]
            items = min(items, last - first)
        else:
            first = self.position
        if self._item_bytes:
            # what a queue may hold in bytes is never asked for twice over
            room = self.board.options.byte_budget // len(self.board.lanes) // 2
            items = min(items, max(1, int(room / self._item_bytes)))
        cut = min((lane.message_items for lane in served), default=items)
        self.asked = items
        self._asked_at = self.board.now
        self.board.out.append(Pull(first, items, cut))

    def arrived(self, event: ItemsArrived) -> None:
        number = event.first
        for segment in event.segments:
            self._item_bytes = segment.size_bytes / max(1, segment.items)
            self.board.read += segment.items
            self._answered(segment.items)
            segment.first = segment.first or (number,)
            self._place("", segment, number)
            number += segment.items
        if self.gaps and event.first == self.gaps[0][0]:
            last = self.gaps.pop(0)[1]
            if number < last:
                self.gaps.insert(0, (number, last))
        else:
            self.position = max(self.position, number)

    def _answered(self, items: int) -> None:
        if self.asked and self.asked <= items:
            self._awaited_s += self.board.now - self._asked_at
        self.asked = max(0, self.asked - items)

    def ended(self, items: int) -> None:
        """The source has no more."""
        if self.spooled is not None or self.stopped:
            return
        self._answered(self.asked)
        if self.gaps:
            # a resumed source that ended inside a gap; what lies behind it cannot be had
            self.gaps = [gap for gap in self.gaps if gap[0] < items]
            if self.gaps:
                return
        self.board.total = items
        self.end()

    def end(self) -> None:
        """No more input for this wave."""
        self.stopped = True
        if self.filling is not None:
            epoch, self.filling = self.filling, None
            self.progress.input_ended = True
            self.progress.close(epoch)
        self.progress.input_ended = True
        self.progress.look_for_ends()

    def leave_unfinished_barrier(self) -> None:
        """A barrier gets everything or nothing: what was read for one before a drain is left for whoever resumes."""
        epoch = self.filling
        if epoch is not None and self.waits_for_all:
            self.filling = None
            epoch.dead = True
            self.board.held_bytes -= epoch.bytes
            del self.board.epochs[epoch.id]
            for lane in self.board.lanes:
                lane.queue.forget(epoch.id)

    def _feed_from_spool(self) -> None:
        assert self.spooled is not None
        while self.next_spooled < len(self.spooled):
            name, segment = self.spooled[self.next_spooled]
            lane = self.board.lane_of[name]
            if not self.waits_for_all and (self._too_many_open() or not has_room(self.board, lane)):
                return
            self._place(name, segment, self.gaps[self.next_spooled][0])
            self.next_spooled += 1
        self.end()

    def _place(self, name: str, segment: Segment, number: int) -> None:
        """Into the epoch that is being filled; it is closed when it has enough."""
        epoch = self.filling
        if epoch is not None and epoch.last != number:
            self._close_filling()
            epoch = None
        if epoch is None:
            epoch = self.open(number)
            self.filling = epoch
        epoch.last = number + segment.items
        self.put(epoch, name, (segment, 0, segment.items))
        if self.board.now >= self._goal_due:
            # what was thought of the speed when it was opened may be wrong by now
            self._goal_due = self.board.now + GOAL_EVERY_S
            epoch.goal = min(epoch.goal, self.epoch_items())
        enough = (
            epoch.last - epoch.first >= epoch.goal or epoch.read_bytes >= self.board.options.byte_budget // OPEN_AT_ONCE
        )
        if enough and not self.waits_for_all:
            self._close_filling()

    def open(self, first: int) -> Epoch:
        epoch = Epoch(self.board.number(), first, len(self.board.lanes), self.board.now)
        epoch.goal = self.epoch_items()
        self.board.epochs[epoch.id] = epoch
        options = self.board.options
        if options.serving:
            wait_s = options.epoch_s if options.max_wait_s is None else min(options.epoch_s, options.max_wait_s)
            self.board.at(self.board.now + wait_s, partial(self._old_enough, epoch, wait_s))
        return epoch

    def put(self, epoch: Epoch, name: str, part: Part) -> None:
        """Input of an epoch, to whom it belongs."""
        size = bytes_in([part])
        if not self.board.options.payloads_survive:
            epoch.source.append((name, part))
            epoch.bytes += size
            self.board.held_bytes += size
        epoch.read_bytes += size
        lanes = [self.board.lane_of[name]] if name else self.entries
        for lane in lanes:
            lane.queue.add_part(epoch.id, part, self.board.now)
            epoch.pending[lane.index] += part[2] - part[1]
            self.board.dirty[lane.index] = True
        if not name:
            for later in self.later:
                epoch.spooled.setdefault(later, []).append(part[0])

    def _close_filling(self) -> None:
        epoch, self.filling = self.filling, None
        if epoch is not None:
            self.progress.close(epoch)

    def _old_enough(self, epoch: Epoch, wait_s: float) -> None:
        """With serving it is closed as soon as that costs nothing: who asked for something that was dropped waits for
        it. While items of it wait for workers that are busy, they may still become full batches with what comes."""
        if self.filling is not epoch:
            return
        if self.board.options.max_wait_s is not None and any(_busy_with(lane, epoch) for lane in self.board.lanes):
            self.board.at(self.board.now + wait_s, partial(self._old_enough, epoch, wait_s))
        else:
            self._close_filling()

    def begin_again(self, epoch: Epoch) -> None:
        """An epoch of which something was lost: its input comes again, under new numbers, and of the source in smaller
        pieces, so that the next loss touches less of it. (A spool is resumed by whole segments, so it is not cut.)"""
        assert not self.board.options.payloads_survive, f"{epoch} begins again, and nobody kept its input"
        was_filling = self.filling is epoch
        self.filling = None if was_filling else self.filling
        items = epoch.last - epoch.first
        may_cut = not (self.waits_for_all or self.later or self.spooled is not None)
        size = max(1, -(-items // (PIECES if may_cut else 1)))
        parts = [part for _, part in epoch.source]
        opened = []
        for begin in range(0, items, size):
            end = min(begin + size, items)
            again = self.open(epoch.first + begin)
            again.last = epoch.first + end
            inside = [("", part) for part in cut(parts, begin, end)] if may_cut else epoch.source
            for name, part in inside:
                self.put(again, name, part)
            opened.append(again)
        if was_filling and opened:
            self.filling = opened.pop()
        for again in opened:
            self.progress.close(again)

    def epoch_items(self) -> int:
        """About `epoch_s` of source work, at least some full batches of every unit, and a fair share of what is in
        hand: a thousand workers must not have hundreds of epochs open."""
        options = self.board.options
        least = few = 1.0
        unknown = False
        in_hand = 0.0
        rate = math.inf
        per_item = {lane.name: self.share_of(lane) for lane in self.entries}
        for lane in self.board.lanes:
            items = per_item.get(lane.name, 0.0)
            for child in lane.children:
                per_item[child.name] = per_item.get(child.name, 0.0) + items * lane.speeds.returns
            if not items:
                continue
            least = max(least, options.epoch_batches * lane.batch_size / items)
            batches = min(FEW, options.epoch_batches) if lane.batch_size > 1 else 1
            few = max(few, batches * lane.batch_size / items)
            in_hand = max(in_hand, lane.cap / items)
            seconds = lane.speeds.seconds_per_item
            if seconds is None:
                unknown = True
            elif seconds:
                rate = min(rate, max(1, len(lane.workers)) * lane.work.slots / (seconds * items))
        if unknown and rate < math.inf:
            # the quick ones are measured first, and would make far too much of it
            return int(min(max(least, AT_FIRST), EPOCH_LIMIT))
        if rate == math.inf:
            return int(min(max(least, in_hand / OPEN_AT_ONCE), EPOCH_LIMIT))
        goal = max(
            min(least, max(few, options.epoch_most_s * rate)), in_hand / OPEN_AT_ONCE, options.epoch_s * rate, 1.0
        )
        return int(min(goal, EPOCH_LIMIT))


def _busy_with(lane: Lane, epoch: Epoch) -> bool:
    """Whether items of the epoch wait there, and nobody is idle."""
    waiting = lane.queue.by_epoch.get(epoch.id)
    return waiting is not None and bool(waiting.items) and not lane.pool.levels[0]
