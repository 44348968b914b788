"""Properties of claims: random shapes, workers and arrivals in simulated time."""

from __future__ import annotations

from random import Random

import pytest

from dovetail.jobs.job import NO_RESOURCES, JobSpec
from dovetail.jobs.ordering import AGEING_MS_PER_STEP
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.resources import Resources
from jobs.claim_simulation import CLAIM_EVERY_MS, SimulatedWorker, Simulation
from jobs.job_strategies import SHAPES
from waiting import LONG

GB = 10**9
SECOND = 1000
HOUR = 3600 * SECOND
NODES = (
    Node("cpu", 4000, 16 * GB, custom=(("licence", 2000),)),
    Node("small", 2000, 8 * GB),
    Node("gpu", 8000, 64 * GB, (Gpu("a100", 40 * GB),) * 2, (("zone", "a"),)),
    Node("large", 16_000, 128 * GB, (Gpu("l4", 24 * GB),) * 4, (), (("licence", 1000),)),
)
SEEDS = range(500 if LONG else 5)


def random_fleet(random: Random) -> list[SimulatedWorker]:
    queues = [("a", "b"), ("a",), ("b", "c"), ("a", "b", "c")]
    return [
        SimulatedWorker(f"w{number}", random.choice(NODES), random.randint(1, 8), random.choice(queues))
        for number in range(random.randint(1, 6))
    ]


def random_job(random: Random, number: int) -> JobSpec:
    return JobSpec(
        f"j{number:04}",
        "app:work",
        queue=random.choice("abc"),
        priority=random.choice([0, 0, 0, 1, -1, 3]),
        shape=random.choice((NO_RESOURCES, *SHAPES)),
        timeout_ms=random.choice([None, 5 * SECOND, 60 * SECOND]),
    )


def random_simulation(seed: int, jobs: int = 200 if LONG else 60) -> Simulation:
    random = Random(seed)
    simulation = Simulation(*random_fleet(random))
    for queue in "abc":
        weight, max_running = random.choice([None, None, 1, 3]), random.choice([None, None, 2, 5])
        simulation.store.set_limits(queue, weight, max_running)
    time_ms = 0
    for number in range(jobs):
        spec = random_job(random, number)
        time_ms += random.choice([0, 0, 500, 3 * SECOND])
        longest = 60 * SECOND if spec.timeout_ms is None else spec.timeout_ms
        simulation.submit(time_ms, spec, random.randint(1, longest))
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_no_job_that_fits_waits_without_a_reason(seed: int) -> None:
    simulation = random_simulation(seed)

    def check() -> None:
        assert simulation.unexplained() == []

    simulation.run(HOUR, check)  # a worker that is over-committed raises
    assert len(simulation.starts) == len(simulation.ends) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_job_overtakes_one_of_its_queue_and_shape_that_is_older_than_60_s_per_priority_step(seed: int) -> None:
    simulation = random_simulation(seed)
    simulation.run(HOUR)
    submitted = {spec.id: simulation.store.get([spec.id])[0] for _, _, spec in simulation.starts}
    for position, (_, _, overtaken) in enumerate(simulation.starts):
        for began_ms, _, spec in simulation.starts[:position]:
            if (spec.queue, spec.shape) == (overtaken.queue, overtaken.shape):
                first, last = submitted[spec.id], submitted[overtaken.id]
                assert first is not None
                assert last is not None
                if last.enqueued_ms >= began_ms + simulation.began_ms:
                    continue  # it was submitted later
                older_ms = first.enqueued_ms - last.enqueued_ms
                assert older_ms <= AGEING_MS_PER_STEP * (spec.priority - overtaken.priority)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_job_starts_within_the_bound_of_its_reservation(seed: int) -> None:
    """Under an endless stream of small jobs: a worker is reserved after 30 s and a third of a lease, or when the jobs
    that are ahead of it have started; the longest small job may have started just before."""
    random = Random(seed)
    longest_ms = random.choice([2, 20, 90]) * SECOND
    gpus = random.choice([1, 2])
    workers = [SimulatedWorker(f"w{number}", NODES[2], 8) for number in range(random.randint(1, 4))]
    simulation = Simulation(*workers)
    begin_ms = random.randint(0, 20) * SECOND
    large = Resources(cpus=random.choice([1, 4, 8]), gpus=2).shape()
    small = [Resources(cpus=1, gpus=gpus / 2).shape(), Resources(cpus=2, gpus=1).shape(), Resources(cpus=1).shape()]
    simulation.submit(begin_ms, JobSpec("large", "app:train", shape=large), SECOND)
    interval_ms = max(50, longest_ms // (12 * len(workers)))
    for number in range(400 if LONG else 200):
        timeout_ms = random.choice([None, longest_ms])
        spec = JobSpec(f"s{number:04}", "app:infer", shape=random.choice(small), timeout_ms=timeout_ms)
        simulation.submit(number * interval_ms, spec, random.randint(longest_ms // 2, longest_ms))
    simulation.run(HOUR)
    ahead = {f"s{number:04}" for number in range(begin_ms // interval_ms + 1)}
    last_ahead_ms = max((start.time_ms for start in simulation.starts if start.spec.id in ahead), default=0)
    reserved_ms = max(begin_ms + 30 * SECOND + CLAIM_EVERY_MS, last_ahead_ms)
    assert simulation.start_of("large").time_ms <= reserved_ms + longest_ms


@pytest.mark.parametrize("seed", range(50 if LONG else 2))
def test_queues_get_their_shares_within_5_percent_over_an_hour(seed: int) -> None:
    random = Random(seed)
    weights = {queue: random.randint(1, 4) for queue in "abc"}
    total = sum(weights.values())
    workers = [SimulatedWorker(f"w{number}", NODES[0], 2 * total, ("a", "b", "c")) for number in range(2)]
    simulation = Simulation(*workers)
    begin_ms = 600 * SECOND  # all jobs of the queue that was first have ended
    for queue, weight in weights.items():
        simulation.store.set_limits(queue, weight, None)
        mean_ms = random.choice([60, 120, 200] if LONG else [200, 300]) * SECOND
        for number in range(4 * total * (HOUR + begin_ms) // mean_ms):  # more than it can run
            spec = JobSpec(f"{queue}{number:05}", "app:work", queue=queue)
            simulation.submit(0, spec, random.randint(mean_ms // 2, mean_ms * 3 // 2))
    simulation.run(HOUR + begin_ms)
    used = dict.fromkeys(weights, 0)
    for start in simulation.starts:
        end_ms = min(start.time_ms + simulation.durations[start.spec.id], HOUR + begin_ms)
        used[start.spec.queue] += max(0, end_ms - max(start.time_ms, begin_ms))
    everything = sum(used.values())
    assert everything == pytest.approx(4 * total * HOUR, rel=0.001)
    for queue, weight in weights.items():
        assert used[queue] / everything == pytest.approx(weight / total, rel=0.05)
