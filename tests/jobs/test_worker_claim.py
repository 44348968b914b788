"""A worker shares its machine with runs, actor systems and other workers by claims."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dovetail.claims.store import ClaimRequest, Grant
from dovetail.jobs.workers.worker_capacity import MachineClaim, WorkerCapacity
from dovetail.resources.cluster import Cluster
from dovetail.resources.resources import Resources
from dovetail.resources.seat import Seat
from dovetail.runtime.admission import machine_claims
from jobs.worker_aids import make_worker, memory_queue
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.claims.store import ClaimStore

MACHINE = Cluster.parse("8cpu, 16GB, 2xA100:40GB")
NODE = MACHINE.nodes[0]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    monkeypatch.delenv("DOVETAIL_INSIDE", raising=False)


@pytest.fixture
def ledger() -> ClaimStore:
    return machine_claims(MACHINE)


class ClaimingWorker:
    def __init__(self, name: str = "worker-1", cards: tuple[int, ...] | None = None) -> None:
        self.capacity = WorkerCapacity(NODE, 8, cards or ())
        self.claim = MachineClaim(name, MACHINE, cards)
        self.stop = threading.Event()

    def acquire(self) -> bool:
        return self.claim.acquire(self.capacity, self.stop)

    @property
    def cpus(self) -> float:
        return self.capacity.free().cpu_milli / 1000


@pytest.fixture
def worker() -> Iterator[ClaimingWorker]:
    found = ClaimingWorker()
    yield found
    found.claim.release()


def test_a_worker_that_is_alone_gets_the_machine_and_gives_it_back(worker: ClaimingWorker, ledger: ClaimStore) -> None:
    assert worker.acquire()
    assert [owner.name for owner in ledger.owners()] == ["worker-1"]
    free = worker.capacity.free()
    assert (free.cpu_milli, len(free.cards.free), free.cards.free[1].milli) == (8000, 2, 1000)
    worker.claim.release()
    assert ledger.owners() == []


def test_an_idle_worker_gives_a_share_to_a_run(worker: ClaimingWorker, ledger: ClaimStore) -> None:
    assert worker.acquire()
    about, need = ClaimRequest("run"), (Seat(NODE.name, 4000),)
    until(lambda: isinstance(ledger.request(about, need, accept_minimum=True), Grant), "the run may begin")
    until(lambda: worker.cpus == 4, "the worker has half of the machine")
    ledger.release(about.id)
    until(lambda: worker.cpus == 8, "the worker has the machine again")


def test_running_jobs_keep_what_they_have(worker: ClaimingWorker, ledger: ClaimStore) -> None:
    assert worker.acquire()
    fits, seat = worker.capacity.try_take(Resources(cpus=7).shape())
    assert fits
    about, need = ClaimRequest("run"), (Seat(NODE.name, 4000),)
    ledger.request(about, need)
    until(lambda: worker.cpus == 0)
    assert not isinstance(ledger.request(about, need, accept_minimum=True), Grant)
    worker.capacity.release(seat)
    until(lambda: worker.cpus == 4)
    until(lambda: isinstance(ledger.request(about, need, accept_minimum=True), Grant), "the run may begin")


def test_a_worker_of_one_card_claims_that_card_only(ledger: ClaimStore) -> None:
    worker = ClaimingWorker(cards=(1,))
    assert worker.acquire()
    assert [card.milli for card in worker.capacity.free().cards.free] == [0, 1000]
    second = ClaimingWorker("worker-2", cards=(0,))
    assert second.acquire()
    assert [card.milli for card in second.capacity.free().cards.free] == [1000, 0]
    assert len(ledger.owners()) == 2
    worker.claim.release()
    second.claim.release()


def test_a_worker_without_a_free_card_begins_without_cards(worker: ClaimingWorker) -> None:
    everything = ClaimingWorker("greedy", cards=(0, 1))
    assert everything.acquire()
    assert worker.acquire()
    assert [card.milli for card in worker.capacity.free().cards.free] == [0, 0]
    assert worker.cpus == 4
    everything.claim.release()


def test_a_worker_that_must_not_use_gpus_claims_none(ledger: ClaimStore) -> None:
    worker = ClaimingWorker(cards=())
    assert worker.acquire()
    assert [card.milli for card in worker.capacity.free().cards.free] == [0, 0]
    assert len(ledger.owners()) == 1
    worker.claim.release()


def test_a_worker_that_is_stopped_while_it_waits_leaves_no_claim(worker: ClaimingWorker, ledger: ClaimStore) -> None:
    everything = ClaimingWorker("greedy", cards=(0, 1))
    assert everything.acquire()
    waiting = ClaimingWorker("waiting", cards=(0,))
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(waiting.acquire()))
    thread.start()
    until(lambda: len(ledger.owners()) == 2)
    waiting.stop.set()
    thread.join()
    assert answers == [False]
    assert [owner.name for owner in ledger.owners()] == ["greedy"]
    everything.claim.release()


def test_a_worker_inside_of_a_run_shares_its_resources(
    worker: ClaimingWorker, ledger: ClaimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_INSIDE", "1")
    assert worker.acquire()
    assert worker.cpus == 8
    assert ledger.owners() == []


def test_a_worker_claims_this_machine_by_default() -> None:
    here = machine_claims(Cluster.local())
    with memory_queue() as queue:
        worker = make_worker(queue, resources="auto", worker_id="worker-1").start()
        until(lambda: worker.get_status()["state"] == "running")
        assert [owner.name for owner in here.owners()] == ["worker-1"]
        worker.stop()
    assert here.owners() == []
