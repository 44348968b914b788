"""What is the state of a run that all its parts share, and who is told when something changes?"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from dovetail.control.commands import Note
from dovetail.control.lifecycle import RunState, checked_run_move

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import Command
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.options import Options
    from dovetail.streaming.workers import Worker


class Board:
    """Lanes, open epochs, workers, the clock, and the commands of this step."""

    def __init__(self, lanes: list[Lane], options: Options) -> None:
        self.options = options
        self.all_lanes = lanes
        """Parents before children, of every wave."""
        self.lane_of = {lane.name: lane for lane in lanes}
        self.lanes: list[Lane] = []
        """Those of the wave that runs."""
        self.dirty: list[bool] = []
        """Per lane of the wave: whether it could send something now."""
        self.wave = -1
        self.workers: dict[int, Worker] = {}
        self.epochs: dict[int, Epoch] = {}
        """Those that are open."""
        self.now = 0.0
        self.out: list[Command] = []
        self.state = RunState.RUNNING
        self.ending = False
        """Nothing new is sent or started any more. Kept, because it is asked for several times per event."""
        self.error = ""
        self.error_detail = ""
        self.total: int | None = None
        """Source items there are, once that is known."""
        self.expected: int | None = None
        """About how many there are, if somebody said so."""
        self.held_bytes = 0
        """Of the input and the results of all epochs that are not delivered."""
        self.read = self.finished_items = self.delivered = self.aside = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    def number(self) -> int:
        """A new one: for timers, epochs, messages and workers alike."""
        self._numbers += 1
        return self._numbers

    def note(self, kind: str, text: str, **data: object) -> None:
        self.out.append(Note(kind, text, data))

    def stir(self, lane: Lane) -> None:
        """Something changed at this lane: it, or those who wait for room in front of it, could send something now."""
        if lane.work.wave == self.wave:
            self.dirty[lane.index] = True
            for parent in lane.parents:
                self.dirty[parent.index] = True

    def fewer_coming(self, lane: Lane, expected_bytes: int) -> None:
        """A message of this lane is over: those who wait because something was on its way may send now."""
        for child in lane.children:
            child.incoming -= 1
            child.coming_bytes -= expected_bytes
            for parent in child.parents:
                if parent.blocked:
                    self.dirty[parent.index] = True

    def move(self, new: RunState) -> None:
        self.state = checked_run_move(self.state, new)
        self.ending = new not in (RunState.RUNNING, RunState.DRAINING)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, self.number(), action))

    def next_timer(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def ring(self) -> None:
        """Does whatever was to be done by now."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
