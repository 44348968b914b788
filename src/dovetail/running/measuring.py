"""Who measures what workers use? A thread that comes late: a run that is over in a moment does not pay for it."""

from __future__ import annotations

from threading import Lock, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.engines.local.engine import LocalEngine
    from dovetail.observe.recorder import Recorder
    from dovetail.observe.telemetry import Telemetry
    from dovetail.resources.cluster import Cluster
    from dovetail.streaming.work import Work

AFTER_S = 0.5


class Measuring:
    """Telemetry from half a second after the start on."""

    def __init__(self, workers: LocalEngine, works: tuple[Work, ...], cluster: Cluster, recorder: Recorder) -> None:
        self._workers = workers
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
        from dovetail.observe.telemetry import Asked, Process, Telemetry

        def there() -> dict[int, Process]:
            found = self._workers.processes()
            return {
                worker: Process(pids, unit, self._workers.is_ready(worker)) for worker, (unit, pids) in found.items()
            }

        def asked(worker: int) -> Asked | None:
            found = self._workers.processes().get(worker)
            shape = self._shapes.get(found[0]) if found is not None else None
            return None if shape is None else Asked(shape.cpu_milli / 1000, shape.memory_bytes or None, shape.ranks)

        if not self._real_cards:
            return Telemetry(there, asked)
        from dovetail.machine.gpu_use import NvmlMeter

        return Telemetry(there, asked, gpu=NvmlMeter())
