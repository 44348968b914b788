"""Random traces of operations on a job store, and their comparison with the memory store.

A trace is a list of operations as plain data. `StoreTrace` applies them to a store; leases are named by their position
in the list of all leases that the trace has been given, so that stale ones occur, too. Two stores that behave alike
give equal answers to the same trace, and have the same contents after it:

    @given(traces())
    def test_random_traces_give_what_the_memory_store_gives(operations):
        assert_like_memory_store(lambda clock: RedisStore(url, clock_ms=clock), operations)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from dovetail.jobs.job import NO_RESOURCES, DependencyPolicy, JobSpec, JobState, Lease, Outcome, Retries
from dovetail.jobs.store import (
    BatchRoom,
    Claim,
    Completion,
    Exchange,
    JobFilter,
    PreemptibleJob,
    Renewal,
    Schedule,
    WorkerInfo,
)
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.resources.fit import Fit
from jobs.job_strategies import SHAPES
from jobs.store_contract import CPU_NODE, GPU_NODE, free_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.store import Store
    from dovetail.resources.cluster import Node
    from dovetail.resources.shape import Shape

BUSY_NODE = replace(GPU_NODE, cpu_milli=2000, gpus=GPU_NODE.gpus[:1])
START_MS = 1_700_000_000_000
IDS = tuple(f"j{number:02}" for number in range(60))
KEYS = ("k1", "k2")
QUEUES = ("default", "x")
WORKERS = ("w1", "w2", "w3")
SCHEDULES = ("nightly", "hourly")
GANGS = tuple(replace(shape, ranks=ranks) for shape in (NO_RESOURCES, *SHAPES[:3]) for ranks in (2, 3))
BATCHED = tuple(replace(shape, custom=(("batch jobs_app:work", 0),)) for shape in (NO_RESOURCES, SHAPES[0]))
STEPS_MS = (0, 1, 60, 1_000, 15_000, 60_000)
FAILURES = (Outcome.ERROR, Outcome.TIMEOUT, Outcome.LOST, Outcome.OUT_OF_MEMORY)


# --- operations


@dataclass(frozen=True, slots=True)
class Submit:
    specs: tuple[JobSpec, ...]


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A completion of the lease at this position, counted from the newest one."""

    position: int
    outcome: Outcome
    jitter: float
    final: bool
    shape: Shape | None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRenewal:
    """A renewal of the lease at this position, counted from the newest one."""

    position: int
    progress: float | None
    message: str | None


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """An exchange."""

    worker: str
    ends: tuple[LeaseEnd, ...]
    renewals: tuple[LeaseRenewal, ...]
    slots: int | None
    node: Node
    queues: tuple[str, ...]
    lease_ms: int
    placement_delay_ms: int
    address: str = ""
    preemptible: tuple[tuple[int, Shape], ...] = ()
    """Positions of leases that the worker runs, and what they hold of the node."""
    ends_in_ms: int | None = None
    batches: tuple[BatchRoom, ...] = ()


@dataclass(frozen=True, slots=True)
class Advance:
    """Move the clock."""

    milliseconds: int


@dataclass(frozen=True, slots=True)
class Cancel:
    ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Purge:
    """`age_ms`: only jobs that finished at least this long ago."""

    states: frozenset[JobState]
    queue: str | None
    age_ms: int | None
    limit: int
    keep_bytes: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    queue: str
    paused: bool


@dataclass(frozen=True, slots=True)
class Limit:
    queue: str
    weight: int | None
    max_running: int | None


@dataclass(frozen=True, slots=True)
class Register:
    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Remove:
    worker: str


@dataclass(frozen=True, slots=True)
class PutSchedule:
    """`delay_ms`: from now to the next fire time."""

    name: str
    cron: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class RemoveSchedule:
    name: str


@dataclass(frozen=True, slots=True)
class Fire:
    """Fire a schedule at its next fire time, or `late`, when another worker has fired it."""

    name: str
    spec: JobSpec
    late: bool


Operation = (
    Submit
    | RoundTrip
    | Advance
    | Cancel
    | Requeue
    | Purge
    | Pause
    | Limit
    | Register
    | Remove
    | PutSchedule
    | RemoveSchedule
    | Fire
)


# --- random traces


