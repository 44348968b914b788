"""CPU, memory, shared memory and descriptors of this process and its descendants."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_S = 0.05
PRIVATE = ("Pss_Anon:", "Pss_File:")
"""Memory without shared memory, in /proc/PID/smaps_rollup."""


def cpu_s() -> float:
    """CPU of this process and of all children that it has waited for, such as workers of runs that have ended."""
    return own_cpu_s() + children_cpu_s()


def own_cpu_s() -> float:
    return _cpu_s(resource.RUSAGE_SELF)


def children_cpu_s() -> float:
    return _cpu_s(resource.RUSAGE_CHILDREN)


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def shmem_mb() -> float:
    """Shared memory of the whole machine: unnamed shared memory is in no folder where it could be counted."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    return 0.0


def descriptors() -> int:
    """Number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def tree_pss_mb(pid: int, fields: tuple[str, ...] = ("Pss:",)) -> float:
    """Memory of a process and its descendants; pages that several share are counted once."""
    with suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return sum(_pss_mb(each, fields) for each in (pid, *(child.pid for child in children)))
    return 0.0


def _pss_mb(pid: int, fields: tuple[str, ...]) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(fields)) / 1024
    return 0.0


class PeakSampler:
    """Samples a value in MB from a thread until it is stopped."""

    def __init__(self, read_mb: Callable[[], float], every_s: float = SAMPLE_S) -> None:
        self.samples: list[float] = []
        self._read_mb = read_mb
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.samples.append(self._read_mb())
            if self._stopped.wait(self._every_s):
                return

    @property
    def mb(self) -> float:
        return max(self.samples)

    @property
    def growth(self) -> float:
        """Peak of the last third of the time divided by that of the second third."""
        third = len(self.samples) // 3
        if not third:
            return 1.0
        return max(self.samples[2 * third :]) / max(self.samples[third : 2 * third])


def memory_peak() -> PeakSampler:
    """Memory of this process and its descendants, plus the growth of shared memory on this machine."""
    before_mb, pid = shmem_mb(), os.getpid()
    return PeakSampler(lambda: tree_pss_mb(pid, PRIVATE) + shmem_mb() - before_mb)
