"""Simulation of a queue of jobs in virtual time: `dt.simulate_jobs`, `dovetail simulate jobs.yaml`.

The decisions are those of a real queue: simulated workers send the exchanges of real ones to the memory store, whose
clock the simulation moves. Only the work is simulated: an attempt takes a time and ends with success, an error, a
timeout, or the loss of its worker. Deterministic: equal scenarios and seeds give equal results.

A worker sends an exchange when attempts of it have ended, and, as a worker that waits, when a job becomes ready that
fits on it: no other exchange could give it a job. If the store gives it none although one fits (because of a
reservation, say), the workers on which a job fits ask again at the time that the store names, when another job becomes
ready, and after a third of a lease.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING
from zlib import crc32

from dovetail.jobs.batch import mark_of, marked_shape, unmarked_shape
from dovetail.jobs.job import NO_RESOURCES, JobSpec, JobState, Outcome
from dovetail.jobs.placement_problem import placement_problem
from dovetail.jobs.simulated.simulated_worker import Machine, SimulatedWorker
from dovetail.jobs.simulated.simulation_fields import worker_names
from dovetail.jobs.simulated.simulation_file import parse_scenario, read_scenario
from dovetail.jobs.simulated.simulation_report import (
    CallCount,
    JobSimulation,
    QueueLength,
    SimulatedJob,
    Usage,
    make_report,
)
from dovetail.jobs.store import Completion
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.resources.fit import Fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dovetail.jobs.simulated.simulated_worker import SimulatedBatch
    from dovetail.jobs.simulated.simulation_fields import JobCalls, JobClass
    from dovetail.jobs.simulated.simulation_file import ParsedScenario, Samples
    from dovetail.jobs.store import ClaimedJob
    from dovetail.resources.shape import Shape

START_MS = 1_700_000_000_000
"""Start of the virtual time."""
ReadyKey = tuple[str, "Shape"]
"""A queue and a shape."""


def simulate_jobs(
    scenario: str | Path | Mapping[str, object], *, seed: int = 0, one_more: bool = True, sets: Sequence[str] = ()
) -> JobSimulation:
    """Simulate a queue of jobs, its workers and its arrivals in virtual time.

    `scenario`: a jobs file, or its data. `one_more`: simulate also with one more worker of each kind, for
    the same arrivals. `sets`: changes of the file, such as "workers.gpu.count=4".
    """
    parsed = parse_scenario(scenario) if isinstance(scenario, Mapping) else read_scenario(scenario, sets)
    result = Simulation(parsed, seed).run()
    if not one_more:
        return result
    kinds = parsed.scenario.workers
    more = {kind: Simulation(parsed.with_one_more(kind), seed).run() for kind in kinds}
    return result.compared_with(more)


class FittingWorkers:
    """Workers on which one shape fits now. Only those that have changed since the last call are tested again."""

    __slots__ = ("_fit", "_positions", "_seen")

    def __init__(self, fit: Fit | None) -> None:
        """`fit`: None: the shape fits on every worker that is alive."""
        self._fit = fit
        self._positions: set[int] = set()
        self._seen = 0

    def positions(self, workers: Sequence[SimulatedWorker], changes: Sequence[int]) -> set[int]:
        """`changes`: positions of workers in the order of their changes, from the start of the simulation."""
        if self._seen < len(changes):
            for position in set(changes[self._seen :]):
                worker = workers[position]
                if worker.is_alive and (self._fit is None or self._fit.assignments(worker.capacity.free())):
                    self._positions.add(position)
                else:
                    self._positions.discard(position)
            self._seen = len(changes)
        return self._positions


class Simulation:
    """One simulation: the store, the workers, the pending events, and the results so far."""

    def __init__(self, parsed: ParsedScenario, seed: int) -> None:
        scenario = self.scenario = parsed.scenario
        self._name, self._samples, self._seed = parsed.name, parsed.samples, seed
        self._death_source = self._source("deaths")
        self.now_ms = START_MS
        self.end_ms = START_MS + round(1000 * scenario.duration_s)
        self.store = MemoryStore(lambda: self.now_ms)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._machines = {kind: Machine(one.node, one.queues, one.slot_count) for kind, one in scenario.workers.items()}
        self.workers: list[SimulatedWorker] = []
        self._positions: dict[str, int] = {}
        self._serving: dict[str, set[int]] = {}
        self._changes: list[int] = []
        self._fits: dict[Shape, Fit] = {}
        self._fitting: dict[Shape, FittingWorkers] = {}
        self.jobs: dict[str, SimulatedJob] = {}
        self._specs: list[JobSpec] = []
        """Jobs that arrive now."""
        self._arriving = 0
        """Number of classes of which more jobs arrive."""
        self._unfinished = 0
        self._ready: dict[ReadyKey, dict[str, None]] = {}
        """Jobs that are ready, or may be when a worker next asks."""
        self._fresh: dict[ReadyKey, None] = {}
        """Queues and shapes of jobs that became ready since the last exchanges."""
        self._unsure: dict[str, None] = {}
        """Jobs that the store will change in the next claim of any worker: due retries and expired leases."""
        self._completing: dict[int, None] = {}
        self._collecting: dict[ReadyKey, set[int]] = {}
        """Positions of workers of which a batch may collect such jobs."""
        self._is_refused = False
        """Whether the store gave nothing to a worker on which a ready job fits."""
        self._retry_ms: int | None = None
        """`Reply.next_ms` of the replies without jobs although a job fits."""
        self._asks_at_ms: int | None = None
        self.lengths = {one.queue: QueueLength(START_MS) for one in scenario.jobs.values()}
        self.usage: dict[str, Usage] = {}
        self.calls = {name: CallCount() for name, one in scenario.jobs.items() if one.batch is not None}

    def run(self) -> JobSimulation:
        for kind, one in self.scenario.workers.items():
            for name in worker_names(kind, one.count):
                self._start_worker(len(self.workers), name, kind)
            slots = self.workers[-1].capacity.plain_slots
            self.usage[kind] = Usage(slots, plain_slots_only=one.slot_count is None)
        for name, jobs in self.scenario.jobs.items():
            self._arriving += 1
            self._arrive_next(name, self._arrivals(name, jobs, self._samples[name]))
        for death in self.scenario.deaths:
            at_ms = START_MS + round(1000 * death.at_s)
            self._at(at_ms, partial(self._kill_worker, self._positions[death.worker], death.back_s))
        while self._events and self._events[0][0] <= self.end_ms and not self._is_over():
            self.now_ms = self._events[0][0]
            while self._events and self._events[0][0] == self.now_ms:
                heappop(self._events)[2]()
            self._exchange_all()
        if not self._is_over():
            self.now_ms = self.end_ms
        self._finish()
        counted = self.lengths, self.usage, self.calls
        span_ms = START_MS, self.now_ms
        return make_report(self._name, self.scenario, self.jobs.values(), *counted, span_ms, self._misfits())

    def _is_over(self) -> bool:
        return not self._arriving and not self._unfinished and not self._specs

    def _at(self, at_ms: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heappush(self._events, (at_ms, self._sequence, action))

    def _finish(self) -> None:
        for worker in self.workers:
            if worker.is_alive:
                self._count_end(worker)

    def _misfits(self) -> list[str]:
        """Classes of jobs that no worker can run, with the reason."""
        infos = [self.workers[self._positions[worker_names(kind, 1)[0]]].info() for kind in self.scenario.workers]
        found = {name: placement_problem(one.queue, one.shape, infos) for name, one in self.scenario.jobs.items()}
        return [f"{name}: {problem.message}" for name, problem in found.items() if problem is not None]

    # --- arrivals

    def _arrivals(self, name: str, one: JobClass, samples: Samples) -> Iterator[tuple[int, int]]:
        """(time of arrival, time that the job takes), in milliseconds."""
        times = self._times(name, one, samples)
        end_ms = self.end_ms if one.end_s is None else min(self.end_ms, START_MS + round(1000 * one.end_s))
        for at_s, known_s in islice(self._arrival_times(name, one, samples), one.count):
            at_ms = START_MS + round(1000 * (one.start_s + at_s))
            if at_ms >= end_ms:
                return
            yield at_ms, max(1, round(1000 * (next(times) if known_s is None else known_s)))

    def _arrival_times(self, name: str, one: JobClass, samples: Samples) -> Iterator[tuple[float, float | None]]:
        """Seconds since the start of the class; endless, but for listed arrivals and jobs that arrive at once."""
        if one.rate is not None:
            source, at_s = self._source(f"arrivals {name}"), 0.0
            rate = one.jobs_per_s or 1.0
            while True:
                at_s += source.expovariate(rate)
                yield at_s, None
        elif one.every is not None:
            interval_s, number = 1 / (one.jobs_per_s or 1.0), 0
            while True:
                yield number * interval_s, None
                number += 1
        elif one.arrivals is not None:
            yield from samples.arrivals
        else:
            yield from ((0.0, None) for _ in range(one.count or 0))

    def _times(self, name: str, one: JobClass, samples: Samples) -> Iterator[float]:
        """Seconds that jobs take; endless."""
        source = self._source(f"times {name}")
        mean_s, sigma = one.mean_s or 0.0, one.variation
        while True:
            if samples.times_s:
                yield source.choice(samples.times_s)
            else:
                yield mean_s * math.exp(source.gauss(-sigma * sigma / 2, sigma)) if sigma else mean_s

    def _source(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed} {purpose}")  # noqa: S311 - not for secrets

    def _arrive_next(self, name: str, arrivals: Iterator[tuple[int, int]]) -> None:
        following = next(arrivals, None)
        if following is None:
            self._arriving -= 1
        else:
            self._at(following[0], partial(self._arrive, name, arrivals, following[1]))

    def _arrive(self, name: str, arrivals: Iterator[tuple[int, int]], time_ms: int) -> None:
        one = self.scenario.jobs[name]
        job_id = f"{len(self.jobs):09d}"
        self.jobs[job_id] = SimulatedJob(name, self.now_ms, time_ms)
        self._unfinished += 1
        self._specs.append(
            JobSpec(
                id=job_id,
                function=f"simulated:{name}",
                queue=one.queue,
                priority=one.priority_number,
                shape=one.shape if one.batch is None else marked_shape(one.shape, mark_of(name, None, {})),
                retries=one.job_retries,
                timeout_ms=one.timeout_ms,
            )
        )
        self._arrive_next(name, arrivals)

    # --- ready jobs

    def _add_ready(self, job_id: str, key: ReadyKey) -> None:
        jobs = self._ready.setdefault(key, {})
        if job_id not in jobs:
            jobs[job_id] = None
            self.lengths[key[0]].change(self.now_ms, +1)
        self._fresh[key] = None

    def _remove_ready(self, job_id: str, key: ReadyKey) -> None:
        jobs = self._ready.get(key, {})
        if job_id in jobs:
            del jobs[job_id]
            self.lengths[key[0]].change(self.now_ms, -1)
            if not jobs:
                del self._ready[key]

    def _become_due(self, job_id: str) -> None:
        """Note a job that the next claim of any worker makes ready, if it is due or its lease has expired."""
        [record] = self.store.get([job_id])
        assert record is not None
        if record.due_ms is not None and record.due_ms <= self.now_ms:
            self._unsure[job_id] = None
            self._add_ready(job_id, (record.spec.queue, record.shape))

    def _follow(self, job_id: str) -> None:
        """What the store made of a job whose attempt has ended without success."""
        [record] = self.store.get([job_id])
        assert record is not None
        key = record.spec.queue, record.shape
        if record.state.is_finished:
            self._remove_ready(job_id, key)
            self._end_job(job_id, succeeded=False)
        elif record.state is JobState.READY:
            self._add_ready(job_id, key)
        elif record.due_ms is not None and record.due_ms > self.now_ms:
            self._at(record.due_ms, partial(self._become_due, job_id))
        else:
            return
        self._unsure.pop(job_id, None)

    def _end_job(self, job_id: str, *, succeeded: bool) -> None:
        self.jobs[job_id].end(self.now_ms, succeeded=succeeded)
        self._unfinished -= 1

    # --- exchanges

    def _exchange_all(self) -> None:
        """Submit the jobs that have arrived; then every worker that has something to report or can get a job sends an
        exchange."""
        if self._specs:
            self.store.submit(self._specs)
            for spec in self._specs:
                self._add_ready(spec.id, (spec.queue, spec.shape))
            self._specs = []
        was_refused, self._is_refused, self._retry_ms = self._is_refused, False, None
        completing, self._completing = self._completing, {}
        for position in completing:
            if self.workers[position].is_alive:
                self._exchange(self.workers[position], self._ready)
        keys = list(self._ready if was_refused else self._fresh)
        self._fresh = {}
        self._ask(keys)
        for job_id in list(self._unsure):
            self._follow(job_id)
        if self._is_refused:
            self._ask_later()

    def _ask(self, keys: Sequence[ReadyKey]) -> None:
        """Let the workers claim on which a job of these queues and shapes fits, in random order."""
        waiting: set[int] = set()
        for queue, shape in keys:
            if (queue, shape) in self._ready:
                fitting = self._fitting.setdefault(shape, FittingWorkers(self._fit(shape)))
                waiting |= fitting.positions(self.workers, self._changes) & self._serving[queue]
                waiting |= self._collecting_now((queue, shape))
        for position in sorted(waiting, key=self._turn):
            keys = [key for key in keys if key in self._ready]
            if not keys:
                return
            if self._can_claim(self.workers[position], keys):
                self._exchange(self.workers[position], keys)

    def _collecting_now(self, key: ReadyKey) -> set[int]:
        """Workers of which a batch collects such jobs."""
        found = {one for one in self._collecting.get(key, ()) if self.workers[one].has_room(key)}
        if key in self._collecting:
            self._collecting[key] = found
        return found

    def _turn(self, position: int) -> int:
        """Order of workers that ask at the same time: random, and independent of which others ask."""
        return crc32(f"{self._seed} {self.now_ms} {self.workers[position].name}".encode())

    def _can_claim(self, worker: SimulatedWorker, keys: Iterable[ReadyKey]) -> bool:
        """Whether the worker has a free slot, and a ready job of these queues and shapes fits on it; or such a job can
        join one of its batches."""
        keys = list(keys)
        if any(key in self._ready and worker.has_room(key) for key in keys):
            return True
        if worker.capacity.free_slots() <= 0:
            return False
        free = worker.capacity.free()
        for queue, shape in keys:
            if queue in worker.queues and (queue, shape) in self._ready:
                fit = self._fit(shape)
                if fit is None or fit.assignments(free):
                    return True
        return False

    def _fit(self, shape: Shape) -> Fit | None:
        """The cached `Fit` of a shape; None for jobs without resources, which fit everywhere."""
        shape = unmarked_shape(shape)
        found = self._fits.get(shape)
        if found is None and shape != NO_RESOURCES:
            found = self._fits[shape] = Fit(shape)
        return found

    def _ask_later(self) -> None:
        """A worker that waits asks again at the time that the store has named, and after a third of a lease."""
        at_ms = self.now_ms + max(1, self.scenario.lease_ms // 3)
        if self._retry_ms is not None:
            at_ms = max(self.now_ms + 1, min(at_ms, self._retry_ms))
        if self._asks_at_ms is None or not self.now_ms < self._asks_at_ms <= at_ms:
            self._asks_at_ms = at_ms
            self._at(at_ms, _do_nothing)

    def _exchange(self, worker: SimulatedWorker, keys: Iterable[ReadyKey]) -> None:
        """As many exchanges as the loop of a worker makes. `keys`: what it may claim."""
        while True:
            request = worker.exchange()
            assert request.claim is not None
            reply = self.store.exchange(request)
            assert not reply.refused, reply.refused
            self._on_completed(request.completions)
            for claimed in reply.claimed:
                self._start_job(worker, claimed)
            may_claim_more = len(reply.claimed) >= request.claim.slots and worker.capacity.free_slots() > 0
            if not worker.has_new_batch and not (reply.claimed and may_claim_more):
                break
        if self._can_claim(worker, keys):
            self._is_refused = True
            if reply.next_ms is not None:
                self._retry_ms = reply.next_ms if self._retry_ms is None else min(self._retry_ms, reply.next_ms)

    def _on_completed(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            if completion.outcome is Outcome.SUCCEEDED:
                self._end_job(completion.job_id, succeeded=True)
            else:
                self._follow(completion.job_id)

    # --- attempts

    def _start_job(self, worker: SimulatedWorker, claimed: ClaimedJob) -> None:
        job_id = claimed.spec.id
        self._unsure.pop(job_id, None)
        self._remove_ready(job_id, (claimed.spec.queue, claimed.shape))
        calls = self.scenario.jobs[self.jobs[job_id].name].batch
        if calls is not None:
            self._start_in_batch(worker, claimed, calls)
            return
        self.jobs[job_id].start(self.now_ms)
        running = worker.start(claimed, self.now_ms)
        self._changes.append(worker.position)
        took_ms, completion = self._ending(claimed)
        self._at(self.now_ms + took_ms, partial(self._end_attempt, worker, completion, running))

    def _ending(self, claimed: ClaimedJob) -> tuple[int, Completion]:
        """Duration and outcome of an attempt."""
        spec, lease = claimed.spec, claimed.lease
        job = self.jobs[spec.id]
        took_ms, outcome, jitter = job.time_ms, Outcome.SUCCEEDED, 0.0
        probability = self.scenario.jobs[job.name].failures
        is_late = spec.timeout_ms is not None and took_ms > spec.timeout_ms
        if probability or is_late:
            source = self._source(f"attempt {spec.id} {lease.token}")
            fails, share, jitter = source.random() < probability, source.random(), source.random()
            if is_late and spec.timeout_ms is not None:
                took_ms, outcome = spec.timeout_ms, Outcome.TIMEOUT
            if fails:
                took_ms, outcome = max(1, round(share * took_ms)), Outcome.ERROR
        return took_ms, Completion(
            spec.id, lease.token, outcome, jitter=jitter, error="" if not jitter else "simulated"
        )

    def _end_attempt(self, worker: SimulatedWorker, completion: Completion, running: object) -> None:
        if not worker.is_alive or worker.running.get(completion.job_id) is not running:
            return
        ended = worker.end(completion)
        self.usage[worker.kind].count(ended.seat, self.now_ms - ended.started_ms)
        self._changes.append(worker.position)
        self._completing[worker.position] = None

    # --- batches

    def _start_in_batch(self, worker: SimulatedWorker, claimed: ClaimedJob, calls: JobCalls) -> None:
        batch = worker.start_in_batch(claimed, calls.size, calls.wait_ms, self.now_ms)
        self._changes.append(worker.position)
        if batch.room is None:
            self._call(worker, batch)
        else:
            self._collecting.setdefault(batch.key, set()).add(worker.position)
            self._at(batch.flush_at_ms, partial(self._call_if_due, worker, batch))

    def _call_if_due(self, worker: SimulatedWorker, batch: SimulatedBatch) -> None:
        if worker.is_alive and batch.called_ms is None and batch.flush_at_ms <= self.now_ms:
            self._call(worker, batch)

    def _call(self, worker: SimulatedWorker, batch: SimulatedBatch) -> None:
        """Call the function for the jobs of a batch."""
        worker.call(batch, self.now_ms)
        specs = [item.job.spec for item in batch.items]
        first = self.jobs[specs[0].id]
        for spec in specs:
            self.jobs[spec.id].start(self.now_ms)
        calls = self.scenario.jobs[first.name].batch
        assert calls is not None
        took_ms = first.time_ms + calls.more_ms(len(specs))
        left_ms = [item.started_ms + ms for item in batch.items if (ms := item.job.spec.timeout_ms) is not None]
        limit_ms = max(1, min(left_ms) - self.now_ms) if left_ms else took_ms
        is_late = took_ms > limit_ms
        completions = [self._ending_in_call(item.job, is_late=is_late) for item in batch.items]
        self._at(self.now_ms + min(took_ms, limit_ms), partial(self._end_call, worker, batch, completions))

    def _ending_in_call(self, claimed: ClaimedJob, *, is_late: bool) -> Completion:
        """Outcome of a job of a call. One that fails does so alone, when the call returns."""
        spec, lease = claimed.spec, claimed.lease
        source = self._source(f"attempt {spec.id} {lease.token}")
        fails, jitter = source.random() < self.scenario.jobs[self.jobs[spec.id].name].failures, source.random()
        if not is_late and not fails:
            return Completion(spec.id, lease.token, Outcome.SUCCEEDED)
        outcome = Outcome.TIMEOUT if is_late else Outcome.ERROR
        return Completion(spec.id, lease.token, outcome, jitter=jitter, error="simulated")

    def _end_call(self, worker: SimulatedWorker, batch: SimulatedBatch, completions: Sequence[Completion]) -> None:
        if not worker.is_alive:
            return
        for completion in completions:
            worker.end(completion)
        self._count_batch(worker, batch)
        self.calls[self.jobs[batch.items[0].job.spec.id].name].count(len(batch.items))
        self._changes.append(worker.position)
        self._completing[worker.position] = None

    def _count_batch(self, worker: SimulatedWorker, batch: SimulatedBatch) -> None:
        self.usage[worker.kind].count(batch.seat, self.now_ms - batch.started_ms, len(batch.items))

    # --- workers

    def _start_worker(self, position: int, name: str, kind: str) -> None:
        worker = SimulatedWorker(position, name, kind, self._machines[kind], self.now_ms)
        if position == len(self.workers):
            self.workers.append(worker)
        else:
            self.workers[position] = worker
        self._positions[name] = position
        for queue in worker.queues:
            self._serving.setdefault(queue, set()).add(position)
        self._changes.append(position)
        self._completing[position] = None
        self.store.register_worker(worker.info())

    def _kill_worker(self, position: int, back_s: float | None) -> None:
        """Kill a worker, between two renewals: its leases expire after two thirds of a lease to a whole one."""
        worker = self.workers[position]
        if worker.is_alive:
            lease_ms = self._death_source.randint(2 * self.scenario.lease_ms // 3, self.scenario.lease_ms)
            if worker.has_completions:
                last = worker.exchange(claims=False)
                self.store.exchange(last)
                self._on_completed(last.completions)
            self.store.exchange(worker.last_renewal(max(1, lease_ms)))
            self._count_end(worker)
            ends_ms = self.now_ms + max(1, lease_ms)
            for job_id in worker.running:
                self._at(ends_ms, partial(self._become_due, job_id))
            self._at(ends_ms, partial(self._forget_worker, worker))
            self._changes.append(position)
        if back_s is not None:
            at_ms = self.now_ms + max(1, round(1000 * back_s))
            self._at(at_ms, partial(self._restart_worker, position))

    def _forget_worker(self, worker: SimulatedWorker) -> None:
        """Handle a dead worker whose heartbeat is so old that it no longer counts as alive."""
        if self.workers[worker.position] is worker:
            self.store.remove_worker(worker.name)

    def _restart_worker(self, position: int) -> None:
        worker = self.workers[position]
        if not worker.is_alive:
            self._start_worker(position, worker.name, worker.kind)

    def _count_end(self, worker: SimulatedWorker) -> None:
        self.usage[worker.kind].count_worker(self.now_ms - worker.started_ms)
        batches = {id(running.batch): running.batch for running in worker.running.values()}
        for batch in batches.values():
            if batch is not None:
                self._count_batch(worker, batch)
        for running in worker.running.values():
            if running.batch is None:
                self.usage[worker.kind].count(running.seat, self.now_ms - running.started_ms)


def _do_nothing() -> None:
    """Event that changes nothing; waiting workers send exchanges after every event."""
