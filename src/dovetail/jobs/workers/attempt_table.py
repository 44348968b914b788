"""Running attempts of a worker, and the outbox: ended attempts that the store has not recorded yet."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING

from dovetail.jobs.job import Outcome
from dovetail.jobs.workers.isolation import PROCESS_KINDS
from dovetail.jobs.workers.job_batches import BatchAttempt
from dovetail.jobs.workers.running_attempt import AttemptKey, StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.store import Completion
    from dovetail.jobs.workers.job_batches import JobBatch
    from dovetail.jobs.workers.running_attempt import RunningAttempt
    from dovetail.resources.seat import Seat

MAX_COMPLETIONS_PER_EXCHANGE = 500
"""Maximum number of completions in one exchange; more can collect while the store cannot be reached."""


class AttemptTable:
    """Shared by the loop, the renewal thread and the runners. Each method is atomic under the GIL."""

    def __init__(self, release: Callable[[Seat | None], None], wake: Callable[[], None]) -> None:
        """`release`: frees the seat of an attempt. `wake`: ends the wait of the loop."""
        self.running: dict[AttemptKey, RunningAttempt] = {}
        self.abandoned: dict[AttemptKey, RunningAttempt] = {}
        """Attempts that were completed although their code still runs and cannot be interrupted. They keep their
        slots."""
        self.totals: Counter[str] = Counter()
        """Number of ended attempts by outcome."""
        self.ended_here = 0
        """Number of attempts that ran in the worker's own process."""
        self.calls = 0
        """Number of calls for batches that have ended."""
        self.is_loop_waiting = False
        self._outbox: deque[Completion] = deque()
        self._release = release
        self._wake = wake

    def finish(self, attempt: RunningAttempt, completion: Completion) -> None:
        """The attempt has ended, or the call for a batch. Thread: any."""
        # before the completion is visible, so that the exchange that sends it claims another job
        self._release(attempt.seat)
        if isinstance(attempt, BatchAttempt):
            self.calls += 1
            for item, of_item in attempt.completions(completion):
                self._end(item, of_item)
        else:
            self._end(attempt, completion)
        if self.is_loop_waiting:
            self.is_loop_waiting = False
            self._wake()

    def drop(self, batch: JobBatch, ended: Sequence[tuple[RunningAttempt, Completion]]) -> None:
        """Jobs of a batch end before its call; its slot and seat are free if these were all. Thread: loop."""
        if not batch.items:
            self._release(batch.seat)
        for item, completion in ended:
            self._end(item, completion)

    def _end(self, attempt: RunningAttempt, completion: Completion) -> None:
        if self.running.pop(attempt.key, None) is None:
            self.abandoned.pop(attempt.key, None)
        elif attempt.stop_reason is not StopReason.LEASE_LOST:
            self._outbox.append(completion)
        if attempt.isolation not in PROCESS_KINDS:
            self.ended_here += 1

    def abandon(self, attempt: RunningAttempt) -> None:
        """Complete an attempt whose code does not end. Thread: any."""
        if self.running.pop(attempt.key, None) is None:
            return
        self.abandoned[attempt.key] = attempt
        if attempt.stop_reason is not StopReason.LEASE_LOST:
            self._outbox.append(attempt.stopped())
        self._wake()

    def ends_in_ms(self, now: float, kill_grace_s: float) -> int | None:
        """Time until all attempts will have ended, by their timeouts; None if one has no timeout."""
        latest = now
        for attempt in list(self.running.values()):
            if attempt.timeout_s is None:
                return None
            latest = max(latest, attempt.started + attempt.timeout_s + kill_grace_s)
        return None if self.abandoned else math.ceil(1000 * (latest - now))

    def of_lease(self, job_id: str, token: int) -> list[RunningAttempt]:
        """The running attempt with this lease; of a gang, its members on this worker. Thread: any."""
        found = self.running.get(AttemptKey(job_id, token))
        if found is not None and found.membership is None:
            return [found]
        return [attempt for attempt in list(self.running.values()) if attempt.key[:2] == (job_id, token)]

    def refuse(self, completion: Completion) -> None:
        """Complete a claimed job that was not started."""
        self._outbox.append(completion)

    @property
    def has_completions(self) -> bool:
        return bool(self._outbox)

    def take_completions(self) -> list[Completion]:
        """Completions for one exchange, oldest first. Thread: loop."""
        outbox = self._outbox
        return [outbox.popleft() for _ in range(min(len(outbox), MAX_COMPLETIONS_PER_EXCHANGE))]

    def put_back(self, completions: Sequence[Completion]) -> None:
        """Put completions back after a failed exchange, for the next one. The store may receive them twice."""
        self._outbox.extendleft(reversed(completions))

    def count(self, completions: Sequence[Completion]) -> None:
        """Count completions that the store has recorded. Thread: loop."""
        totals = self.totals
        for completion in completions:
            if completion.outcome is not Outcome.RELEASED:
                totals[completion.outcome.value] += 1
