"""What do the workers of a running run use? A thread that looks once per second, and costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from dovetail.machine.host_use import HostUse, all_hosts
from dovetail.machine.meter import MOST_SHARE, Meter
from dovetail.observe.advice import Advice, Adviser, Asked, overuse
from dovetail.observe.use import Accounts, Process, UnitUse, WorkerUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.machine.gpu_use import CardUse, GpuMeter
    from dovetail.observe.use import Sample

__all__ = ["MOST_SHARE", "Telemetry", "Snapshot", "Source", "Process", "Asked", "WorkerUse", "UnitUse", "overuse"]

ADVICE_KEPT = 100


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look gave. Nothing of it ever changes."""

    workers: Mapping[int, WorkerUse] = field(default_factory=lambda: MappingProxyType({}))
    units: Mapping[str, UnitUse] = field(default_factory=lambda: MappingProxyType({}))
    machine: HostUse | None = None
    """All machines together."""
    gpus: tuple[CardUse, ...] = ()
    """Of this machine; those of other nodes are in `nodes`."""
    nodes: Mapping[str, NodeUse] = field(default_factory=lambda: MappingProxyType({}))
    """Of a run on a cluster, each by itself; else empty."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node of a cluster."""

    host: HostUse | None
    gpus: tuple[CardUse, ...]
    workers: Mapping[str, int]
    """Unit -> how many of its workers are there, all or in part."""


class Source(Protocol):
    """Where samples come from that others took, on the nodes of a cluster. All of it is asked from the thread."""

    def uses(self) -> Mapping[int, Sample]:
        """Worker -> its last sample, with the time at which it was taken."""
        ...

    def units(self) -> Mapping[str, Mapping[str, int]]:
        """Node -> unit -> how many of its workers are there; every node of which something is known."""
        ...

    def hosts(self) -> Mapping[str, HostUse]:
        """Node -> the machine under it."""
        ...

    def machines(self) -> Sequence[HostUse]:
        """Every machine once, also if several nodes are on it."""
        ...

    def cards(self) -> Mapping[str, tuple[CardUse, ...]]:
        """Node -> its cards."""
        ...


class Telemetry:
    """Everything may be asked at any time from any thread; answers are as old as the last look.

    `workers`: who is there now, called from the thread. `asked`: what a worker asked for, if that is known. `source`:
    where samples come from, if workers are not on this machine.
    """

    def __init__(
        self,
        workers: Callable[[], Mapping[int, Process]],
        asked: Callable[[int], Asked | None] = lambda _: None,
        every_s: float = 1.0,
        gpu: GpuMeter | None = None,
        *,
        source: Source | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s = every_s
        self.problem = ""
        """Why the last look failed; empty if it did not."""
        self._workers, self._asked, self._clock = workers, asked, clock
        self._source, self._meter = source, Meter(gpu, clock)
        self._accounts, self._adviser = Accounts(), Adviser()
        self._asked_of: dict[str, Asked] = {}
        self._snapshot = Snapshot()
        self._advice: deque[Advice] = deque(maxlen=ADVICE_KEPT)
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- what is known

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def latest(self) -> Mapping[int, WorkerUse]:
        """The workers that were there at the last look."""
        return self._snapshot.workers

    def units(self) -> Mapping[str, UnitUse]:
        """All units that ever had a worker."""
        return self._snapshot.units

    def machine(self) -> HostUse | None:
        return self._snapshot.machine

    def gpus(self) -> Sequence[CardUse]:
        return self._snapshot.gpus

    def peak(self, worker: int) -> int:
        """The largest USS that was seen of a worker, also of one that is gone; 0: it never was."""
        return self._accounts.peak(worker)

    def advice(self) -> list[Advice]:
        """What is new since this was asked last: workers that use more than they asked for."""
        found: list[Advice] = []
        while self._advice:
            found.append(self._advice.popleft())
        return found

    # ---- looking

    def start(self) -> None:
        """May be called once."""
        assert self._thread is None, "it runs already"
        self._thread = threading.Thread(target=self._run, name="dovetail-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for that. May be called twice, and without a start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._meter.close()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.look()
            pause_s = max(self.every_s, (time.thread_time() - began) / MOST_SHARE)

    def look(self) -> None:
        """Now; the thread calls it again and again. A look that fails is left out: a run must not suffer from it."""
        with self._looking:
            try:
                self._snapshot = self._taken()
                self.problem = ""
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

    def _taken(self) -> Snapshot:
        workers = dict(self._workers())
        if self._source is not None:
            of_workers, of_units = self._counted(workers, self._source.uses())
            nodes, machine = nodes_of(self._source), all_hosts(self._source.machines())
            return Snapshot(of_workers, of_units, machine, nodes=MappingProxyType(nodes))
        reading = self._meter.read({worker: process.pids for worker, process in workers.items()})
        of_workers, of_units = self._counted(workers, reading.samples)
        return Snapshot(of_workers, of_units, reading.host, reading.cards)

    def _counted(
        self, workers: Mapping[int, Process], samples: Mapping[int, Sample]
    ) -> tuple[Mapping[int, WorkerUse], Mapping[str, UnitUse]]:
        seen = {worker: (process, samples[worker]) for worker, process in workers.items() if worker in samples}
        of_workers, of_units = self._accounts.take(self._clock(), seen)
        self._advise(workers, of_units)
        return MappingProxyType(of_workers), MappingProxyType(of_units)

    def _advise(self, workers: Mapping[int, Process], units: Mapping[str, UnitUse]) -> None:
        for worker, process in workers.items():
            if asked := self._asked(worker):
                self._asked_of[process.unit] = asked
        for name, use in units.items():
            if name in self._asked_of:
                self._advice.extend(self._adviser.news(use, self._asked_of[name]))


def nodes_of(source: Source) -> dict[str, NodeUse]:
    """By name, in order."""
    units, hosts, cards = source.units(), source.hosts(), source.cards()
    names = sorted({*units, *hosts, *cards})
    return {name: NodeUse(hosts.get(name), cards.get(name, ()), units.get(name, {})) for name in names}
