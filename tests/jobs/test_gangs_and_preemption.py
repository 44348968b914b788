"""Gangs and preemption over the memory store in simulated time: workers come, crash and restart at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.job import JobSpec, JobState, Outcome, Retries
from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, PreemptibleJob, Renewal, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, node_amounts
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.resources import Resources
from waiting import LONG

if TYPE_CHECKING:
    from dovetail.jobs.store import ClaimedJob, Reply
    from dovetail.resources.seat import Seat

GB = 10**9
NODES = (
    Node("cpu", cpu_milli=4000, memory_bytes=16 * GB),
    Node("gpu", cpu_milli=8000, memory_bytes=64 * GB, gpus=(Gpu("gpu", 40 * GB), Gpu("gpu", 40 * GB))),
)
REQUESTS = (
    Resources(cpus=1),
    Resources(cpus=2),
    Resources(cpus=4),
    Resources(cpus=1, gpus=0.5),
    Resources(cpus=1, gpus=1),
    Resources(cpus=1, gpus=2),
)
LEASE_MS, TICK_MS, GRACE_MS = 15_000, 500, 2_000
CRASHES_END_MS, GIVE_UP_MS = 120_000, 3_600_000


@dataclass
class RunningRank:
    job: ClaimedJob
    seat: Seat | None
    ends_ms: int
    outcome: Outcome = Outcome.SUCCEEDED


@dataclass
class SimulatedWorker:
    """A worker that takes what its claims give it, with the capacity of a real one."""

    id: str
    node: Node
    slots: int
    running: dict[tuple[str, int, int], RunningRank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = WorkerCapacity(self.node, self.slots)
        self.capacity.set_limit(node_amounts(self.node))

    def exchange(self, simulation: Simulation) -> None:
        now_ms = simulation.now_ms
        ended = {key: rank for key, rank in self.running.items() if rank.ends_ms <= now_ms}
        for key, rank in ended.items():
            self._remove(key, rank)
        completions = [
            Completion(job_id, token, ended[job_id, token, rank].outcome, b"%d" % rank, "json", rank=rank)
            for job_id, token, rank in ended
        ]
        renewals = [Renewal(*lease) for lease in sorted({key[:2] for key in self.running})]
        claim = Claim(
            *(self.capacity.free_slots(), self.capacity.free(), ("default",)),
            preemptible=self._preemptible(),
            address=f"{self.id}:1",
        )
        reply = simulation.store.exchange(Exchange(self.id, completions, renewals, claim, LEASE_MS))
        simulation.on_reply(self, reply)
        self._stop(reply, now_ms)
        for job in reply.claimed:
            fits, seat = self.capacity.try_take(job.shape.rank)
            assert fits, f"{self.id} is over-committed by {job}"
            length_ms = simulation.random.choice([500, 2_000, 10_000, 40_000])
            self.running[job.lease.job_id, job.lease.token, job.rank] = RunningRank(job, seat, now_ms + length_ms)
        assert 0 <= self.capacity.running <= self.slots

    def _stop(self, reply: Reply, now_ms: int) -> None:
        for job_id, token in reply.refused:
            for key in [key for key in self.running if key[:2] == (job_id, token)]:
                self._remove(key, self.running[key])
        for key, rank in self.running.items():
            if key[0] in reply.preempted and rank.outcome is Outcome.SUCCEEDED and rank.ends_ms > now_ms + GRACE_MS:
                rank.outcome, rank.ends_ms = Outcome.PREEMPTED, now_ms + GRACE_MS

    def _remove(self, key: tuple[str, int, int], rank: RunningRank) -> None:
        del self.running[key]
        self.capacity.release(rank.seat)

    def _preemptible(self) -> tuple[PreemptibleJob, ...]:
        found: dict[tuple[str, int], list[Seat]] = {}
        for (job_id, token, _), rank in self.running.items():
            if rank.job.spec.preemptible and rank.seat is not None:
                found.setdefault((job_id, token), []).append(rank.seat)
        return tuple(PreemptibleJob(*lease, tuple(seats), len(seats)) for lease, seats in found.items())


class Simulation:
    """Random jobs on random workers. Without crashes at the end, all jobs succeed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = 1_700_000_000_000
        self.start_ms = self.now_ms
        self.store = MemoryStore(lambda: self.now_ms)
        self.workers: list[SimulatedWorker] = []
        self.started_workers = 0
        self.ranks_sent: dict[tuple[str, int], set[int]] = {}
        self.preemptions = 0

    def run(self) -> None:
        for node in (*NODES, NODES[0]):
            self._start_worker(node)
        waiting = [self._spec(f"j{number:02}") for number in range(self.random.randint(15, 40))]
        while waiting or self._unfinished():
            assert self.now_ms < self.start_ms + GIVE_UP_MS, self._unfinished()
            self.now_ms += TICK_MS
            if waiting and self.random.random() < 0.3:
                self.store.submit([waiting.pop()])
            if self.random.random() < 0.02 and self.now_ms < self.start_ms + CRASHES_END_MS:
                crashed = self.workers.pop(self.random.randrange(len(self.workers)))
                self._start_worker(crashed.node)
            for worker in self.random.sample(self.workers, len(self.workers)):
                worker.exchange(self)
                self._check_gangs()

    def on_reply(self, worker: SimulatedWorker, reply: Reply) -> None:
        assert reply.known
        for job in reply.claimed:
            sent = self.ranks_sent.setdefault(job.lease[:2], set())
            assert job.rank not in sent, "each rank is sent once"
            sent.add(job.rank)
            assert job.gang is None or job.gang.workers[job.rank] == worker.id
        for job_id in reply.preempted:
            [record] = self.store.get([job_id])
            assert record is not None
            assert record.spec.preemptible
            if record.preempted_for is None:  # its attempt has ended in the same step
                continue
            [preemptor] = self.store.get([record.preempted_for])
            assert preemptor is not None
            assert record.spec.priority < preemptor.spec.priority
            self.preemptions += 1

    def _start_worker(self, node: Node) -> None:
        self.started_workers += 1
        worker = SimulatedWorker(f"w{self.started_workers}", node, self.random.choice([3, 8]))
        self.workers.append(worker)
        self.store.register_worker(WorkerInfo(worker.id))

    def _spec(self, name: str) -> JobSpec:
        choose = self.random.choice
        request, ranks = choose(REQUESTS), choose([1, 1, 1, 2, 2, 3])
        if request.gpus and ranks > 1:
            request = Resources(cpus=1, gpus=0.5)
        retries = Retries(error=0, lost=100, backoff_ms=0)
        shape = request.shape(ranks)
        return JobSpec(
            name,
            "app:run",
            shape=shape,
            priority=choose([0, 0, 5, 50]),
            retries=retries,
            preemptible=choose([True, False]),
        )

    def _unfinished(self) -> list[str]:
        states = frozenset({JobState.READY, JobState.LEASED, JobState.SCHEDULED})
        return [record.id for record in self.store.find(JobFilter(states)).jobs]

    def _check_gangs(self) -> None:
        """All ranks of a running gang have a place on workers, each on one that runs it or is to be given it."""
        leased = self.store.find(JobFilter(frozenset({JobState.LEASED})), 1_000).jobs
        for record in leased:
            if record.spec.shape.ranks == 1:
                assert record.gang is None
                continue
            assert record.gang is not None
            assert len(record.gang.members) == record.spec.shape.ranks
            for rank, member in enumerate(record.gang.members):
                key = record.id, record.token, rank
                holders = [worker for worker in self.workers if worker.id == member.worker]  # none: it has crashed
                assert not member.is_sent or member.has_ended or all(key in worker.running for worker in holders)


@pytest.mark.parametrize("seed", range(300 if LONG else 12))
def test_gangs_run_as_a_whole_and_only_preemptible_jobs_of_lower_priority_are_preempted(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run()
    for record in simulation.store.find(JobFilter(), 1_000).jobs:
        [whole] = simulation.store.get([record.id])
        assert whole is not None
        assert (whole.state, whole.result) == (JobState.SUCCEEDED, b"0")
        assert {attempt.outcome for attempt in whole.attempts} <= {Outcome.SUCCEEDED, Outcome.LOST, Outcome.PREEMPTED}
        last = whole.attempts[-1]
        assert simulation.ranks_sent[whole.id, last.token] == set(range(whole.spec.shape.ranks))
        if not whole.spec.preemptible:
            assert all(attempt.outcome is not Outcome.PREEMPTED for attempt in whole.attempts)


def test_the_simulations_preempt_jobs_and_place_gangs_on_several_workers() -> None:
    simulations = [Simulation(seed) for seed in range(6)]
    for simulation in simulations:
        simulation.run()
    assert sum(simulation.preemptions for simulation in simulations) > 5
    assert any(len(ranks) > 1 for simulation in simulations for ranks in simulation.ranks_sent.values())
