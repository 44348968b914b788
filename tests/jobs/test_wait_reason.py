"""Why a ready job waits."""

from __future__ import annotations

import pytest

from dovetail.jobs.job import JobState
from dovetail.jobs.store import WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.wait_reason import wait_reason
from dovetail.resources.resources import Resources
from jobs.store_contract import FOUR_CPUS, ONE_CPU, StoreScene, spec
from jobs.test_memory_store import ManualClock


@pytest.fixture
def scene() -> StoreScene:
    clock = ManualClock()
    store = MemoryStore(clock)
    store.register_worker(WorkerInfo("w1"))
    return StoreScene(store, clock.advance, lambda: store)


def reason(scene: StoreScene, job_id: str) -> str:
    store = scene.store
    stats = {one.queue: one for one in store.stats()}
    return wait_reason(scene.record(job_id), stats, store.reservations(), store.workers(), store.now_ms())


def test_a_job_that_a_worker_will_take_has_no_reason_to_wait(scene: StoreScene) -> None:
    scene.claim(2)
    scene.submit(spec("a"))
    assert reason(scene, "a") == ""
    scene.claim(2)
    assert scene.state("a") is JobState.LEASED
    assert reason(scene, "a") == ""


def test_no_worker_no_slot_and_no_room_are_named(scene: StoreScene) -> None:
    scene.submit(spec("a", shape=FOUR_CPUS))
    assert reason(scene, "a") == "no live worker"
    scene.claim(0)
    assert reason(scene, "a") == "no free slot"
    scene.claim(2, used=ONE_CPU)
    assert reason(scene, "a") == "no room"


def test_pause_and_limit_are_named(scene: StoreScene) -> None:
    scene.store.set_limits("default", None, 1)
    scene.submit(spec("a"), spec("b"))
    scene.claim()
    assert reason(scene, "b") == "limit: 1 of 1 jobs of queue default run"
    scene.store.set_paused("default", True)
    assert reason(scene, "b") == "paused: queue default"


def test_a_reservation_is_named_by_both_jobs(scene: StoreScene) -> None:
    scene.submit(spec("big", shape=FOUR_CPUS), spec("small", shape=Resources(cpus=2).shape()))
    scene.advance(30_000)
    assert scene.claim(used=ONE_CPU) == []
    assert reason(scene, "big") == "no room yet: worker w1 is reserved for it"
    assert reason(scene, "small") == "reservation: worker w1 is kept free for job big"


def test_the_share_of_other_queues_is_named(scene: StoreScene) -> None:
    scene.store.set_limits("x", 2, None)
    scene.claim(2)
    scene.submit(spec("a"))
    assert reason(scene, "a") == "share: other queues than default are next"
