"""Metrics of workers on other nodes as the driver sees them. No Ray is started."""

from __future__ import annotations

import marshal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.ray.metrics import ClusterMetrics, NodeMeter
from dovetail.machine.gpus import NvmlMeter
from dovetail.machine.host_usage import HostUsage
from dovetail.machine.meter import MAX_CPU_SHARE
from machine.scripted_use import GIB, BusyCard, BusyNvml
from machine.sessions import session
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

MB = 1 << 20
Workers = dict[int, tuple[str, tuple[int, ...]]]


def look(meter: NodeMeter, now: float) -> dict[str, Any]:
    """A sample as it arrives at the driver."""
    found = meter.sample(now)
    assert found is not None, meter.problem
    again = marshal.loads(marshal.dumps(found))
    assert again == found
    assert isinstance(again, dict)
    return again


def data(at: float, *workers: tuple[int, str, float], machine: str = "m", cards: tuple[str | None, ...] = ()) -> Any:
    """A sample of (worker, unit, CPU seconds) ..."""
    figures = {worker: (unit, cpu_s, 10 * MB, 1, 2, None, 1) for worker, unit, cpu_s in workers}
    shown = [(index, uuid, 50, None, None, None, None, None, None) for index, uuid in enumerate(cards)]
    return {"at": at, "machine": machine, "workers": figures, "host": (1.5, 4, 2 * MB, 8 * MB), "cards": shown}


def test_the_usage_of_a_real_worker_is_measured() -> None:
    with session("data = b'x' * (50 << 20); burn(0.3); say(); wait()") as worker:
        worker.hear()
        library = BusyNvml(BusyCard("GPU-aaa", processes={worker.pid: 3 * GIB}))
        meter = NodeMeter(lambda: {7: ("caption", (worker.pid,))}, NvmlMeter(library))
        measured = ClusterMetrics()
        measured.record("x", look(meter, 100.0))
        use = measured.uses()[7]
        assert use.cpu_s >= 0.25
        assert use.uss_bytes > 50 * MB
        assert (use.gpu_bytes, use.processes) == (3 * GIB, 1)
        assert measured.units_by_worker() == {7: "caption"}
        assert measured.units() == {"x": {"caption": 1}}
        assert [card.use_percent for card in measured.cards()["x"]] == [70]
        assert measured.hosts()["x"].cpus is None
        measured.record("x", look(meter, 105.0))
        assert measured.hosts()["x"].cpus is not None
        meter.stop()
        assert library.open == 0


def test_only_nodes_that_left_are_forgotten() -> None:
    measured = ClusterMetrics()
    measured.record("x", data(1.0, (1, "a", 5.0)))
    measured.record("y", data(1.0, (2, "b", 6.0), machine="n"))
    measured.record("y", None)  # a measurement that was not due
    measured.on_node_left("x")
    measured.on_node_left("nobody")
    assert measured.uses().keys() == {2}
    assert measured.units() == {"y": {"b": 1}}
    assert measured.hosts().keys() == {"y"}


def test_a_gang_on_two_nodes_is_one_worker() -> None:
    measured = ClusterMetrics()
    measured.record("x", data(1.0, (1, "train", 5.0)))
    measured.record("y", data(1.0, (1, "train", 7.0)))
    use = measured.uses()[1]
    assert (use.cpu_s, use.uss_bytes, use.processes) == (12.0, 20 * MB, 2)
    assert measured.units() == {"x": {"train": 1}, "y": {"train": 1}}


def test_nodes_on_one_machine_count_its_cpus_and_cards_once() -> None:
    measured = ClusterMetrics()
    measured.record("y", data(1.0, machine="one", cards=("GPU-a", "GPU-b")))
    measured.record("x", data(1.0, machine="one", cards=("GPU-a", "GPU-b")))
    measured.record("z", data(1.0, machine="two", cards=("GPU-c", None, None)))
    assert measured.machines() == [HostUsage(1.5, 4, 2 * MB, 8 * MB)] * 2
    assert measured.hosts().keys() == {"x", "y", "z"}
    assert {node: [card.uuid for card in cards] for node, cards in measured.cards().items()} == {
        "x": ["GPU-a", "GPU-b"],
        "z": ["GPU-c", None, None],
    }


def test_machines_without_an_identity_are_counted_separately() -> None:
    measured = ClusterMetrics()
    measured.record("x", data(1.0, machine=""))
    measured.record("y", data(1.0, machine=""))
    assert len(measured.machines()) == 2


def test_a_sample_has_the_drivers_time_and_the_nodes_interval() -> None:
    now = [1000.0]
    measured = ClusterMetrics(lambda: now[0])
    measured.record("x", data(50.0, (1, "a", 0.0)))
    assert measured.uses()[1].at == 1000.0
    now[0] = 1001.7  # it arrived late
    measured.record("x", data(51.0, (1, "a", 1.0)))
    assert measured.uses()[1].at == 1001.0
    measured.record("x", data(3.0, (1, "a", 1.0)))  # another machine has the name now
    assert measured.uses()[1].at == 1001.7


def test_a_measurement_that_is_not_due_is_skipped() -> None:
    asked: list[int] = []

    def no_workers() -> Workers:
        asked.append(1)
        return {}

    meter = NodeMeter(no_workers, every_s=1.0)
    assert meter.sample(10.0) is not None
    assert meter.sample(10.5) is None
    assert len(asked) == 1
    assert meter.sample(10_000.0) is not None


def test_slow_measurements_are_made_less_often() -> None:
    def slow() -> Workers:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return {}

    meter = NodeMeter(slow, every_s=0.001)
    assert meter.sample(0.0) is not None
    assert meter.sample(0.02 / MAX_CPU_SHARE - 0.01) is None


def test_ten_workers_cost_less_than_a_hundredth_of_a_core() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(session("say(); wait()")) for _ in range(10)]
        for worker in workers:
            worker.hear()
        there: Workers = {number: ("a", (worker.pid,)) for number, worker in enumerate(workers)}
        meter = NodeMeter(lambda: there, every_s=0.0)
        meter.sample(0.0)
        began, samples = time.thread_time(), 0
        for second in range(1, 11):
            samples += meter.sample(100.0 * second) is not None
        assert samples == 10
        assert (time.thread_time() - began) / 10 < 0.01


def test_a_failed_measurement_is_skipped_and_the_next_one_is_made() -> None:
    answers: list[Mapping[int, tuple[str, tuple[int, ...]]]] = [{}]

    def processes() -> Mapping[int, tuple[str, tuple[int, ...]]]:
        return answers.pop()

    meter = NodeMeter(processes, every_s=0.0)
    assert meter.sample(0.0) is not None
    assert meter.sample(100.0) is None
    assert "pop from empty list" in meter.problem
    answers.append({})
    assert meter.sample(200.0) is not None
    assert meter.problem == ""


def test_a_thread_measures_until_stopped_and_each_sample_is_taken_once() -> None:
    others = set(threading.enumerate())
    meter = NodeMeter(dict, every_s=0.02)
    assert meter.take() is None
    meter.start()
    found: list[dict[str, Any]] = []

    def twice() -> bool:
        taken = meter.take()
        if taken is not None:
            found.append(taken)
        return len(found) == 2

    until(twice, "two samples")
    assert found[0]["at"] < found[1]["at"]
    meter.stop()
    meter.stop()
    assert "dovetail-meter" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_a_sample_of_a_hundred_workers_is_small() -> None:
    size = len(marshal.dumps(data(1.0, *((number, "caption", 5.0) for number in range(100)))))
    assert size == pytest.approx(6_000, rel=0.5)
