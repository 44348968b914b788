"""Failures in the workers of a unit: streaks, held items, and the trial of a suspected worker.

Bad items fail in any worker and have good items between them; in a broken worker every item fails. A failed item is
therefore held until its worker has passed another call: then the item is to blame. If instead more items fail in
succession than bad items explain (`broken_worker_rule`), the worker is suspected, and its held items are tried on other
workers (`Trial`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.streaming.broken_worker_rule import MAX_REPLACEMENTS_WITHOUT_SUCCESS, may_replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.worker_pool import Suspect

MAX_HELD_CALLS = 100
"""Failed calls of one worker that are held; beyond it, the oldest counts as the fault of its items."""


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
        self.held = _without_epoch(self.held, epoch)


class Trial:
    """Items that failed in a suspected worker, while they are tried on other workers.

    One of them passes: the worker is broken. All fail: they are to blame. The item that failed first is not tried
    until the worker is known to be broken, because it may be what breaks workers. An item that fails in a trial may
    have broken that worker, too: its failure counts when that worker passes another call.
    """

    __slots__ = ("failed", "first", "open", "passed", "streak", "unconfirmed", "worker")

    def __init__(self, worker: int, streak: int, first: Suspect | None) -> None:
        self.worker = worker
        self.streak = streak
        """Length of the streak that made the worker suspicious."""
        self.first = first
        """The items that failed first in the streak."""
        self.open: list[Suspect] = []
        """Items that wait for a worker or run."""
        self.unconfirmed: dict[int, list[Suspect]] = {}
        """Worker -> items that failed in it since its last call that passed, in the order of their failure."""
        self.failed: list[Suspect] = []
        self.passed = False

    @property
    def is_over(self) -> bool:
        return not self.open and not self.unconfirmed

    def begin(self, suspects: Iterable[Suspect]) -> None:
        self.open.extend(suspects)

    def begin_first(self) -> list[Suspect]:
        """Try the items that failed first, too."""
        suspects = [] if self.first is None else [replace(self.first, trial=self)]
        self.first = None
        self.begin(suspects)
        return suspects

    def close(self, suspect: Suspect) -> None:
        """The items have run, whatever the result."""
        self.open = [other for other in self.open if other is not suspect]

    def add_failed(self, suspect: Suspect, worker: int) -> None:
        self.unconfirmed.setdefault(worker, []).append(suspect)

    def confirm(self, worker: int) -> None:
        """The worker passed another call: it was not to blame for what failed in it."""
        self.failed.extend(self.unconfirmed.pop(worker, []))

    def take_unconfirmed(self, worker: int) -> list[Suspect]:
        """The worker is broken or gone: what failed in it proves nothing."""
        return self.unconfirmed.pop(worker, [])

    def mark_passed(self) -> None:
        self.passed = True

    def waiting(self) -> Iterator[Suspect]:
        """Items that neither wait for a worker nor run."""
        yield from self.failed
        for suspects in self.unconfirmed.values():
            yield from suspects
        if self.first is not None:
            yield self.first

    def take_waiting(self) -> list[Suspect]:
        """Remove and return the items that neither wait for a worker nor run."""
        waiting = list(self.waiting())
        self.first, self.failed, self.unconfirmed = None, [], {}
        return waiting

    def drop_epoch(self, epoch: Epoch) -> None:
        self.open = _without_epoch(self.open, epoch)
        self.failed = _without_epoch(self.failed, epoch)
        kept = {worker: _without_epoch(suspects, epoch) for worker, suspects in self.unconfirmed.items()}
        self.unconfirmed = {worker: suspects for worker, suspects in kept.items() if suspects}
        if self.first is not None and self.first.epoch is epoch:
            self.first = None


class UnitFailures:
    """Failures in the workers of a unit: streaks, the trial of a suspected worker, and what the rule counts."""

    __slots__ = ("failed_calls", "longest_cleared_streak", "replaced_in_succession", "streaks", "trial")

    def __init__(self) -> None:
        self.streaks: dict[int, FailureStreak] = {}
        """Worker -> its failures since its last call that passed."""
        self.trial: Trial | None = None
        """Decides whether a suspected worker is broken; one at a time."""
        self.failed_calls = 0
        """Calls that raised and whose items were to blame."""
        self.replaced_in_succession = 0
        """Broken workers that were replaced since the last call that passed."""
        self.longest_cleared_streak = 0
        """Longest streak of failures of a suspected worker that was not broken."""

    @property
    def awaits_success(self) -> bool:
        """Whether a call that passes changes anything."""
        return bool(self.streaks) or self.replaced_in_succession > 0

    @property
    def replaced_enough(self) -> bool:
        """Whether new workers fail, too, so that the items are to blame."""
        return self.replaced_in_succession >= MAX_REPLACEMENTS_WITHOUT_SUCCESS

    def may_replace(self, streak: FailureStreak | None) -> bool:
        """Whether the worker with this streak may be replaced: not if new workers fail, too, unless its streak is
        long."""
        return may_replace(0 if streak is None else streak.length, self.replaced_in_succession)

    @property
    def holds_items(self) -> bool:
        """Whether failed items are held in streaks."""
        return any(streak.held for streak in self.streaks.values()) if self.streaks else False

    def streak_of(self, worker: int) -> FailureStreak:
        """The streak of failures of a worker, begun if there is none."""
        return self.streaks.setdefault(worker, FailureStreak())

    def end_streak(self, worker: int) -> list[Suspect]:
        """Forget the streak of a worker, and return the items that it held."""
        streak = self.streaks.pop(worker, None)
        return [] if streak is None else streak.take_held()

    def clear_streak(self, length: int) -> None:
        """The items were to blame for a streak that looked like a broken worker."""
        self.longest_cleared_streak = max(self.longest_cleared_streak, length)

    def count_failed_calls(self, calls: int) -> None:
        self.failed_calls += calls

    def count_replacement(self) -> None:
        self.replaced_in_succession += 1

    def end_replacements(self) -> None:
        """A call passed."""
        self.replaced_in_succession = 0

    def begin_trial(self, trial: Trial) -> None:
        self.trial = trial

    def end_trial(self) -> None:
        self.trial = None

    def waiting(self) -> Iterator[Suspect]:
        """Failed items that are held back, and are neither queued nor at a worker."""
        for streak in self.streaks.values():
            yield from streak.held
        if self.trial is not None:
            yield from self.trial.waiting()

    def drop_epoch(self, epoch: Epoch) -> None:
        for streak in self.streaks.values():
            streak.drop_epoch(epoch)
        if self.trial is not None:
            self.trial.drop_epoch(epoch)


def _without_epoch(suspects: list[Suspect], epoch: Epoch) -> list[Suspect]:
    return [suspect for suspect in suspects if suspect.epoch is not epoch]
