"""Telemetry of worker processes, started half a second after the run so that short runs do not pay for it."""

from __future__ import annotations

from threading import Lock, Timer
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.engines.ray.metrics import ClusterMetrics
    from dovetail.observe.recorder import Recorder
    from dovetail.observe.telemetry import Telemetry, UnitUse, WorkerProcesses, WrittenRequest
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.shape import Shape

START_DELAY_S = 0.5


class MeasurableEngine(Protocol):
    """An engine. With an attribute `measured`, workers are measured on their nodes, otherwise on this machine."""

    def is_ready(self, worker: int) -> bool: ...

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> its unit and its pids on this machine."""
        ...


class DelayedTelemetry:
    """Telemetry that starts after `START_DELAY_S`."""

    def __init__(
        self, engine: MeasurableEngine, shapes: Mapping[str, Shape], cluster: Cluster, recorder: Recorder
    ) -> None:
        """`shapes`: unit -> what one of its workers requests."""
        self._engine = engine
        self._measured: ClusterMetrics | None = getattr(engine, "measured", None)
        self._units: Mapping[int, str] = {}
        self._shapes = shapes
        self._real_cards = any(card.uuid for node in cluster.nodes for card in node.gpus)
        self._recorder = recorder
        self._telemetry: Telemetry | None = None
        self._is_stopped = False
        self._lock = Lock()
        self._timer = Timer(START_DELAY_S, self._start_telemetry)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_stopped = True
        if self._telemetry is not None:
            self._telemetry.stop()

    def peaks(self) -> dict[str, int]:
        """Unit -> peak memory of one of its workers in bytes."""
        telemetry = self._telemetry
        return {} if telemetry is None else {name: use.peak_bytes for name, use in telemetry.units().items()}

    def units(self) -> dict[str, UnitUse]:
        """Unit -> what its workers use; empty if nothing was measured yet."""
        return {} if self._telemetry is None else dict(self._telemetry.units())

    def memory_of(self, worker: int) -> int | None:
        """Host memory that a worker uses now, in bytes; None: not measured yet."""
        use = None if self._telemetry is None else self._telemetry.latest().get(worker)
        return None if use is None else use.uss_bytes

    def _start_telemetry(self) -> None:
        telemetry = self._create_telemetry()
        with self._lock:
            if self._is_stopped:
                return
            self._telemetry = telemetry
            telemetry.start()
        self._recorder.watch(telemetry)

    def _create_telemetry(self) -> Telemetry:
        from dovetail.observe.telemetry import Telemetry

        if self._measured is not None:
            return Telemetry(self._process_lister(), self._requested, source=self._measured)
        if not self._real_cards:
            return Telemetry(self._process_lister(), self._requested)
        from dovetail.machine.gpus import NvmlMeter

        return Telemetry(self._process_lister(), self._requested, gpu=NvmlMeter())

    def _process_lister(self) -> Callable[[], dict[int, WorkerProcesses]]:
        """Lists the current workers; called for every sample, before `_requested`."""
        from dovetail.observe.telemetry import WorkerProcesses

        engine, measured = self._engine, self._measured

        def here() -> dict[int, WorkerProcesses]:
            found = engine.processes()
            self._units = {worker: unit for worker, (unit, _) in found.items()}
            return {
                worker: WorkerProcesses(pids, unit, engine.is_ready(worker)) for worker, (unit, pids) in found.items()
            }

        def elsewhere() -> dict[int, WorkerProcesses]:
            assert measured is not None
            self._units = measured.units_by_worker()
            return {worker: WorkerProcesses((), unit, engine.is_ready(worker)) for worker, unit in self._units.items()}

        return here if measured is None else elsewhere

    def _requested(self, worker: int) -> WrittenRequest | None:
        from dovetail.observe.telemetry import WrittenRequest

        shape = self._shapes.get(self._units.get(worker, ""))
        return (
            None if shape is None else WrittenRequest(shape.cpu_milli / 1000, shape.memory_bytes or None, shape.ranks)
        )
