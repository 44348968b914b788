"""Scaling decisions: how many workers a role should have, from one signal at a time.

Target tracking: a signal that is twice its target asks for twice the workers. Of a signal that is true or false, the
share of the time in which it was true counts. These rules keep the number steady:

- signals within `tolerance` of the target change nothing, nor does a queue or a pool that moves towards its target;
- workers are added when two signals in succession ask for more, and only as many as both ask for; by signals other than
  `outstanding`, which take time to follow a change, not within `cooldown` of the last addition;
- workers are removed when all signals within `cooldown` ask for fewer, and not within `cooldown` of a change;
- a change that reverses the one before it doubles the waiting time; from the second one on, workers are changed half
  of the way to the number that was last too high or too low, or in small steps beyond it. A signal without a middle
  (`is_full()`) comes to rest beside the number at which it changes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.actors.scale_signal import OUTSTANDING
from dovetail.pipeline.durations import parse_duration
from dovetail.text_format import format_count, format_duration

if TYPE_CHECKING:
    from dovetail.actors.role import Scale

__all__ = ["OUTSTANDING", "Decision", "Scaler"]

MAX_GROWTH = 4
"""Workers are at most multiplied by this where the signal says that there are too few, but not how many are missing."""
MAX_REVERSALS = 6
"""The waiting time is doubled at most this number of times."""
CALM_PERIODS = 4
"""Waiting times without a change after which earlier changes no longer count."""
MIN_APPROACH = 0.05
"""Share of the distance to its target by which a signal comes nearer from one decision to the next."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers that a role should have, and why."""

    workers: int
    change: int
    reason: str


class Scaler:
    """Decides for one role. Time is an argument; the caller makes the changes that it decides."""

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
        self._last_signal: float | None = None
        self._first_signal_at: float | None = None
        self._changed_at: float | None = None
        self._direction = 0
        self._reversals = 0
        self._same_direction = 0
        """Changes in the same direction since the last reversal."""
        self._too_few: tuple[float, int] | None = None
        """(time, workers) of the last change to more."""
        self._too_many: tuple[float, int] | None = None

    def decide(self, now: float, workers: int, signal: float | bool | None, room: int | None = None) -> Decision:
        """`workers`: ready and starting, not draining. `signal`: None if it could not be measured. `room`: how many fit
        in addition; None if unknown."""
        if isinstance(signal, bool):
            signal = self._share_of_true(now, signal)
        if signal is None or math.isnan(signal):
            return Decision(workers, 0, f"no value of {self._signal_name()}: {_count(workers)} kept")
        is_closing = self._is_closing(signal)
        wanted = workers if is_closing else self._wanted_workers(workers, max(0.0, float(signal)))
        self._remember(now, wanted)
        high = self.high if room is None else min(self.high, workers + room // self.step * self.step)
        target, hold = (workers, "moves towards its target") if is_closing else self._steady_target(now, workers)
        limited = max(self.low, min(target, high))
        if limited == workers or (limited < workers) != (target < workers):
            return Decision(
                workers, 0, self._reason(signal, workers, wanted, hold or self._limit_text(wanted, workers))
            )
        self._note_change(now, workers, 1 if limited > workers else -1)
        limit = self._limit_text(wanted, limited) if limited != target else ""
        return Decision(limited, limited - workers, self._reason(signal, workers, limited, limit, changed=True))

    # --- the number that a signal asks for

    def _share_of_true(self, now: float, value: bool) -> float:
        """The share of signals within the cooldown, since the last change, that were true."""
        since = max(now - self.cooldown_s, -math.inf if self._changed_at is None else self._changed_at)
        self._flags.append((now, value))
        while self._flags[0][0] < since:
            self._flags.popleft()
        return sum(flag for _, flag in self._flags) / len(self._flags)

    def _is_closing(self, signal: float) -> bool:
        """Whether a signal that takes time to follow a change comes nearer to its target by itself."""
        previous, self._last_signal = self._last_signal, signal
        if previous is None or self.scale.signal == OUTSTANDING or self._flags:
            return False
        before, after = previous - self.scale.target, signal - self.scale.target
        return before * after > 0 and abs(after) < (1 - MIN_APPROACH) * abs(before)

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
    def _waiting_time_s(self) -> float:
        return self.cooldown_s * float(2**self._reversals)

    @property
    def _wait_for_more_s(self) -> float:
        """Calls spread over new workers at once; a queue or a pool needs time to follow a change."""
        if self._direction > 0 and self.scale.signal != OUTSTANDING:
            return self.cooldown_s
        return self._waiting_time_s - self.cooldown_s if self._direction < 0 else 0.0

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
            return self._after(now, self._waiting_time_s, workers, max(wanted))
        return workers, ""

    def _after(self, now: float, wait_s: float, workers: int, target: int) -> tuple[int, str]:
        since = self._first_signal_at if self._changed_at is None else self._changed_at
        assert since is not None
        if now - since < wait_s - ROUNDING:
            return workers, f"not within {format_duration(wait_s)} of the last change"
        bound = self._bound(now, workers, 1 if target > workers else -1)
        if bound is None:
            return target, ""
        return (min(target, bound) if target > workers else max(target, bound)), ""

    def _bound(self, now: float, workers: int, direction: int) -> int | None:
        """While changes reverse each other: half of the way to the number that was wrong in the other direction; where
        that number is behind, one step, then two, then four. None: no bound."""
        reversals = self._reversals + self._is_reversal(now, direction)
        known = self._too_many if direction > 0 else self._too_few
        if reversals < 2 or known is None or now - known[0] >= CALM_PERIODS * self._waiting_time_s:
            return None
        steps = (known[1] - workers) * direction // self.step
        longest = math.ceil(steps / 2) if steps > 0 else 2**self._same_direction
        return workers + direction * longest * self.step

    def _is_reversal(self, now: float, direction: int) -> bool:
        recent = self._changed_at is not None and now - self._changed_at < CALM_PERIODS * self._waiting_time_s
        return recent and direction == -self._direction

    def _note_change(self, now: float, workers: int, direction: int) -> None:
        if self._is_reversal(now, direction):
            self._reversals = min(MAX_REVERSALS, self._reversals + 1)
        elif self._changed_at is None or now - self._changed_at >= CALM_PERIODS * self._waiting_time_s:
            self._reversals = 0
        self._same_direction = self._same_direction + 1 if direction == self._direction else 0
        self._changed_at, self._direction = now, direction
        if direction > 0:
            self._too_few = (now, workers)
        else:
            self._too_many = (now, workers)

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
