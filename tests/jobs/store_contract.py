"""Contract suite of the job store port. A test class of a store subclasses `StoreContract` and supplies a scene."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.jobs.admission import Admission
from dovetail.jobs.free_vector import shared_free
from dovetail.jobs.job import (
    DEFAULT_LEASE_MS,
    NO_RESOURCES,
    Attempt,
    DependencyPolicy,
    JobRecord,
    JobSpec,
    JobState,
    Outcome,
    Retries,
)
from dovetail.jobs.store import (
    BatchRoom,
    Claim,
    ClaimedJob,
    Completion,
    Exchange,
    GangPlace,
    JobFilter,
    LeaseId,
    Offer,
    PreemptibleJob,
    Purged,
    Receipt,
    Renewal,
    Reply,
    Reservation,
    Schedule,
    Store,
    WorkerInfo,
)
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.fit import Fit
from dovetail.resources.free_resources import FreeResources, NodeKind
from dovetail.resources.resources import Resources
from waiting import LONG, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.resources.seat import Seat
    from dovetail.resources.shape import Shape

GB = 10**9
CPU_NODE = Node("cpu", cpu_milli=4000, memory_bytes=16 * GB, custom=(("licence", 2000),))
GPU_NODE = Node("gpu", cpu_milli=8000, memory_bytes=64 * GB, gpus=(Gpu("gpu", 40 * GB), Gpu("gpu", 40 * GB)))
ONE_GPU_NODE = replace(GPU_NODE, gpus=GPU_NODE.gpus[:1])
HALF_GPU_NODE = replace(ONE_GPU_NODE, cpu_milli=7000)
GPU_SHAPE = Resources(cpus=1, gpus=0.5).shape()
ADDRESS = "10.0.0.1:4000"
TWO_CPUS_GANGS = {ranks: Resources(cpus=2).shape(ranks) for ranks in (3, 4, 5)}
GANG = TWO_CPUS_GANGS[3]
ONE_CPU, TWO_CPUS, FOUR_CPUS, FIVE_CPUS = (Resources(cpus=cpus).shape() for cpus in (1, 2, 4, 5))
BATCHED = replace(NO_RESOURCES, custom=(("batch m:f", 0),))
SECOND = 1000
MINUTE = 60 * SECOND


@dataclass
class StoreScene:
    """A store with a clock that the test moves."""

    store: Store
    advance: Callable[[int], None]
    """Move the store's clock forward by this many milliseconds."""
    another: Callable[[], Store]
    """Open the same store again, as another process would; in the memory store the same object."""

    def submit(self, *specs: JobSpec) -> list[str]:
        receipts = self.store.submit(specs)
        assert [receipt.created for receipt in receipts] == [True] * len(specs)
        return [receipt.id for receipt in receipts]

    def claim(self, slots: int = 100, worker: str = "w1", **options: Any) -> list[ClaimedJob]:
        return list(self.exchange(worker, slots=slots, **options).claimed)

    def claim_ids(self, slots: int = 100, **options: Any) -> list[str]:
        return [job.spec.id for job in self.claim(slots, **options)]

    def exchange(
        self,
        worker: str = "w1",
        *,
        completions: tuple[Completion, ...] = (),
        renewals: tuple[Renewal, ...] = (),
        slots: int | None = None,
        node: Node = CPU_NODE,
        queues: tuple[str, ...] = ("default",),
        lease_ms: int = DEFAULT_LEASE_MS,
        delay_ms: int = 0,
        running: tuple[ClaimedJob, ...] = (),
        ends_in_ms: int | None = None,
        used: Shape = NO_RESOURCES,
        address: str = "",
        batches: tuple[BatchRoom, ...] = (),
    ) -> Reply:
        """`running`: jobs that hold resources of the node; those that are preemptible are offered for preemption.
        `used`: what others hold."""
        free = free_of(node) if used == NO_RESOURCES else Admission().take(used, free_of(node))
        assert free is not None
        held: dict[LeaseId, PreemptibleJob] = {}
        for job in running:
            seats = () if job.shape == NO_RESOURCES else (seat_on(free, job.shape.rank),)
            for seat in seats:
                left = free.taken(seat)
                assert left is not None
                free = left
            if job.spec.preemptible:
                lease = LeaseId(*job.lease[:2])
                before = held.get(lease, PreemptibleJob(*lease, slots=0))
                held[lease] = before._replace(seats=before.seats + seats, slots=before.slots + 1)
        preemptible = tuple(held.values())
        claim = None
        if slots is not None:
            claim = Claim(slots, free, queues, delay_ms, preemptible, ends_in_ms, address, batches)
        return self.store.exchange(Exchange(worker, completions, renewals, claim, lease_ms))

    def complete(self, job: ClaimedJob, outcome: Outcome = Outcome.SUCCEEDED, **fields: Any) -> Reply:
        return self.exchange(completions=(completion(job, outcome, **fields),))

    def record(self, job_id: str) -> JobRecord:
        [found] = self.store.get([job_id])
        assert found is not None
        return found

    def state(self, job_id: str) -> JobState:
        return self.record(job_id).state

    def run(self, job_id: str, outcome: Outcome = Outcome.SUCCEEDED, **fields: Any) -> None:
        """Claim this job, which must be the next one, and complete it."""
        [job] = self.claim(1)
        assert job.spec.id == job_id
        assert not self.complete(job, outcome, **fields).refused


def free_of(node: Node) -> FreeResources:
    return NodeKind(node).untouched()


def seat_on(free: FreeResources, shape: Shape) -> Seat:
    """The seat that a worker gives to a job of this shape."""
    fit = Fit(shape)
    return fit.seat("", fit.assignments(free)[0])


def spec(job_id: str, **fields: Any) -> JobSpec:
    return replace(JobSpec(job_id, "jobs_app:work"), **fields)


def completion(job: ClaimedJob, outcome: Outcome = Outcome.SUCCEEDED, **fields: Any) -> Completion:
    return Completion(job.lease.job_id, job.lease.token, outcome, **fields)


def renewal(job: ClaimedJob, **fields: Any) -> Renewal:
    return Renewal(job.lease.job_id, job.lease.token, **fields)


def outcomes(record: JobRecord) -> list[Outcome]:
    return [attempt.outcome for attempt in record.attempts]


