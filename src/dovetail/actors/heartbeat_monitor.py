"""Heartbeats of a live system: figures and health checks of every instance, collected without blocking.

Thread: `on_step` in the loop, answers in threads of the engine, `request_figures` in any.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from threading import Condition, Lock, Semaphore
from threading import Event as ThreadEvent
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dovetail.actors.health_check import HealthChecked
from dovetail.actors.instance_directory import InstanceState
from dovetail.control.commands import StopWorker
from dovetail.control.engine import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from dovetail.actors.health_check import HealthLimits
    from dovetail.actors.system_controller import ActorController
    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.runtime.sites import RunEngine

HEARTBEAT_S = 2.0
CLOSE_TIMEOUT_S = 0.5
LATE_HEARTBEATS = 3
"""Number of heartbeats without an answer after which an instance without `health` is degraded."""


FIGURES = ("calls", "failed", "busy_s")
"""Figures of an incarnation that are summed."""


class FigureTotals(NamedTuple):
    """Calls of a role since the launch."""

    calls: int = 0
    failed: int = 0
    busy_s: float = 0.0
    """Time in which an instance executed at least one call, summed over all instances."""

    def plus(self, figures: Mapping[str, Any]) -> FigureTotals:
        return FigureTotals(*(mine + figures.get(name, 0) for name, mine in zip(FIGURES, self, strict=True)))


class FigureRequest:
    """Request for figures that are at least as new as the request."""

    def __init__(self) -> None:
        self._is_sent = ThreadEvent()
        self._asked = 0
        self._answers = Semaphore(0)

    def on_sent(self, asked: Sequence[Future[Any]]) -> None:
        """Called after the callbacks that store the answers, which were added before."""
        self._asked = len(asked)
        for future in asked:
            future.add_done_callback(lambda _: self._answers.release())
        self._is_sent.set()

    def wait(self, timeout_s: float) -> None:
        """Return when all instances that were asked have answered, or after the timeout."""
        end = time.monotonic() + timeout_s
        if self._is_sent.wait(timeout_s):
            for _ in range(self._asked):
                if not self._answers.acquire(timeout=max(0.0, end - time.monotonic())):
                    return


class Heartbeat:
    """The last answer of one instance to the monitor, and its open health check."""

    __slots__ = (
        "answered_at",
        "asked_at",
        "check_due_at",
        "check_open_at",
        "figures",
        "is_draining",
        "is_open",
        "is_unhealthy",
        "worker",
    )

    def __init__(self, worker: int, now: float) -> None:
        self.worker = worker
        self.asked_at = self.answered_at = now
        self.figures: Mapping[str, Any] = {}
        self.check_due_at = now
        self.check_open_at: float | None = None
        """Start of the check whose outcome is not known yet."""
        self.is_unhealthy = False
        self.is_draining = False
        """Whether its last question was sent."""
        self.is_open = False
        """Whether a question is not answered yet."""

    @property
    def is_answered(self) -> bool:
        return self.asked_at <= self.answered_at

    @property
    def has_health(self) -> bool:
        return "health" in self.figures


class HeartbeatMonitor:
    """Observer that asks every instance for its figures, and starts a health check when one is due. Outcomes are posted
    as events; the controller decides what they mean."""

    def __init__(self, controller: ActorController, engine: RunEngine, limits: Mapping[str, HealthLimits]) -> None:
        """`limits`: by role."""
        self._controller, self._engine, self._limits = controller, engine, limits
        self._due = float("-inf")
        self._lock = Lock()
        """Answers arrive in threads of the engine."""
        self._answered = Condition(self._lock)
        self.heartbeats: dict[tuple[str, int], Heartbeat] = {}
        self._ended: dict[str, FigureTotals] = {}
        """Role -> the calls of incarnations that have ended."""
        self._leaving: list[tuple[str, Heartbeat]] = []
        """Incarnations that have ended, and whose last answer is on its way."""
        self._requests: deque[FigureRequest] = deque()

    def request_figures(self) -> FigureRequest:
        """Ask all instances in the next step of the loop, which the caller must wake."""
        request = FigureRequest()
        self._requests.append(request)
        return request

    def totals(self, role: str) -> FigureTotals:
        """Calls of all incarnations of a role."""
        found = self._ended.get(role, FigureTotals())
        mine = [beat for (name, _), beat in self.heartbeats.items() if name == role]
        for beat in (*mine, *(beat for name, beat in self._leaving if name == role)):
            found = found.plus(beat.figures)
        return found

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        # observers are called before the commands are submitted: the question arrives before the worker drains
        drains = any(isinstance(command, StopWorker) and command.drain for command in commands)
        if now >= self._due or self._requests or drains:
            self._due = now + HEARTBEAT_S if now >= self._due else self._due
            asked = self.ask_all(now)
            while self._requests:
                self._requests.popleft().on_sent(asked)

    def ask_all(self, now: float) -> list[Future[Any]]:
        """Ask all ready instances without an open question, and those that begin to drain."""
        asked, current = [], {}
        for process in self._controller.processes:
            is_draining = process.state is InstanceState.DRAINING
            if process.worker is None or not (is_draining or process.state is InstanceState.READY):
                continue
            for hosted, instance in zip(process.hosted_names, process.instances, strict=True):
                beat = self.heartbeats.get(instance)
                if beat is None or beat.worker != process.worker:
                    beat = Heartbeat(process.worker, now)
                current[instance] = beat
                if beat.is_draining or not self._may_ask(now, beat, instance, is_draining=is_draining):
                    continue
                is_checked, timeout_s = beat.check_open_at is not None, self._limits[instance[0]].timeout_s
                future = self._engine.call(beat.worker, hosted, "_dovetail_status", is_checked, timeout_s)
                future.add_done_callback(partial(self._on_answer, beat, instance))
                asked.append(future)
        self._add_ended(current)
        self.heartbeats = current
        return asked

    def _may_ask(self, now: float, beat: Heartbeat, instance: tuple[str, int], *, is_draining: bool) -> bool:
        with self._lock:
            beat.is_draining = is_draining
            if not is_draining:
                self._open_check(now, beat, self._limits[instance[0]])
                if not beat.is_answered:
                    self._on_silence(now, beat, instance)
                    return False
            beat.asked_at = now + 1e-9
            beat.is_open = True
            return True

    def _add_ended(self, current: Mapping[tuple[str, int], Heartbeat]) -> None:
        for instance, beat in self.heartbeats.items():
            if current.get(instance) is not beat:
                self._leaving.append((instance[0], beat))
        for role, beat in self._leaving:
            if not beat.is_open:
                self._ended[role] = self._ended.get(role, FigureTotals()).plus(beat.figures)
        self._leaving = [one for one in self._leaving if one[1].is_open]

    def _open_check(self, now: float, beat: Heartbeat, limits: HealthLimits) -> None:
        if beat.check_open_at is None and now >= beat.check_due_at:
            beat.check_open_at, beat.check_due_at = now, now + limits.period_s

    def _on_silence(self, now: float, beat: Heartbeat, instance: tuple[str, int]) -> None:
        """The last question is not answered yet."""
        silent_s = now - beat.answered_at
        has_health = self._has_health(beat, instance[0])
        if has_health:
            is_late = beat.check_open_at is not None and now - beat.check_open_at > self._limits[instance[0]].timeout_s
            beat.check_open_at = None if is_late else beat.check_open_at
        else:
            is_late = silent_s > LATE_HEARTBEATS * HEARTBEAT_S and not beat.is_unhealthy
        if is_late:
            self._post(beat, instance, f"has not answered for {silent_s:.0f} s", counts=has_health)

    def _has_health(self, beat: Heartbeat, role: str) -> bool:
        """Whether the class of an instance has `health`; known from the class if possible, because an instance can
        become silent before its first answer."""
        names = self._controller.directory.roles[role].methods.names
        return beat.has_health or (names is not None and "health" in names)

    def _on_answer(self, beat: Heartbeat, instance: tuple[str, int], done: Future[Any]) -> None:
        with self._answered:
            if not done.cancelled() and not isinstance(done.exception(), WorkerLostError):  # its loss is reported
                self._store_answer(beat, instance, done)
            beat.is_open = False
            self._answered.notify_all()

    def _store_answer(self, beat: Heartbeat, instance: tuple[str, int], done: Future[Any]) -> None:
        error = done.exception()
        beat.answered_at = max(beat.asked_at, self._engine.now())
        if error is not None:
            self._post(beat, instance, f"{error}", counts=False)
            return
        beat.figures = done.result()
        problem = beat.figures.get("health", "")
        if problem is None or (beat.has_health and beat.check_open_at is None):
            return  # still running, or reported already
        beat.check_open_at = None
        self._post(beat, instance, problem, counts=beat.has_health)

    def _post(self, beat: Heartbeat, instance: tuple[str, int], problem: str, *, counts: bool) -> None:
        if beat.is_draining or (not problem and not beat.is_unhealthy):
            return
        beat.is_unhealthy = bool(problem)
        self._engine.post(cast("Event", HealthChecked(beat.worker, instance, problem, counts)))

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        """Wait a moment for the last answers of instances that have drained."""
        with self._answered:
            self._answered.wait_for(lambda: not any(beat.is_open for beat in self.heartbeats.values()), CLOSE_TIMEOUT_S)
