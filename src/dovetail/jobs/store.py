"""The store port: durable jobs behind atomic operations, and the requests and replies of these operations. Pure.

Stores: `memory_store` (the reference), `sqlite_store`, `redis_store`. All of them pass `tests/jobs/store_contract.py`.

**Atomic.** Each method is one atomic step: all of it has happened when it returns, and nothing of it when it raises
(`StoreUnavailableError` after a broken connection: it may have happened; every method may be repeated safely).

**Time** is the store's clock only: whole milliseconds that count like Unix time. Clocks of workers and submitters are
never read. A step sees one time.

**Leases.** A claim gives an attempt a lease until `now + lease_ms` and a fencing token, which is larger than all
earlier tokens of the job. Renewals and completions carry the token. They are refused if the job is not leased under
that token. A lease that is past its deadline stays valid until a claim finds it expired. A completion that is repeated
because its reply was lost is accepted again, without effect.

**Expiry** is found inside every claim, by any worker: there is no sweeper. A worker that waits asks again at
`Reply.next_ms` and at least once per third of its lease, so that the job of a killed worker is run again as soon as
its lease ends.

**Attempts** are charged at the claim. An attempt that ends with an error, timeout, loss or out of memory is retried
while `JobSpec.retries` allows it for that outcome, and is then a dead letter (`dead`); with 0 retries, or a completion
that is `final`, it is `failed`.

**Gangs.** A job whose shape has several ranks is a gang: one attempt, one lease and one fencing token for all ranks.
Each worker renews it for its ranks, and it expires when one of them has not. Its members complete one by one. It
succeeds when all have succeeded, with the result of rank 0. Any other end of one member ends the attempt; the other
workers are woken, and the renewals and completions of their members are refused.

**Batches.** A claim first gives the batches that its worker is filling (`Claim.batches`) the first jobs of their
buckets. These take no slot and nothing of the free resources: the call that is made for the batch has them. A job that
was attempted before is not added to a batch, and none behind it.

**Order.** Ready jobs are in buckets, one per queue and shape. A claim looks at the first job of each bucket, takes the
one with the smallest order key (`ordering.order_key`, then the id) that fits into the free resources, and repeats this
until no slot is left or no first job fits. A bucket whose first job does not fit is not searched further.

**Choice of the worker.** A claim with a placement delay passes over a job that another worker with a live offer should
rather run (`worker_choice`), wakes that worker, and names in `Reply.next_ms` when it will take the job itself.

**Reservations.** The first job of a queue that does not fit, once its order key is 30 s old, gets a worker reserved: of
those on which it fits when they are empty, the one whose running jobs end first. That worker then takes jobs behind it
only if they end before it starts, by their timeout, or leave it all that it needs.

**Limits and shares.** A queue with as many leased jobs as its `max_running` gives none. If a claim names a queue that
has a weight, the next job comes from the queue with the fewest leased jobs per weight that has one that fits; all
queues without a weight are one, with weight 1. Equal queues are served in the order of their jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.errors import ConfigError, EngineError
from dovetail.jobs.job import DEFAULT_LEASE_MS, DEFAULT_QUEUE, FINISHED, JobRecord, JobSpec, JobState, Lease, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seat
    from dovetail.resources.shape import Shape

SCHEMA_VERSION = 1
"""Version of what stores keep. A store with a newer version is refused (`StoreVersionError`)."""
DUE_PER_STEP = 1_000
"""Maximum number of expired leases and scheduled jobs that one claim handles, so that no step takes long."""


class StoreUnavailableError(EngineError):
    """The store cannot be reached, or is full. The operation can be repeated."""


class StoreVersionError(ConfigError):
    """The store was written by a newer version, or by another program."""


class Receipt(NamedTuple):
    """Reply to the submission of one job."""

    id: str
    """Id of the job in the store: different from the submitted one if the idempotency key is in use."""
    created: bool
    """Whether the job was stored; False if the store already has a job with this id or key."""
    missing: tuple[str, ...] = ()
    """Dependencies (`after`) that the store does not have. If there are any, the job was not stored."""


class Completion(NamedTuple):
    """The end of an attempt, as its worker reports it."""

    job_id: str
    token: int
    outcome: Outcome
    result: bytes | None = None
    encoding: str = ""
    """Encoding of the result."""
    error: str = ""
    traceback: str = ""
    final: bool = False
    """Whether the job is not to be retried."""
    jitter: float = 0.0
    """Random number, 0 <= jitter < 1, for the delay before the retry. It is an argument, so that traces can be
    replayed."""
    shape: Shape | None = None
    """Resources of the next attempt, if they change (more memory)."""
    exit_code: int | None = None
    cpu_ms: int | None = None
    peak_memory_bytes: int | None = None
    rank: int = 0
    """Rank of the member that has ended, if the job is a gang."""


class Renewal(NamedTuple):
    """A running attempt, with its progress if that has changed. Of a gang, all members that the worker runs."""

    job_id: str
    token: int
    progress: float | None = None
    message: str | None = None


class LeaseId(NamedTuple):
    """A lease by its job and fencing token."""

    job_id: str
    token: int


class PreemptibleJob(NamedTuple):
    """A preemptible job that a worker runs, and what its end would free there."""

    job_id: str
    token: int
    seats: tuple[Seat, ...] = ()
    """Seats of the job, empty if it declares no resources."""
    slots: int = 1
    """Number of slots (as in `Claim.slots`) that become free."""


class BatchRoom(NamedTuple):
    """What a batch can take that a worker is filling."""

    queue: str
    shape: Shape
    """Shape of its jobs; with the queue, it identifies their bucket."""
    jobs: int
    """Maximum number."""
    payload_bytes: int | None = None
    """No more jobs are added once the payloads of those that this claim adds have this size; None: no limit."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker can take now."""

    slots: int
    """Maximum number of jobs."""
    free: FreeResources
    """Free resources of the worker; the jobs that it gets fit into them together, each taken by the first assignment
    of `Fit.assignments`, in the order of the reply."""
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    placement_delay_ms: int = 0
    """Time for which a job is left to a better worker (`worker_choice`); 0: not at all."""
    preemptible: tuple[PreemptibleJob, ...] = ()
    """Preemptible jobs that run on the worker, including those whose preemption is requested."""
    ends_in_ms: int | None = None
    """Time until all running jobs of the worker will have ended, by their timeouts; 0 if it runs none, None if it is
    not known."""
    address: str = ""
    """HOST:PORT at which rank 0 of a gang can listen on this worker; "" if the claim takes no gang."""
    batches: tuple[BatchRoom, ...] = ()
    """Batches that the worker is filling."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round trip of a worker: complete, renew, then claim."""

    worker: str
    completions: Sequence[Completion] = ()
    renewals: Sequence[Renewal] = ()
    claim: Claim | None = None
    lease_ms: int = DEFAULT_LEASE_MS
    """Length of the leases that are renewed and claimed."""


