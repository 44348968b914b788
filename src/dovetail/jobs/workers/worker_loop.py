"""Loop of a worker: one exchange with the store completes what has ended and claims what fits; then it waits.

    running ──request_drain──▶ draining ──all ended, or the grace is over──▶ ended
                                  └──request_drain again: now──▶

The wait ends when the store has news, when an attempt ends, at the next time that the store has named, and at the
latest after a third of a lease.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from enum import Enum
from itertools import groupby
from threading import Event
from typing import TYPE_CHECKING

from dovetail.claims.owner import ProcessId, is_alive
from dovetail.errors import UNSET, Change, ConfigError, DovetailError, Problem
from dovetail.jobs.batch import unmarked_shape
from dovetail.jobs.job import Outcome
from dovetail.jobs.schedule import fire_schedule
from dovetail.jobs.store import Claim, Completion, Exchange, PreemptibleJob, StoreUnavailableError
from dovetail.jobs.submit_options import BAD_OPTION
from dovetail.jobs.workers.isolation import isolation_of, timeout_of
from dovetail.jobs.workers.job_batches import JobBatch
from dovetail.jobs.workers.job_ending import refusal_ending
from dovetail.jobs.workers.rendezvous_port import RendezvousPort
from dovetail.jobs.workers.running_attempt import Membership, RunningAttempt, StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.application import Application
    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.store import ClaimedJob, Renewal, Reply, Schedule, Store, WorkerInfo
    from dovetail.jobs.workers.attempt_table import AttemptTable
    from dovetail.jobs.workers.job_batches import JobBatches
    from dovetail.jobs.workers.lease_renewal import LeaseRenewal
    from dovetail.jobs.workers.running_attempt import Runner
    from dovetail.jobs.workers.worker_capacity import WorkerCapacity
    from dovetail.jobs.workers.worker_options import WorkerOptions
    from dovetail.resources.seat import Seat

ID_IN_USE = "DT625"
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 2.0
"""Delays between attempts to reach the store."""
MIN_WAIT_S = 0.005
SLOWER_WEIGHT, FASTER_WEIGHT = 0.5, 0.05
"""Weights of the latest exchange in the expected duration of the next one."""
START_FAILED_PAUSE_S = 1.0
"""Pause of claims after a process could not be started."""
LIMITS_KEPT = 1_000
KILL_MARGIN_S = 1.0
"""Time after SIGKILL until an attempt that has not ended is abandoned: threads, and coroutines that do not await."""
STORE_MARGIN_S = 3.0
"""Time at the end of the worker for the last completions, if the store does not respond."""


class LoopState(Enum):
    STARTING = "starting"
    """It waits for its share of the machine."""
    RUNNING = "running"
    DRAINING = "draining"
    """It claims no jobs and lets running ones end."""
    ENDED = "ended"


def _lease_of(job: ClaimedJob) -> tuple[str, int]:
    return job.lease[:2]


class WorkerLoop:
    """Loop of a worker. Thread: loop, except `request_drain`, `pause_claims` and attributes that the status reads."""

    def __init__(
        self,
        store: Store,
        info: Callable[[], WorkerInfo],
        options: WorkerOptions,
        application: Application,
        capacity: WorkerCapacity,
        table: AttemptTable,
        renewal: LeaseRenewal,
        runners: Mapping[str, Runner],
        batches: JobBatches,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._info = info
        self._options = options
        self._worker = options.worker_id
        self._application = application
        self._functions: dict[str, JobFunction] = {}
        self._limits_of: dict[tuple[object, ...], tuple[float | None, str]] = {}
        """Timeout and isolation by what they follow from."""
        self._capacity = capacity
        self._table = table
        self._renewal = renewal
        self._runners = runners
        self._batches = batches
        self._say = say
        self.state = LoopState.STARTING
        self.is_store_available = True
        self.exchanged_at: float | None = None
        """Monotonic time of the last exchange, for readiness."""
        self._draining_until: float | None = None
        """Time at which running jobs are ended; None: they are not."""
        self._ending_until = 0.0
        self._is_now = False
        self._has_terminated = False
        self._has_closed = False
        self._retry_s = FIRST_RETRY_S
        self._wakeup = Event()
        self._claims_paused_until = 0.0
        self._rendezvous = RendezvousPort(lambda: options.rendezvous_host or store.local_host())
        self._has_preemptible = False
        """Whether a preemptible attempt may be running."""
        self._asked_at = 0.0
        """Monotonic time at which the latest exchange was sent: the wait of a batch includes the claim of its first
        job."""
        self._exchange_s = 0.0
        """What an exchange takes, rather too long: it follows slow ones fast and fast ones slowly."""
        self._was_woken = False
        """Whether the store has ended a wait while attempts run: the reason may be a cancellation, which a renewal
        finds."""

    # --- any thread

    def request_drain(self, grace_s: float | None) -> None:
        """Stop claiming, and end running jobs after the grace (None: never)."""
        until = None if grace_s is None else time.monotonic() + grace_s
        if self.state is not LoopState.DRAINING or (
            until is not None and (self._draining_until is None or until < self._draining_until)
        ):
            self._draining_until = until
        if self.state is not LoopState.ENDED:
            self.state = LoopState.DRAINING
        self._wake()

    def request_end_now(self) -> None:
        """Kill running jobs at once."""
        self._is_now = True
        self.request_drain(0.0)

    def pause_claims(self) -> None:
        self._claims_paused_until = time.monotonic() + START_FAILED_PAUSE_S

    def _wake(self) -> None:
        self._wakeup.set()
        self._store.wake(self._worker)

    # --- the loop

    def run(self) -> None:
        """Run until the worker has drained."""
        try:
            self._run()
        finally:
            self._rendezvous.release()

    def _run(self) -> None:
        self._register()
        if self.state is LoopState.STARTING:
            self.state = LoopState.RUNNING
        while not self._is_over():
            reply = self._step()
            while reply is not None and not self._is_over():
                reply = self._wait(reply)
        self.state = LoopState.ENDED
        with suppress(StoreUnavailableError):  # it is forgotten after some time
            self._store.remove_worker(self._worker)

    def _register(self) -> None:
        """Register the worker. Raises ConfigError if another live worker has this id."""
        seen_ms: int | None = None
        while self.state is not LoopState.DRAINING:
            try:
                beat_ms = self._heartbeat_of_another()
                if beat_ms is None:
                    self._store.register_worker(self._info())
                    self._on_store_reached()
                    return
            except StoreUnavailableError as error:
                self._on_store_away(error)
                continue
            if seen_ms is not None and beat_ms > seen_ms:
                raise ConfigError(self._id_in_use())
            seen_ms = beat_ms if seen_ms is None else seen_ms
            self._wakeup.wait(self._options.lease_ms / 10_000)
            self._wakeup.clear()

    def _heartbeat_of_another(self) -> int | None:
        """Heartbeat of a worker that is registered under this id, if it may be alive. One whose process has ended, or
        that has been silent for a lease, is replaced."""
        found = self._registered()
        if found is None or self._store.now_ms() - found.heartbeat_ms > self._options.lease_ms:
            return None
        process = found.details.get("process")
        if isinstance(process, list) and len(process) == 3 and is_alive(ProcessId(*process)) is False:
            return None
        return found.heartbeat_ms

    def _registered(self) -> WorkerInfo | None:
        return next((info for info in self._store.workers() if info.id == self._worker), None)

    def _id_in_use(self) -> Problem:
        found = self._registered()
        details = found.details if found is not None else {}
        where = f"process {details.get('pid', '?')} on {details.get('host', '?')}"
        message = f"another worker runs under the id {self._worker!r}: {where}"
        fixes = (Change({"worker_id": f"{self._worker}-2"}), "unset WORKER_ID")
        return Problem(ID_IN_USE, message, ("workers of one store need different ids",), fixes)

    def _step(self) -> Reply | None:
        """Make one exchange. Returns None if there is more to do at once."""
        table = self._table
        draining = self.state is LoopState.DRAINING
        if draining:
            self._drain()
        self._batches.flush_due(self._exchange_s)
        completions = table.take_completions()
        renewals: tuple[Renewal, ...] = ()
        if self._was_woken and self._renewal.early_in_s() <= 0:
            self._was_woken = False
            renewals = tuple(self._renewal.collect())
        request = Exchange(self._worker, completions, renewals, self._claim(), self._options.lease_ms)
        self._asked_at = time.monotonic()
        try:
            reply = self._store.exchange(request)
        except StoreUnavailableError as error:
            table.put_back(completions)
            self._renewal.give_back(renewals)
            self._was_woken = self._was_woken or bool(renewals)
            self._on_store_away(error)
            return None
        self._note_exchange()
        return self._on_exchanged(request, reply)

    @property
    def _may_claim(self) -> bool:
        return self.state is not LoopState.DRAINING and time.monotonic() >= self._claims_paused_until

    def _claim(self) -> Claim:
        """What this worker can take; also without slots, so that the store knows that it takes nothing."""
        may_claim, options = self._may_claim, self._options
        slots, preemptible = (self._capacity.free_slots(), self._preemptible()) if may_claim else (0, ())
        address = self._rendezvous.address() if may_claim else ""
        ends_in_ms = self._table.ends_in_ms(time.monotonic(), options.kill_grace_s)
        free, delay_ms = self._capacity.claimable(), options.placement_delay_ms
        rooms = () if self.state is LoopState.DRAINING else self._batches.rooms
        return Claim(slots, free, options.queues, delay_ms, preemptible, ends_in_ms, address, rooms)

    def _on_exchanged(self, request: Exchange, reply: Reply) -> Reply | None:
        """Handle a reply. Returns None if there is more to do at once."""
        assert request.claim is not None
        self._on_store_reached()
        self._on_reply(reply, request.completions)
        if request.renewals or reply.preempted:
            self._renewal.apply(reply)
        self._batches.flush_due(self._exchange_s)
        is_full = len(reply.claimed) >= request.claim.slots
        may_claim_more = is_full and self._may_claim and self._capacity.free_slots() > 0
        return None if may_claim_more or self._batches.has_new else reply

    def _note_exchange(self) -> None:
        more_s = time.monotonic() - self._asked_at - self._exchange_s
        self._exchange_s += more_s * (SLOWER_WEIGHT if more_s > 0 else FASTER_WEIGHT)

    def _on_reply(self, reply: Reply, completions: Sequence[Completion]) -> None:
        if completions:
            self._table.count(completions)
            if reply.refused:
                self._count_refused(reply, completions)
        if reply.claimed:
            self._start(reply.claimed)
        for schedule in reply.due_schedules:
            self._fire(schedule, reply.now_ms)
        if not reply.known:
            self._store.register_worker(self._info())

    def _count_refused(self, reply: Reply, completions: Sequence[Completion]) -> None:
        """Log results that came after their lease was lost: another attempt counts."""
        refused = {(item.job_id, item.token) for item in reply.refused}
        for completion in completions:
            if (completion.job_id, completion.token) in refused:
                self._table.totals[completion.outcome.value] -= 1
                self._table.totals["refused"] += 1

    def _fire(self, schedule: Schedule, now_ms: int) -> None:
        try:
            fire_schedule(self._store, schedule, now_ms)
        except StoreUnavailableError:
            raise
        except (DovetailError, ValueError) as error:  # written by another version
            self._say(f"schedule {schedule.name} cannot be fired: {error}")

    def _wait(self, reply: Reply) -> Reply | None:
        """Wait, and make the next exchange if the worker is idle: its reply, else None."""
        table = self._table
        timeout_s = self._options.lease_ms / 3000
        if reply.next_ms is not None:
            timeout_s = min(timeout_s, max(MIN_WAIT_S, (reply.next_ms - reply.now_ms) / 1000))
        if self.state is LoopState.DRAINING:
            timeout_s = min(timeout_s, self._seconds_to_end())
        if self._was_woken:
            timeout_s = min(timeout_s, max(MIN_WAIT_S, self._renewal.early_in_s()))
        flush_in_s = self._batches.seconds_left(self._exchange_s)
        if flush_in_s is not None:
            timeout_s = min(timeout_s, flush_in_s)
        if self._claims_paused_until:
            timeout_s = min(timeout_s, START_FAILED_PAUSE_S)
        table.is_loop_waiting = True
        if table.has_completions or self._wakeup.is_set():
            table.is_loop_waiting = False
            self._wakeup.clear()
            return None
        is_idle = self._may_claim and not (table.running or table.abandoned or self._was_woken)
        request = Exchange(self._worker, (), (), self._claim(), self._options.lease_ms) if is_idle else None
        woken, following = False, None
        try:
            if request is None:
                woken = self._store.wait(self._worker, timeout_s)
            else:
                following = self._store.wait_and_exchange(request, timeout_s)
        except StoreUnavailableError as error:
            self._on_store_away(error)
            return None
        if woken and table.is_loop_waiting:  # otherwise an attempt has ended
            self._was_woken = bool(table.running)
        table.is_loop_waiting = False
        self._wakeup.clear()
        if request is None or following is None:
            return None
        self._asked_at = time.monotonic()  # the store claims as it ends the wait
        handled = self._on_exchanged(request, following)
        return None if self.state is LoopState.DRAINING else handled

    # --- claimed jobs

    def _start(self, claimed: Sequence[ClaimedJob]) -> None:
        starting: dict[str, list[RunningAttempt]] = {}
        for _, group in groupby(claimed, _lease_of):
            jobs = list(group)
            function = self._function_of(jobs[0].spec)
            if function is not None and function.defaults.batch is not None:
                self._start_in_batch(jobs, function)
                continue
            for attempt in self._attempts(jobs):
                self._table.running[attempt.key] = attempt
                self._has_preemptible = self._has_preemptible or attempt.spec.preemptible
                starting.setdefault(attempt.isolation, []).append(attempt)
        for isolation, attempts in starting.items():
            self._runners[isolation].start(attempts)

    def _start_in_batch(self, jobs: Sequence[ClaimedJob], function: JobFunction) -> None:
        """A job of a function with batches joins one, or begins one with a slot and a seat."""
        job, declared = jobs[0], function.defaults.batch
        assert declared is not None
        if self.state is LoopState.DRAINING:
            self._give_back(job)
            return
        try:
            if job.gang is not None or job.spec.preemptible:
                message = f"{job.spec.function} has batches: its jobs are neither gangs nor preemptible"
                fixes = (Change({"ranks": UNSET, "preemptible": UNSET}),)
                raise ConfigError(Problem(BAD_OPTION, message, fixes=fixes))  # noqa: TRY301 - as the errors of `_limits`
            timeout_s, isolation = self._limits(job, function)
        except ConfigError as error:
            self._refuse(job, error)
            return
        batch = self._batches.find(job, isolation)
        if batch is None:
            shape = unmarked_shape(job.shape)
            fits, seat = self._capacity.try_take(shape)
            if not fits:
                self._capacity.make_room(shape)
                self._give_back(job)
                return
            batch = JobBatch(declared, job.spec.queue, job.shape, isolation, seat, self._asked_at)
        attempt = RunningAttempt(job, None, function, isolation, timeout_s)
        self._table.running[attempt.key] = attempt
        self._batches.add(batch, attempt)

    def _attempts(self, jobs: Sequence[ClaimedJob]) -> list[RunningAttempt]:
        """The attempt of a claimed job, or the ranks of a gang on this worker. Without room they are given back, and a
        job that the worker does not run is refused."""
        seats: list[Seat | None] = []
        for job in jobs:
            fits, seat = self._capacity.try_take(job.shape.rank)
            if fits:
                seats.append(seat)
            elif self.state is not LoopState.DRAINING:
                self._capacity.make_room(job.shape.rank)
        error: DovetailError | None = None
        if len(seats) == len(jobs) and self.state is not LoopState.DRAINING:
            try:
                found = [self._attempt(job, tuple(seats), place) for place, job in enumerate(jobs)]
            except DovetailError as refusal:
                error = refusal
            else:
                if jobs[0].gang is not None and jobs[0].rank == 0:
                    self._rendezvous.release()
                return found
        for seat in seats:
            self._capacity.release(seat)
        if error is None:
            self._give_back(jobs[0])
        else:
            self._refuse(jobs[0], error)
        return []

    def _give_back(self, job: ClaimedJob) -> None:
        self._table.refuse(Completion(*job.lease[:2], Outcome.RELEASED, rank=job.rank))

    def _refuse(self, job: ClaimedJob, error: DovetailError) -> None:
        ending, jitter = refusal_ending(error), random.random()  # noqa: S311
        completion = Completion(*job.lease[:2], ending.outcome, error=ending.error, final=True, jitter=jitter)
        self._table.refuse(completion._replace(rank=job.rank))

    def _function_of(self, spec: JobSpec) -> JobFunction | None:
        """None: the worker does not run it."""
        function = self._functions.get(spec.function)
        if function is None:
            with suppress(DovetailError):
                function = self._functions[spec.function] = self._application.find(spec.function)
        return function

    def _limits(self, job: ClaimedJob, function: JobFunction) -> tuple[float | None, str]:
        """Timeout and isolation. ConfigError: the job cannot have them."""
        spec = job.spec
        key = function, job.shape, spec.shape.ranks, spec.timeout_ms, spec.isolation
        found = self._limits_of.get(key)
        if found is None:
            timeout_s = timeout_of(spec, function, self._options.job_timeout_s)
            isolation = isolation_of(spec, job.shape, function, self._options)
            if len(self._limits_of) >= LIMITS_KEPT:
                self._limits_of.clear()
            found = self._limits_of[key] = None if isolation == "thread" else timeout_s, isolation
        return found

    def _attempt(self, job: ClaimedJob, seats: tuple[Seat | None, ...], place: int) -> RunningAttempt:
        """`seats`: of the ranks of its gang on this worker, or its own. JobRefusedError, ConfigError: the worker does
        not run it."""
        function = self._function_of(job.spec) or self._application.find(job.spec.function)
        timeout_s, isolation = self._limits(job, function)
        membership = None if job.gang is None else Membership(job.rank, job.gang, seats, place)
        return RunningAttempt(job, seats[place], function, isolation, timeout_s, membership)

    def _preemptible(self) -> tuple[PreemptibleJob, ...]:
        """The preemptible jobs that run, and what their end would free."""
        if not self._has_preemptible:
            return ()
        found = [attempt for attempt in list(self._table.running.values()) if attempt.spec.preemptible]
        self._has_preemptible = bool(found)
        by_lease: dict[tuple[str, int], PreemptibleJob] = {}
        for attempt in found:
            if attempt.stop_reason in (None, StopReason.PREEMPTED, StopReason.CANCELLED):
                job_id, token, _ = attempt.key
                _, _, seats, slots = by_lease.get((job_id, token), PreemptibleJob(job_id, token, slots=0))
                seats += () if attempt.seat is None else (attempt.seat,)
                slots += self._capacity.slots_of(attempt.seat)
                by_lease[job_id, token] = PreemptibleJob(job_id, token, seats, slots)
        return tuple(by_lease.values())

    # --- the end

    def _drain(self) -> None:
        """Return jobs that have not begun, end running ones after the grace, and then abandon those that do not end."""
        self._batches.release()
        for runner in self._runners.values():
            runner.release_unbegun()
        now = time.monotonic()
        if self._draining_until is None or now < self._draining_until:
            return
        if not self._has_terminated:
            self._has_terminated = True
            self._ending_until = now + self._options.kill_grace_s + KILL_MARGIN_S
            for attempt in list(self._table.running.values()):
                self._batches.stop(attempt, StopReason.SHUTDOWN)
        if self._is_now and not self._has_closed:
            self._has_closed = True
            self._ending_until = now
            for runner in self._runners.values():
                runner.close()
        if time.monotonic() >= self._ending_until:
            for attempt in list(self._table.running.values()):
                self._table.abandon(attempt)

    def _is_over(self) -> bool:
        if self.state is not LoopState.DRAINING:
            return False
        if not self._table.running and not self._table.has_completions:
            return True
        # the store cannot be reached: leases of attempts that could not be completed expire
        return self._has_terminated and time.monotonic() >= self._ending_until + STORE_MARGIN_S

    def _seconds_to_end(self) -> float:
        """Time until the next step of the drain."""
        if self._draining_until is None:
            return MAX_RETRY_S
        until = self._ending_until if self._has_terminated else self._draining_until
        return max(MIN_WAIT_S, until - time.monotonic())

    # --- the store

    def _on_store_away(self, error: StoreUnavailableError) -> None:
        if self.is_store_available:
            self.is_store_available = False
            self._say(f"{error}\nthe worker continues its jobs, and tries again")
        self._wakeup.wait(self._retry_s)
        self._wakeup.clear()
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)

    def _on_store_reached(self) -> None:
        self.exchanged_at = time.monotonic()
        if not self.is_store_available:
            self.is_store_available = True
            self._retry_s = FIRST_RETRY_S
            self._say("the store of jobs can be reached again")
