"""Who measures what workers use? A thread that comes late: a run that is over in a moment does not pay for it."""

from __future__ import annotations

from threading import Lock, Timer
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.engines.ray.measured import Measured
    from dovetail.observe.recorder import Recorder
    from dovetail.observe.telemetry import Asked, Process, Telemetry
    from dovetail.resources.cluster import Cluster
    from dovetail.streaming.work import Work

AFTER_S = 0.5


class Workers(Protocol):
    """An engine. If it has an attribute `measured`, its workers are measured where they are, and else here."""

    def is_ready(self, worker: int) -> bool: ...

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> its unit, and its pids on this machine."""
        ...


class Measuring:
    """Telemetry from half a second after the start on."""

    def __init__(self, workers: Workers, works: tuple[Work, ...], cluster: Cluster, recorder: Recorder) -> None:
        self._workers = workers
        self._measured: Measured | None = getattr(workers, "measured", None)
        self._units: Mapping[int, str] = {}
        self._shapes = {work.name: work.shape for work in works}
        self._real_cards = any(card.uuid for node in cluster.nodes for card in node.gpus)
        self._recorder = recorder
        self._telemetry: Telemetry | None = None
        self._over = False
        self._lock = Lock()
        self._timer = Timer(AFTER_S, self._begin)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._telemetry is not None:
            self._telemetry.stop()

    def peaks(self) -> dict[str, int]:
        """Unit -> the most memory that one of its workers was seen to use."""
        telemetry = self._telemetry
        return {} if telemetry is None else {name: use.peak_bytes for name, use in telemetry.units().items()}

    def _begin(self) -> None:
        telemetry = self._made()
        with self._lock:
            if self._over:
                return
            self._telemetry = telemetry
            telemetry.start()
        self._recorder.watch(telemetry)

    def _made(self) -> Telemetry:
        from dovetail.observe.telemetry import Telemetry

        if self._measured is not None:
            return Telemetry(self._there(), self._asked, source=self._measured)
        if not self._real_cards:
            return Telemetry(self._there(), self._asked)
        from dovetail.machine.gpu_use import NvmlMeter

        return Telemetry(self._there(), self._asked, gpu=NvmlMeter())

    def _there(self) -> Callable[[], dict[int, Process]]:
        """Who is there now; it is asked at every look, before what they asked for."""
        from dovetail.observe.telemetry import Process

        workers, measured = self._workers, self._measured

        def here() -> dict[int, Process]:
            found = workers.processes()
            self._units = {worker: unit for worker, (unit, _) in found.items()}
            return {worker: Process(pids, unit, workers.is_ready(worker)) for worker, (unit, pids) in found.items()}

        def elsewhere() -> dict[int, Process]:
            assert measured is not None
            self._units = measured.who()
            return {worker: Process((), unit, workers.is_ready(worker)) for worker, unit in self._units.items()}

        return here if measured is None else elsewhere

    def _asked(self, worker: int) -> Asked | None:
        from dovetail.observe.telemetry import Asked

        shape = self._shapes.get(self._units.get(worker, ""))
        return None if shape is None else Asked(shape.cpu_milli / 1000, shape.memory_bytes or None, shape.ranks)
