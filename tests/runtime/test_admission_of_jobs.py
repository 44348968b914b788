"""A run in the process of a job uses what the job has, and claims nothing."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial

import pytest

from dovetail.errors import InfeasibleError
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, node_amounts
from dovetail.machine.job_seat import SEAT_VARIABLE, job_seat
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.cluster import Cluster
from dovetail.resources.resources import Resources
from dovetail.runtime.admission import Admission, admit
from dovetail.scheduling.planner import plan

MACHINE = Cluster((replace(Cluster.parse("8cpu, 16GB, 2xA100:40GB").nodes[0], name=socket.gethostname()),))


def capacity(slots: int | None = None, cards: tuple[int, ...] = ()) -> WorkerCapacity:
    found = WorkerCapacity(MACHINE.nodes[0], slots, cards)
    found.set_limit(node_amounts(MACHINE.nodes[0]))
    return found


def admitted(monkeypatch: pytest.MonkeyPatch, job: Resources, stage: Resources) -> Admission:
    """The run of one stage in a job, on a machine that shows the cards of the job."""
    worker = capacity()
    fits, seat = worker.try_take(job.shape())
    assert fits
    for name, value in worker.environment({}, seat).items():
        monkeypatch.setenv(name, value)
    found = job_seat({SEAT_VARIABLE: worker.environment({}, seat)[SEAT_VARIABLE]})
    assert found is not None
    node = MACHINE.nodes[0]
    cards = node.gpus[: len(found.cards)]
    cluster = Cluster((replace(node, cpu_milli=found.cpu_milli, memory_bytes=found.memory_bytes, gpus=cards),))
    planned = partial(plan, Pipeline([Stage("s", len, stage)], name="p"))
    return admit("run", planned(cluster), planned, wait=False)


def test_a_run_has_the_whole_cards_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found = admitted(monkeypatch, Resources(cpus=2, gpus=1), Resources(cpus=1, gpus=1))
    assert found.granted is None
    assert found.plan.units[0].workers == 1
    # codecs that the job did not request are for other jobs
    assert all(share.milli == share.memory_bytes == 0 for seat in found.reserved for share in seat.cards)


def test_a_run_has_no_more_of_a_card_than_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found = admitted(monkeypatch, Resources(cpus=4, gpus=0.5), Resources(cpus=1, gpus=0.25))
    [outside] = found.reserved
    assert outside.cards[0].milli == 500
    with pytest.raises(InfeasibleError, match="more of a GPU than its job has"):
        admitted(monkeypatch, Resources(cpus=4, gpus=0.5), Resources(cpus=1, gpus=1))


def test_a_job_that_declares_nothing_has_its_part_of_the_worker() -> None:
    seat = job_seat(capacity(slots=4, cards=(0, 1)).environment({}, None))
    assert seat is not None
    assert (seat.cpu_milli, seat.memory_bytes) == (2000, MACHINE.nodes[0].memory_bytes // 4)
    assert [card[:2] for card in seat.cards] == [(250, MACHINE.nodes[0].gpus[0].memory_bytes // 4)] * 2
