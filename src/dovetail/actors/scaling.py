"""Scaling decisions: how many workers a role should have, from one signal at a time. Pure.

Target tracking: a signal that is twice its target asks for twice the workers. Of a signal that is true or false, the
share of the time in which it was true counts. These rules keep the number steady:

- signals within `tolerance` of the target change nothing, nor does a queue or a pool that moves towards its target;
- workers are added when two signals in succession ask for more, and only as many as both ask for; by signals other than
  `outstanding`, which take time to follow a change, not within `cooldown` of the last addition;
- workers are removed when all signals within `cooldown` ask for fewer, and not within `cooldown` of a change;
- once changes reverse each other, the number is searched by bisection between the highest number that was too low and
  the lowest that was too high. Where these are neighbours, no number keeps the signal at its target (a queue that grows
  with 7 workers and empties with 8, a pool that is full or not): the higher one is kept, and the lower one is tried
  again after 120 cooldowns.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.actors.scale_signal import OUTSTANDING
from dovetail.pipeline.durations import parse_duration
from dovetail.text_format import format_count, format_duration

if TYPE_CHECKING:
    from dovetail.actors.role import Scale

__all__ = ["OUTSTANDING", "Decision", "Scaler"]

MAX_GROWTH = 4
"""Maximum factor of one increase by a signal that shows a shortage, but not its size."""
MIN_APPROACH = 0.25
"""Share of its distance to the target by which a signal must approach it within a cooldown, so that nothing is
changed."""
SEARCH_REVERSALS = 2
"""Number of reversed changes after which the number of workers is searched between bounds."""
REST_PERIODS = 120
"""Number of cooldowns for which a number of workers that was too low is not tried again. Older changes do not count as
reversals."""
PROBE_PERIODS = 4
"""Number of cooldowns between changes beyond the tried numbers: a full pool stays full for a while."""
TOO_HIGH_PERIODS = 10
"""Number of cooldowns for which a number of workers that was too high limits an increase."""
ROUNDING = 1e-9


class Bound(NamedTuple):
    """A number of workers that was too low or too high."""

    at: float
    workers: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers that a role should have, with the reason."""

    workers: int
    change: int
    reason: str