class TraceGenerator:
    """Random operations. Half of them are exchanges, and most exchanges claim.

    `is_quiet`: mostly single plain jobs, and idle workers that claim them; a store may take shorter ways for these.
    """

    def __init__(self, random: Random, *, is_quiet: bool = False) -> None:
        self._random = random
        self._is_quiet = is_quiet
        choose = random.choice
        self._rare: tuple[Callable[[], Operation], ...] = (
            lambda: Cancel(self._ids(), choose(["", "not needed"])),
            lambda: Requeue(tuple(random.sample(IDS, 20))),
            self._purge,
            lambda: Pause(choose(QUEUES), choose([True, False, False])),
            lambda: Limit(choose(QUEUES), choose([None, None, 1, 3]), choose([None, None, 1, 2, 5])),
            lambda: Register(self._worker()),
            lambda: Remove(choose(WORKERS)),
            lambda: PutSchedule(choose(SCHEDULES), choose(["* * * * *", "5 * * * *"]), choose([0, 60, 1_000])),
            lambda: RemoveSchedule(choose(SCHEDULES)),
            lambda: Fire(choose(SCHEDULES), self._spec(), late=choose([False, False, True])),
        )

    def operation(self) -> Operation:
        kind = self._random.random()
        if self._is_quiet and kind < 0.85:
            return self._quiet_operation()
        if kind < 0.5:
            return self._round_trip()
        if kind < 0.7:
            return Submit(tuple(self._spec() for _ in range(self._random.randint(1, 5))))
        if kind < 0.85:
            return Advance(self._random.choice(STEPS_MS))
        return self._random.choice(self._rare)()

    def _quiet_operation(self) -> Operation:
        random, choose = self._random, self._random.choice
        kind = random.random()
        if kind < 0.3:
            spec = self._spec()
            if random.random() < 0.7:
                spec = replace(spec, priority=0, key=None, after=(), at_ms=None, delay_ms=0)
            shape = choose((NO_RESOURCES, NO_RESOURCES, spec.shape))
            return Submit((replace(spec, shape=shape, queue=choose(["x", "x", "default"])),))
        if kind < 0.85:
            trip = self._round_trip()
            ends = trip.ends[: choose([0, 0, 1])]
            return replace(trip, ends=ends, renewals=(), queues=("x",), preemptible=(), batches=())
        return Advance(choose(STEPS_MS[:4]))

    def _ids(self) -> tuple[str, ...]:
        return tuple(self._random.choices(IDS, k=self._random.randint(0, 4)))

    def _spec(self) -> JobSpec:
        random, choose = self._random, self._random.choice
        counts = {name: random.randint(0, 2) for name in ("error", "timeout", "lost", "out_of_memory")}
        return JobSpec(
            id=choose(IDS),
            function=choose(["jobs_app:work", "jobs_app:other"]),
            payload=choose([b"", b"{}", b"\x00\xff" * 20]),
            queue=choose(QUEUES),
            priority=random.randint(-1, 1),
            shape=choose((NO_RESOURCES, *SHAPES, *GANGS, *BATCHED)),
            retries=Retries(**counts, backoff_ms=choose([0, 100, 1_000]), max_backoff_ms=choose([150, 10_000])),
            key=choose([None, None, None, *KEYS]),
            after=tuple(random.sample(IDS, choose([0, 0, 0, 1, 2]))),
            if_dependency_fails=choose(list(DependencyPolicy)),
            at_ms=choose([None, None, START_MS, START_MS + 61_000]),
            delay_ms=choose([0, 0, 0, 60, 1_000]),
            timeout_ms=choose([None, 500, 30_000]),
            schedule=choose([None, *SCHEDULES]),
            preemptible=choose([True, False]),
        )

    def _round_trip(self) -> RoundTrip:
        random, choose = self._random, self._random.choice
        ends = (self._end() for _ in range(random.randint(0, 4)))
        renewals = (
            LeaseRenewal(random.randint(0, 7), choose([None, 0.25, 1.0]), choose([None, "", "epoch 1"]))
            for _ in range(random.randint(0, 3))
        )
        return RoundTrip(
            worker=choose(WORKERS),
            ends=tuple(ends),
            renewals=tuple(renewals),
            slots=choose([None, 0, 1, 2, 3, 6, 20]),
            node=choose([CPU_NODE, GPU_NODE, BUSY_NODE]),
            queues=choose([("default",), ("x",), ("default", "x"), ("x", "none", "x")]),
            lease_ms=choose([60, 1_000, 15_000]),
            placement_delay_ms=choose([0, 0, 50, 10_000]),
            address=choose(["", "h:1", "h:2"]),
            preemptible=tuple(
                (random.randint(0, 7), choose((NO_RESOURCES, *SHAPES))) for _ in range(choose([0, 0, 1, 2, 4, 6]))
            ),
            ends_in_ms=choose([None, 0, 1_000, 60_000]),
            batches=tuple(self._batch() for _ in range(choose([0, 0, 1, 2]))),
        )

    def _batch(self) -> BatchRoom:
        choose = self._random.choice
        return BatchRoom(choose(QUEUES), choose((NO_RESOURCES, *BATCHED)), choose([1, 2, 10]), choose([None, 1, 30]))

    def _end(self) -> LeaseEnd:
        choose = self._random.choice
        outcome = choose([Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.SUCCEEDED, *FAILURES, *Outcome])
        final = choose([False, False, False, True])
        jitter = choose([0.0, 0.5, 0.999])
        rank = choose([0, 0, 0, 1, 1, 2, 3])
        return LeaseEnd(self._random.randint(0, 7), outcome, jitter, final, choose([None, *SHAPES]), rank)

    def _purge(self) -> Purge:
        choose = self._random.choice
        states = frozenset(self._random.sample(list(JobState), choose([0, 0, 3])))
        return Purge(states, choose([None, *QUEUES]), choose([None, 0, 1_000]), choose([1, 3, 100]), choose([None, 50]))

    def _worker(self) -> WorkerInfo:
        choose = self._random.choice
        queues = choose([("default",), ("x", "default")])
        return WorkerInfo(choose(WORKERS), queues, self._random.randint(0, 3), choose([{}, {"host": "ä", "pid": 7}]))


