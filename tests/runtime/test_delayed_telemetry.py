"""Telemetry that starts with a delay, on this machine or on the nodes of the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.metrics import ClusterMetrics, NodeMeter
from dovetail.observe.history import RunHistory
from dovetail.resources.cluster import Cluster
from dovetail.runtime import delayed_telemetry
from dovetail.runtime.delayed_telemetry import DelayedTelemetry
from machine.sessions import session
from observe.made import recorder
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MB = 1 << 20


class Engine:
    """Has a worker 1 of the unit a."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_ready(self, worker: int) -> bool:
        return worker == 1

    def processes(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        return {1: ("a", (self.pid,))}


class Far(Engine):
    """Whose worker is measured elsewhere."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.measured = ClusterMetrics()

    def processes(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        raise AssertionError("not sampled on this machine")


def measured_by(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, also: Any = lambda: None) -> RunHistory:
    """A run that lasts until the unit has advice: it uses more memory than it asked for."""
    monkeypatch.setattr(delayed_telemetry, "START_DELAY_S", 0.0)
    shapes: Any = {"a": SimpleNamespace(cpu_milli=100_000, memory_bytes=MB, ranks=1)}
    written = recorder(path)
    one = DelayedTelemetry(engine, shapes, Cluster.of("1x(4cpu)"), written)
    one.start()
    now = [0.0]

    def has_advice() -> bool:
        also()
        now[0] += 1.0
        written.request_view()
        written.on_step(now[0], [], [])
        return bool(RunHistory.load(path).notes("advice"))

    until(has_advice, "advice is written")
    one.stop()
    assert one.peaks()["a"] > 30 * MB
    written.close(now[0])
    return RunHistory.load(path)


def test_workers_of_this_machine_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session("data = b'x' * (30 << 20); say(); wait()") as worker:
        worker.hear()
        history = measured_by(Engine(worker.pid), tmp_path / "r", monkeypatch)
    assert history.unit_uses.keys() == {"a"}
    assert history.node_uses == {}


def test_workers_on_other_nodes_are_measured_by_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session("data = b'x' * (30 << 20); say(); wait()") as worker:
        worker.hear()
        engine = Far(worker.pid)
        meter = NodeMeter(lambda: {1: ("a", (worker.pid,))}, every_s=0.05)
        meter.start()

        def pass_on() -> None:
            found = meter.take()
            if found is not None:
                engine.measured.record("far", found)

        history = measured_by(engine, tmp_path / "r", monkeypatch, pass_on)
        meter.stop()
    assert history.unit_uses.keys() == {"a"}
    assert history.node_uses.keys() == {"far"}
    assert history.node_uses["far"][-1]["workers"] == {"a": 1}