class Scaler:
    """Scaling decisions for one role. Time is an argument; the caller applies the decisions."""

    def __init__(self, scale: Scale, limits: tuple[int, int], step: int = 1) -> None:
        """`step`: workers are added and removed in multiples of it, as many as one bundle has."""
        self.scale = scale
        self.low, self.high = limits
        self.step = step
        self.interval_s = parse_duration(scale.interval)
        self.cooldown_s = parse_duration(scale.cooldown)
        self._wanted: deque[tuple[float, int]] = deque()
        """(time, workers asked for) of the signals within the cooldown."""
        self._flags: deque[tuple[float, bool]] = deque()
        self._signals: deque[tuple[float, float]] = deque()
        """(time, signal) within the cooldown, since the last change."""
        self._first_signal_at: float | None = None
        self._changed_at: float | None = None
        self._direction = 0
        self._reversals = 0
        self._too_low: Bound | None = None
        self._too_high: Bound | None = None
        self._same_direction = 0
        """Changes in the direction of the last one since the last reversal, without the first."""

    def decide(self, now: float, workers: int, signal: float | bool | None, room: int | None = None) -> Decision:
        """`workers`: ready and starting, not draining. `signal`: None if it could not be measured. `room`: how many fit
        in addition; None if unknown."""
        if isinstance(signal, bool):
            signal = self._share_of_true(now, signal)
        if signal is None or math.isnan(signal):
            return Decision(workers, 0, f"no value of {self._signal_name()}: {_count(workers)} kept")
        approach = self._approach(now, signal)
        wanted = self._wanted_workers(workers, max(0.0, float(signal)))
        if approach >= MIN_APPROACH:
            wanted, hold = workers, "moves towards its target"
        else:
            hold = ""
        self._remember(now, wanted)
        target = workers
        if not hold:
            target, hold = self._steady_target(now, workers)
            if target != workers:
                target, hold = self._bounded(now, workers, target, is_evidence=approach <= 0)
        high = self.high if room is None else min(self.high, workers + room // self.step * self.step)
        limited = max(self.low, min(target, high))
        if limited == workers or (limited < workers) != (target < workers):
            return Decision(
                workers, 0, self._reason(signal, workers, wanted, hold or self._limit_text(wanted, workers))
            )
        self._note_change(now, 1 if limited > workers else -1)
        limit = self._limit_text(wanted, limited) if limited != target else ""
        return Decision(limited, limited - workers, self._reason(signal, workers, limited, limit, changed=True))

    # --- the number that a signal asks for

    def _share_of_true(self, now: float, value: bool) -> float:
        """The share of signals that were true, since the last change and within the cooldown; once the number is
        searched for, within several cooldowns."""
        periods = PROBE_PERIODS if self._reversals >= SEARCH_REVERSALS else 1
        since = max(now - periods * self.cooldown_s, -math.inf if self._changed_at is None else self._changed_at)
        self._flags.append((now, value))
        while self._flags[0][0] < since:
            self._flags.popleft()
        return sum(flag for _, flag in self._flags) / len(self._flags)

    def _approach(self, now: float, signal: float) -> float:
        """Share of its distance to the target by which a signal that takes time to follow a change came nearer within
        the cooldown, since the last change; below 0: it moves away."""
        if not self._is_slow or self._flags:
            return 0.0
        self._signals.append((now, signal))
        while self._signals[0][0] < now - self.cooldown_s:
            self._signals.popleft()
        began, first = self._signals[0]
        before, after = first - self.scale.target, signal - self.scale.target
        if now == began or before * after <= 0:
            return 0.0
        return (1 - after / before) * self.cooldown_s / (now - began)

    def _wanted_workers(self, workers: int, signal: float) -> int:
        target, current = self.scale.target, max(1, workers)
        if abs(signal - target) <= self.scale.tolerance * target + ROUNDING:
            return workers
        if self.scale.inverse:
            factor = min(float(MAX_GROWTH), target / signal) if signal > 0 else float(MAX_GROWTH)
        else:
            factor = signal / target
        exact = min(current * factor, float(self.high)) / self.step
        # Fewer workers is the safe side only where a higher signal means fewer
        steps = math.floor(exact + ROUNDING) if self.scale.inverse and factor < 1 else math.ceil(exact - ROUNDING)
        return max(self.low, min(self.high, steps * self.step))

    def _remember(self, now: float, wanted: int) -> None:
        if self._first_signal_at is None:
            self._first_signal_at = now
        self._wanted.append((now, wanted))
        while len(self._wanted) > 2 and self._wanted[0][0] < now - self.cooldown_s:
            self._wanted.popleft()

    # --- steadiness

    @property
    def _is_slow(self) -> bool:
        """Whether the signal needs time to follow a change, as a queue or a pool does. Calls spread over new workers at
        once, unless their callers do not wait for answers: then the number of workers does not settle."""
        return self.scale.signal != OUTSTANDING or self._reversals >= SEARCH_REVERSALS

    @property
    def _wait_for_more_s(self) -> float:
        return self.cooldown_s if self._direction > 0 and self._is_slow else 0.0

    def _steady_target(self, now: float, workers: int) -> tuple[int, str]:
        """The workers to have now, and why fewer changes are made than the last signal asks for."""
        wanted = [count for _, count in self._wanted]
        if wanted[-1] > workers:
            if len(wanted) < 2 or min(wanted[-2:]) <= workers:
                return workers, "waits for a second signal"
            return self._after(now, self._wait_for_more_s, workers, min(wanted[-2:]))
        if wanted[-1] < workers:
            if max(wanted) >= workers:
                return workers, f"waits for {format_duration(self.cooldown_s)} of such signals"
            return self._after(now, self.cooldown_s, workers, max(wanted))
        return workers, ""

    def _after(self, now: float, wait_s: float, workers: int, target: int) -> tuple[int, str]:
        since = self._first_signal_at if self._changed_at is None else self._changed_at
        assert since is not None
        if now - since < wait_s - ROUNDING:
            return workers, f"not within {format_duration(wait_s)} of the last change"
        return target, ""

    # --- search between bounds

    def _bounded(self, now: float, workers: int, target: int, *, is_evidence: bool) -> tuple[int, str]:
        """The next number in the direction of the target. `is_evidence`: the signal does not come nearer by itself, so
        the present number is too low or too high."""
        direction = 1 if target > workers else -1
        is_search = self._reversals + self._is_reversal(now, direction) >= SEARCH_REVERSALS
        bound = self._find_bound(now, workers, direction)
        if is_search and bound is None and (direction < 0 or self._flags):  # beyond the numbers that were tried
            _, hold = self._after(now, PROBE_PERIODS * self.cooldown_s, workers, target)
            if hold:
                return workers, hold
        if is_evidence:
            self._note_bound(now, workers, direction)
        if not is_search:
            return target, ""
        distance = self._next_steps(direction)
        if bound is not None:
            distance = self._half_way(abs(bound - workers), direction)
        if direction > 0:
            return min(target, workers + distance), ""
        return max(target, workers - distance), "" if distance else f"{bound} were too few"

    def _find_bound(self, now: float, workers: int, direction: int) -> int | None:
        """The number that limits a change in this direction; None if it is unknown, too old, or was wrong."""
        if self._too_low is not None and direction < 0 and now - self._too_low.at > self._rest_s:
            self._too_low, self._same_direction = None, 0
        bound = self._too_high if direction > 0 else self._too_low
        if bound is None or (bound.workers - workers) * direction <= 0:
            return None
        is_old = direction > 0 and now - bound.at > TOO_HIGH_PERIODS * self.cooldown_s
        return None if is_old else bound.workers

    def _half_way(self, distance: int, direction: int) -> int:
        """Distance to the next number towards a bound: all of it to a neighbour above, else half. Never reaches the
        lower bound."""
        halves = distance / self.step / 2
        return (math.ceil(halves) if direction > 0 else math.floor(halves)) * self.step

    def _next_steps(self, direction: int) -> int:
        """Distance to the next number without a bound: one step, then two, then four."""
        return self.step * (2**self._same_direction if direction == self._direction else 1)

    @property
    def _rest_s(self) -> float:
        return REST_PERIODS * self.cooldown_s

    def _note_bound(self, now: float, workers: int, direction: int) -> None:
        """Record that the present number is too low (direction 1) or too high; the load may have changed since the
        other bound was found."""
        if direction < 0:
            self._too_high = Bound(now, workers)
            if self._too_low is not None and self._too_low.workers >= workers:
                self._too_low = None
        else:
            self._too_low = Bound(now, workers)
            if self._too_high is not None and self._too_high.workers <= workers:
                self._too_high, self._same_direction = None, 0

    def _is_reversal(self, now: float, direction: int) -> bool:
        recent = self._changed_at is not None and now - self._changed_at < 2 * self._rest_s
        return recent and direction == -self._direction

    def _note_change(self, now: float, direction: int) -> None:
        if self._is_reversal(now, direction):
            self._reversals += 1
        elif self._changed_at is None or now - self._changed_at >= 2 * self._rest_s:
            self._reversals = 0
        self._same_direction = self._same_direction + 1 if direction == self._direction else 0
        self._changed_at, self._direction = now, direction
        self._signals.clear()

    # --- text

    def _signal_name(self) -> str:
        signal = self.scale.signal
        return signal if isinstance(signal, str) else getattr(signal, "__name__", "the signal")

    def _reason(self, signal: float, workers: int, wanted: int, note: str, *, changed: bool = False) -> str:
        per = " per instance" if self.scale.signal == OUTSTANDING else ""
        inverse = ", inverse" if self.scale.inverse else ""
        text = f"{self._signal_name()} {signal:.3g}{per}, target {self.scale.target:g}{inverse}: "
        if changed:
            text += f"{workers} -> {_count(wanted)}"
        else:
            text += f"{_count(workers)} kept" if wanted == workers else f"{_count(workers)} kept, {wanted} wanted"
        return f"{text} ({note})" if note else text

    def _limit_text(self, wanted: int, workers: int) -> str:
        if wanted > workers and workers < self.high:
            return "no more fit"
        return "maximum" if workers >= self.high > self.low else "minimum" if workers <= self.low else ""


def _count(workers: int) -> str:
    return format_count(workers, "worker")