class StoreContract:
    """Behaviour that all stores share."""

    @pytest.fixture
    def scene(self) -> StoreScene:
        raise NotImplementedError

    # --- submission

    def test_a_job_is_stored_as_it_was_submitted(self, scene: StoreScene) -> None:
        submitted = spec(
            "a",
            payload=b'{"x": [1, "\xc3\xa4"]}\x00\xff',
            encoding="pickle",
            queue="gpu",
            priority=-3,
            shape=Resources(cpus=2, gpus=0.5, memory="4GB", labels={"zone": "a|b"}, custom={"licence": 1}).shape(),
            retries=Retries(error=7, timeout=0, lost=1, out_of_memory=0, backoff_ms=10, max_backoff_ms=99),
            key="once",
            delay_ms=1,
            at_ms=5,
            timeout_ms=1234,
            isolation="thread",
            schedule="nightly",
            if_dependency_fails=DependencyPolicy.BLOCK,
            options={"batch": {"size": 3}, "name": "ä"},
        )
        now = scene.store.now_ms()
        assert scene.store.submit([submitted]) == [Receipt("a", created=True)]
        record = scene.record("a")
        assert record.spec == submitted
        assert (record.state, record.shape) == (JobState.SCHEDULED, submitted.shape)
        assert (record.submitted_ms, record.due_ms, record.attempts) == (now, now + 1, ())

    def test_a_job_that_waits_for_nothing_is_ready(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        record = scene.record("a")
        assert (record.state, record.enqueued_ms, record.token) == (JobState.READY, scene.store.now_ms(), 0)

    def test_an_unknown_job_is_none(self, scene: StoreScene) -> None:
        assert scene.store.get(["nothing"]) == [None]
        assert scene.store.cancel(["nothing"]) == [None]
        assert scene.store.requeue(["nothing"]) == [None]

    def test_a_submission_can_be_repeated(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        again = scene.store.submit([spec("a"), spec("b")])
        assert again == [Receipt("a", created=False), Receipt("b", created=True)]
        assert scene.claim_ids() == ["a", "b"]

    def test_a_key_in_use_gives_the_job_that_has_it(self, scene: StoreScene) -> None:
        receipts = scene.store.submit([spec("a", key="k"), spec("b", key="k"), spec("c")])
        assert receipts == [Receipt("a", created=True), Receipt("a", created=False), Receipt("c", created=True)]
        scene.run("a")
        assert scene.store.submit([spec("d", key="k")]) == [Receipt("a", created=False)]
        assert scene.store.id_of_key("k") == "a"
        assert scene.store.id_of_key("other") is None

    def test_a_key_is_free_again_when_its_job_is_purged(self, scene: StoreScene) -> None:
        scene.submit(spec("a", key="k"))
        scene.run("a")
        assert scene.store.purge(JobFilter()) == Purged(1, 0)
        assert scene.store.submit([spec("b", key="k")]) == [Receipt("b", created=True)]

    def test_concurrent_submissions_of_one_key_give_one_job(self, scene: StoreScene) -> None:
        threads, each = 10, 100 if LONG else 10
        receipts: list[Receipt] = []

        def submit(thread: int) -> None:
            receipts.extend(
                receipt for n in range(each) for receipt in scene.store.submit([spec(f"j{thread}-{n}", key="k")])
            )

        _together([lambda thread=thread: submit(thread) for thread in range(threads)])  # type: ignore[misc]
        assert len(receipts) == threads * each
        assert len({receipt.id for receipt in receipts}) == 1
        assert [receipt.created for receipt in receipts].count(True) == 1

    # --- order

    def test_jobs_are_claimed_in_the_order_of_their_submission(self, scene: StoreScene) -> None:
        scene.submit(spec("b"))
        scene.advance(1)
        scene.submit(spec("a"), spec("c"))
        assert scene.claim_ids(2) == ["b", "a"]
        assert scene.claim_ids(2) == ["c"]
        assert scene.claim_ids(2) == []

    def test_priority_is_worth_a_minute_of_waiting_per_step(self, scene: StoreScene) -> None:
        scene.submit(spec("old"), spec("low", priority=-1))
        scene.advance(MINUTE - 1)
        scene.submit(spec("high", priority=1), spec("new"))
        scene.advance(2)
        scene.submit(spec("late high", priority=1))
        assert scene.claim_ids() == ["high", "old", "late high", "new", "low"]

    def test_a_claim_takes_from_its_queues_only(self, scene: StoreScene) -> None:
        scene.submit(spec("a", queue="x"), spec("b", queue="y"), spec("c", queue="z"))
        assert scene.claim_ids(queues=("y", "none", "z")) == ["b", "c"]
        assert scene.claim_ids(queues=("x", "x")) == ["a"]

    def test_a_claim_takes_no_more_than_its_slots(self, scene: StoreScene) -> None:
        scene.submit(*(spec(f"{n:03}") for n in range(50)))
        assert scene.claim_ids(0) == []
        assert scene.claim_ids(7) == [f"{n:03}" for n in range(7)]
        assert scene.claim_ids(1) == ["007"]

    # --- admission

    def test_claimed_jobs_fit_together_into_the_free_resources(self, scene: StoreScene) -> None:
        three = Resources(cpus=3).shape()
        one = Resources(cpus=1).shape()
        scene.submit(spec("a", shape=three), spec("b", shape=three), spec("c", shape=one), spec("d", shape=one))
        assert scene.claim_ids() == ["a", "c"]

    def test_a_job_for_a_gpu_never_goes_to_a_worker_without_one(self, scene: StoreScene) -> None:
        half = Resources(cpus=1, gpus=0.5).shape()
        scene.submit(spec("a", shape=half), spec("b"), *(spec(f"c{n}", shape=half) for n in range(5)))
        assert scene.claim_ids() == ["b"]
        assert scene.claim_ids(node=GPU_NODE) == ["a", "c0", "c1", "c2"]

    def test_whole_cards_memory_labels_and_custom_resources_are_respected(self, scene: StoreScene) -> None:
        scene.submit(
            spec("a share", shape=Resources(cpus=1, gpus=0.25).shape()),
            spec("both cards", shape=Resources(cpus=1, gpus=2).shape()),
            spec("card", shape=Resources(cpus=1, gpus=1).shape()),
            spec("memory", shape=Resources(cpus=1, memory="65GB").shape()),
            spec("label", shape=Resources(cpus=1, labels={"zone": "a"}).shape()),
            spec("licence", shape=Resources(cpus=1, custom={"licence": 1.5}).shape()),
            spec("licence again", shape=Resources(cpus=1, custom={"licence": 1.5}).shape()),
        )
        assert scene.claim_ids(node=GPU_NODE) == ["a share", "card"]
        assert scene.claim_ids(node=replace(CPU_NODE, labels=(("zone", "a"),))) == ["label", "licence"]

    def test_gpu_memory_is_counted_per_card(self, scene: StoreScene) -> None:
        shape = Resources(cpus=0.1, gpu_memory="15GB").shape()
        scene.submit(*(spec(f"{n}", shape=shape) for n in range(9)))
        assert scene.claim_ids(node=GPU_NODE) == ["0", "1", "2", "3"]

    # --- leases

    def test_a_claim_gives_a_lease_and_charges_an_attempt(self, scene: StoreScene) -> None:
        scene.submit(spec("a", payload=b"[1]"))
        now = scene.store.now_ms()
        [job] = scene.claim(lease_ms=5 * SECOND)
        assert job.spec == spec("a", payload=b"[1]")
        assert job.lease == ("a", 1, 1, now + 5 * SECOND)
        record = scene.record("a")
        assert record.lease == job.lease
        assert (record.state, record.worker, record.started_ms) == (JobState.LEASED, "w1", now)

    def test_a_completion_records_result_and_attempt(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim()
        began = scene.store.now_ms()
        scene.advance(70)
        reply = scene.complete(job, result=b'"\xff"', encoding="json", exit_code=0, cpu_ms=12, peak_memory_bytes=99)
        assert (reply.refused, reply.cancelled, reply.claimed) == ([], [], ())
        record = scene.record("a")
        assert (record.state, record.result, record.result_encoding) == (JobState.SUCCEEDED, b'"\xff"', "json")
        assert (record.finished_ms, record.worker, record.due_ms) == (began + 70, None, None)
        done = Attempt(1, 1, "w1", began, began + 70, Outcome.SUCCEEDED, "", "", 0, 12, 99)
        assert record.attempts == (done,)

    def test_one_exchange_completes_and_claims(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"), spec("c", after=("a",)))
        [a] = scene.claim(1)
        reply = scene.exchange(completions=(completion(a),), slots=9)
        assert [job.spec.id for job in reply.claimed] == ["b", "c"]
        assert scene.state("a") is JobState.SUCCEEDED

    def test_an_expired_lease_is_found_by_the_claim_of_any_worker(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [first] = scene.claim(worker="w1", lease_ms=2 * SECOND)
        scene.advance(2 * SECOND - 1)
        reply = scene.exchange("w2", slots=1)
        assert (reply.claimed, reply.next_ms) == ([], first.lease.deadline_ms)
        scene.advance(1)
        [second] = scene.claim(worker="w2")
        assert (second.lease.token, second.lease.attempt) == (2, 2)
        assert outcomes(scene.record("a")) == [Outcome.LOST]

    def test_a_late_completion_is_refused(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [first] = scene.claim(lease_ms=SECOND)
        scene.advance(SECOND)
        [second] = scene.claim(worker="w2")
        late = scene.exchange("w1", completions=(completion(first, result=b"1"),), renewals=(renewal(first),))
        assert late.refused == [LeaseId("a", 1), LeaseId("a", 1)]
        assert scene.record("a").result is None
        assert scene.exchange("w2", completions=(completion(second, result=b"2"),)).refused == []
        assert scene.record("a").result == b"2"
        assert scene.complete(first, result=b"1").refused == [LeaseId("a", 1)]
        assert scene.record("a").result == b"2"

    def test_a_lease_past_its_deadline_is_valid_until_a_claim_finds_it(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim(lease_ms=SECOND)
        scene.advance(10 * SECOND)
        assert scene.complete(job).refused == []
        assert scene.state("a") is JobState.SUCCEEDED

    def test_a_renewed_lease_does_not_expire(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim(lease_ms=3 * SECOND)
        for _ in range(5):
            scene.advance(2 * SECOND)
            assert scene.exchange(renewals=(renewal(job),), lease_ms=3 * SECOND).refused == []
            assert scene.claim_ids(worker="w2") == []
        assert scene.record("a").due_ms == scene.store.now_ms() + 3 * SECOND

    def test_progress_is_reported_with_a_renewal(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim()
        scene.exchange(renewals=(renewal(job, progress=0.25, message="epoch 1"),))
        scene.exchange(renewals=(renewal(job),))
        record = scene.record("a")
        assert (record.progress, record.message) == (0.25, "epoch 1")

    def test_a_repeated_completion_counts_once(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"))
        a, b = scene.claim()
        for _ in range(2):
            assert scene.complete(a, result=b"1").refused == []
            assert scene.complete(b, Outcome.ERROR, error="E", jitter=0.5).refused == []
        assert len(scene.record("a").attempts) == len(scene.record("b").attempts) == 1
        assert scene.complete(a, Outcome.ERROR).refused == [LeaseId("a", 1)]

    def test_unknown_leases_are_refused(self, scene: StoreScene) -> None:
        unknown = Completion("nothing", 1, Outcome.SUCCEEDED)
        assert scene.exchange(completions=(unknown,)).refused == [LeaseId("nothing", 1)]
        assert scene.exchange(renewals=(Renewal("nothing", 1),)).refused == [LeaseId("nothing", 1)]

    def test_a_released_job_is_ready_and_not_charged(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"))
        [job] = scene.claim(1)
        scene.advance(SECOND)
        assert scene.complete(job, Outcome.RELEASED).refused == []
        record = scene.record("a")
        assert (record.state, record.attempt, record.attempts) == (JobState.READY, 0, ())
        [again] = scene.claim(1)
        assert again.lease[:3] == ("a", 2, 1)
        assert scene.complete(job).refused == [LeaseId("a", 1)]

    # --- retries

    def test_errors_are_retried_with_full_jitter_and_end_as_a_dead_letter(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(error=3, backoff_ms=100, max_backoff_ms=300)))
        for number, (jitter, delay) in enumerate([(0.5, 50), (0.999, 199), (0.5, 150)], 1):
            scene.run("a", Outcome.ERROR, error=f"E: {number}", traceback="tb", jitter=jitter)
            record = scene.record("a")
            assert (record.state, record.due_ms) == (JobState.SCHEDULED, scene.store.now_ms() + delay)
            scene.advance(delay - 1)
            reply = scene.exchange(slots=1)
            assert (reply.claimed, reply.next_ms) == ([], record.due_ms)
            scene.advance(1)
        scene.run("a", Outcome.ERROR, error="E: 4", jitter=0.5)
        record = scene.record("a")
        assert (record.state, record.error, record.finished_ms) == (JobState.DEAD, "E: 4", scene.store.now_ms())
        assert [(attempt.number, attempt.error) for attempt in record.attempts] == [(n, f"E: {n}") for n in range(1, 5)]
        assert scene.claim_ids() == []

    @pytest.mark.parametrize(
        ("outcome", "count"),
        [(Outcome.ERROR, 4), (Outcome.TIMEOUT, 2), (Outcome.LOST, 4), (Outcome.OUT_OF_MEMORY, 3)],
    )
    def test_every_outcome_has_its_own_number_of_retries(self, scene: StoreScene, outcome: Outcome, count: int) -> None:
        scene.submit(spec("a"))
        for _ in range(count):
            assert scene.state("a") is JobState.READY
            scene.run("a", outcome)
        assert scene.state("a") is JobState.DEAD
        assert outcomes(scene.record("a")) == [outcome] * count

    def test_outcomes_are_counted_apart(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(error=1, timeout=1, lost=1)))
        for outcome in (Outcome.ERROR, Outcome.TIMEOUT, Outcome.LOST):
            scene.run("a", outcome)
        assert scene.state("a") is JobState.READY
        scene.run("a", Outcome.TIMEOUT)
        assert scene.state("a") is JobState.DEAD

    def test_a_job_that_loses_every_worker_is_a_dead_letter(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(lost=2)))
        for _ in range(3):
            assert scene.claim_ids(lease_ms=SECOND) == ["a"]
            scene.advance(SECOND)
        assert scene.claim_ids() == []
        record = scene.record("a")
        assert (record.state, outcomes(record)) == (JobState.DEAD, [Outcome.LOST] * 3)
        assert "lease" in record.error

    def test_without_retries_and_if_final_a_job_is_failed(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(error=0)), spec("b"))
        scene.run("a", Outcome.ERROR, error="E")
        scene.run("b", Outcome.ERROR, error="F", final=True)
        assert [scene.state("a"), scene.state("b")] == [JobState.FAILED, JobState.FAILED]
        assert [scene.record("a").error, scene.record("b").error] == ["E", "F"]

    def test_a_retry_after_out_of_memory_can_ask_for_more(self, scene: StoreScene) -> None:
        small, large = Resources(cpus=1, memory="2GB").shape(), Resources(cpus=1, memory="20GB").shape()
        scene.submit(spec("a", shape=small))
        scene.run("a", Outcome.OUT_OF_MEMORY, shape=large)
        assert scene.claim_ids(node=CPU_NODE) == []
        [job] = scene.claim(node=GPU_NODE)
        assert (job.shape, job.spec.shape) == (large, small)

    def test_a_preempted_job_keeps_its_age_and_its_retries(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(error=0, lost=0)))
        scene.advance(SECOND)
        scene.submit(spec("b"))
        for _ in range(25):
            scene.run("a", Outcome.PREEMPTED)
        record = scene.record("a")
        assert (record.state, record.attempt) == (JobState.READY, 25)
        assert outcomes(record) == [Outcome.PREEMPTED] * 20

    def test_a_worker_that_is_given_its_ranks_learns_when_the_next_lease_expires_afterwards(
        self, scene: StoreScene
    ) -> None:
        for name in ("w1", "w2"):
            scene.store.register_worker(WorkerInfo(name, slots=1))
        scene.submit(spec("gang", shape=Resources(cpus=4).shape(2)))
        scene.exchange("w2", slots=1)
        [job] = scene.claim(1, address=ADDRESS, lease_ms=60)
        scene.advance(1)
        scene.exchange("w1", renewals=(renewal(job),), lease_ms=SECOND)
        scene.advance(1)
        reply = scene.exchange("w2", slots=1, lease_ms=SECOND)
        assert [one.rank for one in reply.claimed] == [1]
        assert reply.next_ms == reply.now_ms + SECOND - 1

    # --- batches

    def test_a_batch_gets_the_first_jobs_of_its_bucket_without_a_slot(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        shapes = {"a": BATCHED, "b": FOUR_CPUS, "c": BATCHED, "d": BATCHED, "e": BATCHED}
        scene.submit(*(spec(name, shape=shape, priority=int(name == "e")) for name, shape in shapes.items()))
        scene.submit(spec("f", shape=BATCHED, queue="x"))
        batch = BatchRoom("default", BATCHED, 3)
        reply = scene.exchange(slots=0, used=FOUR_CPUS, batches=(batch, batch._replace(queue="x")))
        assert [job.spec.id for job in reply.claimed] == ["e", "a", "c"], "x is not among the queues of the claim"
        assert [job.lease.token for job in reply.claimed] == [1, 1, 1]
        assert [scene.state(name) for name in "abcde"] == [
            JobState(s) for s in ["leased", "ready", "leased", "ready", "leased"]
        ]
        [worker] = scene.store.workers()
        assert worker.leases == 3
        assert worker.offer is not None
        assert worker.offer.free.cpu_milli == 0
        more = scene.exchange(slots=1, batches=(batch._replace(jobs=1),))
        assert [job.spec.id for job in more.claimed] == ["d", "b"], "jobs for batches come first"
        assert scene.claim() == []

    def test_a_job_that_was_attempted_is_not_added_to_a_batch_and_none_behind_it(self, scene: StoreScene) -> None:
        scene.submit(*(spec(name, shape=BATCHED) for name in "abc"))
        first, second, _ = scene.claim(3)
        scene.complete(second, Outcome.RELEASED)
        scene.complete(first, Outcome.LOST)
        batch = BatchRoom("default", BATCHED, 10)
        assert scene.exchange(slots=0, batches=(batch,)).claimed == []
        assert scene.claim_ids(1) == ["a"]
        assert [job.spec.id for job in scene.exchange(slots=0, batches=(batch,)).claimed] == ["b"]

    def test_a_batch_gets_no_more_bytes_than_it_can_take(self, scene: StoreScene) -> None:
        scene.submit(*(spec(name, shape=BATCHED, payload=b"1" * 10) for name in "abcd"))
        batch = BatchRoom("default", BATCHED, 10, payload_bytes=11)
        assert [job.spec.id for job in scene.exchange(slots=0, batches=(batch,)).claimed] == ["a", "b"]

    def test_a_batch_respects_the_limit_and_the_pause_of_its_queue(self, scene: StoreScene) -> None:
        scene.submit(*(spec(name, shape=BATCHED) for name in "abcd"))
        batches = (BatchRoom("default", BATCHED, 10),)
        scene.store.set_limits("default", None, 3)
        [job, *_] = scene.exchange(slots=0, batches=batches).claimed
        assert [scene.state(name) for name in "abcd"] == [JobState.LEASED] * 3 + [JobState.READY]
        scene.store.set_paused("default", True)
        scene.complete(job)
        assert scene.exchange(slots=0, batches=batches).claimed == []
        scene.store.set_paused("default", False)
        assert [job.spec.id for job in scene.exchange(slots=0, batches=batches).claimed] == ["d"]

    def test_a_batch_takes_the_job_that_a_worker_is_reserved_for(self, scene: StoreScene) -> None:
        for name in ("w1", "w2"):
            scene.store.register_worker(WorkerInfo(name, slots=1))
        large = replace(FOUR_CPUS, custom=BATCHED.custom)
        scene.submit(spec("large", shape=large))
        scene.advance(31 * SECOND)
        scene.exchange("w2", slots=1, used=ONE_CPU, ends_in_ms=60 * SECOND)
        assert [found.job_id for found in scene.store.reservations()] == ["large"]
        reply = scene.exchange("w1", slots=0, used=FOUR_CPUS, batches=(BatchRoom("default", large, 1),))
        assert [job.spec.id for job in reply.claimed] == ["large"]
        assert scene.store.reservations() == []

    # --- preemption

    def test_a_job_of_higher_priority_preempts_a_preemptible_one(self, scene: StoreScene) -> None:
        scene.submit(spec("low", shape=FOUR_CPUS, preemptible=True))
        scene.advance(20 * MINUTE)
        [low] = scene.claim()
        scene.submit(spec("high", shape=FOUR_CPUS, priority=10))
        reply = scene.exchange(slots=9, running=(low,))
        assert (reply.claimed, reply.preempted) == ([], ["low"])
        assert scene.record("low").preempted_for == "high"
        assert scene.exchange(renewals=(renewal(low),)).preempted == ["low"]
        again = scene.exchange(slots=9, running=(low,))
        assert (again.claimed, again.preempted) == ([], [])
        ended = scene.exchange(completions=(completion(low, Outcome.PREEMPTED),), slots=9)
        assert [job.spec.id for job in ended.claimed] == ["high"]
        record = scene.record("low")
        assert (record.state, record.preempted_for, outcomes(record)) == (JobState.READY, None, [Outcome.PREEMPTED])

    def test_only_preemptible_jobs_of_lower_priority_are_preempted(self, scene: StoreScene) -> None:
        scene.submit(
            spec("not marked", shape=TWO_CPUS, priority=-5),
            spec("same", shape=TWO_CPUS, priority=3, preemptible=True),
        )
        running = tuple(scene.claim())
        scene.submit(spec("high", shape=TWO_CPUS, priority=3))
        assert scene.exchange(slots=9, running=running).preempted == []
        assert all(job.preempted_for is None for job in map(scene.record, ("not marked", "same")))

    def test_waiting_does_not_make_a_job_preempt_others(self, scene: StoreScene) -> None:
        scene.submit(spec("old", shape=FOUR_CPUS))
        scene.advance(60 * MINUTE)
        scene.submit(spec("running", shape=FOUR_CPUS, priority=100, preemptible=True))
        [running] = scene.claim()
        assert running.spec.id == "running"
        scene.advance(600 * MINUTE)
        assert scene.exchange(slots=9, running=(running,)).preempted == []

    def test_a_job_that_would_not_fit_anyway_preempts_nothing(self, scene: StoreScene) -> None:
        scene.submit(spec("low", shape=TWO_CPUS, preemptible=True))
        [low] = scene.claim()
        scene.submit(
            spec("gpu", shape=Resources(gpus=1).shape(), priority=5), spec("five", shape=FIVE_CPUS, priority=5)
        )
        assert scene.exchange(slots=9, running=(low,)).preempted == []

    def test_a_job_that_fits_preempts_nothing(self, scene: StoreScene) -> None:
        scene.submit(spec("low", shape=TWO_CPUS, preemptible=True))
        [low] = scene.claim()
        scene.submit(spec("high", shape=TWO_CPUS, priority=5))
        reply = scene.exchange(slots=9, running=(low,))
        assert ([job.spec.id for job in reply.claimed], reply.preempted) == (["high"], [])

    def test_a_job_that_fits_on_another_live_worker_preempts_nothing(self, scene: StoreScene) -> None:
        for worker in ("w1", "w2"):
            scene.store.register_worker(WorkerInfo(worker))
        scene.submit(spec("low", shape=FOUR_CPUS, preemptible=True))
        [low] = scene.claim()
        scene.exchange("w2", slots=1)
        scene.submit(spec("high", shape=FOUR_CPUS, priority=9))
        assert scene.exchange(slots=9, running=(low,)).preempted == []
        scene.advance(DEFAULT_LEASE_MS + 1)  # w2 is silent
        assert scene.exchange(slots=9, running=(low,), renewals=(renewal(low),)).preempted == ["low"]

    def test_the_smallest_set_of_jobs_is_preempted_the_youngest_first(self, scene: StoreScene) -> None:
        one = {"shape": ONE_CPU, "preemptible": True}
        scene.submit(spec("old", **one))
        running = scene.claim()
        scene.advance(SECOND)
        scene.submit(spec("important", **one, priority=1), spec("young", **one), spec("young too", **one))
        running += scene.claim()
        scene.submit(spec("high", shape=ONE_CPU, priority=9))
        assert scene.exchange(slots=9, running=tuple(running)).preempted == ["young"]
        scene.submit(spec("larger", shape=Resources(cpus=3).shape(), priority=9))
        assert scene.exchange(slots=9, running=tuple(running)).preempted == ["young too", "old", "important"]

    def test_one_large_job_is_preempted_rather_than_several_small_ones(self, scene: StoreScene) -> None:
        scene.submit(spec("large", shape=TWO_CPUS, preemptible=True))
        running = scene.claim()
        scene.advance(SECOND)
        scene.submit(*(spec(name, shape=ONE_CPU, preemptible=True) for name in "ab"))
        running += scene.claim()
        scene.submit(spec("high", shape=TWO_CPUS, priority=9))
        assert scene.exchange(slots=9, running=tuple(running)).preempted == ["large"]

    def test_gpus_are_preempted_by_card(self, scene: StoreScene) -> None:
        half = Resources(cpus=1, gpus=0.5).shape()
        scene.submit(*(spec(name, shape=half, preemptible=True) for name in "abcd"))
        running = tuple(scene.claim(node=GPU_NODE))
        scene.submit(spec("high", shape=Resources(cpus=1, gpus=1).shape(), priority=9))
        assert scene.exchange(slots=9, node=GPU_NODE, running=running).preempted == ["a", "b"]

    def test_a_slot_is_preempted_for_a_job_without_resources(self, scene: StoreScene) -> None:
        scene.submit(spec("low", preemptible=True))
        running = tuple(scene.claim(1))
        scene.submit(spec("high", priority=9))
        assert scene.exchange(slots=0, running=running).preempted == ["low"]

    def test_smaller_jobs_leave_the_room_that_is_being_freed(self, scene: StoreScene) -> None:
        scene.submit(*(spec(name, shape=TWO_CPUS, preemptible=True) for name in "ab"))
        a, b = scene.claim()
        scene.submit(spec("high", shape=FOUR_CPUS, priority=1))
        assert scene.exchange(slots=9, running=(a, b)).preempted == ["a", "b"]
        scene.submit(spec("small", shape=ONE_CPU, priority=100, queue="x"))
        ended = completion(a, Outcome.PREEMPTED)
        both = ("default", "x")
        assert scene.exchange(completions=(ended,), slots=9, queues=both, running=(b,)).claimed == []
        last = scene.exchange(completions=(completion(b, Outcome.PREEMPTED),), slots=9, queues=both)
        assert [job.spec.id for job in last.claimed] == ["high"]

    def test_room_is_kept_for_nothing_when_the_preemptor_runs_elsewhere(self, scene: StoreScene) -> None:
        scene.submit(spec("low", shape=FOUR_CPUS, preemptible=True))
        [low] = scene.claim()
        scene.submit(spec("high", shape=FOUR_CPUS, priority=10))
        assert scene.exchange(slots=9, running=(low,)).preempted == ["low"]
        [high] = scene.claim(worker="w2")
        assert high.spec.id == "high"
        ended = scene.exchange(completions=(completion(low, Outcome.PREEMPTED),), slots=9)
        assert [job.spec.id for job in ended.claimed] == ["low"]

    def test_a_preempted_job_that_ends_otherwise_is_treated_as_usual(self, scene: StoreScene) -> None:
        scene.submit(spec("done", shape=TWO_CPUS, preemptible=True), spec("lost", shape=TWO_CPUS, preemptible=True))
        running = tuple(scene.claim(lease_ms=SECOND))
        scene.submit(spec("high", shape=FOUR_CPUS, priority=10, payload=b"[1]"))
        assert sorted(scene.exchange(slots=9, running=running).preempted) == ["done", "lost"]
        scene.complete(running[0], result=b"1")
        scene.advance(SECOND)
        [high] = scene.claim(worker="w2")
        assert high.spec == spec("high", shape=FOUR_CPUS, priority=10, payload=b"[1]")
        assert scene.state("done") is JobState.SUCCEEDED
        assert outcomes(scene.record("lost")) == [Outcome.LOST]
        assert scene.record("lost").preempted_for is None

    def test_the_preemptor_has_its_payload(self, scene: StoreScene) -> None:
        scene.submit(spec("low", shape=FOUR_CPUS, preemptible=True))
        [low] = scene.claim()
        scene.submit(spec("high", shape=FOUR_CPUS, priority=10, payload=b"\x00[1]"))
        scene.exchange(slots=9, running=(low,))
        [high] = scene.exchange(completions=(completion(low, Outcome.PREEMPTED),), slots=9).claimed
        assert high.spec == spec("high", shape=FOUR_CPUS, priority=10, payload=b"\x00[1]")
        assert scene.record("high").lease == high.lease

    # --- gangs

    @staticmethod
    def register_idle(scene: StoreScene, *workers: str, queues: tuple[str, ...] = ("default",)) -> None:
        """Idle workers with 4 CPUs each."""
        for worker in workers:
            scene.store.register_worker(WorkerInfo(worker, queues))
            scene.exchange(worker, slots=9, queues=queues)

    def start_gang(self, scene: StoreScene, **fields: Any) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """The members of a gang of three: two on w1, and one on w2."""
        self.register_idle(scene, "w1", "w2")
        scene.submit(spec("g", **{"shape": GANG, "payload": b"[1]"} | fields))
        return list(scene.exchange(slots=9, address=ADDRESS).claimed), scene.claim(worker="w2")

    def test_a_gang_is_placed_as_a_whole_on_several_workers(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        while scene.store.wait("w2", 0):
            pass
        scene.submit(spec("g", shape=GANG, payload=b"\x00[1]"))
        while scene.store.wait("w2", 0):
            pass
        first = scene.exchange(slots=9, address=ADDRESS).claimed
        place = GangPlace(ADDRESS, ("w1", "w1", "w2"))
        assert [(job.rank, job.gang) for job in first] == [(0, place), (1, place)]
        assert scene.store.wait("w2", PATIENCE_S)
        [last] = scene.claim(worker="w2")
        assert (last.rank, last.gang, last.shape) == (2, place, GANG)
        assert {job.spec for job in (*first, last)} == {spec("g", shape=GANG, payload=b"\x00[1]")}
        assert last.spec.payload == b"\x00[1]"
        assert {job.lease[:3] for job in (*first, last)} == {("g", 1, 1)}
        record = scene.record("g")
        assert (record.state, record.worker, record.workers) == (JobState.LEASED, "w1", ("w1", "w2"))
        assert record.gang is not None
        assert record.gang.workers == place.workers
        assert scene.claim(worker="w2") == []

    def test_a_gang_that_does_not_fit_as_a_whole_starts_no_member(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        scene.submit(spec("g", shape=TWO_CPUS_GANGS[5]), spec("small", shape=ONE_CPU))
        reply = scene.exchange(slots=9, address=ADDRESS)
        assert [job.spec.id for job in reply.claimed] == ["small"]
        assert scene.claim(worker="w2") == []
        record = scene.record("g")
        assert (record.state, record.attempt, record.gang) == (JobState.READY, 0, None)

    def test_a_gang_uses_only_live_workers_of_its_queue(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        self.register_idle(scene, "w3", queues=("x",))
        scene.submit(spec("g", shape=GANG))
        scene.store.remove_worker("w2")
        assert scene.exchange(slots=9, address=ADDRESS).claimed == []
        self.register_idle(scene, "w4")
        scene.advance(DEFAULT_LEASE_MS + 1)
        assert scene.exchange(slots=9, address=ADDRESS).claimed == []
        self.register_idle(scene, "w4")
        assert [job.rank for job in scene.exchange(slots=9, address=ADDRESS).claimed] == [0, 1]

    def test_a_claim_without_an_address_takes_no_gang_and_others_one_each(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1")
        scene.submit(*(spec(name, shape=Resources(cpus=1).shape(2)) for name in "ab"))
        assert scene.claim() == []
        assert [job.spec.id for job in scene.exchange(slots=9, address=ADDRESS).claimed] == ["a", "a"]

    def test_what_is_offered_is_given_to_one_gang(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2", "w3")
        scene.submit(spec("a", shape=TWO_CPUS_GANGS[4]), spec("b", shape=TWO_CPUS_GANGS[4]))
        assert len(scene.exchange("w1", slots=9, address=ADDRESS).claimed) == 2
        assert scene.exchange("w3", slots=9, address=ADDRESS).claimed == []
        assert [job.spec.id for job in scene.claim(worker="w2")] == ["a", "a"]

    def test_a_gang_takes_nothing_of_a_worker_that_is_kept_free_for_another_job(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        scene.submit(spec("big", shape=FOUR_CPUS))
        scene.advance(30 * SECOND)
        assert scene.claim_ids(worker="w1", used=ONE_CPU, ends_in_ms=SECOND) == []
        assert [one.worker for one in scene.store.reservations()] == ["w1"]
        scene.submit(spec("g", shape=Resources(cpus=1).shape(3)))
        half: dict[str, Any] = {"slots": 9, "used": TWO_CPUS, "address": ADDRESS}
        assert scene.exchange("w2", **half).claimed == []
        assert scene.exchange("w1", slots=9, used=ONE_CPU, ends_in_ms=SECOND, address=ADDRESS).claimed == []
        scene.store.cancel(["big"])
        first = scene.exchange("w2", **half).claimed
        assert [job.gang and job.gang.workers for job in first] == [("w2", "w2", "w1")] * 2

    def test_members_are_taken_from_what_their_worker_claims_with(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        scene.submit(spec("g", shape=GANG), *(spec(f"s{n}", shape=ONE_CPU) for n in range(4)))
        scene.exchange("w1", slots=2, address=ADDRESS)
        assert scene.claim_ids(3, worker="w2") == ["g", "s0", "s1"]

    def test_a_gang_succeeds_when_all_members_have_with_the_result_of_rank_0(self, scene: StoreScene) -> None:
        [a, b], [c] = self.start_gang(scene)
        began = scene.store.now_ms()
        scene.advance(50)
        assert scene.complete(b, result=b"1", encoding="json", rank=1).refused == []
        assert scene.complete(b, result=b"1", encoding="json", rank=1).refused == []
        assert scene.complete(a, result=b'"\xff"', encoding="pickle", rank=0).refused == []
        assert (scene.state("g"), scene.record("g").result) == (JobState.LEASED, None)
        done = completion(c, result=b"2", encoding="json", rank=2)
        assert scene.exchange("w2", completions=(done,)).refused == []
        record = scene.record("g")
        assert (record.state, record.result, record.result_encoding) == (JobState.SUCCEEDED, b'"\xff"', "pickle")
        assert [(one.number, one.worker, one.started_ms, one.outcome) for one in record.attempts] == [
            (1, "w1", began, Outcome.SUCCEEDED)
        ]
        assert record.gang is None
        assert [worker.leases for worker in scene.store.workers()] == [0, 0]

    def test_only_the_worker_of_a_member_completes_it(self, scene: StoreScene) -> None:
        [a, _], _ = self.start_gang(scene)
        for worker, rank in (("w2", 0), ("w1", 2), ("w1", 3), ("w1", -1)):
            wrong = scene.exchange(worker, completions=(completion(a, Outcome.ERROR, rank=rank),))
            assert wrong.refused == [LeaseId("g", 1)]
        assert scene.state("g") is JobState.LEASED

    @pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.TIMEOUT, Outcome.LOST, Outcome.OUT_OF_MEMORY])
    def test_the_failure_of_one_member_ends_all(self, scene: StoreScene, outcome: Outcome) -> None:
        [a, _], [c] = self.start_gang(scene)
        scene.complete(a, result=b"0", rank=0)
        while scene.store.wait("w1", 0):
            pass
        failed = completion(c, outcome, error="it failed", rank=2)
        assert scene.exchange("w2", completions=(failed,)).refused == []
        record = scene.record("g")
        assert (record.state, record.gang, record.result) == (JobState.READY, None, None)
        assert [(one.outcome, one.error) for one in record.attempts] == [(outcome, "rank 2 on w2: it failed")]
        assert scene.store.wait("w1", PATIENCE_S)
        assert scene.exchange("w1", renewals=(renewal(a),)).refused == [LeaseId("g", 1)]
        again = scene.exchange("w1", slots=9, address=ADDRESS).claimed
        assert [(job.lease.token, job.lease.attempt) for job in again] == [(2, 2)] * 2

    def test_the_lease_of_a_gang_holds_while_all_its_workers_renew_it(self, scene: StoreScene) -> None:
        [a, _], [c] = self.start_gang(scene)
        for _ in range(3):
            scene.advance(DEFAULT_LEASE_MS - 1)
            assert scene.exchange("w1", renewals=(renewal(a),)).refused == []
            assert scene.exchange("w2", renewals=(renewal(c),), slots=0).refused == []
        scene.advance(DEFAULT_LEASE_MS - 1)
        assert scene.exchange("w1", renewals=(renewal(a),)).refused == []
        due_ms = scene.record("g").due_ms
        assert due_ms == scene.store.now_ms() + 1
        scene.advance(1)
        scene.exchange("w3", slots=0)
        record = scene.record("g")
        assert (record.state, outcomes(record)) == (JobState.READY, [Outcome.LOST])
        assert record.attempts[0].error.startswith("rank 2 on w2: the lease expired")
        assert scene.exchange("w1", renewals=(renewal(a),)).refused == [LeaseId("g", 1)]

    def test_a_member_that_has_ended_needs_no_renewal(self, scene: StoreScene) -> None:
        [a, _], [c] = self.start_gang(scene)
        scene.exchange("w2", completions=(completion(c, rank=2),))
        for _ in range(3):
            scene.advance(DEFAULT_LEASE_MS - 1)
            assert scene.exchange("w1", renewals=(renewal(a),), slots=0).refused == []
        assert scene.state("g") is JobState.LEASED

    def test_members_that_were_not_sent_in_time_expire_with_their_gang(self, scene: StoreScene) -> None:
        self.register_idle(scene, "w1", "w2")
        scene.submit(spec("g", shape=GANG))
        [a, _] = scene.exchange("w1", slots=9, address=ADDRESS).claimed
        scene.advance(DEFAULT_LEASE_MS - 1)
        assert scene.exchange("w1", renewals=(renewal(a),)).refused == []
        scene.advance(1)
        reply = scene.exchange("w2", slots=9)
        assert (reply.claimed, outcomes(scene.record("g"))) == ([], [Outcome.LOST])

    def test_a_gang_that_is_given_back_is_not_charged(self, scene: StoreScene) -> None:
        [a, _], [c] = self.start_gang(scene)
        given_back = completion(c, Outcome.RELEASED, rank=2)
        assert scene.exchange("w2", completions=(given_back,)).refused == []
        record = scene.record("g")
        assert (record.state, record.attempt, record.attempts, record.gang) == (JobState.READY, 0, (), None)
        assert scene.exchange("w1", renewals=(renewal(a),)).refused == [LeaseId("g", 1)]

    def test_the_cancellation_of_a_gang_reaches_all_its_workers(self, scene: StoreScene) -> None:
        [a, _], [c] = self.start_gang(scene)
        for worker in ("w1", "w2"):
            while scene.store.wait(worker, 0):
                pass
        assert scene.store.cancel(["g"], "not needed") == [JobState.LEASED]
        for worker, job in (("w1", a), ("w2", c)):
            assert scene.store.wait(worker, PATIENCE_S)
            assert scene.exchange(worker, renewals=(renewal(job),)).cancelled == ["g"]
        scene.exchange("w2", completions=(completion(c, Outcome.CANCELLED, rank=2),))
        assert (scene.state("g"), scene.record("g").error) == (JobState.CANCELLED, "not needed")

    def test_a_preempted_gang_ends_when_all_members_have_saved_their_state(self, scene: StoreScene) -> None:
        [a, b], [c] = self.start_gang(scene, preemptible=True)
        scene.exchange("w2", slots=0)
        scene.submit(spec("high", shape=FOUR_CPUS, priority=9))
        assert scene.exchange("w1", slots=9, running=(a, b)).preempted == ["g"]
        assert scene.exchange("w2", renewals=(renewal(c),)).preempted == ["g"]
        saved = completion(c, Outcome.PREEMPTED, rank=2)
        assert scene.exchange("w2", completions=(saved,)).refused == []
        assert scene.complete(a, Outcome.PREEMPTED, rank=0).refused == []
        assert scene.state("g") is JobState.LEASED
        last = scene.exchange("w1", completions=(completion(b, rank=1, result=b"1"),), slots=9)
        assert [job.spec.id for job in last.claimed] == ["high"]
        record = scene.record("g")
        assert (record.state, outcomes(record), record.result) == (JobState.READY, [Outcome.PREEMPTED], None)

    # --- retries

    def test_a_retried_job_keeps_its_age(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        scene.advance(1)
        scene.submit(spec("b"))
        scene.run("a", Outcome.ERROR, jitter=0.5)
        scene.advance(10 * MINUTE)
        assert scene.claim_ids() == ["a", "b"]

    # --- time

    def test_a_delayed_job_becomes_ready_in_time(self, scene: StoreScene) -> None:
        now = scene.store.now_ms()
        scene.submit(spec("delay", delay_ms=500), spec("at", at_ms=now + 300), spec("past", at_ms=now - 1))
        reply = scene.exchange(slots=9)
        assert [job.spec.id for job in reply.claimed] == ["past"]
        assert reply.next_ms == now + 300
        scene.advance(299)
        assert scene.claim_ids() == []
        scene.advance(1)
        assert scene.claim_ids() == ["at"]
        scene.advance(200)
        assert scene.claim_ids() == ["delay"]

    def test_a_scheduled_job_is_ordered_by_its_time(self, scene: StoreScene) -> None:
        scene.submit(spec("scheduled", delay_ms=500))
        scene.advance(499)
        scene.submit(spec("before"))
        scene.advance(2)
        scene.submit(spec("behind"))
        assert scene.claim_ids() == ["before", "scheduled", "behind"]

    def test_many_due_jobs_are_handled_by_successive_claims(self, scene: StoreScene) -> None:
        for start in range(0, 1500, 500):
            scene.submit(*(spec(f"{start + n:05}", delay_ms=10) for n in range(500)))
        scene.advance(10)
        first = scene.exchange(slots=10)
        assert [job.spec.id for job in first.claimed] == [f"{n:05}" for n in range(10)]
        assert first.next_ms is not None
        assert first.next_ms <= first.now_ms
        scene.exchange(slots=0)
        [stats] = scene.store.stats()
        assert stats.counts == {JobState.READY: 1490, JobState.LEASED: 10}

    # --- dependencies

    def test_a_job_waits_for_those_that_it_depends_on(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"), spec("c", after=("a", "b")), spec("d", after=("c",)))
        assert (scene.state("c"), scene.record("c").unmet) == (JobState.BLOCKED, ("a", "b"))
        scene.run("a")
        assert scene.record("c").unmet == ("b",)
        scene.advance(SECOND)
        scene.run("b")
        record = scene.record("c")
        assert (record.state, record.unmet, record.enqueued_ms) == (JobState.READY, (), scene.store.now_ms())
        scene.run("c")
        scene.run("d")

    def test_a_dependency_that_has_succeeded_is_met(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        scene.run("a")
        scene.submit(spec("b", after=("a",)))
        assert scene.state("b") is JobState.READY

    def test_a_job_with_an_unknown_dependency_is_not_stored(self, scene: StoreScene) -> None:
        receipts = scene.store.submit([spec("b", after=("a", "x")), spec("a"), spec("c", after=("b",))])
        assert receipts == [Receipt("b", False, ("a", "x")), Receipt("a", True), Receipt("c", False, ("b",))]
        assert scene.store.get(["b", "c"]) == [None, None]

    def test_a_failed_dependency_cancels_what_waits_for_it(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", after=("a",)), spec("c", after=("b",)), spec("d"))
        scene.run("a", Outcome.ERROR, final=True)
        assert [scene.state("b"), scene.state("c"), scene.state("d")] == [
            JobState.CANCELLED,
            JobState.CANCELLED,
            JobState.READY,
        ]
        assert "a" in scene.record("b").error
        scene.submit(spec("e", after=("a",)))
        assert scene.state("e") is JobState.CANCELLED

    def test_a_failed_dependency_can_leave_a_job_blocked(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", after=("a",), if_dependency_fails=DependencyPolicy.BLOCK))
        scene.run("a", Outcome.ERROR, final=True)
        assert scene.state("b") is JobState.BLOCKED
        scene.submit(spec("c", after=("a",), if_dependency_fails=DependencyPolicy.BLOCK))
        assert scene.state("c") is JobState.BLOCKED
        assert scene.store.requeue(["a"]) == [JobState.READY]
        scene.run("a")
        assert scene.claim_ids() == ["b", "c"]

    def test_a_blocked_job_with_a_delay_is_scheduled_when_it_is_unblocked(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", after=("a",), delay_ms=SECOND))
        scene.run("a")
        record = scene.record("b")
        assert (record.state, record.due_ms) == (JobState.SCHEDULED, record.submitted_ms + SECOND)

    def test_a_graph_of_jobs_runs_in_order(self, scene: StoreScene) -> None:
        count = 200
        specs = [spec(f"{n:03}", after=tuple({f"{n // 2:03}", f"{n * 2 // 3:03}"} - {f"{n:03}"})) for n in range(count)]
        scene.submit(*specs)
        done: list[str] = []
        jobs = scene.claim(7)
        while jobs:
            for job in jobs:
                assert set(job.spec.after) <= set(done)
            done += [job.spec.id for job in jobs]
            reply = scene.exchange(completions=tuple(map(completion, jobs)), slots=7)
            assert reply.refused == []
            jobs = list(reply.claimed)
        assert sorted(done) == [f"{n:03}" for n in range(count)]

    # --- cancellation

    def test_waiting_jobs_are_cancelled_at_once(self, scene: StoreScene) -> None:
        scene.submit(spec("ready"), spec("scheduled", delay_ms=9), spec("blocked", after=("scheduled",)), spec("next"))
        assert scene.store.cancel(["ready", "scheduled"], "not needed") == [JobState.CANCELLED] * 2
        record = scene.record("ready")
        assert (record.state, record.error, record.finished_ms) == (
            JobState.CANCELLED,
            "not needed",
            scene.store.now_ms(),
        )
        assert scene.state("blocked") is JobState.CANCELLED
        scene.advance(10)
        assert scene.claim_ids() == ["next"]
        assert scene.store.cancel(["ready"]) == [JobState.CANCELLED]

    def test_a_running_job_is_cancelled_by_its_worker(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"))
        a, b = scene.claim()
        assert scene.store.cancel(["a"], "stop") == [JobState.LEASED]
        assert scene.record("a").cancel_requested
        reply = scene.exchange(renewals=(renewal(a), renewal(b)))
        assert (reply.cancelled, reply.refused) == (["a"], [])
        assert scene.complete(a, Outcome.CANCELLED).refused == []
        record = scene.record("a")
        assert (record.state, record.error, outcomes(record)) == (JobState.CANCELLED, "stop", [Outcome.CANCELLED])

    def test_a_result_counts_even_if_cancellation_was_requested(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim()
        scene.store.cancel(["a"])
        scene.complete(job, result=b"1")
        assert scene.state("a") is JobState.SUCCEEDED
        assert not scene.record("a").cancel_requested

    @pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.LOST, Outcome.PREEMPTED, Outcome.RELEASED])
    def test_a_job_to_be_cancelled_is_not_run_again(self, scene: StoreScene, outcome: Outcome) -> None:
        scene.submit(spec("a"))
        [job] = scene.claim(lease_ms=SECOND)
        scene.store.cancel(["a"])
        if outcome is Outcome.LOST:
            scene.advance(SECOND)
        else:
            scene.complete(job, outcome)
        assert scene.claim_ids() == []
        assert scene.state("a") is JobState.CANCELLED

    def test_finished_jobs_are_not_cancelled(self, scene: StoreScene) -> None:
        scene.submit(spec("a"))
        scene.run("a")
        assert scene.store.cancel(["a"]) == [JobState.SUCCEEDED]

    # --- requeue and purge

    def test_a_requeued_job_has_all_its_retries_and_keeps_its_attempts(self, scene: StoreScene) -> None:
        scene.submit(spec("a", retries=Retries(error=1)), spec("b"))
        scene.run("a", Outcome.ERROR)
        scene.run("a", Outcome.ERROR)
        assert scene.state("a") is JobState.DEAD
        scene.advance(SECOND)
        assert scene.store.requeue(["a"]) == [JobState.READY]
        record = scene.record("a")
        assert (record.error, record.finished_ms, record.enqueued_ms) == ("", None, scene.store.now_ms())
        scene.run("b")
        [job] = scene.claim()
        assert job.lease[:3] == ("a", 3, 3)
        scene.complete(job, Outcome.ERROR)
        assert scene.state("a") is JobState.READY
        assert len(scene.record("a").attempts) == 3

    def test_only_jobs_that_ended_without_success_are_requeued(self, scene: StoreScene) -> None:
        scene.submit(spec("1 done"), spec("2 running"), spec("3 ready"), spec("4 cancelled"))
        scene.run("1 done")
        scene.claim(1)
        scene.store.cancel(["4 cancelled"])
        states = scene.store.requeue(["1 done", "2 running", "3 ready", "4 cancelled"])
        assert states == [JobState.SUCCEEDED, JobState.LEASED, JobState.READY, JobState.READY]

    def test_a_requeued_job_waits_again_for_unmet_dependencies(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", after=("a",)))
        scene.store.cancel(["b"])
        assert scene.store.requeue(["b"]) == [JobState.BLOCKED]
        scene.run("a")
        scene.run("b")

    def test_purge_removes_finished_jobs_only(self, scene: StoreScene) -> None:
        scene.submit(
            *(spec(name, payload=b"12345") for name in ("1 done", "2 failed", "3 cancelled", "4 run", "5 ready"))
        )
        scene.run("1 done", result=b"123")
        scene.run("2 failed", Outcome.ERROR, final=True)
        scene.store.cancel(["3 cancelled"])
        scene.claim(1)
        assert scene.store.purge(JobFilter(states=frozenset({JobState.CANCELLED, JobState.READY}))) == Purged(1, 5)
        assert scene.store.purge(JobFilter(queue="other")) == Purged(0, 0)
        assert scene.store.purge(JobFilter()) == Purged(2, 13)
        left = [record.id for record in scene.store.find(JobFilter()).jobs]
        assert left == ["5 ready", "4 run"]

    def test_purge_by_age_and_by_bytes_removes_the_oldest_first(self, scene: StoreScene) -> None:
        for n in range(6):
            scene.submit(spec(f"{n}", payload=bytes(10)))
            scene.run(f"{n}", result=bytes(90))
            scene.advance(SECOND)
        before = scene.record("2").finished_ms
        assert scene.store.purge(JobFilter(finished_before_ms=before)) == Purged(2, 200)
        assert scene.store.purge(JobFilter(), keep_bytes=250) == Purged(2, 200)
        assert scene.store.purge(JobFilter(), keep_bytes=250) == Purged(0, 0)
        assert scene.store.purge(JobFilter(), limit=1) == Purged(1, 100)
        assert [record.id for record in scene.store.find(JobFilter()).jobs] == ["5"]

    def test_purge_keeps_jobs_that_blocked_jobs_wait_for(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", after=("a",), if_dependency_fails=DependencyPolicy.BLOCK))
        scene.run("a", Outcome.ERROR, final=True)
        assert scene.store.purge(JobFilter()) == Purged(0, 0)
        scene.store.cancel(["b"])
        assert scene.store.purge(JobFilter()) == Purged(2, 0)

    # --- lists and counts

    def test_jobs_are_listed_newest_first_in_pages(self, scene: StoreScene) -> None:
        scene.submit(*(spec(f"{n}", queue="xy"[n % 2], payload=b"1") for n in range(9)))
        scene.claim(3, queues=("x",))
        page = scene.store.find(JobFilter(), limit=4)
        assert ([record.id for record in page.jobs], page.next_id) == (["8", "7", "6", "5"], "5")
        page = scene.store.find(JobFilter(), limit=4, before="5")
        assert ([record.id for record in page.jobs], page.next_id) == (["4", "3", "2", "1"], "1")
        page = scene.store.find(JobFilter(), limit=4, before="1")
        assert ([record.id for record in page.jobs], page.next_id) == (["0"], None)
        leased = JobFilter(states=frozenset({JobState.LEASED}))
        assert [record.id for record in scene.store.find(leased).jobs] == ["4", "2", "0"]
        some = JobFilter(states=frozenset({JobState.LEASED, JobState.READY}), queue="x", function="jobs_app:work")
        assert [record.id for record in scene.store.find(some, limit=2).jobs] == ["8", "6"]
        assert scene.store.find(JobFilter(function="none")).jobs == []
        assert scene.store.find(JobFilter(schedule="none")).jobs == []

    def test_lists_leave_out_contents(self, scene: StoreScene) -> None:
        scene.submit(spec("a", payload=b"1"))
        scene.run("a", Outcome.ERROR, error="E", traceback="lines")
        [listed] = scene.store.find(JobFilter()).jobs
        whole = scene.record("a")
        assert (whole.spec.payload, whole.attempts[0].traceback) == (b"1", "lines")
        assert (listed.spec.payload, listed.attempts[0].traceback, listed.attempts[0].error) == (b"", "", "E")

    def test_the_age_of_a_queue_is_that_of_its_waiting_jobs_of_any_priority(self, scene: StoreScene) -> None:
        scene.submit(spec("a", priority=1))
        assert [job.spec.id for job in scene.claim(1)] == ["a"]
        scene.advance(5)
        scene.submit(spec("b", priority=1))
        assert [queue.oldest_ms for queue in scene.store.stats()] == [scene.store.now_ms()]

    def test_stats_count_states_and_shapes_of_every_queue(self, scene: StoreScene) -> None:
        one, two = Resources(cpus=1).shape(), Resources(cpus=2).shape()
        began = scene.store.now_ms()
        scene.submit(spec("a", shape=one), spec("b", shape=two), spec("c", shape=two, queue="x"))
        scene.advance(5)
        scene.submit(spec("d", shape=two), spec("e", delay_ms=9))
        scene.run("a")
        default, other = scene.store.stats()
        assert default.counts == {JobState.SUCCEEDED: 1, JobState.READY: 2, JobState.SCHEDULED: 1}
        assert (default.queue, default.oldest_ms, default.paused) == ("default", began, False)
        assert default.ready_by_shape == {two: 2}
        assert (other.queue, other.counts, other.ready_by_shape) == ("x", {JobState.READY: 1}, {two: 1})

    def test_a_paused_queue_gives_no_jobs(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b", queue="x"))
        scene.store.set_paused("default", True)
        assert scene.claim_ids(queues=("default", "x")) == ["b"]
        assert [(stats.queue, stats.paused) for stats in scene.store.stats()] == [("default", True), ("x", False)]
        scene.store.set_paused("default", False)
        assert scene.claim_ids() == ["a"]

    def test_no_more_jobs_of_a_queue_run_than_its_limit(self, scene: StoreScene) -> None:
        scene.store.set_limits("default", None, 2)
        scene.submit(*(spec(name) for name in "abcd"), spec("x1", queue="x"))
        both = ("default", "x")
        assert scene.claim_ids(1) == ["a"]
        assert scene.claim_ids(worker="w2", queues=both) == ["b", "x1"]
        assert scene.claim_ids(queues=both) == []
        scene.store.set_limits("default", None, 3)
        [job] = scene.claim()
        assert job.spec.id == "c"
        assert scene.exchange(completions=(completion(job),), slots=9).claimed[0].spec.id == "d"
        [stats, _] = scene.store.stats()
        assert (stats.queue, stats.weight, stats.max_running) == ("default", None, 3)

    def test_the_end_of_a_job_wakes_the_workers_of_a_queue_at_its_limit(self, scene: StoreScene) -> None:
        scene.store.set_limits("default", None, 1)
        scene.store.register_worker(WorkerInfo("w2"))
        scene.submit(spec("a"), spec("b"))
        [job] = scene.claim(worker="w1")
        assert scene.claim(worker="w2") == []
        while scene.store.wait("w2", 0.0):  # woken by the limit and the submission
            pass
        scene.complete(job)
        assert scene.store.wait("w2", PATIENCE_S)
        assert scene.claim_ids(worker="w2") == ["b"]

    def test_queues_share_running_jobs_by_their_weights(self, scene: StoreScene) -> None:
        for queue, weight in (("a", 1), ("b", 3)):
            scene.store.set_limits(queue, weight, None)
        scene.submit(*(spec(f"{queue}{number}", queue=queue) for queue in "abcd" for number in range(9)))
        queues = ("a", "b", "c", "d")
        first = scene.claim(1, queues=queues)
        assert [job.spec.id for job in first] == ["a0"]  # of equal queues the one with the first job
        more = scene.claim_ids(9, worker="w2", queues=queues)
        # a and b have 1 and 3 of 5 shares; c and d, which have no weights, have 1 together
        assert [sum(name[0] in queue for name in [*more, "a0"]) for queue in ("a", "b", "cd")] == [2, 6, 2]
        assert [name for name in more if name[0] in "cd"] == ["c0", "c1"]
        scene.complete(first[0])
        assert scene.claim_ids(1, queues=queues) == ["a2"]

    def test_a_queue_with_a_small_share_uses_what_others_leave(self, scene: StoreScene) -> None:
        scene.store.set_limits("a", 1, None)
        scene.store.set_limits("b", 9, None)
        scene.submit(
            spec("b0", queue="b", shape=Resources(gpus=1).shape()), spec("a0", queue="a"), spec("a1", queue="a")
        )
        assert scene.claim_ids(queues=("a", "b")) == ["a0", "a1"]

    def test_priorities_and_ages_decide_within_a_queue_with_a_weight(self, scene: StoreScene) -> None:
        scene.store.set_limits("default", 2, None)
        scene.submit(spec("a"), spec("b", priority=1), spec("c", shape=Resources(cpus=1).shape()))
        assert scene.claim_ids() == ["b", "a", "c"]

    # --- workers

    def test_workers_are_registered_with_heartbeats_and_leases(self, scene: StoreScene) -> None:
        registered = scene.store.now_ms()
        scene.store.register_worker(WorkerInfo("w2", ("x", "y"), 3, {"host": "h", "pid": 7}))
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("a"), spec("b"))
        scene.advance(SECOND)
        scene.claim(worker="w1")
        one, two = scene.store.workers()
        assert two == WorkerInfo("w2", ("x", "y"), 3, {"host": "h", "pid": 7}, registered, registered, 0)
        assert (one.id, one.registered_ms, one.heartbeat_ms, one.leases) == ("w1", registered, registered + SECOND, 2)
        scene.store.remove_worker("w1")
        assert [worker.id for worker in scene.store.workers()] == ["w2"]
        assert scene.exchange("w2").known
        assert not scene.exchange("w1").known

    def test_a_claim_leaves_the_offer_of_its_worker_in_the_store(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        assert scene.store.workers()[0].offer is None
        scene.submit(spec("a", shape=Resources(cpus=1, gpus=0.5, custom={"licence": 1}).shape()))
        node = replace(GPU_NODE, custom=(("licence", 2000), ("port", 9000)), labels=(("zone", "a"),))
        [job] = scene.claim(3, node=node)
        [worker] = scene.another().workers()
        assert worker.offer is not None
        after = Admission().take(job.shape, free_of(node))
        assert after is not None
        assert worker.offer.free == shared_free(after)
        assert (worker.offer.free.cards.free, worker.offer.free.custom) == (after.cards.free, after.custom)
        assert worker.offer[:3] == (scene.store.now_ms(), DEFAULT_LEASE_MS, 2)
        assert worker.offer.ends_ms is None
        scene.advance(SECOND)
        scene.complete(job)
        assert scene.store.workers()[0].offer == worker.offer  # a worker gives back what it claims with
        scene.claim(7, node=CPU_NODE)
        [later] = scene.another().workers()
        assert later.offer == Offer(scene.store.now_ms(), DEFAULT_LEASE_MS, 7, shared_free(free_of(CPU_NODE)), None)
        scene.store.register_worker(WorkerInfo("w1"))
        assert scene.store.workers()[0].offer is None

    def test_workers_without_a_heartbeat_are_forgotten(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("old"))
        scene.advance(60 * MINUTE + 1)
        scene.store.register_worker(WorkerInfo("new"))
        assert [worker.id for worker in scene.store.workers()] == ["new"]

    # --- choice of the worker

    def offer(self, scene: StoreScene, worker: str, node: Node, slots: int = 2, queue: str = "default") -> None:
        """Register a worker, which claims while there are no jobs."""
        scene.store.register_worker(WorkerInfo(worker, (queue,)))
        assert scene.claim(slots, worker=worker, node=node, queues=(queue,)) == []

    def test_a_gpu_job_is_left_to_the_worker_with_the_least_idle_gpu(self, scene: StoreScene) -> None:
        self.offer(scene, "large", GPU_NODE)
        self.offer(scene, "small", ONE_GPU_NODE)
        scene.submit(spec("a", shape=GPU_SHAPE))
        while scene.store.wait("small", 0.0):  # woken by the submission
            pass
        reply = scene.exchange("large", slots=2, node=GPU_NODE, delay_ms=50)
        assert (reply.claimed, reply.next_ms) == ([], scene.store.now_ms() + 50)
        assert scene.store.wait("small", PATIENCE_S)
        assert scene.claim_ids(2, worker="small", node=ONE_GPU_NODE, delay_ms=50) == ["a"]

    @pytest.mark.parametrize(
        ("slots", "chosen"), [((1, 2, 1), "b"), ((2, 2, 2), "c"), ((2, 2, 1), "b"), ((2, 1, 1), "a")]
    )
    def test_of_equally_good_workers_the_least_loaded_one_gets_a_job_then_the_one_that_asked_longest_ago(
        self, scene: StoreScene, slots: tuple[int, ...], chosen: str
    ) -> None:
        self.offer(scene, "large", GPU_NODE)
        for name, count in reversed(list(zip("abc", slots, strict=True))):  # c asks first
            self.offer(scene, name, ONE_GPU_NODE, slots=count)
            scene.advance(SECOND)
        scene.submit(spec("j", shape=GPU_SHAPE))
        for name in "abc":
            while scene.store.wait(name, 0.0):  # woken by the submission
                pass
        assert scene.claim_ids(2, worker="large", node=GPU_NODE, delay_ms=50) == []
        assert [name for name in "abc" if scene.store.wait(name, 0.2)] == [chosen]

    def test_any_worker_takes_a_job_after_the_placement_delay(self, scene: StoreScene) -> None:
        self.offer(scene, "large", GPU_NODE)
        self.offer(scene, "small", ONE_GPU_NODE)
        scene.submit(spec("a", shape=GPU_SHAPE), spec("b", shape=GPU_SHAPE))
        assert scene.claim_ids(worker="large", node=GPU_NODE, delay_ms=50) == []
        scene.advance(30)
        reply = scene.exchange("large", slots=1, node=GPU_NODE, delay_ms=50)
        assert (reply.claimed, reply.next_ms) == ([], scene.store.now_ms() + 20)
        scene.advance(20)
        assert scene.claim_ids(1, worker="large", node=GPU_NODE, delay_ms=50) == ["a"]
        assert scene.claim_ids(1, worker="large", node=GPU_NODE) == ["b"]

    def test_a_job_that_still_waits_is_left_to_a_better_worker_again(self, scene: StoreScene) -> None:
        self.offer(scene, "large", GPU_NODE)
        self.offer(scene, "small", ONE_GPU_NODE)
        scene.submit(spec("a", shape=GPU_SHAPE))
        assert scene.claim_ids(worker="large", node=GPU_NODE, delay_ms=50) == []
        scene.advance(10_001)
        assert scene.claim_ids(worker="large", node=GPU_NODE, delay_ms=50) == []
        scene.advance(50)
        assert scene.claim_ids(worker="large", node=GPU_NODE, delay_ms=50) == ["a"]

    @pytest.mark.parametrize(
        "reason", ["no slot", "no room", "another queue", "silent", "removed", "more idle", "equal"]
    )
    def test_a_job_is_left_only_to_a_live_worker_that_can_run_it(self, scene: StoreScene, reason: str) -> None:
        node = {"no room": CPU_NODE, "more idle": GPU_NODE, "equal": ONE_GPU_NODE}.get(reason, HALF_GPU_NODE)
        queue = "x" if reason == "another queue" else "default"
        self.offer(scene, "other", node, slots=0 if reason == "no slot" else 2, queue=queue)
        if reason == "silent":
            scene.advance(DEFAULT_LEASE_MS + 1)
        if reason == "removed":
            scene.store.remove_worker("other")
        scene.submit(spec("a", shape=GPU_SHAPE))
        scene.store.register_worker(WorkerInfo("w1"))
        assert scene.claim_ids(worker="w1", node=ONE_GPU_NODE, delay_ms=50) == ["a"]

    def test_a_job_without_gpus_is_left_to_a_worker_without_gpus(self, scene: StoreScene) -> None:
        self.offer(scene, "cpu", CPU_NODE, slots=2)
        scene.store.register_worker(WorkerInfo("gpu"))
        scene.submit(spec("a"), spec("b", shape=Resources(cpus=6).shape()), spec("c", shape=Resources(cpus=2).shape()))
        assert scene.claim_ids(worker="gpu", node=GPU_NODE, delay_ms=50) == ["b"]
        assert scene.claim_ids(worker="cpu", node=CPU_NODE, delay_ms=50) == ["a", "c"]

    def test_a_job_is_left_to_the_worker_on_which_it_strands_least_gpu(self, scene: StoreScene) -> None:
        """Two CPUs are half of one worker, whose GPU then has too few, and an eighth of the other one."""
        narrow, wide = replace(ONE_GPU_NODE, cpu_milli=4000), replace(ONE_GPU_NODE, cpu_milli=16_000)
        self.offer(scene, "wide", wide)
        scene.store.register_worker(WorkerInfo("narrow"))
        scene.submit(spec("a", shape=TWO_CPUS), spec("b", shape=NO_RESOURCES))
        assert scene.claim_ids(worker="narrow", node=narrow, delay_ms=50) == ["b"]
        assert scene.claim_ids(worker="wide", node=wide, delay_ms=50) == ["a"]

    def test_no_more_jobs_are_left_to_a_worker_than_it_can_take(self, scene: StoreScene) -> None:
        self.offer(scene, "cpu", CPU_NODE, slots=1)
        scene.store.register_worker(WorkerInfo("gpu"))
        scene.submit(spec("a"), spec("b", queue="x"), spec("c", shape=Resources(cpus=2).shape()))
        assert scene.claim_ids(worker="gpu", node=GPU_NODE, delay_ms=50, queues=("default", "x")) == ["b", "c"]

    # --- reservations

    def test_a_job_that_does_not_fit_for_long_gets_a_worker_reserved(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("big", shape=FOUR_CPUS))
        busy: dict[str, Any] = {"used": ONE_CPU, "ends_in_ms": 20_000}
        scene.advance(29_999)
        assert scene.claim_ids(**busy) == []
        assert scene.store.reservations() == []
        scene.advance(1)
        scene.submit(spec("long", shape=ONE_CPU, timeout_ms=20_001), spec("endless", shape=TWO_CPUS))
        scene.submit(spec("short", shape=ONE_CPU, timeout_ms=20_000, queue="x"))
        assert scene.claim_ids(queues=("default", "x"), **busy) == ["short"]
        assert scene.store.reservations() == [Reservation("default", "big", "w1", scene.store.now_ms())]
        assert scene.claim_ids(used=TWO_CPUS) == []
        assert scene.claim_ids(ends_in_ms=0) == ["big"]
        assert scene.store.reservations() == []
        assert scene.claim_ids() == ["endless", "long"]

    def test_jobs_before_a_reserved_one_and_those_that_fit_beside_it_start(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("big", shape=Resources(cpus=4, gpus=2).shape()))
        scene.advance(30_000)
        half = Resources(cpus=2, gpus=0.5).shape()
        scene.submit(
            spec("first", shape=ONE_CPU, priority=1),
            spec("gpu", shape=half),
            spec("beside", shape=ONE_CPU),
            spec("large", shape=TWO_CPUS),
            spec("plain"),
        )
        # 8 CPUs less 2: one is left for each of the first two, and 4 for the reserved job
        assert scene.claim_ids(4, node=GPU_NODE, used=half) == ["first", "beside", "plain"]
        assert scene.claim_ids(1, node=GPU_NODE, used=half) == []  # the last slot is kept, too
        assert [one.job_id for one in scene.store.reservations()] == ["big"]

    def test_the_worker_whose_jobs_end_first_is_reserved(self, scene: StoreScene) -> None:
        scene.submit(spec("big", shape=FOUR_CPUS))
        for worker, ends_in_ms in (("w1", None), ("w2", 90_000), ("w3", 40_000), ("w4", 10_000)):
            scene.store.register_worker(WorkerInfo(worker, ("default",) if worker != "w4" else ("x",)))
            queues = ("x",) if worker == "w4" else ("default",)
            assert scene.claim_ids(worker=worker, used=ONE_CPU, ends_in_ms=ends_in_ms, queues=queues) == []
        scene.advance(10_000)
        small: dict[str, Any] = {"used": ONE_CPU, "ends_in_ms": 80_000}
        for worker in ("w3", "w2", "w1"):
            scene.advance(7_000)
            assert scene.claim_ids(worker=worker, **small | {"ends_in_ms": None if worker == "w1" else 30_000}) == []
        assert scene.claim_ids(worker="w1", used=ONE_CPU) == []
        [found] = scene.store.reservations()
        assert (found.job_id, found.worker) == ("big", "w3")
        scene.submit(spec("small", shape=ONE_CPU))
        assert scene.claim_ids(worker="w3", **small) == []
        assert scene.claim_ids(worker="w2", **small) == ["small"]
        assert scene.claim_ids(worker="w1", ends_in_ms=0) == ["big"]  # wherever it fits first
        assert scene.store.reservations() == []
        assert scene.store.wait("w3", PATIENCE_S)

    def test_another_worker_is_reserved_if_the_first_one_is_silent(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.store.register_worker(WorkerInfo("w2"))
        scene.submit(spec("big", shape=FOUR_CPUS))
        scene.advance(30_000)
        assert scene.claim_ids(worker="w1", used=ONE_CPU) == []
        assert scene.claim_ids(worker="w2", used=ONE_CPU, ends_in_ms=1_000) == []
        assert [one.worker for one in scene.store.reservations()] == ["w1"]
        scene.advance(DEFAULT_LEASE_MS + 1)
        assert scene.claim_ids(worker="w2", used=ONE_CPU) == []
        assert [one.worker for one in scene.store.reservations()] == ["w2"]

    def test_a_reserved_worker_is_free_when_the_job_is_cancelled(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("big", shape=FOUR_CPUS), spec("small", shape=TWO_CPUS, priority=-9))
        scene.advance(30_000)
        assert scene.claim_ids(used=ONE_CPU) == []
        while scene.store.wait("w1", 0.0):  # woken by the submission
            pass
        scene.store.cancel(["big"])
        assert scene.store.wait("w1", PATIENCE_S)
        assert scene.store.reservations() == []
        assert scene.claim_ids(used=ONE_CPU) == ["small"]

    def test_a_worker_is_not_kept_free_for_a_queue_that_is_paused_or_at_its_limit(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("big", shape=FOUR_CPUS), *(spec(f"x{n}", queue="x", shape=TWO_CPUS) for n in range(2)))
        scene.submit(spec("run", priority=1))
        assert scene.claim_ids(1, worker="w2", lease_ms=9 * MINUTE) == ["run"]
        scene.advance(30_000)
        both = ("default", "x")
        assert scene.claim_ids(used=ONE_CPU) == []
        scene.store.set_paused("default", True)
        assert scene.claim_ids(1, used=ONE_CPU, queues=both) == ["x0"]
        scene.store.set_paused("default", False)
        assert scene.claim_ids(1, used=ONE_CPU, queues=both) == []
        scene.store.set_limits("default", None, 1)
        assert scene.claim_ids(1, used=ONE_CPU, queues=both) == ["x1"]

    def test_a_worker_claims_again_for_jobs_that_it_kept_waiting_before_a_reserved_one(self, scene: StoreScene) -> None:
        """Queue x is next by its share; its job may not start before the reserved one, although both fit."""
        scene.store.register_worker(WorkerInfo("w1", ("default", "x")))
        scene.store.set_limits("x", 1, None)
        one, both = Resources(gpus=1).shape(), Resources(gpus=2).shape()
        served: dict[str, Any] = {"node": GPU_NODE, "queues": ("default", "x")}
        scene.submit(spec("run"))
        assert scene.claim_ids(1, worker="w2", lease_ms=9 * MINUTE) == ["run"]
        scene.submit(spec("reserved", shape=one))
        scene.advance(30_000)
        assert scene.claim_ids(used=both, **served) == []
        assert [found.job_id for found in scene.store.reservations()] == ["reserved"]
        scene.submit(spec("beside", shape=one, queue="x"))
        while scene.store.wait("w1", 0.0):  # woken by the submission
            pass
        assert scene.claim_ids(**served) == ["reserved"]
        assert scene.store.wait("w1", PATIENCE_S)
        assert scene.claim_ids(used=one, **served) == ["beside"]

    def test_a_worker_on_which_the_job_never_fits_is_not_kept_free(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.submit(spec("huge", shape=Resources(cpus=5).shape()), spec("big", shape=FOUR_CPUS))
        scene.submit(spec("small", shape=ONE_CPU, priority=-9))
        scene.advance(30_000)
        assert scene.claim_ids(used=TWO_CPUS, ends_in_ms=5_000) == []
        assert [one.job_id for one in scene.store.reservations()] == ["big"]
        # the worker runs nothing, and something else uses two of its CPUs
        assert scene.claim_ids(used=TWO_CPUS, ends_in_ms=0) == ["small"]
        assert scene.store.reservations() == []

    # --- schedules

    def test_each_fire_time_of_a_schedule_submits_one_job(self, scene: StoreScene) -> None:
        now = scene.store.now_ms()
        schedule = Schedule("nightly", "* * * * *", "UTC", spec("", payload=b"1"), now + MINUTE)
        scene.store.put_schedule(schedule)
        scene.store.put_schedule(replace(schedule, next_ms=now + 9 * MINUTE))
        assert scene.store.schedules() == [schedule]
        reply = scene.exchange(slots=1)
        assert (reply.due_schedules, reply.next_ms) == ([], now + MINUTE)
        scene.advance(MINUTE)
        assert scene.exchange(slots=1).due_schedules == [schedule]
        fired = spec("f1", key="nightly@1", schedule="nightly")
        assert scene.store.fire("nightly", now + MINUTE, now + 2 * MINUTE, fired) == Receipt("f1", created=True)
        assert scene.store.fire("nightly", now + MINUTE, now + 2 * MINUTE, replace(fired, id="f2")) is None
        assert scene.exchange(slots=1).due_schedules == []
        assert [record.id for record in scene.store.find(JobFilter(schedule="nightly")).jobs] == ["f1"]
        assert scene.store.schedules() == [replace(schedule, next_ms=now + 2 * MINUTE)]
        scene.store.put_schedule(replace(schedule, cron="5 * * * *", next_ms=now + 5 * MINUTE))
        assert scene.store.schedules()[0].next_ms == now + 5 * MINUTE
        assert scene.store.remove_schedule("nightly")
        assert not scene.store.remove_schedule("nightly")
        assert scene.store.fire("nightly", now + 5 * MINUTE, now + 6 * MINUTE, spec("f3")) is None

    # --- waiting

    def test_a_waiting_worker_is_woken_by_a_job_in_its_queue(self, scene: StoreScene) -> None:
        for worker, queue in (("w1", "x"), ("w2", "y")):
            scene.store.register_worker(WorkerInfo(worker, (queue,)))
            while scene.store.wait(worker, 0.0):
                pass
        woken: list[bool] = []
        thread = threading.Thread(target=lambda: woken.append(scene.store.wait("w1", PATIENCE_S)))
        thread.start()
        scene.another().submit([spec("a", queue="x")])
        thread.join(PATIENCE_S)
        assert woken == [True]
        assert not scene.store.wait("w1", 0.0)

    def test_a_job_submitted_before_the_wait_is_not_missed(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        while scene.store.wait("w1", 0.0):
            pass
        assert scene.claim_ids() == []
        scene.another().submit([spec("a")])
        assert scene.store.wait("w1", PATIENCE_S)

    @pytest.mark.parametrize("event", ["cancel", "retry", "resume", "schedule", "requeue", "wake", "delayed"])
    def test_a_worker_is_woken_by(self, scene: StoreScene, event: str) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        scene.store.register_worker(WorkerInfo("w2"))
        scene.submit(spec("a"), spec("b"))
        [job] = scene.claim(1)
        scene.store.cancel(["b"])
        while scene.store.wait("w1", 0.0):
            pass
        match event:
            case "cancel":
                scene.store.cancel(["a"])
            case "retry":
                scene.exchange("w2", completions=(completion(job, Outcome.ERROR, jitter=0.5),))
            case "resume":
                scene.store.set_paused("default", False)
            case "schedule":
                scene.store.put_schedule(Schedule("s", "* * * * *", "UTC", spec(""), 10**15))
            case "requeue":
                scene.store.requeue(["b"])
            case "delayed":
                scene.submit(spec("c", delay_ms=10**6))
            case _:
                scene.store.wake("w1")
        assert scene.store.wait("w1", PATIENCE_S)

    @pytest.mark.parametrize("event", ["submit", "wake", "timeout"])
    def test_a_wait_with_an_exchange_ends_as_a_wait(self, scene: StoreScene, event: str) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        while scene.store.wait("w1", 0.0):
            pass
        found: list[list[str]] = []
        request = Exchange("w1", (), (), Claim(1, free_of(CPU_NODE)))

        def wait() -> None:
            reply = scene.store.wait_and_exchange(request, 0.02 if event == "timeout" else PATIENCE_S)
            reply = scene.store.exchange(request) if reply is None else reply
            found.append([job.spec.id for job in reply.claimed])

        thread = threading.Thread(target=wait)
        thread.start()
        match event:
            case "submit":
                scene.another().submit([spec("a"), spec("b")])
            case "wake":
                scene.store.wake("w1")
        thread.join(PATIENCE_S)
        assert found == [["a"] if event == "submit" else []]
        assert [job.state for job in scene.store.find(JobFilter()).jobs].count(JobState.LEASED) == len(found[0])

    def test_a_wait_without_a_reason_ends_with_its_timeout(self, scene: StoreScene) -> None:
        scene.store.register_worker(WorkerInfo("w1"))
        while scene.store.wait("w1", 0.0):
            pass
        assert not scene.store.wait("w1", 0.02)

    def test_a_waiting_submitter_is_woken_by_the_end_of_a_job(self, scene: StoreScene) -> None:
        scene.submit(spec("a"), spec("b"))
        [job] = scene.claim(1)
        assert scene.store.wait_finished(["a", "b"], 0.01) == []
        found: list[list[str]] = []
        submitter = scene.another()
        thread = threading.Thread(target=lambda: found.append(submitter.wait_finished(["b", "a"], PATIENCE_S)))
        thread.start()
        scene.complete(job)
        thread.join(PATIENCE_S)
        assert found == [["a"]]
        scene.store.cancel(["b"])
        assert submitter.wait_finished(["b", "a", "unknown"], PATIENCE_S) == ["b", "a", "unknown"]

    def test_concurrent_workers_claim_every_job_once(self, scene: StoreScene) -> None:
        count, workers = 400 if LONG else 120, 4
        scene.submit(*(spec(f"{n:04}") for n in range(count)))
        done: list[str] = []

        def work(worker: str, store: Store) -> None:
            completions: tuple[Completion, ...] = ()
            while True:
                reply = store.exchange(Exchange(worker, completions, (), Claim(5, free_of(CPU_NODE))))
                assert reply.refused == []
                if not reply.claimed:
                    return
                done.extend(job.spec.id for job in reply.claimed)
                completions = tuple(map(completion, reply.claimed))

        _together([lambda n=n: work(f"w{n}", scene.another()) for n in range(workers)])  # type: ignore[misc]
        assert sorted(done) == [f"{n:04}" for n in range(count)]
        [stats] = scene.store.stats()
        assert stats.counts == {JobState.SUCCEEDED: count}


def _together(actions: list[Callable[[], None]]) -> None:
    """Run actions in threads of their own, and raise what one of them raised."""
    errors: list[BaseException] = []

    def act(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    for error in errors:
        raise error
