"""Meter: one bounded-cost sample of workers, host and GPUs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.machine.host_usage import HostMeter
from dovetail.machine.processes import SessionSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.machine.gpus import CardUsage, GpuMeter, GpuReading
    from dovetail.machine.host_usage import HostUsage
    from dovetail.machine.processes import SessionUsage

MAX_CPU_SHARE = 0.01
"""Maximum share of a core for sampling workers; with thousands of workers, samples become less frequent."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """All ranks of a worker at one moment. Totals since the start; None: unknown."""

    cpu_s: float
    uss_bytes: int
    read_bytes: int
    write_bytes: int
    gpu_bytes: int | None = None
    processes: int = 1
    at: float | None = None
    """Time of the sample; None: now. A sample of a worker on another machine may be seen twice."""


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Result of one sample."""

    samples: Mapping[int, WorkerSample]
    """Workers with known values."""
    host: HostUsage
    cards: tuple[CardUsage, ...]


class Meter:
    """Samples this machine repeatedly. Thread: one at a time."""

    def __init__(self, gpu: GpuMeter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu = gpu
        self._sampler, self._host = SessionSampler(clock), HostMeter(clock=clock)

    def read(self, workers: Mapping[int, Sequence[int]]) -> MachineReading:
        """Worker -> pids of its ranks, each of which leads its own session."""
        uses = self._sampler.sample(pid for pids in workers.values() for pid in pids)
        reading = self._gpu.read() if self._gpu is not None else None
        samples = {
            worker: sample_of([uses[pid] for pid in pids], reading)
            for worker, pids in workers.items()
            if all(pid in uses for pid in pids)
        }
        return MachineReading(samples, self._host.read(), reading.cards if reading is not None else ())

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


def sample_of(ranks: Sequence[SessionUsage], reading: GpuReading | None) -> WorkerSample:
    """Sum over the ranks of a worker."""
    return WorkerSample(
        cpu_s=sum(use.cpu_s for use in ranks),
        uss_bytes=sum(use.uss_bytes for use in ranks),
        read_bytes=sum(use.read_bytes for use in ranks),
        write_bytes=sum(use.write_bytes for use in ranks),
        gpu_bytes=None if reading is None else reading.memory_of({pid for use in ranks for pid in use.pids}),
        processes=sum(use.processes for use in ranks),
    )


def merge_samples(samples: Sequence[WorkerSample]) -> WorkerSample:
    """Sum over the parts of a worker whose ranks run on several machines."""
    return WorkerSample(
        cpu_s=sum(it.cpu_s for it in samples),
        uss_bytes=sum(it.uss_bytes for it in samples),
        read_bytes=sum(it.read_bytes for it in samples),
        write_bytes=sum(it.write_bytes for it in samples),
        gpu_bytes=_sum_known(it.gpu_bytes for it in samples),
        processes=sum(it.processes for it in samples),
        at=max((it.at for it in samples if it.at is not None), default=None),
    )


def _sum_known(figures: Iterable[int | None]) -> int | None:
    """Sum of the known values; None: all are unknown."""
    known = [it for it in figures if it is not None]
    return sum(known) if known else None
