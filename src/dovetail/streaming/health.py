"""Back-off after failed worker setups, limits on repeated failures, and nodes believed to be down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.streaming.state import StreamState, UnitState

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 600.0
MAX_SETUP_FAILURES_PER_NODE = 3
"""A unit whose setup failed so often in a row on a node says so; it waits twice as long each time."""
MAX_SETUP_FAILURES_IN_A_ROW = 10
"""Failed setups of a unit, with none that worked in between; and two more per node."""
MAX_IDLE_DEATHS = 10
"""Deaths soon after the start that nobody is suspected of, without a single message coming to its end in between; and
two more per worker."""
SHORT_LIFE_S = 10.0
NODE_DOWN_S = 60.0
"""How long a node counts as lost when its workers say so and nobody else does."""


@dataclass(slots=True)
class SetupFailures:
    """Setups of one unit that failed on one node."""

    failed: int = 0
    in_a_row: int = 0
    retry_at: float = 0.0
    """No further try before this."""


class HealthTracker:
    """Remembers what failed where."""

    def __init__(self, board: StreamState, fail: Callable[[str, str], None]) -> None:
        self.state = board
        self.fail = fail
        self.down_until: dict[str, float] = {}
        """Nodes whose workers were lost with them, and until when that is believed."""
        self._setup_failures: dict[tuple[str, str], SetupFailures] = {}

    def backoff_s(self, lane: UnitState, nodes: tuple[str, ...]) -> float:
        """How long to wait before a worker of this unit is tried there again; 0: not at all."""
        if not self._setup_failures:
            return 0.0
        found = [self._setup_failures.get((lane.name, node)) for node in nodes]
        return max((trouble.retry_at - self.state.now for trouble in found if trouble is not None), default=0.0)

    def on_setup_succeeded(self, lane: UnitState, node: str) -> None:
        lane.setups_done += 1
        lane.setup_failures_in_a_row = 0
        trouble = self._setup_failures.get((lane.name, node))
        if trouble is not None:
            trouble.in_a_row = 0

    def on_setup_failed(self, lane: UnitState, node: str, what: str, detail: str) -> None:
        """Later again; a node where it keeps failing is left alone, and a unit that fails everywhere fails the run."""
        trouble = self._setup_failures.setdefault((lane.name, node), SetupFailures())
        trouble.failed += 1
        trouble.in_a_row += 1
        lane.setups_failed += 1
        lane.setup_failures_in_a_row += 1
        wait = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(trouble.in_a_row - 1, 20))
        trouble.retry_at = self.state.now + wait
        if trouble.in_a_row >= MAX_SETUP_FAILURES_PER_NODE:
            text = (
                f"{lane.name}: its setup failed {trouble.in_a_row} times in a row on {node}: not there for {wait:g} s"
            )
            self.state.add_note("decision", text, unit=lane.name, node=node)
        # one bad node counts for no more than a few failures, however often it was tried
        nodes = [entry for (unit, _), entry in self._setup_failures.items() if unit == lane.name]
        failed = sum(min(entry.failed, MAX_SETUP_FAILURES_PER_NODE) for entry in nodes)
        # those that are still at it count too: failing is quicker than succeeding
        tried = lane.setups_done + failed + sum(w.state is WorkerState.STARTING for w in lane.workers.values())
        if failed >= 3 and failed > self.state.options.max_setup_failure_share * tried:
            self.fail(f"{lane.name}: {failed} of {tried} workers failed in setup; the last: {what}", detail)
        elif lane.setup_failures_in_a_row >= MAX_SETUP_FAILURES_IN_A_ROW + 2 * len(nodes) and not lane.workers:
            self.fail(f"{lane.name}: {lane.setup_failures_in_a_row} setups failed in a row; the last: {what}", detail)

    def on_idle_death(self, lane: UnitState, lived_s: float, what: str, detail: str) -> None:
        """A death that nobody is suspected of."""
        lane.idle_deaths = lane.idle_deaths + 1 if lived_s < SHORT_LIFE_S else 0
        if lane.idle_deaths > MAX_IDLE_DEATHS + 2 * len(lane.workers):
            self.fail(f"{lane.name}: {lane.idle_deaths} workers in a row died without having worked: {what}", detail)

    def on_node_lost(self, node: str) -> None:
        self.down_until[node] = self.state.now + NODE_DOWN_S

    def forget_node(self, node: str) -> None:
        """It left for good, or is there again: nothing is assumed of it any more."""
        self.down_until.pop(node, None)
        for key in [key for key in self._setup_failures if key[1] == node]:
            del self._setup_failures[key]

    def current_down_nodes(self) -> list[str]:
        for node in [node for node, until in self.down_until.items() if until <= self.state.now]:
            del self.down_until[node]
        return list(self.down_until)
