"""Preemption: which running jobs end to make room for a job of higher priority, and the room that is kept for it. Pure.

A job is ended only if it is preemptible and its priority is lower than that of the other one; waiting does not raise a
priority here. The smallest sufficient set is chosen: one job, if the end of one suffices, else jobs are added until the
other one fits, and then those that are not needed are taken out again. Jobs of the lowest priority come first, and of
these the youngest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.ordering import order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dovetail.jobs.admission import Admission, FreeCapacity
    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import PreemptibleJob


class Candidate(NamedTuple):
    """A preemptible job that runs on a worker."""

    record: JobRecord
    held: PreemptibleJob


class KeptRoom:
    """Room that a claim keeps for jobs of higher priority, for which other jobs are being ended; in the order of these
    jobs."""

    def __init__(
        self, admission: Admission, waiting: Iterable[JobRecord], ending: Iterable[Candidate], room: FreeCapacity
    ) -> None:
        """`waiting`: ready jobs for which others are being ended, or have just ended. `ending`: jobs that still run,
        and will end. `room`: of the worker now."""
        self._admission = admission
        self._ending = list(ending)
        self.waiting: list[JobRecord] = []
        later = self._later(room)
        for record in sorted(waiting, key=order_of):
            left = later.after_start(record.shape, admission)
            if left is not None:  # otherwise the worker has become smaller: no room is kept for this job
                later = left
                self.waiting.append(record)

    def has_room_after(self, room: FreeCapacity) -> bool:
        """Whether the waiting jobs fit when the ending ones have ended; `room`: after the start of another job."""
        return not self.waiting or self.left(room) is not None

    def take_startable(
        self, room: FreeCapacity, may_start: Callable[[JobRecord], bool]
    ) -> tuple[JobRecord, FreeCapacity] | None:
        """Remove the first waiting job that fits now. Returns it, and the room after its start."""
        for record in self.waiting:
            left = room.after_start(record.shape, self._admission) if may_start(record) else None
            if left is None:
                continue
            before, self.waiting = self.waiting, [one for one in self.waiting if one is not record]
            if self.has_room_after(left):
                return record, left
            self.waiting = before
        return None

    def keep(self, record: JobRecord, ending: Iterable[Candidate]) -> None:
        """Keep room for another job, for which these jobs are being ended."""
        self._ending += ending
        self.waiting.append(record)

    def left(self, room: FreeCapacity) -> FreeCapacity | None:
        """The room when the ending jobs have ended and the waiting ones have started; None if they do not fit."""
        later = self._later(room)
        for record in self.waiting:
            after = later.after_start(record.shape, self._admission)
            if after is None:
                return None
            later = after
        return later

    def _later(self, room: FreeCapacity) -> FreeCapacity:
        for candidate in self._ending:
            room = room.after_end(candidate.held.seats, candidate.held.slots)
        return room


def choose_preempted(
    admission: Admission, job: JobRecord, room: FreeCapacity, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Running jobs whose end makes room for this job; empty if no set of them suffices, or if none is needed."""
    lower = [one for one in candidates if one.record.spec.priority < job.spec.priority]
    lower.sort(key=_preference)

    def suffices(chosen: Iterable[Candidate]) -> bool:
        later = room
        for candidate in chosen:
            later = later.after_end(candidate.held.seats, candidate.held.slots)
        return later.after_start(job.shape, admission) is not None

    if suffices(()) or not suffices(lower):
        return []
    for candidate in lower:
        if suffices((candidate,)):
            return [candidate]
    chosen: list[Candidate] = []
    for candidate in lower:
        chosen.append(candidate)
        if suffices(chosen):
            break
    for candidate in reversed(chosen[:-1]):
        fewer = [one for one in chosen if one is not candidate]
        if suffices(fewer):
            chosen = fewer
    return chosen


def _preference(candidate: Candidate) -> tuple[int, int, str]:
    record = candidate.record
    return record.spec.priority, -(record.started_ms or 0), record.spec.id