class GangPlace(NamedTuple):
    """Placement of the ranks of a gang."""

    address: str
    """HOST:PORT at which rank 0 listens."""
    workers: tuple[str, ...]
    """The worker of each rank."""


class ClaimedJob(NamedTuple):
    """A job for the worker that claimed it, or a rank of a gang for the worker on which it was placed."""

    spec: JobSpec
    shape: Shape
    lease: Lease
    rank: int = 0
    gang: GangPlace | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job that is submitted at the times of a cron expression."""

    name: str
    cron: str
    timezone: str
    template: JobSpec
    """The job to submit; its id and key are replaced for each fire time (`schedule.job_of`)."""
    next_ms: int
    """The next fire time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to an exchange."""

    now_ms: int
    """The store's time of the step."""
    claimed: Sequence[ClaimedJob] = ()
    """Claimed jobs: ranks of gangs that other workers have placed here, then those that this claim took, in order, then
    those for batches."""
    refused: Sequence[LeaseId] = ()
    """Completions and renewals whose lease is not valid any more: stop their attempts; their results are dropped."""
    cancelled: Sequence[str] = ()
    """Renewed jobs whose cancellation is requested."""
    preempted: Sequence[str] = ()
    """Jobs of the worker to end for others: those whose preemption this claim requests, and of the jobs renewed those
    for which it was requested before."""
    next_ms: int | None = None
    """When the next scheduled job is due, a lease expires, a schedule fires, or the claim takes a job that it has left
    to another worker; ask again then. None: no such time.
    Given if the exchange had a claim."""
    due_schedules: Sequence[Schedule] = ()
    """Schedules whose fire time has come: submit their jobs with `fire`. Given if the exchange had a claim."""
    known: bool = True
    """Whether the worker is registered; if not, it should register again."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Filter of jobs to list or purge; an empty field accepts all."""

    states: frozenset[JobState] = frozenset()
    queue: str | None = None
    function: str | None = None
    schedule: str | None = None
    finished_before_ms: int | None = None
    """Only finished jobs, and only those that finished before this time."""


class Page(NamedTuple):
    """A part of a list of jobs, newest first (descending ids)."""

    jobs: Sequence[JobRecord]
    """Without payload, result and tracebacks; `get` has them."""
    next_id: str | None
    """Pass it as `before` for the next page; None: this is the last one."""


class Purged(NamedTuple):
    """Jobs that were removed."""

    jobs: int
    bytes: int
    """Bytes of their payloads and results."""


