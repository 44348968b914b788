"""Throughput of one worker of a unit: measured rate, confidence, items out per item in, setup time.

Measured is the time spent in the user's code, never the time between results: a starved worker is not a slow one.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_MESSAGES = 1024
"""Messages that are remembered, and more where there are many workers."""
MIN_MESSAGES = 4
"""Messages before what is measured counts for more than what was given."""
OUTLIER_FACTOR = 20.0
"""Times the middle: longer ones count as this long, so that one hung call does not make a stage slow."""
MIN_MESSAGES_PER_WORKER = 2
"""Messages per busy worker before what is measured counts."""
OVERDUE_FACTOR = 3.0
"""Times the mean: a message in flight that is older is overdue."""
OVERDUE_STD_ERRORS = 4.0
MIN_VARIANCE = 0.01
"""More overdue messages than chance explains by so many standard errors: the unit has become slow."""
GUESSED_CONFIDENCE = 0.5
"""How sure a rate is that is drawn from messages which have not ended."""
MIN_RECENT_MESSAGES = 32
DRIFT_STD_ERRORS = 4.0
DRIFT_SHARE = 0.1
"""If the newest quarter of what is remembered differs from the rest by so many standard errors and by this share, the
speed has changed."""
GIVEN_CONFIDENCE = 0.3


class ThroughputEstimator:
    """The last messages of a unit: items in, seconds, items out."""

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
        """Messages that are in a worker at the same time: it takes in so many times what one of them says."""
        self.given_rate = rate
        self.given_returns = returns
        self.window: deque[tuple[int, float, int]] = deque()
        self.max_window = WINDOW_MESSAGES
        self.messages = 0
        self._in = 0
        self._out = 0
        self._seconds = 0.0
        self.setup_s: float | None = None
        """Seconds that a worker's setup takes: the mean of the last ones."""
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
        """How much is remembered with so many workers at work; and what is older than a change of speed is forgotten.

        Some rounds of all of them: those that began together end in the order of their luck, and the last few would say
        more of that than of their speed.
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
    def seconds_per_item(self) -> float | None:
        """The plain mean, for sizing messages; None: nothing is known."""
        if self._in:
            return max(self._seconds, 0.0) / self._in
        return None if self.given_rate is None else self.slots / self.given_rate

    @property
    def is_measured(self) -> bool:
        return self.messages >= MIN_MESSAGES

    def rate(self, ages: Iterable[tuple[int, float]] = ()) -> tuple[float | None, float]:
        """Items per second that a worker takes in while it has work, and how sure that is (0 to 1).

        `ages` are messages in flight, as (items, seconds so far). If more than a few already took much longer than
        usual, they count as if they ended now: a stage that became slow is seen before its first slow message ends.
        """
        if not self.window:
            return self.given_rate, GIVEN_CONFIDENCE
        middle, mean, sure, chance = self._window_statistics()
        flying = list(ages)
        enough = max(MIN_MESSAGES, MIN_MESSAGES_PER_WORKER * len(flying))
        if self.messages < enough:
            # the quick ones end first: until every worker has had some, their mean says too little
            if self.given_rate is not None:
                return self.given_rate, GIVEN_CONFIDENCE
            sure *= self.messages / enough
        seconds = mean
        overdue = [
            min(age / items, OUTLIER_FACTOR * middle) for items, age in flying if age > OVERDUE_FACTOR * mean * items
        ]
        if overdue and _is_more_than_chance(len(overdue), len(flying), chance):
            share = len(overdue) / len(flying)
            seconds = (1 - share) * mean + share * sum(overdue) / len(overdue)
            sure = min(sure, GUESSED_CONFIDENCE)
        return (self.slots / seconds if seconds > 0 else 1e9), sure

    def _window_statistics(self) -> tuple[float, float, float, float]:
        """Seconds per item in the middle, their mean without outliers, how sure the mean is, and which share of what is
        in flight is overdue by chance: the long ones are in flight for longer."""
        known = self._cached_statistics
        if known is not None and known[0] == self.messages:
            return known[1:]
        per_item = sorted((seconds / items, items) for items, seconds, _ in self.window if items)
        if not per_item:
            return 0.0, 0.0, 0.0, 0.0
        middle = per_item[len(per_item) // 2][0]
        limit = OUTLIER_FACTOR * middle
        weight = sum(items for _, items in per_item)
        mean = sum(min(value, limit) * items for value, items in per_item) / weight
        values = [value for value, _ in per_item]
        total = sum(values)
        chance = sum(max(0.0, value - OVERDUE_FACTOR * mean) for value in values) / total if total > 0 else 0.0
        self._cached_statistics = (self.messages, middle, mean, _confidence(values), chance)
        return self._cached_statistics[1:]


def _is_more_than_chance(overdue: int, flying: int, chance: float) -> bool:
    error = math.sqrt(max(chance * (1 - chance), MIN_VARIANCE) / flying)
    return overdue / flying > chance + OVERDUE_STD_ERRORS * error


def _confidence(values: list[float]) -> float:
    """1 less the standard error of the mean, as a share of it; few messages say little."""
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
