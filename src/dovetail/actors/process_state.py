"""State of one process of an actor system over all of its incarnations. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.actors.health_check import UnhealthyInstance
from dovetail.actors.instance_directory import InstanceAddress, InstanceState
from dovetail.control.lifecycle import checked_move

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.actors.colocation import ProcessTemplate
    from dovetail.actors.health_check import HealthChecked
    from dovetail.actors.restart_rules import RestartRules
    from dovetail.resources.seat import Seats

_S = InstanceState
LEGAL_MOVES = frozenset(
    {
        (_S.STARTING, _S.STARTING),
        (_S.STARTING, _S.READY),
        (_S.STARTING, _S.DRAINING),
        (_S.STARTING, _S.DEAD),
        (_S.READY, _S.STARTING),
        (_S.READY, _S.DRAINING),
        (_S.READY, _S.DEAD),
        (_S.DRAINING, _S.DEAD),
    }
)
"""A process is not degraded itself: its instances are, by what their `health` reports."""


@dataclass(eq=False)
class ProcessState:
    """One process of the plan, or one gang. Changed by its methods only."""

    number: int
    """Number of the process; restarts keep it."""
    bundle: int
    """Number of the bundle with which it was placed."""
    template: ProcessTemplate
    instances: tuple[tuple[str, int], ...]
    rules: RestartRules
    level: int
    seats: Seats
    state: InstanceState = InstanceState.STARTING
    reason: str = "not started yet"
    since: float = 0.0
    worker: int | None = None
    incarnation: int = 0
    restarts: int = 0
    start_at: float | None = None
    """Time at which it is due to be started; None if it is not."""
    is_stopping: bool = False
    """Whether its stop was sent."""
    unhealthy: dict[tuple[str, int], UnhealthyInstance] = field(default_factory=dict)
    """Its instances whose last health check failed."""
    kill_reason: str = ""
    """The reason for which it is being killed and restarted."""
    on_move: Callable[[ProcessState], object] | None = None
    """Called after each change of state or reason."""
    _recent_restarts: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return ", ".join(f"{role}[{index}]" for role, index in self.instances)

    @property
    def hosted_names(self) -> tuple[str, ...]:
        """Name of each instance in the process: its role; of several instances of one role, with a number."""
        count = dict(self.template.instances)
        seen: dict[str, int] = {}
        names = []
        for role, _ in self.instances:
            number = seen[role] = seen.get(role, -1) + 1
            names.append(role if count[role] == 1 else f"{role}.{number}")
        return tuple(names)

    def address(self, position: int) -> InstanceAddress:
        state, reason, _ = self.instance_state(self.instances[position])
        return InstanceAddress(state, self.worker, self.hosted_names[position], self.incarnation, reason)

    def instance_state(self, instance: tuple[str, int]) -> tuple[InstanceState, str, float]:
        """State, reason and since when; an instance that is not healthy is degraded."""
        unhealthy = self.unhealthy.get(instance)
        if unhealthy is None or self.state is not InstanceState.READY:
            return self.state, self.reason, self.since
        return InstanceState.DEGRADED, unhealthy.problem, unhealthy.since

    def _move(self, now: float, state: InstanceState, reason: str) -> None:
        before = self.state, self.reason
        self.state = checked_move(LEGAL_MOVES, self.state, state, self.name)
        self.reason = reason
        if before[0] is not state:
            self.since = now
        if state is not InstanceState.READY:
            self.unhealthy = {}
        if self.on_move is not None and before != (state, reason):
            self.on_move(self)

    # --- life

    def start(self, now: float, worker: int) -> None:
        self.incarnation += 1
        self._move(now, InstanceState.STARTING, "starting")
        self.since = now
        self.worker, self.start_at, self.kill_reason = worker, None, ""

    def on_ready(self, now: float) -> None:
        if self.state is InstanceState.STARTING:
            self._move(now, InstanceState.READY, "")

    def on_health_checked(self, now: float, event: HealthChecked) -> UnhealthyInstance | None:
        """Record the outcome of a check. Returns the instance if it is unhealthy."""
        before = self.unhealthy.pop(event.instance, None)
        if not event.problem:
            return None
        failures = (0 if before is None else before.failures) + event.counts
        found = UnhealthyInstance(event.problem, now if before is None else before.since, failures)
        self.unhealthy[event.instance] = found
        return found

    def drain(self, now: float, reason: str) -> None:
        """Take no more calls. A process that is waiting for its restart is dead at once."""
        self.start_at = None
        if self.worker is None:
            self.end(now, reason)
        elif self.state is not InstanceState.DRAINING:
            self._move(now, InstanceState.DRAINING, reason)

    def end(self, now: float, reason: str) -> None:
        """Mark the process as dead."""
        self.worker = self.start_at = None
        if self.state is not InstanceState.DEAD:
            self._move(now, InstanceState.DEAD, reason)

    def schedule_restart(self, now: float, reason: str) -> float | None:
        """Wait for a restart; returns the wait in seconds, or None if the limit is reached: then it is dead."""
        recent = self._recent_restarts
        while recent and recent[0] <= now - self.rules.window_s:
            recent.popleft()
        wait_s = self.rules.wait_s(len(recent))
        if wait_s is None:
            limit = f"{self.rules.limit} restarts within {self.rules.window_s:g} s"
            self.end(now, f"{reason}; not restarted again after {limit}")
            return None
        recent.append(now)
        self.restarts += 1
        self.worker = None
        self.start_at = now + wait_s
        self._move(now, InstanceState.STARTING, f"restarts after {wait_s:g} s: {reason}")
        self.since = now
        return wait_s

    def wait_for_room(self, now: float, retry_s: float, reason: str) -> None:
        """Postpone the start: no node has room for the process at present."""
        self.start_at = now + retry_s
        self._move(now, InstanceState.STARTING, reason)