class Reservation(NamedTuple):
    """A worker that is kept free for a job which does not fit; at most one per queue and per worker."""

    queue: str
    job_id: str
    """Empty if no worker could be reserved."""
    worker: str
    tried_ms: int
    """Time at which it was made, or tried."""


class QueueSettings(NamedTuple):
    """Weight and limit of a queue, and whether it is paused."""

    paused: bool = False
    weight: int | None = None
    """Its share of running jobs, in proportion to other queues; None: it shares the weight 1 with all such queues."""
    max_running: int | None = None
    """Maximum number of jobs that run at once; None: not limited."""


PLAIN_QUEUE = QueueSettings()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts of one queue."""

    queue: str
    counts: Mapping[JobState, int]
    paused: bool
    oldest_ms: int | None
    """When the longest-waiting ready job was enqueued."""
    ready_by_shape: Mapping[Shape, int]
    weight: int | None = None
    max_running: int | None = None


class Offer(NamedTuple):
    """What a worker can take, as of its latest claim, less what that claim took."""

    offered_ms: int
    """Time of the claim."""
    lease_ms: int
    """Length of its leases."""
    slots: int
    free: FreeResources
    """An object that equal states of equal nodes share (`free_vector.shared_free`)."""
    ends_ms: int | None
    """Time at which all jobs of the worker will have ended, by their timeouts; None if it is not known."""

    def is_live(self, now_ms: int) -> bool:
        """Whether the claim is not older than a lease: a worker that lives claims three times in it."""
        return self.offered_ms >= now_ms - self.lease_ms


class OfferingWorker(NamedTuple):
    """A registered worker that can take jobs."""

    id: str
    queues: tuple[str, ...]
    offer: Offer


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it registered, and what the store knows of it."""

    id: str
    """Unique among live workers: two processes must not register under the same id."""
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    slots: int = 0
    details: Mapping[str, object] = field(default_factory=dict)
    """Plain JSON data: host, pid, resources, isolation, version."""
    registered_ms: int = 0
    heartbeat_ms: int = 0
    """Time of its latest exchange."""
    leases: int = 0
    """Number of jobs that it holds; a gang is held by the worker of its rank 0."""
    offer: Offer | None = None
    """The latest offer; None if it has not claimed since it registered."""


