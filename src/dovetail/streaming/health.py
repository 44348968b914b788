"""Back-off after failed worker setups, limits on repeated failures, and nodes believed to be down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.events import RunFailure
from dovetail.control.lifecycle import WorkerState
from dovetail.pipeline.units import short_unit_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.streaming.state import StreamState, UnitState

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 600.0
MAX_SETUP_FAILURES_PER_NODE = 3
"""Consecutive failed setups of a unit on one node after which a note is written; the back-off doubles each time."""
MAX_SETUP_FAILURES_IN_A_ROW = 10
"""Consecutive failed setups of a unit that fail the run; two more are allowed per node."""
MAX_IDLE_DEATHS = 10
"""Consecutive worker deaths soon after the start, without a suspect and without a finished message in between, that
fail the run; two more are allowed per worker."""
SHORT_LIFE_S = 10.0
MAX_BROKEN_IN_A_ROW = 20
"""Consecutive workers of a unit that exceptions report as broken, with no call that passes in between, that do not fail
the run; two more are allowed per worker. An item that breaks every process costs two of them."""
BROKEN_IN_A_ROW_BEFORE_BACKOFF = 3
MAX_BROKEN_BACKOFF_S = 10.0
NODE_DOWN_S = 60.0
"""How long a node counts as down after its workers were lost with it and before the engine reports that it left."""


@dataclass(slots=True)
class SetupFailures:
    """Failed setups of one unit on one node."""

    failed: int = 0
    in_a_row: int = 0
    retry_at: float = 0.0
    """Time of the next attempt."""


class HealthTracker:
    """Tracks failed setups per unit and node, idle deaths, and nodes that are down."""

    def __init__(self, state: StreamState, fail: Callable[[RunFailure], None]) -> None:
        self.state = state
        self.fail = fail
        self.down_until: dict[str, float] = {}
        """Node -> until when it counts as down."""
        self._setup_failures: dict[tuple[str, str], SetupFailures] = {}
        self._broken_retry_at: dict[str, float] = {}
        """Unit -> time of the next start, after several of its workers were broken in succession."""

    def backoff_s(self, unit: UnitState, nodes: tuple[str, ...]) -> float:
        """Seconds to wait before a worker of this unit is started on these nodes; 0 or less: start now."""
        if not (self._setup_failures or self._broken_retry_at):
            return 0.0
        found = [self._setup_failures.get((unit.name, node)) for node in nodes]
        times = [failures.retry_at for failures in found if failures is not None]
        return max(self._broken_retry_at.get(unit.name, 0.0), *times, 0.0) - self.state.now

    def on_setup_succeeded(self, unit: UnitState, node: str) -> None:
        unit.count_setup_done()
        failures = self._setup_failures.get((unit.name, node))
        if failures is not None:
            failures.in_a_row = 0

    def on_setup_failed(self, unit: UnitState, node: str, what: str, detail: str) -> None:
        """Back off on this node; fail the run if too many setups of the unit failed."""
        name = short_unit_name(unit.name)
        failures = self._setup_failures.setdefault((unit.name, node), SetupFailures())
        failures.failed += 1
        failures.in_a_row += 1
        unit.count_setup_failed()
        wait = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures.in_a_row - 1, 20))
        failures.retry_at = self.state.now + wait
        if failures.in_a_row >= MAX_SETUP_FAILURES_PER_NODE:
            text = (
                f"{name}: setup failed {failures.in_a_row} times in a row on node {node}; "
                f"next attempt there in {wait:g} s"
            )
            self.state.add_note("decision", text, unit=unit.name, node=node)
        limit = unit.spec.max_setup_failures
        if limit is not None:
            if unit.setup_failures_in_a_row > limit:
                error = f"{unit.setup_failures_in_a_row} setups failed in a row, more than max_setup_failures={limit}"
                self.fail(RunFailure(f"{name}: {error} allows; the last: {what}", detail))
            return
        # one bad node counts for a few failures only, regardless of how often it was tried
        nodes = [entry for (failed_unit, _), entry in self._setup_failures.items() if failed_unit == unit.name]
        failed = sum(min(entry.failed, MAX_SETUP_FAILURES_PER_NODE) for entry in nodes)
        # setups in progress count as attempts: failing is quicker than succeeding
        tried = unit.setups_done + failed + sum(w.state is WorkerState.STARTING for w in unit.workers.values())
        if failed >= 3 and failed > self.state.options.max_setup_failure_share * tried:
            self.fail(RunFailure(f"{name}: {failed} of {tried} workers failed in setup; the last: {what}", detail))
        elif unit.setup_failures_in_a_row >= MAX_SETUP_FAILURES_IN_A_ROW + 2 * len(nodes) and not unit.workers:
            self.fail(
                RunFailure(f"{name}: {unit.setup_failures_in_a_row} setups failed in a row; the last: {what}", detail)
            )

    def on_idle_death(self, unit: UnitState, lived_s: float, what: str, detail: str) -> None:
        """Count a death without a suspect; fail the run if too many workers die young."""
        if lived_s < SHORT_LIFE_S:
            unit.count_idle_death()
        else:
            unit.reset_idle_deaths()
        if unit.idle_deaths > MAX_IDLE_DEATHS + 2 * len(unit.workers):
            name = short_unit_name(unit.name)
            self.fail(
                RunFailure(f"{name}: {unit.idle_deaths} workers in a row died before they did any work: {what}", detail)
            )

    def on_worker_broken(self, unit: UnitState) -> bool:
        """Back off after a worker that an exception reports as broken; True: too many of them in succession."""
        in_a_row = unit.failures.replaced_in_succession
        doublings = in_a_row - BROKEN_IN_A_ROW_BEFORE_BACKOFF - 1
        if doublings >= 0:
            wait = min(MAX_BROKEN_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(doublings, 20))
            self._broken_retry_at[unit.name] = self.state.now + wait
            name = short_unit_name(unit.name)
            text = f"{name}: {in_a_row} workers in succession were broken; the next one starts in {wait:g} s"
            self.state.add_note("decision", text, unit=unit.name)
        return in_a_row > MAX_BROKEN_IN_A_ROW + 2 * len(unit.workers)

    def on_node_lost(self, node: str) -> None:
        self.down_until[node] = self.state.now + NODE_DOWN_S

    def forget_node(self, node: str) -> None:
        """Clear everything known about a node: it left, or it joined again."""
        self.down_until.pop(node, None)
        for key in [key for key in self._setup_failures if key[1] == node]:
            del self._setup_failures[key]

    def current_down_nodes(self) -> list[str]:
        """Names of nodes that count as down now."""
        for node in [node for node, until in self.down_until.items() if until <= self.state.now]:
            del self.down_until[node]
        return list(self.down_until)
