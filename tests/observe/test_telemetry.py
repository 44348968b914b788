"""Telemetry of real workers: samples, totals of ended workers, and cost."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.machine.gpus import NvmlMeter
from dovetail.observe.telemetry import MAX_CPU_SHARE, Telemetry, WorkerProcesses, WrittenRequest
from machine.scripted_use import GIB, BusyCard, BusyNvml
from machine.sessions import session
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

MB = 1 << 20
BUSY = "say()\nwhile True: burn(1)"


def mapping_of(*workers: WorkerProcesses) -> Any:
    return lambda: dict(enumerate(workers))


def test_a_thread_samples_until_it_is_stopped() -> None:
    others = set(threading.enumerate())
    with session("data = b'x' * (50 << 20); say()\nwhile True: burn(1)") as worker:
        worker.hear()
        telemetry = Telemetry(mapping_of(WorkerProcesses((worker.pid,), "caption")), every_s=0.05)
        assert telemetry.latest() == {}
        telemetry.start()

        def busy() -> bool:
            use = telemetry.latest().get(0)
            # for so long that it does not matter if a look was interrupted
            return use is not None and (use.cpus or 0) > 0.2 and use.cpu_s_total > 1.0

        until(busy, "the worker uses a CPU")
        telemetry.stop()
        assert "dovetail-telemetry" not in {thread.name for thread in set(threading.enumerate()) - others}
        use, unit, machine = telemetry.latest()[0], telemetry.units()["caption"], telemetry.machine()
        assert (use.worker, use.unit, use.processes) == (0, "caption", 1)
        assert 50 * MB < use.uss_bytes <= use.peak_bytes == telemetry.peak(0) == unit.peak_bytes
        assert use.cpu_s_total == pytest.approx(unit.cpu_s_total)
        assert unit.cpus is not None
        assert 0.02 < unit.cpus < 1.3
        assert machine is not None
        assert machine.cpus is not None
        assert machine.cpus > 0.02
        assert telemetry.gpus() == ()
        telemetry.stop()


def test_it_can_be_stopped_at_once_and_without_a_start() -> None:
    telemetry = Telemetry(dict, every_s=600.0)
    telemetry.stop()
    telemetry = Telemetry(dict, every_s=600.0)
    telemetry.start()
    began = time.monotonic()
    telemetry.stop()
    assert time.monotonic() - began < 10


def test_what_is_handed_out_does_not_change() -> None:
    with session(BUSY) as worker:
        worker.hear()
        telemetry = Telemetry(mapping_of(WorkerProcesses((worker.pid,), "a")))
        telemetry.sample()
        seen = telemetry.snapshot()
        before = (dict(seen.workers), dict(seen.units))
        assert isinstance(seen.workers, MappingProxyType)
        telemetry.sample()
        assert (dict(seen.workers), dict(seen.units)) == before
        assert telemetry.snapshot() is not seen


def test_a_worker_of_several_ranks_is_all_of_them() -> None:
    with session("burn(0.2); say(); wait()") as one, session("burn(0.3); say(); wait()") as two:
        one.hear()
        two.hear()
        telemetry = Telemetry(mapping_of(WorkerProcesses((one.pid, two.pid), "train")))
        telemetry.sample()
        assert telemetry.latest()[0].cpu_s_total >= 0.45
        assert telemetry.latest()[0].processes == 2


def test_a_worker_that_is_gone_stays_in_its_unit_and_its_peak_is_known() -> None:
    there: dict[int, WorkerProcesses] = {}
    telemetry = Telemetry(lambda: there)
    with session("data = b'x' * (40 << 20); burn(0.3); say(); wait()") as worker:
        worker.hear()
        there[7] = WorkerProcesses((worker.pid,), "a")
        telemetry.sample()
    there.clear()
    telemetry.sample()
    assert telemetry.latest() == {}
    assert telemetry.units()["a"].cpu_s_total >= 0.25
    assert telemetry.peak(7) > 40 * MB
    assert telemetry.peak(8) == 0


def test_gpu_memory_is_put_to_the_worker_whose_child_holds_it() -> None:
    with session("child = os.fork()\nsay(child if child else '')\nwait() if child else time.sleep(1000)") as worker:
        child = int(worker.hear() or worker.hear())
        library = BusyNvml(BusyCard("GPU-aaa", processes={child: 3 * GIB, 1: GIB}))
        telemetry = Telemetry(mapping_of(WorkerProcesses((worker.pid,), "a")), gpu=NvmlMeter(library))
        telemetry.sample()
        assert telemetry.latest()[0].gpu_bytes == 3 * GIB
        assert telemetry.units()["a"].gpu_peak_bytes == 3 * GIB
        assert [card.use_percent for card in telemetry.gpus()] == [70]
        telemetry.stop()
        assert library.open == 0


def test_a_stage_that_uses_more_than_it_requested_gets_advice_once() -> None:
    with session("data = b'x' * (40 << 20); say()\nwhile True: burn(1)") as worker:
        worker.hear()
        asked = WrittenRequest(cpus=0.05, memory_bytes=10 * MB)

        def clock() -> float:
            """A clock so slow that the worker is busy even on a loaded machine."""
            return time.monotonic() / 20

        telemetry = Telemetry(
            mapping_of(WorkerProcesses((worker.pid,), "caption")), lambda _: asked, every_s=0.2, clock=clock
        )
        telemetry.start()
        found = []

        def both() -> bool:
            found.extend(telemetry.advice())
            return {it.about for it in found} == {"cpus", "memory"}

        until(both, "advice exists for both")
        telemetry.stop()
        assert all(it.text.startswith("stage caption") for it in found)
        assert len(found) == 2


def test_a_failed_sample_is_left_out_and_the_next_is_taken() -> None:
    calls = []

    def workers() -> Mapping[int, WorkerProcesses]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return {}

    telemetry = Telemetry(workers)
    telemetry.sample()
    assert telemetry.problem == "RuntimeError: dictionary changed size during iteration"
    assert telemetry.machine() is None
    telemetry.sample()
    assert telemetry.problem == ""
    assert telemetry.machine() is not None


def test_a_worker_that_is_not_there_any_more_or_not_yet_is_no_trouble() -> None:
    with session("wait()") as worker:
        pass
    telemetry = Telemetry(mapping_of(WorkerProcesses((worker.pid,), "a"), WorkerProcesses((), "b")))
    telemetry.sample()
    assert telemetry.problem == ""
    assert [use.cpu_s_total for use in telemetry.latest().values()] == [0.0, 0.0]


def test_ten_workers_cost_less_than_a_hundredth_of_a_core() -> None:
    """At one sample per second; measured on a quiet machine: 0.1 %."""
    with ExitStack() as stack:
        workers = [stack.enter_context(session("say(); wait()")) for _ in range(10)]
        for worker in workers:
            worker.hear()
        now = [0.0]
        telemetry = Telemetry(
            mapping_of(*(WorkerProcesses((worker.pid,), "a") for worker in workers)), clock=lambda: now[0]
        )
        telemetry.sample()
        began = time.thread_time()
        for _ in range(10):
            now[0] += 1.0
            telemetry.sample()
        assert (time.thread_time() - began) / 10 < 0.01


def test_slow_samples_are_taken_less_often() -> None:
    """The thread never takes more than its share of a core, however slow the list of workers is."""
    samples: list[float] = []

    def slow() -> Mapping[int, WorkerProcesses]:
        samples.append(time.monotonic())
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return {}

    telemetry = Telemetry(slow, every_s=0.001)
    telemetry.start()
    until(lambda: len(samples) >= 2)
    telemetry.stop()
    assert samples[1] - samples[0] >= 0.01 / MAX_CPU_SHARE
