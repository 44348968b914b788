"""Telemetry of workers that other nodes measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.ray.metrics import ClusterMetrics, NodeMeter
from dovetail.machine.host_usage import HostUsage
from dovetail.observe.history import RunHistory
from dovetail.observe.summary import summarize_run
from dovetail.observe.telemetry import Telemetry, UsageTotals, WorkerProcesses, WorkerSample, WrittenRequest
from machine.sessions import session
from observe.made import recorder, run_at

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


def data(at: float, *workers: tuple[int, float], machine: str = "m", unit: str = "a") -> dict[str, Any]:
    """A look: (worker, CPU seconds) ..."""
    figures = {worker: (unit, cpu_s, 10 * MB, 1, 2, None, 1) for worker, cpu_s in workers}
    host = (1.5, 4, 2 * MB, 8 * MB)
    return {"at": at, "machine": machine, "workers": figures, "host": host, "cards": []}


class Run:
    """A run on nodes, second by second."""

    def __init__(self, asked: WrittenRequest | None = None) -> None:
        self.now = 0.0
        self.measured = ClusterMetrics(self.clock)
        self.telemetry = Telemetry(self.there, lambda _: asked, source=self.measured, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def there(self) -> dict[int, WorkerProcesses]:
        return {worker: WorkerProcesses((), unit) for worker, unit in self.measured.units_by_worker().items()}

    def sample(self, now: float) -> None:
        self.now = now
        self.telemetry.sample()
        assert self.telemetry.problem == ""


def test_units_are_counted_over_nodes() -> None:
    run = Run()
    for second in range(4):
        run.now = float(second)
        run.measured.record("x", data(100.0 + second, (1, 0.5 * second), (2, 1.0 * second)))
        run.measured.record("y", data(900.0 + second, (3, 2.0 * second), machine="n"))
        run.sample(second + 0.3)
    unit = run.telemetry.units()["a"]
    assert (unit.workers, unit.uss_bytes) == (3, 30 * MB)
    assert unit.cpu_s_total == pytest.approx(10.5)
    assert unit.cpus_now == pytest.approx(3.5)
    assert unit.cpus == pytest.approx(3.5 / 3)
    assert run.telemetry.latest()[3].cpus == pytest.approx(2.0)


def test_all_machines_together_and_each_node_by_itself() -> None:
    run = Run()
    run.sample(0.0)
    assert run.telemetry.machine() is None
    run.measured.record("x", data(0.0, (1, 0.0)))
    run.measured.record("y", data(0.0, machine="n"))
    run.measured.record("y2", data(0.0, (2, 0.0), machine="n"))
    run.sample(1.0)
    seen = run.telemetry.snapshot()
    assert seen.machine == HostUsage(3.0, 8, 4 * MB, 16 * MB)
    assert {name: dict(node.workers) for name, node in seen.nodes.items()} == {"x": {"a": 1}, "y": {}, "y2": {"a": 1}}
    run.measured.on_node_left("x")
    run.sample(2.0)
    assert run.telemetry.snapshot().nodes.keys() == {"y", "y2"}
    assert run.telemetry.latest().keys() == {2}
    assert run.telemetry.peak(1) == 10 * MB


def test_a_repeated_sample_does_not_count_as_a_pause() -> None:
    """A node samples less often than the driver, or its answer is late: its workers are as busy as before."""
    run = Run(WrittenRequest(cpus=1.0))
    given_advice = []
    for look in range(24):
        second = look / 2
        if look % 3 == 0:
            run.now = second
            run.measured.record("x", data(second, (1, 3.0 * second)))
        run.sample(second + 0.1)
        given_advice += run.telemetry.advice()
        if look >= 3:
            assert run.telemetry.latest()[1].cpus == pytest.approx(3.0)
            assert run.telemetry.units()["a"].cpus_now == pytest.approx(3.0)
    unit = run.telemetry.units()["a"]
    assert unit.cpus == pytest.approx(3.0)
    assert unit.cpus_least == unit.cpus_recent == pytest.approx(3.0)
    assert [it.about for it in given_advice] == ["cpus"]


def test_samples_without_a_time_are_of_now() -> None:
    accounts, timed = UsageTotals(), UsageTotals()
    for second in (0.0, 1.0, 3.0, 4.0):
        cpu_s = second**2
        here = accounts.add_samples(second, {1: (WorkerProcesses((1,), "a"), WorkerSample(cpu_s, MB, 1, 2))})
        there = timed.add_samples(second, {1: (WorkerProcesses((1,), "a"), WorkerSample(cpu_s, MB, 1, 2, at=second))})
        assert here == there


def test_a_real_worker_of_another_node_is_written_down(tmp_path: Path) -> None:
    with session("data = b'x' * (30 << 20); say()\nwhile True: burn(1)") as real:
        real.hear()
        run = Run()
        meter = NodeMeter(lambda: {1: ("a", (real.pid,))}, every_s=0.0)
        written = recorder(tmp_path / "r", run_at, telemetry=run.telemetry)
        for second in range(12):
            run.now = 20.0 * second  # so that looks are due however busy the machine is
            found = meter.sample(run.now)
            if found is not None:
                run.measured.record("far", found)
            run.sample(run.now)
            written.on_step(float(second), [], [])
        written.close(12.0)
        meter.stop()
    summary = summarize_run(RunHistory.load(tmp_path / "r"))
    assert summary.units[0].peak_bytes is not None
    assert summary.units[0].peak_bytes > 30 * MB
    (far,) = [node for node in summary.nodes if node.name == "far"]
    assert far.workers == {"a": 1}
    assert far.memory_bytes is not None
    assert far.cpus is not None
