"""Where is it no use to start a worker now, and when is a unit beyond help?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 600.0
SHUNNED_AFTER = 3
"""A unit whose setup failed so often in a row on a node says so; it waits twice as long each time."""
IN_A_ROW = 10
"""Failed setups of a unit, with none that worked in between; and two more per node."""
CRASHES = 10
"""Deaths soon after the start that nobody is suspected of, without a single message coming to its end in between; and
two more per worker."""
SHORT_LIFE_S = 10.0
DOWN_S = 60.0
"""How long a node counts as lost when its workers say so and nobody else does."""


@dataclass(slots=True)
class Trouble:
    """Setups of one unit that failed on one node."""

    failed: int = 0
    in_a_row: int = 0
    until: float = 0.0
    """No further try before this."""


class Health:
    """Remembers what failed where."""

    def __init__(self, board: Board, fail: Callable[[str, str], None]) -> None:
        self.board = board
        self.fail = fail
        self.down: dict[str, float] = {}
        """Nodes whose workers were lost with them, and until when that is believed."""
        self._trouble: dict[tuple[str, str], Trouble] = {}

    def wait_s(self, lane: Lane, nodes: tuple[str, ...]) -> float:
        """How long to wait before a worker of this unit is tried there again; 0: not at all."""
        if not self._trouble:
            return 0.0
        found = [self._trouble.get((lane.name, node)) for node in nodes]
        return max((trouble.until - self.board.now for trouble in found if trouble is not None), default=0.0)

    def set_up(self, lane: Lane, node: str) -> None:
        lane.setups_done += 1
        lane.failed_in_a_row = 0
        trouble = self._trouble.get((lane.name, node))
        if trouble is not None:
            trouble.in_a_row = 0

    def setup_failed(self, lane: Lane, node: str, what: str, detail: str) -> None:
        """Later again; a node where it keeps failing is left alone, and a unit that fails everywhere fails the run."""
        trouble = self._trouble.setdefault((lane.name, node), Trouble())
        trouble.failed += 1
        trouble.in_a_row += 1
        lane.setups_failed += 1
        lane.failed_in_a_row += 1
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(trouble.in_a_row - 1, 20))
        trouble.until = self.board.now + wait
        if trouble.in_a_row >= SHUNNED_AFTER:
            text = (
                f"{lane.name}: its setup failed {trouble.in_a_row} times in a row on {node}: not there for {wait:g} s"
            )
            self.board.note("decision", text, unit=lane.name, node=node)
        # one bad node counts for no more than a few failures, however often it was tried
        nodes = [entry for (unit, _), entry in self._trouble.items() if unit == lane.name]
        failed = sum(min(entry.failed, SHUNNED_AFTER) for entry in nodes)
        # those that are still at it count too: failing is quicker than succeeding
        tried = lane.setups_done + failed + sum(w.state is WorkerState.STARTING for w in lane.workers.values())
        if failed >= 3 and failed > self.board.options.setup_failures * tried:
            self.fail(f"{lane.name}: {failed} of {tried} workers failed in setup; the last: {what}", detail)
        elif lane.failed_in_a_row >= IN_A_ROW + 2 * len(nodes) and not lane.workers:
            self.fail(f"{lane.name}: {lane.failed_in_a_row} setups failed in a row; the last: {what}", detail)

    def died_idle(self, lane: Lane, lived_s: float, what: str, detail: str) -> None:
        """A death that nobody is suspected of."""
        lane.crashes = lane.crashes + 1 if lived_s < SHORT_LIFE_S else 0
        if lane.crashes > CRASHES + 2 * len(lane.workers):
            self.fail(f"{lane.name}: {lane.crashes} workers in a row died without having worked: {what}", detail)

    def node_lost(self, node: str) -> None:
        self.down[node] = self.board.now + DOWN_S

    def node_settled(self, node: str) -> None:
        """It left for good, or is there again: nothing is assumed of it any more."""
        self.down.pop(node, None)
        for key in [key for key in self._trouble if key[1] == node]:
            del self._trouble[key]

    def nodes_down(self) -> list[str]:
        for node in [node for node, until in self.down.items() if until <= self.board.now]:
            del self.down[node]
        return list(self.down)