def traces(length: int = 100) -> st.SearchStrategy[list[Operation]]:
    """Random traces of at most this length. Hypothesis shortens one that fails to its shortest beginning that fails."""
    return st.builds(random_trace, st.integers(0, 2**32), st.just(length) | st.integers(0, length))


def random_trace(seed: int, length: int) -> list[Operation]:
    generator = TraceGenerator(Random(seed), is_quiet=seed % 2 == 1)
    registered = [Register(WorkerInfo(worker, QUEUES)) for worker in WORKERS[: seed % (len(WORKERS) + 1)]]
    return [*registered, *(generator.operation() for _ in range(length))][:length]


# --- application and comparison


class TraceClock:
    """A clock that only the trace moves."""

    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class StoreTrace:
    """A trace on one store."""

    def __init__(self, store: Store, clock: TraceClock) -> None:
        self.store, self._clock = store, clock
        self._leases: list[Lease] = []

    def apply(self, operation: Operation) -> object:  # noqa: C901 - one line per kind of operation
        """Apply one operation; its answer can be compared with that of another store."""
        store = self.store
        match operation:
            case Submit(specs):
                return store.submit(specs)
            case RoundTrip():
                return self._exchange(operation)
            case Advance(milliseconds):
                self._clock.now_ms += milliseconds
                return store.now_ms()
            case Cancel(ids, reason):
                return store.cancel(ids, reason)
            case Requeue(ids):
                return store.requeue(ids)
            case Purge(states, queue, age_ms, limit, keep_bytes):
                before_ms = None if age_ms is None else self._clock.now_ms - age_ms
                chosen = JobFilter(states, queue, finished_before_ms=before_ms)
                return store.purge(chosen, limit, keep_bytes)
            case Pause(queue, paused):
                store.set_paused(queue, paused)
            case Limit(queue, weight, max_running):
                store.set_limits(queue, weight, max_running)
            case Register(worker):
                store.register_worker(worker)
            case Remove(worker_id):
                store.remove_worker(worker_id)
            case PutSchedule(name, cron, delay_ms):
                template = JobSpec("", "jobs_app:work", b"[1]", schedule=name)
                store.put_schedule(Schedule(name, cron, "UTC", template, self._clock.now_ms + delay_ms))
            case RemoveSchedule(name):
                return store.remove_schedule(name)
            case Fire():
                return self._fire(operation)
        return None

    def contents(self) -> list[object]:
        """All that the store shows of its contents."""
        store = self.store
        found: list[object] = []
        before: str | None = None
        while True:
            page = store.find(JobFilter(), 7, before)
            found += [list(page.jobs), store.get([record.id for record in page.jobs])]
            before = page.next_id
            if before is None:
                break
        for state in JobState:
            found.append([record.id for record in store.find(JobFilter(frozenset({state}), "x"), 5).jobs])
        found += [[store.id_of_key(key) for key in KEYS], store.workers(), store.schedules(), store.stats()]
        found.append(store.reservations())
        return found

    def _exchange(self, trip: RoundTrip) -> object:
        recent = self._leases[::-1]
        completions = [_completion(recent[end.position], end) for end in trip.ends if end.position < len(recent)]
        renewals = [
            Renewal(lease.job_id, lease.token, item.progress, item.message)
            for item in trip.renewals
            if item.position < len(recent) and (lease := recent[item.position])
        ]
        claim = None if trip.slots is None else self._claim(trip, recent)
        reply = self.store.exchange(Exchange(trip.worker, completions, renewals, claim, trip.lease_ms))
        self._leases += [job.lease for job in reply.claimed]
        return replace(
            reply,
            claimed=list(reply.claimed),
            refused=list(reply.refused),
            cancelled=list(reply.cancelled),
            preempted=list(reply.preempted),
            due_schedules=list(reply.due_schedules),
        )

    def _claim(self, trip: RoundTrip, recent: Sequence[Lease]) -> Claim:
        """A claim of what the preemptible jobs leave of the node."""
        free, held = free_of(trip.node), {}
        for position, shape in trip.preemptible:
            if position >= len(recent) or recent[position] in held:
                continue
            job_id, token = recent[position][:2]
            ways = Fit(shape).assignments(free)
            if shape == NO_RESOURCES or not ways:
                held[recent[position]] = PreemptibleJob(job_id, token)
                continue
            seat = Fit(shape).seat("", ways[0])
            left = free.taken(seat)
            assert left is not None
            free, held[recent[position]] = left, PreemptibleJob(job_id, token, (seat,), position % 2)
        held_jobs = tuple(held.values())
        delay_ms, ends_in_ms = trip.placement_delay_ms, trip.ends_in_ms
        return Claim(trip.slots or 0, free, trip.queues, delay_ms, held_jobs, ends_in_ms, trip.address, trip.batches)

    def _fire(self, fire: Fire) -> object:
        known = {schedule.name: schedule.next_ms for schedule in self.store.schedules()}
        fire_ms = known.get(fire.name, START_MS) - fire.late
        return self.store.fire(fire.name, fire_ms, fire_ms + 60_000, fire.spec)


