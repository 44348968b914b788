"""Resource usage of workers and nodes: a meter on each node, and the metrics of all nodes at the driver.

What goes between the two is plain data: numbers, texts, tuples and dicts.
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
    """On a node: looks at the workers there. Either `sample` is called now and then, or `start` makes a thread that
    looks by itself, and `take` gives what it found: the first look at a GPU driver may take a second."""

    def __init__(self, processes: Processes, gpu: GpuMeter | None = None, every_s: float = SAMPLE_S) -> None:
        """`processes`: worker -> the name of its unit and the pids of its ranks here; from the thread, if there is one.
        Without `gpu` NVML is asked, where there is one."""
        self.problem = ""
        """Why the last look failed; empty if it did not."""
        self._processes, self._every_s = processes, every_s
        self._now = time.monotonic()
        self._meter = Meter(gpu or NvmlMeter(), lambda: self._now)
        self._machine = machine_id()
        self._due = float("-inf")
        self._latest: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self, now: float) -> dict[str, Any] | None:
        """One look, as plain data; None: it is not due yet, or failed. All looks cost a hundredth of a core at most."""
        if now < self._due:
            return None
        began = time.thread_time()
        try:
            return self._look(now)
        except Exception as error:  # a run must not suffer from it
            self.problem = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._due = now + max(self._every_s, (time.thread_time() - began) / MAX_CPU_SHARE)

    def _look(self, now: float) -> dict[str, Any]:
        self._now = now
        there = dict(self._processes())
        reading = self._meter.read({worker: pids for worker, (_, pids) in there.items()})
        self.problem = ""
        return {
            "at": now,
            "machine": self._machine,
            "workers": {worker: (there[worker][0], *astuple(it)[:-1]) for worker, it in reading.samples.items()},
            "host": astuple(reading.host),
            "cards": [astuple(card) for card in reading.cards],
        }

    # ---- the same in a thread

    def start(self) -> None:
        """May be called once."""
        assert self._thread is None, "it runs already"
        self._thread = threading.Thread(target=self._run, name="dovetail-meter", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, Any] | None:
        """What the last look found; None: that was taken already. From any thread, but always the same."""
        found, self._latest = self._latest, None
        return found

    def stop(self) -> None:
        """May be called twice, and without a start."""
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
    """What its clock is behind ours, about: the same as long as the node is there, so that differences are exact."""
    at: float
    workers: dict[int, tuple[str, WorkerSample]]
    host: HostUsage | None
    cards: tuple[CardUsage, ...]


class ClusterMetrics:
    """At the driver: what is known of all nodes. `took` and `left` come from one thread, everything else from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[tuple[str, str], _NodeMetrics] = {}

    def record(self, node: str, data: Mapping[str, Any] | None, agent: str = "") -> None:
        """What the meter of a node's agent found; None: nothing new."""
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
        """Forgets it; one that is not known is no trouble."""
        for key in [key for key in self._nodes if key[0] == node]:
            del self._nodes[key]

    def units_by_worker(self) -> dict[int, str]:
        """Worker -> its unit, of all that were seen at the last look of their node."""
        return {worker: unit for _, it in self._all() for worker, (unit, _) in it.workers.items()}

    def uses(self) -> dict[int, WorkerSample]:
        """Worker -> what it used at the last look; of a gang on several nodes, all of it together."""
        found: dict[int, list[WorkerSample]] = {}
        for _, node in self._all():
            for worker, (_, sample) in node.workers.items():
                found.setdefault(worker, []).append(sample)
        return {worker: it[0] if len(it) == 1 else merge_samples(it) for worker, it in found.items()}

    def units(self) -> dict[str, dict[str, int]]:
        """Node -> unit -> how many of its workers are there, all or in part."""
        found: dict[str, dict[str, int]] = {}
        for name, node in self._all():
            counts = found.setdefault(name, {})
            for unit, _ in node.workers.values():
                counts[unit] = counts.get(unit, 0) + 1
        return found

    def hosts(self) -> dict[str, HostUsage]:
        """Node -> the machine it is on, with the work of others."""
        return {name: node.host for name, node in self._all() if node.host is not None}

    def machines(self) -> list[HostUsage]:
        """Every machine once, also if several nodes are on it."""
        return list({node.machine or name: node.host for name, node in self._all() if node.host is not None}.values())

    def cards(self) -> dict[str, tuple[CardUsage, ...]]:
        """Node -> its cards; those that several nodes see, because they are on one machine, are the first one's."""
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
