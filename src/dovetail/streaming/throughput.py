"""Throughput of one worker of a unit: measured rate, confidence, items out per item in, setup time.

The time in user code is measured, not the time between results: a starved worker is not a slow worker.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_MESSAGES = 1024
"""Messages in the window; more if there are many workers."""
MIN_MESSAGES = 4
"""Messages before measured values replace configured ones."""
OUTLIER_FACTOR = 20.0
"""Multiple of the median at which times are capped, so that one hung call does not make a stage look slow."""
MIN_MESSAGES_PER_WORKER = 2
"""Messages per busy worker before measured values are used."""
OVERDUE_FACTOR = 3.0
"""Multiple of the mean after which a message in flight is overdue."""
OVERDUE_STD_ERRORS = 4.0
"""Standard errors above chance at which overdue messages mean that the unit has become slow."""
MIN_VARIANCE = 0.01
"""Lower bound of the variance when the overdue messages are compared with what chance explains."""
GUESSED_CONFIDENCE = 0.5
"""Confidence of a rate that is estimated from messages in flight."""
MIN_RECENT_MESSAGES = 32
DRIFT_STD_ERRORS = 4.0
DRIFT_SHARE = 0.1
"""The rate has changed if the newest quarter of the window differs from the rest by this many standard errors and by
this share."""
GIVEN_CONFIDENCE = 0.3
"""Confidence of a configured rate."""
MIN_DROPPED_ITEMS = 1000
"""A unit that dropped this number of items, and returned none, is expected to drop all."""


class ThroughputEstimator:
    """Throughput statistics over the last messages of a unit: items in, seconds, items out."""

    __slots__ = (
        "_cached_statistics",
        "_in",
        "_out",
        "_seconds",
        "given_rate",
        "given_returns",
        "max_window",
        "messages",
        "setup_s",
        "slots",
        "window",
    )

    def __init__(self, rate: float | None, returns: float | None, slots: int = 1) -> None:
        self.slots = slots
        """Messages that a worker runs concurrently: its rate is this multiple of the rate of one."""
        self.given_rate = rate
        self.given_returns = returns
        self.window: deque[tuple[int, float, int]] = deque()
        self.max_window = WINDOW_MESSAGES
        self.messages = 0
        self._in = 0
        self._out = 0
        self._seconds = 0.0
        self.setup_s: float | None = None
        """Moving average of the setup time of a worker."""
        self._cached_statistics: tuple[int, float, float, float, float] | None = None

    def add(self, items: int, seconds: float, out: int) -> None:
        window = self.window
        window.append((items, seconds, out))
        while len(window) > self.max_window:
            self._drop_oldest()
        self._in += items
        self._seconds += seconds
        self._out += out
        self.messages += 1

    def adjust_window(self, busy: int) -> None:
        """Set the window for the number of busy workers, and drop messages from before a change of the rate.

        The window covers several messages per worker: messages that start together end in order of their duration, so
        the last few would be biased.
        """
        self.max_window = max(WINDOW_MESSAGES, MIN_MESSAGES_PER_WORKER * busy)
        recent = len(self.window) // 4
        if recent < max(MIN_RECENT_MESSAGES, busy):
            return
        values = [seconds / items for items, seconds, _ in self.window if items]
        old, new = values[:-recent], values[-recent:]
        mean_old, mean_new = sum(old) / len(old), sum(new) / recent
        error = math.sqrt(_variance(old, mean_old) / len(old) + _variance(new, mean_new) / recent)
        if abs(mean_new - mean_old) > max(DRIFT_STD_ERRORS * error, DRIFT_SHARE * mean_old):
            while len(self.window) > recent:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._cached_statistics = None
        items, seconds, out = self.window.popleft()
        self._in -= items
        self._seconds -= seconds
        self._out -= out

    def add_setup(self, seconds: float) -> None:
        self.setup_s = seconds if self.setup_s is None else 0.8 * self.setup_s + 0.2 * seconds

    @property
    def returns(self) -> float:
        """Items out per item in."""
        if self._in and (self.messages >= MIN_MESSAGES or self.given_returns is None):
            return self._out / self._in
        return 1.0 if self.given_returns is None else self.given_returns

    @property
    def possible_returns(self) -> float:
        """As `returns`, but not 0 after a few items: the next one may be the first that is not dropped."""
        return self.returns or (1 / (1 + self._in) if self._in < MIN_DROPPED_ITEMS else 0.0)

    @property
    def seconds_per_item(self) -> float | None:
        """Mean time per item, for sizing messages; None: unknown."""
        if self._in:
            return max(self._seconds, 0.0) / self._in
        return None if self.given_rate is None else self.slots / self.given_rate

    @property
    def is_measured(self) -> bool:
        return self.messages >= MIN_MESSAGES

    def rate(self, ages: Iterable[tuple[int, float]] = ()) -> tuple[float | None, float]:
        """Items per second of one worker while it has work, and the confidence of that rate (0 to 1).

        `ages` are messages in flight, as (items, seconds so far). If more of them are overdue than chance explains,
        they count as if they ended now, so that a slowdown is noticed before the first slow message ends.
        """
        if not self.window:
            return self.given_rate, GIVEN_CONFIDENCE
        median, mean, confidence, chance = self._window_statistics()
        in_flight = list(ages)
        enough = max(MIN_MESSAGES, MIN_MESSAGES_PER_WORKER * len(in_flight))
        if self.messages < enough:
            # short messages end first: until every worker has finished some, the mean is biased
            if self.given_rate is not None:
                return self.given_rate, GIVEN_CONFIDENCE
            confidence *= self.messages / enough
        seconds = mean
        overdue = [
            min(age / items, OUTLIER_FACTOR * median) for items, age in in_flight if age > OVERDUE_FACTOR * mean * items
        ]
        if overdue and _is_more_than_chance(len(overdue), len(in_flight), chance):
            share = len(overdue) / len(in_flight)
            seconds = (1 - share) * mean + share * sum(overdue) / len(overdue)
            confidence = min(confidence, GUESSED_CONFIDENCE)
        return (self.slots / seconds if seconds > 0 else 1e9), confidence

    def _window_statistics(self) -> tuple[float, float, float, float]:
        """Median and capped mean of the seconds per item, confidence of the mean, and the share of messages in flight
        that is overdue by chance: long messages are in flight for longer."""
        known = self._cached_statistics
        if known is not None and known[0] == self.messages:
            return known[1:]
        per_item = sorted((seconds / items, items) for items, seconds, _ in self.window if items)
        if not per_item:
            return 0.0, 0.0, 0.0, 0.0
        median = per_item[len(per_item) // 2][0]
        limit = OUTLIER_FACTOR * median
        weight = sum(items for _, items in per_item)
        mean = sum(min(value, limit) * items for value, items in per_item) / weight
        values = [value for value, _ in per_item]
        total = sum(values)
        chance = sum(max(0.0, value - OVERDUE_FACTOR * mean) for value in values) / total if total > 0 else 0.0
        self._cached_statistics = (self.messages, median, mean, _confidence(values), chance)
        return self._cached_statistics[1:]


def _is_more_than_chance(overdue: int, in_flight: int, chance: float) -> bool:
    error = math.sqrt(max(chance * (1 - chance), MIN_VARIANCE) / in_flight)
    return overdue / in_flight > chance + OVERDUE_STD_ERRORS * error


def _confidence(values: list[float]) -> float:
    """1 minus the relative standard error of the mean; reduced for few messages."""
    count = len(values)
    if count < 2:
        return 0.1
    mean = sum(values) / count
    if mean <= 0:
        return 1.0
    error = math.sqrt(_variance(values, mean) / count) / mean
    return max(0.1, min(1.0, 1 - error)) * min(1.0, count / MIN_MESSAGES)


def _variance(values: list[float], mean: float) -> float:
    return sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
