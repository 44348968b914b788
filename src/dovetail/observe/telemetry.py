"""Telemetry of a run: a sampling thread, and the resource use of workers, units and nodes over time."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from dovetail.machine.host_usage import HostUsage, sum_hosts
from dovetail.machine.meter import MAX_CPU_SHARE, Meter, WorkerSample
from dovetail.observe.resource_advice import Advice, Adviser, WrittenRequest, overuse_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.machine.gpus import CardUsage, GpuMeter

__all__ = ["UsageTotals", "WorkerProcesses", "WorkerSample", "UnitUse", "WorkerUse"]

RECENT_SAMPLE_COUNT = 5
RECENT_S = 10.0
MIN_PEAKS_KEPT = 10_000
"""Minimum number of exited workers to remember."""


@dataclass(frozen=True, slots=True)
class WorkerProcesses:
    """Location of a worker."""

    pids: tuple[int, ...]
    """Pids of its ranks on this machine; each leads its own session."""
    unit: str
    ready: bool = True
    """Setup is not compared with the request: loading a model says nothing about the needs of its stage."""


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """One worker with its child processes and all ranks. Fields ending in `_total` only grow."""

    worker: int
    unit: str
    cpus: float | None
    """CPUs used since the previous sample; None: no previous sample."""
    cpu_s_total: float
    uss_bytes: int
    peak_bytes: int
    """Peak USS."""
    read_bytes_total: int
    write_bytes_total: int
    gpu_bytes: int | None
    """GPU memory on all cards of the worker; None: no card, or unknown."""
    processes: int


@dataclass(frozen=True, slots=True)
class UnitUse:
    """All workers of a unit, including exited ones."""

    unit: str
    workers: int
    """Number of current workers."""
    cpus_now: float | None
    """CPUs used by all workers since the previous sample; None: no previous sample."""
    cpus: float | None
    """Average CPUs of one ready worker over the run; None: none was ready."""
    cpus_recent: float | None
    """The same over the last samples; None: too few samples."""
    cpus_least: float | None
    """The minimum over these samples."""
    cpu_s_total: float
    uss_bytes: int
    """Sum over all current workers."""
    peak_bytes: int
    """Maximum over the workers."""
    read_bytes_total: int
    write_bytes_total: int
    gpu_peak_bytes: int | None
    """Maximum over the workers."""


@dataclass(slots=True)
class _UnitTotals:
    cpu_s: float = 0.0
    read: int = 0
    written: int = 0
    peak: int = 0
    gpu_peak: int | None = None
    ready_s: float = 0.0
    ready_cpu_s: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_SAMPLE_COUNT))
    """(seconds, CPUs per ready worker)."""


@dataclass(slots=True)
class _Interval:
    seconds: float
    """Since the last sample."""
    workers: int = 0
    uss: int = 0
    cpus: float = 0.0
    ready: int = 0
    ready_s: float = 0.0
    ready_cpu_s: float = 0.0
    longest_s: float = 0.0
    """Between two samples of a ready worker."""


@dataclass(frozen=True, slots=True)
class _LastSample:
    """A worker at the last sample."""

    process: WorkerProcesses
    sample: WorkerSample
    at: float
    cpus: float | None


class UsageTotals:
    """Computes the resource use of workers and units from samples."""

    def __init__(self) -> None:
        self._units: dict[str, _UnitTotals] = {}
        self._before: dict[int, _LastSample] = {}
        self._at: float | None = None
        self._peaks: dict[int, int] = {}

    def peak(self, worker: int) -> int:
        """Peak USS of a worker, also after its exit; 0: not sampled."""
        return self._peaks.get(worker, 0)

    def add_samples(
        self, now: float, seen: Mapping[int, tuple[WorkerProcesses, WorkerSample]]
    ) -> tuple[dict[int, WorkerUse], dict[str, UnitUse]]:
        seconds = 0.0 if self._at is None else now - self._at
        intervals: dict[str, _Interval] = {}
        uses: dict[int, WorkerUse] = {}
        after: dict[int, _LastSample] = {}
        for worker, (process, sample) in seen.items():
            interval = intervals.setdefault(process.unit, _Interval(seconds))
            after[worker], uses[worker] = self._worker(worker, process, sample, now, interval)
        self._before, self._at = after, now
        for name, unit in self._units.items():
            _add_interval(unit, intervals.setdefault(name, _Interval(seconds)))
        if len(self._peaks) > 2 * MIN_PEAKS_KEPT + len(seen):
            gone = [worker for worker in self._peaks if worker not in seen]
            for worker in gone[:-MIN_PEAKS_KEPT]:
                del self._peaks[worker]
        return uses, {name: _unit_use(name, unit, intervals[name]) for name, unit in self._units.items()}

    def _worker(
        self, number: int, process: WorkerProcesses, sample: WorkerSample, now: float, interval: _Interval
    ) -> tuple[_LastSample, WorkerUse]:
        unit = self._units.setdefault(process.unit, _UnitTotals())
        old = self._before.get(number)
        at = now if sample.at is None else sample.at
        seconds = at - old.at if old else interval.seconds
        before = old.sample if old else WorkerSample(0.0, 0, 0, 0)
        cpu_s = max(0.0, sample.cpu_s - before.cpu_s)
        # a repeated sample carries no new information: the last usage applies until the next one
        cpus = cpu_s / seconds if seconds > 0 else old.cpus if old else None
        _add_sample(unit, before, sample, cpu_s)
        peak = self._peaks[number] = max(self._peaks.get(number, 0), sample.uss_bytes)
        unit.peak = max(unit.peak, peak)
        interval.workers += 1
        interval.uss += sample.uss_bytes
        interval.cpus += cpus or 0.0
        if old and old.process.ready and process.ready:
            interval.ready += 1
            interval.ready_s += max(0.0, seconds)
            interval.ready_cpu_s += cpu_s
            interval.longest_s = max(interval.longest_s, seconds)
        shown = cpus if old else None
        return _LastSample(process, sample, at, shown), _worker_use(number, process.unit, sample, peak, shown)


def _worker_use(number: int, unit: str, sample: WorkerSample, peak: int, cpus: float | None) -> WorkerUse:
    return WorkerUse(
        worker=number,
        unit=unit,
        cpus=cpus,
        cpu_s_total=sample.cpu_s,
        uss_bytes=sample.uss_bytes,
        peak_bytes=peak,
        read_bytes_total=sample.read_bytes,
        write_bytes_total=sample.write_bytes,
        gpu_bytes=sample.gpu_bytes,
        processes=sample.processes,
    )


def _add_sample(unit: _UnitTotals, before: WorkerSample, now: WorkerSample, cpu_s: float) -> None:
    unit.cpu_s += cpu_s
    unit.read += max(0, now.read_bytes - before.read_bytes)
    unit.written += max(0, now.write_bytes - before.write_bytes)
    if now.gpu_bytes is not None:
        unit.gpu_peak = max(unit.gpu_peak or 0, now.gpu_bytes)


def _add_interval(unit: _UnitTotals, interval: _Interval) -> None:
    unit.ready_s += interval.ready_s
    unit.ready_cpu_s += interval.ready_cpu_s
    if interval.ready_s > 0:
        unit.recent.append((interval.longest_s, interval.ready_cpu_s / interval.ready_s))
    elif interval.seconds > 0 and not interval.ready:
        unit.recent.clear()


def _unit_use(name: str, unit: _UnitTotals, interval: _Interval) -> UnitUse:
    seconds = sum(seconds for seconds, _ in unit.recent)
    enough = len(unit.recent) == RECENT_SAMPLE_COUNT or seconds >= RECENT_S
    return UnitUse(
        unit=name,
        workers=interval.workers,
        cpus_now=interval.cpus if interval.seconds > 0 else None,
        cpus=unit.ready_cpu_s / unit.ready_s if unit.ready_s else None,
        cpus_recent=sum(each * cpus for each, cpus in unit.recent) / seconds if enough else None,
        cpus_least=min(cpus for _, cpus in unit.recent) if enough else None,
        cpu_s_total=unit.cpu_s,
        uss_bytes=interval.uss,
        peak_bytes=unit.peak,
        read_bytes_total=unit.read,
        write_bytes_total=unit.written,
        gpu_peak_bytes=unit.gpu_peak,
    )


__all__ = [
    "MAX_CPU_SHARE",
    "Telemetry",
    "UsageSnapshot",
    "SampleSource",
    "WorkerProcesses",
    "WrittenRequest",
    "WorkerUse",
    "UnitUse",
    "overuse_texts",
]

MAX_ADVICE_KEPT = 100


@dataclass(frozen=True, slots=True)
class UsageSnapshot:
    """Immutable result of one sample."""

    workers: Mapping[int, WorkerUse] = field(default_factory=lambda: MappingProxyType({}))
    units: Mapping[str, UnitUse] = field(default_factory=lambda: MappingProxyType({}))
    machine: HostUsage | None = None
    """Sum over all machines."""
    gpus: tuple[CardUsage, ...] = ()
    """GPUs of this machine; those of other nodes are in `nodes`."""
    nodes: Mapping[str, NodeTelemetry] = field(default_factory=lambda: MappingProxyType({}))
    """Telemetry by node, for a run on a cluster; otherwise empty."""


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """One node of a cluster."""

    host: HostUsage | None
    gpus: tuple[CardUsage, ...]
    workers: Mapping[str, int]
    """Unit -> number of its workers with a rank on this node."""


class SampleSource(Protocol):
    """Source of samples taken on the nodes of a cluster. Thread: the sampling thread."""

    def uses(self) -> Mapping[int, WorkerSample]:
        """Worker -> its last sample, with its time."""
        ...

    def units(self) -> Mapping[str, Mapping[str, int]]:
        """Node -> unit -> number of workers; every known node."""
        ...

    def hosts(self) -> Mapping[str, HostUsage]:
        """Node -> its host."""
        ...

    def machines(self) -> Sequence[HostUsage]:
        """Every host once, even with several nodes on it."""
        ...

    def cards(self) -> Mapping[str, tuple[CardUsage, ...]]:
        """Node -> its cards."""
        ...


class Telemetry:
    """Sampling thread and its results. Thread: any; results are those of the last sample.

    `workers` returns the current workers and is called in the sampling thread. `asked` returns the request of a worker,
    if known. `source` supplies samples of workers on other machines.
    """

    def __init__(
        self,
        workers: Callable[[], Mapping[int, WorkerProcesses]],
        asked: Callable[[int], WrittenRequest | None] = lambda _: None,
        every_s: float = 1.0,
        gpu: GpuMeter | None = None,
        *,
        source: SampleSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s = every_s
        self.problem = ""
        """Error of the last sample; empty if it succeeded."""
        self._workers, self._requested, self._clock = workers, asked, clock
        self._source, self._meter = source, Meter(gpu, clock)
        self._totals, self._adviser = UsageTotals(), Adviser()
        self._requested_by_unit: dict[str, WrittenRequest] = {}
        self._snapshot = UsageSnapshot()
        self._advice: deque[Advice] = deque(maxlen=MAX_ADVICE_KEPT)
        self._sample_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- results

    def snapshot(self) -> UsageSnapshot:
        return self._snapshot

    def latest(self) -> Mapping[int, WorkerUse]:
        """The workers at the last sample."""
        return self._snapshot.workers

    def units(self) -> Mapping[str, UnitUse]:
        """All units that ever had a worker."""
        return self._snapshot.units

    def machine(self) -> HostUsage | None:
        return self._snapshot.machine

    def gpus(self) -> Sequence[CardUsage]:
        return self._snapshot.gpus

    def peak(self, worker: int) -> int:
        """Peak USS of a worker, also after its exit; 0: not sampled."""
        return self._totals.peak(worker)

    def advice(self) -> list[Advice]:
        """Advice since the last call: workers that use more than requested."""
        found: list[Advice] = []
        while self._advice:
            found.append(self._advice.popleft())
        return found

    # --- sampling

    def start(self) -> None:
        """Start the thread. Call once."""
        assert self._thread is None, "already started"
        self._thread = threading.Thread(target=self._run, name="dovetail-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and join it. Idempotent; may be called without a start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._meter.close()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.sample()
            pause_s = max(self.every_s, (time.thread_time() - began) / MAX_CPU_SHARE)

    def sample(self) -> None:
        """Take a sample; called by the thread. A failing sample is dropped: it must not affect the run."""
        with self._sample_lock:
            try:
                self._snapshot = self._take_snapshot()
                self.problem = ""
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

    def _take_snapshot(self) -> UsageSnapshot:
        workers = dict(self._workers())
        if self._source is not None:
            of_workers, of_units = self._update_totals(workers, self._source.uses())
            nodes, machine = node_telemetry(self._source), sum_hosts(self._source.machines())
            return UsageSnapshot(of_workers, of_units, machine, nodes=MappingProxyType(nodes))
        reading = self._meter.read({worker: process.pids for worker, process in workers.items()})
        of_workers, of_units = self._update_totals(workers, reading.samples)
        return UsageSnapshot(of_workers, of_units, reading.host, reading.cards)

    def _update_totals(
        self, workers: Mapping[int, WorkerProcesses], samples: Mapping[int, WorkerSample]
    ) -> tuple[Mapping[int, WorkerUse], Mapping[str, UnitUse]]:
        seen = {worker: (process, samples[worker]) for worker, process in workers.items() if worker in samples}
        of_workers, of_units = self._totals.add_samples(self._clock(), seen)
        self._advise(workers, of_units)
        return MappingProxyType(of_workers), MappingProxyType(of_units)

    def _advise(self, workers: Mapping[int, WorkerProcesses], units: Mapping[str, UnitUse]) -> None:
        for worker, process in workers.items():
            if asked := self._requested(worker):
                self._requested_by_unit[process.unit] = asked
        for name, use in units.items():
            if name in self._requested_by_unit:
                self._advice.extend(self._adviser.new_advice(use, self._requested_by_unit[name]))


def node_telemetry(source: SampleSource) -> dict[str, NodeTelemetry]:
    """Sorted by name."""
    units, hosts, cards = source.units(), source.hosts(), source.cards()
    names = sorted({*units, *hosts, *cards})
    return {name: NodeTelemetry(hosts.get(name), cards.get(name, ()), units.get(name, {})) for name in names}
