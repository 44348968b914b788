"""The decisions of claims are the same in all stores: which worker starts which job, and when."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.job import JobSpec
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.stores.redis_store import RedisStore
from dovetail.jobs.stores.sqlite_store import SqliteStore
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.resources import Resources
from jobs.claim_simulation import SimulatedWorker, Simulation
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.jobs.store import Store
    from jobs.store_traces import TraceClock
    from redis_aids import RedisProcess

GB = 10**9
WORKERS, JOBS = (50, 1_000) if LONG else (6, 100)
SECOND = 1000
SHAPES = tuple(
    Resources(cpus=cpus, gpus=gpus).shape()
    for cpus, gpus in ((1, 0), (4, 0), (1, 0.25), (2, 0.5), (4, 1), (8, 2), (8, 4))
)
numbers = count()


def recorded(make_store: Callable[[TraceClock], Store]) -> Simulation:
    """A simulation of more jobs than fit, in which large ones wait for reservations."""
    random = Random(7)
    cards = (Gpu("a100", 40 * GB),)
    nodes = [
        Node("gpu", 16_000, 64 * GB, cards * 4),
        Node("half", 8000, 64 * GB, cards * 2),
        Node("cpu", 8000, 32 * GB),
    ]
    queues = ("a", "b")
    workers = [SimulatedWorker(f"w{number:02}", nodes[number % 3], 16, queues) for number in range(WORKERS)]
    simulation = Simulation(*workers, make_store=make_store)
    simulation.store.set_limits("b", 2, 3 * WORKERS)
    for number in range(JOBS):
        timeout_ms = random.choice([None, 20 * SECOND, 60 * SECOND])
        spec = JobSpec(
            f"j{number:04}",
            "app:work",
            queue=random.choice(queues),
            priority=random.choice([0, 0, 1]),
            shape=random.choice(SHAPES),
            timeout_ms=timeout_ms,
        )
        simulation.submit(number * 1_500 // WORKERS, spec, random.randint(SECOND, timeout_ms or 60 * SECOND))
    simulation.run(3600 * SECOND)
    simulation.store.close()
    return simulation


@pytest.fixture(params=["sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[TraceClock], Store]:
    if request.param == "sqlite":
        return lambda clock: SqliteStore(tmp_path / "jobs.db", clock_ms=clock)
    server: RedisProcess = request.getfixturevalue("redis_server")
    return lambda clock: RedisStore(server.url, prefix=f"claims{next(numbers)}", clock_ms=clock)


def test_a_recorded_simulation_gives_the_same_decisions(make_store: Callable[[TraceClock], Store]) -> None:
    expected, found = recorded(MemoryStore), recorded(make_store)
    assert len(expected.ends) == JOBS
    assert found.starts == expected.starts
    assert found.ends == expected.ends
