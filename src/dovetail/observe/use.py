"""What do workers and units use, over their lives? Sums of samples; no clock and no processes of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.machine.meter import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Accounts", "Process", "Sample", "UnitUse", "WorkerUse"]

RECENT_SAMPLES = 5
RECENT_S = 10.0
PEAKS_KEPT = 10_000
"""At least, of workers that are gone."""


@dataclass(frozen=True, slots=True)
class Process:
    """Where a worker is."""

    pids: tuple[int, ...]
    """Of its ranks on this machine; each leads a session of its own."""
    unit: str
    ready: bool = True
    """While it is set up it may use what it likes: importing a model says nothing about what its stage needs."""


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """One worker, its children and all its ranks included. Everything that ends in `_total` only grows."""

    worker: int
    unit: str
    cpus: float | None
    """CPUs it used since the sample before; None: there was none."""
    cpu_s_total: float
    uss_bytes: int
    peak_bytes: int
    """The largest USS that was seen."""
    read_bytes_total: int
    write_bytes_total: int
    sent_bytes_total: int | None
    """Over TCP; None: not known."""
    received_bytes_total: int | None
    gpu_bytes: int | None
    """On all its cards; None: on none, or not known."""
    processes: int


@dataclass(frozen=True, slots=True)
class UnitUse:
    """All workers of a unit, those that are gone included."""

    unit: str
    workers: int
    """That are there now."""
    cpus_now: float | None
    """CPUs that they used together since the sample before; None: there was none."""
    cpus: float | None
    """CPUs that one ready worker used, on average over the run; None: there was none."""
    cpus_recent: float | None
    """The same over the last few samples; None: too few of them."""
    cpus_least: float | None
    """And in the sample of them in which it was least."""
    cpu_s_total: float
    uss_bytes: int
    """Of all workers together, now."""
    peak_bytes: int
    """Of that worker that had most."""
    read_bytes_total: int
    write_bytes_total: int
    sent_bytes_total: int | None
    received_bytes_total: int | None
    gpu_peak_bytes: int | None
    """Of that worker that had most."""


@dataclass(slots=True)
class _Unit:
    cpu_s: float = 0.0
    read: int = 0
    written: int = 0
    sent: int | None = None
    received: int | None = None
    peak: int = 0
    gpu_peak: int | None = None
    ready_s: float = 0.0
    ready_cpu_s: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_SAMPLES))
    """(seconds, CPUs per ready worker)."""


@dataclass(slots=True)
class _Interval:
    seconds: float
    """Since the last look."""
    workers: int = 0
    uss: int = 0
    cpus: float = 0.0
    ready: int = 0
    ready_s: float = 0.0
    ready_cpu_s: float = 0.0
    longest_s: float = 0.0
    """Between two samples of a ready worker."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A worker at the last look."""

    process: Process
    sample: Sample
    at: float
    cpus: float | None


class Accounts:
    """Takes samples of workers; says what each uses, and each unit."""

    def __init__(self) -> None:
        self._units: dict[str, _Unit] = {}
        self._before: dict[int, _Seen] = {}
        self._at: float | None = None
        self._peaks: dict[int, int] = {}

    def peak(self, worker: int) -> int:
        """The largest USS that was seen of a worker, also of one that is gone; 0: it never was."""
        return self._peaks.get(worker, 0)

    def take(
        self, now: float, seen: Mapping[int, tuple[Process, Sample]]
    ) -> tuple[dict[int, WorkerUse], dict[str, UnitUse]]:
        seconds = 0.0 if self._at is None else now - self._at
        intervals: dict[str, _Interval] = {}
        uses: dict[int, WorkerUse] = {}
        after: dict[int, _Seen] = {}
        for worker, (process, sample) in seen.items():
            interval = intervals.setdefault(process.unit, _Interval(seconds))
            after[worker], uses[worker] = self._worker(worker, process, sample, now, interval)
        self._before, self._at = after, now
        for name, unit in self._units.items():
            _remember(unit, intervals.setdefault(name, _Interval(seconds)))
        if len(self._peaks) > 2 * PEAKS_KEPT + len(seen):
            gone = [worker for worker in self._peaks if worker not in seen]
            for worker in gone[:-PEAKS_KEPT]:
                del self._peaks[worker]
        return uses, {name: _shown(name, unit, intervals[name]) for name, unit in self._units.items()}

    def _worker(
        self, number: int, process: Process, sample: Sample, now: float, interval: _Interval
    ) -> tuple[_Seen, WorkerUse]:
        unit = self._units.setdefault(process.unit, _Unit())
        old = self._before.get(number)
        at = now if sample.at is None else sample.at
        seconds = at - old.at if old else interval.seconds
        before = old.sample if old else Sample(0.0, 0, 0, 0)
        cpu_s = max(0.0, sample.cpu_s - before.cpu_s)
        # a sample that was seen before says nothing new: what it used last counts until the next
        cpus = cpu_s / seconds if seconds > 0 else old.cpus if old else None
        _add(unit, before, sample, cpu_s)
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
        return _Seen(process, sample, at, shown), _worker_use(number, process.unit, sample, peak, shown)


def _worker_use(number: int, unit: str, sample: Sample, peak: int, cpus: float | None) -> WorkerUse:
    return WorkerUse(
        worker=number,
        unit=unit,
        cpus=cpus,
        cpu_s_total=sample.cpu_s,
        uss_bytes=sample.uss_bytes,
        peak_bytes=peak,
        read_bytes_total=sample.read_bytes,
        write_bytes_total=sample.write_bytes,
        sent_bytes_total=sample.sent_bytes,
        received_bytes_total=sample.received_bytes,
        gpu_bytes=sample.gpu_bytes,
        processes=sample.processes,
    )


def _add(unit: _Unit, before: Sample, now: Sample, cpu_s: float) -> None:
    unit.cpu_s += cpu_s
    unit.read += max(0, now.read_bytes - before.read_bytes)
    unit.written += max(0, now.write_bytes - before.write_bytes)
    unit.sent = _more(unit.sent, before.sent_bytes, now.sent_bytes)
    unit.received = _more(unit.received, before.received_bytes, now.received_bytes)
    if now.gpu_bytes is not None:
        unit.gpu_peak = max(unit.gpu_peak or 0, now.gpu_bytes)


def _more(total: int | None, before: int | None, now: int | None) -> int | None:
    return total if now is None else (total or 0) + max(0, now - (before or 0))


def _remember(unit: _Unit, interval: _Interval) -> None:
    unit.ready_s += interval.ready_s
    unit.ready_cpu_s += interval.ready_cpu_s
    if interval.ready_s > 0:
        unit.recent.append((interval.longest_s, interval.ready_cpu_s / interval.ready_s))
    elif interval.seconds > 0 and not interval.ready:
        unit.recent.clear()


def _shown(name: str, unit: _Unit, interval: _Interval) -> UnitUse:
    seconds = sum(seconds for seconds, _ in unit.recent)
    enough = len(unit.recent) == RECENT_SAMPLES or seconds >= RECENT_S
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
        sent_bytes_total=unit.sent,
        received_bytes_total=unit.received,
        gpu_peak_bytes=unit.gpu_peak,
    )