class Store(Protocol):
    """Durable jobs. Thread-safe: any method may be called from any thread, also while `wait` blocks."""

    # --- jobs

    def submit(self, specs: Sequence[JobSpec]) -> list[Receipt]:
        """Store jobs, in one step. Receipts are in the order of the specifications, each decided on its own.

        A job whose id or key is in the store is not stored again. `after` may name jobs that are in the store, and
        jobs that come earlier in the same call. A job does not wait for one that has already succeeded. If one has
        already ended otherwise, the job is cancelled or stays blocked, as `if_dependency_fails` says.
        """

    def cancel(self, ids: Sequence[str], reason: str = "") -> list[JobState | None]:
        """Cancel jobs. Returns their states afterwards, None for unknown jobs.

        Waiting jobs are cancelled at once. A leased job stays leased: its worker is woken and finds the job in
        `Reply.cancelled` of its next exchange that renews it. If the worker completes it with success, the result
        counts. An attempt that ends in any other way, or whose lease expires, leaves the job cancelled. Finished jobs
        do not change.
        """

    def requeue(self, ids: Sequence[str]) -> list[JobState | None]:
        """Run failed, dead or cancelled jobs again, with all their retries, ordered by the time of this call.

        Jobs in other states do not change. Returns the states afterwards, None for unknown jobs. A requeued job waits
        again for those in `after` that have not succeeded; purged ones count as met. Jobs that were cancelled because
        they depended on a requeued one are not requeued with it.
        """

    def purge(self, chosen: JobFilter, limit: int = 10_000, keep_bytes: int | None = None) -> Purged:
        """Remove finished jobs, those that finished first (then the smallest id) first, at most `limit`.

        With `keep_bytes`, only until the payloads and results of all finished jobs that the filter accepts are at most
        that many bytes. Jobs that a blocked job waits for are kept.
        """

    def get(self, ids: Sequence[str]) -> list[JobRecord | None]:
        """Whole records; None for unknown jobs."""

    def find(self, chosen: JobFilter, limit: int = 100, before: str | None = None) -> Page:
        """List jobs, newest first; `before` is `Page.next_id` of the page before."""

    def id_of_key(self, key: str) -> str | None:
        """The job with this idempotency key."""

    def wait_finished(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        """Block until one of these jobs is finished, or the time has passed. Returns all that are finished (or
        unknown). Woken by the store, without polling."""

    # --- workers

    def register_worker(self, worker: WorkerInfo) -> None:
        """Add a worker, or replace the one with this id. Registration does not touch leases."""

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that has ended. Leases that it holds expire as usual."""

    def workers(self) -> list[WorkerInfo]:
        """All registered workers, by id."""

    def exchange(self, request: Exchange) -> Reply:
        """One round trip of a worker, in this order:

        1. completions, in order; the jobs that become ready by them can be claimed in step 5;
        2. renewals;
        3. the heartbeat of the worker;
        4. if there is a claim: expired leases and scheduled jobs whose time has come, up to `DUE_PER_STEP`, earliest
           first;
        5. the claim. Queues that are paused or at their limit give nothing;
        6. gangs: a gang that is taken in the claim is placed as a whole, or not at all: rank 0 on the claiming worker,
           as many ranks as fit there, and the rest on the offers of other live workers that serve its queue, first on
           those that fit most of them. These workers are woken, their offers become smaller, and they get their ranks
           at the beginning of the claim in their next exchange. A claim takes at most one gang;
        7. preemption (`preemption.py`): if the first job of a bucket fits on no live worker, and would fit on this one
           after the end of preemptible jobs of lower priority there, their end is requested. Until it is claimed, this
           claim and those that see these jobs end leave room for it.

        What is left of the worker's slots and free resources is kept as its offer, if it is registered; it offers no
        slots while it keeps room.

        After a broken connection the same exchange can be repeated: completions count once. Jobs that were claimed
        by a lost reply are run again when their lease expires.
        """

    def wait(self, worker: str, timeout_s: float) -> bool:
        """Block until there may be something to do for this worker, or the time has passed (False).

        Returns True at once if, since the last wait of this worker returned, another step than its own exchanges made
        a job ready or scheduled in one of its queues (as registered), resumed a queue, set a schedule, requested the
        cancellation or preemption of a job that it holds, placed ranks of a gang on it or ended a gang, or if `wake`
        was called. It may also return True without a reason. It does not wake for times: pass a timeout that ends at
        `Reply.next_ms`. One thread waits for a worker at a time.
        """

    def wait_and_exchange(self, request: Exchange, timeout_s: float) -> Reply | None:
        """Wait as `wait`, then exchange; one round trip less for an idle worker, whose request does not change
        meanwhile. None: it has only waited, and an exchange may have something to do."""

    def wake(self, worker: str) -> None:
        """End the `wait` of a worker of this process, or its next one. Cheap; called by any thread."""

    # --- queues and schedules

    def set_paused(self, queue: str, paused: bool) -> None:
        """Pause or resume a queue. A paused queue accepts jobs and gives none; running jobs continue."""

    def set_limits(self, queue: str, weight: int | None, max_running: int | None) -> None:
        """Set the weight of a queue (at least 1), and how many of its jobs run at once. Running jobs continue."""

    def stats(self) -> list[QueueStats]:
        """All queues that have jobs, are paused or have limits, by name."""

    def reservations(self) -> list[Reservation]:
        """Workers that are kept free for jobs, by queue."""

    def put_schedule(self, schedule: Schedule) -> None:
        """Add a schedule, or replace the one with this name. If cron, timezone and template (but for its id) are
        unchanged, the next fire time stays, so that several processes can declare the same schedule."""

    def remove_schedule(self, name: str) -> bool:
        """Remove a schedule; jobs that it has submitted stay. Returns False if there is none."""

    def schedules(self) -> list[Schedule]:
        """All schedules, by name."""

    def fire(self, name: str, fire_ms: int, next_ms: int, spec: JobSpec) -> Receipt | None:
        """Submit the job of a fire time and set the next one, if `fire_ms` is still the schedule's next fire time;
        otherwise None: another worker has fired it. So each fire time submits one job."""

    # --- the store itself

    def now_ms(self) -> int:
        """The store's time."""

    def local_host(self) -> str:
        """Address of this machine at which the other workers of the store reach it."""

    def close(self) -> None:
        """Release connections and end waits. The store cannot be used afterwards."""


def is_accepted(chosen: JobFilter, record: JobRecord) -> bool:
    """Whether a filter accepts a job."""
    spec = record.spec
    if chosen.states and record.state not in chosen.states:
        return False
    if chosen.queue is not None and spec.queue != chosen.queue:
        return False
    if chosen.function is not None and spec.function != chosen.function:
        return False
    if chosen.schedule is not None and spec.schedule != chosen.schedule:
        return False
    if chosen.finished_before_ms is None:
        return True
    return record.finished_ms is not None and record.finished_ms < chosen.finished_before_ms


def purgeable_states(chosen: JobFilter) -> frozenset[JobState]:
    """States of the jobs that `purge` may remove."""
    return FINISHED & chosen.states if chosen.states else FINISHED
