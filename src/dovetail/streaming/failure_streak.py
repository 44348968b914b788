"""Streaks of failures in a worker, and the rule that tells a broken worker from bad items.

Bad items fail in any worker and have good items between them; in a broken worker every item fails. A failed item is
therefore held until its worker has passed another call: then the item is to blame. If instead more items fail in
succession than bad items explain, the worker is suspected, and its held items are tried on other workers (`Trial`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.worker_pool import Suspect

MIN_SUSPICIOUS_STREAK = 2
MAX_FALSE_ALARMS = 0.001
"""Expected number of streaks of bad items that are mistaken for a broken worker, per unit."""
MAX_HELD_CALLS = 100
"""Failed calls of one worker that are held; beyond it, the oldest counts as the fault of its items."""


def is_suspicious(streak: int, failed: int, calls: int, looks: int, longest_cleared: int) -> bool:
    """Whether `streak` failures in succession are too many to be bad items.

    A call fails with about the probability (failed + 1) / (calls + 2), from all earlier calls of the unit and the
    failures that its items were to blame for. `looks` is the number of streaks that were or will be looked at.
    Neighbouring items are often bad together: after a streak that was found to be the fault of the items, only twice
    its length is suspicious, so that the number of false alarms grows with the logarithm of the longest streak.
    """
    if streak < MIN_SUSPICIOUS_STREAK or streak < 2 * longest_cleared:
        return False
    probability = (failed + 1) / (calls + 2)
    expected: float = max(1, looks) * probability**streak
    return expected < MAX_FALSE_ALARMS


class FailureStreak:
    """Calls that failed in one worker since its last call that passed."""

    __slots__ = ("held", "length")

    def __init__(self) -> None:
        self.length = 0
        """Number of failed calls, each with other items."""
        self.held: list[Suspect] = []
        """Failed items that are neither retried nor given up yet, in the order of their failure."""

    def count(self) -> None:
        self.length += 1

    def hold(self, suspect: Suspect) -> None:
        self.held.append(suspect)

    def take_oldest(self) -> Suspect:
        return self.held.pop(0)

    def take_held(self) -> list[Suspect]:
        held, self.held = self.held, []
        return held

    def drop_epoch(self, epoch: Epoch) -> None:
        self.held = [suspect for suspect in self.held if suspect.epoch is not epoch]


class Trial:
    """Items that failed in a suspected worker, while they are tried on other workers.

    One of them passes: the worker is broken. All fail: they are to blame. The item that failed first is not tried
    until the worker is known to be broken, because it may be what breaks workers.
    """

    __slots__ = ("failed", "first", "open", "passed", "streak", "worker")

    def __init__(self, worker: int, streak: int, first: Suspect | None) -> None:
        self.worker = worker
        self.streak = streak
        """Length of the streak that made the worker suspicious."""
        self.first = first
        """The items that failed first in the streak."""
        self.open: list[Suspect] = []
        """Items that wait for a worker or run."""
        self.failed: list[Suspect] = []
        self.passed = False

    def begin(self, suspects: Iterable[Suspect]) -> None:
        self.open.extend(suspects)

    def close(self, suspect: Suspect) -> None:
        """The items have run, whatever the result."""
        self.open = [other for other in self.open if other is not suspect]

    def add_failed(self, suspect: Suspect) -> None:
        self.failed.append(suspect)

    def mark_passed(self) -> None:
        self.passed = True

    def drop_epoch(self, epoch: Epoch) -> None:
        self.open = [suspect for suspect in self.open if suspect.epoch is not epoch]
        self.failed = [suspect for suspect in self.failed if suspect.epoch is not epoch]
        if self.first is not None and self.first.epoch is epoch:
            self.first = None