def _completion(lease: Lease, end: LeaseEnd) -> Completion:
    succeeded = end.outcome is Outcome.SUCCEEDED
    return Completion(
        lease.job_id,
        lease.token,
        end.outcome,
        result=b"\x00result" if succeeded else None,
        encoding="json" if succeeded else "",
        error="" if succeeded else "ValueError: ä",
        traceback="" if succeeded else "line 1\nline 2",
        final=end.final,
        jitter=end.jitter,
        shape=end.shape if end.outcome is Outcome.OUT_OF_MEMORY else None,
        exit_code=0 if succeeded else None,
        cpu_ms=end.position,
        rank=end.rank,
    )


def assert_like_memory_store(make_store: Callable[[TraceClock], Store], operations: Sequence[Operation]) -> None:
    """Apply a trace to a new, empty store and to a memory store, and compare answers and contents."""
    clocks = TraceClock(), TraceClock()
    expected, found = StoreTrace(MemoryStore(clocks[0]), clocks[0]), StoreTrace(make_store(clocks[1]), clocks[1])
    try:
        for number, operation in enumerate(operations):
            assert found.apply(operation) == expected.apply(operation), f"operation {number}: {operation}"
        assert found.contents() == expected.contents()
    finally:
        expected.store.close()
        found.store.close()
