"""Resource usage of workers and nodes: a meter on each node, and the metrics of all nodes at the driver.

`node_monitor` sends what `NodeMeter` measured, as plain data; `message_handlers` records it in `ClusterMetrics`, which
`observe` reads.
"""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.machine.gpus import CardUsage, NvmlMeter
from dovetail.machine.host_usage import HostUsage, machine_id
from dovetail.machine.meter import MAX_CPU_SHARE, Meter, WorkerSample, merge_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.machine.gpus import GpuMeter

    Processes = Callable[[], Mapping[int, tuple[str, tuple[int, ...]]]]

SAMPLE_S = 1.0


class NodeMeter:
    """Measures the workers of a node. Either call `sample` from time to time, or `start` a thread that samples, and
    `take` its result: the first query of a GPU driver may take a second."""

    def __init__(self, processes: Processes, gpu: GpuMeter | None = None, every_s: float = SAMPLE_S) -> None:
        """`processes`: worker -> name of its unit and pids of its ranks here; called in the thread, if there is one.
        `gpu`: default is NVML."""
        self.problem = ""
        """Error of the last sample; empty if it succeeded."""
        self._processes, self._every_s = processes, every_s
        self._now = time.monotonic()
        self._meter = Meter(gpu or NvmlMeter(), lambda: self._now)
        self._machine = machine_id()
        self._due = float("-inf")
        self._latest: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self, now: float) -> dict[str, Any] | None:
        """One sample as plain data; None: not due yet, or failed. Sampling takes at most 1% of a CPU."""
        if now < self._due:
            return None
        began = time.thread_time()
        try:
            return self._measure(now)
        except Exception as error:  # a failed sample must not fail the run
            self.problem = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._due = now + max(self._every_s, (time.thread_time() - began) / MAX_CPU_SHARE)

    def _measure(self, now: float) -> dict[str, Any]:
        self._now = now
        processes = dict(self._processes())
        reading = self._meter.read({worker: pids for worker, (_, pids) in processes.items()})
        self.problem = ""
        return {
            "at": now,
            "machine": self._machine,
            "workers": {
                worker: (processes[worker][0], *astuple(sample)[:-1]) for worker, sample in reading.samples.items()
            },
            "host": astuple(reading.host),
            "cards": [astuple(card) for card in reading.cards],
        }

    # --- in a thread

    def start(self) -> None:
        """May be called once."""
        assert self._thread is None, "already started"
        self._thread = threading.Thread(target=self._run, name="dovetail-meter", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, Any] | None:
        """The last sample; None if it was taken already. Thread: any one, always the same."""
        found, self._latest = self._latest, None
        return found

    def stop(self) -> None:
        """May be called twice, and without `start`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._meter.close()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            now = time.monotonic()
            found = self.sample(now)
            if found is not None:
                self._latest = found
            pause_s = max(0.001, self._due - now)


@dataclass(frozen=True, slots=True)
class _NodeMetrics:
    machine: str
    offset: float
    """Approximate offset of its clock to that of the driver; constant while the node is present, so that differences
    are exact."""
    at: float
    workers: dict[int, tuple[str, WorkerSample]]
    host: HostUsage | None
    cards: tuple[CardUsage, ...]


class ClusterMetrics:
    """Metrics of all nodes. Thread: `record` and `on_node_left` from one, everything else from any. Driver side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[tuple[str, str], _NodeMetrics] = {}

    def record(self, node: str, data: Mapping[str, Any] | None, agent: str = "") -> None:
        """Record a sample of a node's agent; None: nothing new."""
        if data is None:
            return
        before, at = self._nodes.get((node, agent)), data["at"]
        offset = before.offset if before is not None and at >= before.at else self._clock() - at
        workers = {
            worker: (unit, replace(WorkerSample(*figures), at=at + offset))
            for worker, (unit, *figures) in data["workers"].items()
        }
        cards = tuple(CardUsage(*card) for card in data["cards"])
        self._nodes[node, agent] = _NodeMetrics(data["machine"], offset, at, workers, HostUsage(*data["host"]), cards)

    def on_node_left(self, node: str) -> None:
        """Forget a node, known or not."""
        for key in [key for key in self._nodes if key[0] == node]:
            del self._nodes[key]

    def units_by_worker(self) -> dict[int, str]:
        """Worker -> its unit, for all workers of the last samples."""
        return {worker: unit for _, it in self._all() for worker, (unit, _) in it.workers.items()}

    def uses(self) -> dict[int, WorkerSample]:
        """Worker -> its usage in the last sample; summed for a gang on several nodes."""
        found: dict[int, list[WorkerSample]] = {}
        for _, node in self._all():
            for worker, (_, sample) in node.workers.items():
                found.setdefault(worker, []).append(sample)
        return {worker: it[0] if len(it) == 1 else merge_samples(it) for worker, it in found.items()}

    def units(self) -> dict[str, dict[str, int]]:
        """Node -> unit -> number of its workers on the node, with gangs that are partly there."""
        found: dict[str, dict[str, int]] = {}
        for name, node in self._all():
            counts = found.setdefault(name, {})
            for unit, _ in node.workers.values():
                counts[unit] = counts.get(unit, 0) + 1
        return found

    def hosts(self) -> dict[str, HostUsage]:
        """Node -> usage of its machine by all processes."""
        return {name: node.host for name, node in self._all() if node.host is not None}

    def machines(self) -> list[HostUsage]:
        """Usage of each machine once, also if several nodes are on it."""
        return list({node.machine or name: node.host for name, node in self._all() if node.host is not None}.values())

    def cards(self) -> dict[str, tuple[CardUsage, ...]]:
        """Node -> its GPUs; a GPU that several nodes of one machine see is listed under the first."""
        seen: set[str] = set()
        found: dict[str, tuple[CardUsage, ...]] = {}
        for name, node in self._all():
            new = (card for card in node.cards if card.uuid is None or card.uuid not in seen)
            found[name] = (*found.get(name, ()), *new)
            seen |= {card.uuid for card in node.cards if card.uuid is not None}
        return {name: cards for name, cards in found.items() if cards}

    def _all(self) -> list[tuple[str, _NodeMetrics]]:
        found = list(self._nodes.items())
        return [(name, node) for (name, _), node in sorted(found, key=lambda pair: pair[0])]
