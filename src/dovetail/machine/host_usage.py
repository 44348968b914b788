"""CPU and memory usage of the whole machine and of the cgroups of this process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dovetail.machine.cgroups import memory_cgroups, parse_memory_limit, physical_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

IDLE_COLUMN, IOWAIT_COLUMN, STEAL_COLUMN = 3, 4, 7


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Usage of the machine between two samples. Unknown values are None."""

    cpus: float | None
    """Number of busy CPUs."""
    cpu_count: int
    memory_used_bytes: int | None
    memory_bytes: int | None


def sum_hosts(hosts: Iterable[HostUsage]) -> HostUsage | None:
    """Sum over several machines; unknown values are left out. None: no machine."""
    found = list(hosts)
    if not found:
        return None
    cpus = [it.cpus for it in found if it.cpus is not None]
    used = [it.memory_used_bytes for it in found if it.memory_used_bytes is not None]
    total = [it.memory_bytes for it in found if it.memory_bytes is not None]
    return HostUsage(
        sum(cpus) if cpus else None,
        sum(it.cpu_count for it in found),
        sum(used) if used else None,
        sum(total) if total else None,
    )


class HostMeter:
    """Samples the machine repeatedly. Thread: one at a time."""

    def __init__(self, root: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._before: tuple[float, float] | None = None

    def read(self) -> HostUsage:
        now, busy = self._clock(), parse_busy(_read_text(self._root / "stat"))
        before = self._before
        self._before = None if busy is None else (now, busy)
        cpus = None
        if before is not None and busy is not None and now > before[0]:
            cpus = max(0.0, busy - before[1]) / (now - before[0])
        used, total = parse_meminfo(_read_text(self._root / "meminfo"))
        return HostUsage(cpus, os.cpu_count() or 1, used, total)


def parse_busy(stat: str) -> float | None:
    """Seconds that all CPUs together were busy. Time stolen from a virtual machine does not count."""
    head, *words = stat.partition("\n")[0].split()[:9] or [""]
    if head != "cpu" or len(words) <= IOWAIT_COLUMN:
        return None
    ticks = sum(
        int(word) for place, word in enumerate(words) if place not in (IDLE_COLUMN, IOWAIT_COLUMN, STEAL_COLUMN)
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def parse_meminfo(meminfo: str) -> tuple[int | None, int | None]:
    """Bytes in use (not available without swapping), and total bytes."""
    sizes = {words[0]: int(words[1]) * 1024 for line in meminfo.splitlines() if len(words := line.split()) == 3}
    total, available = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    return (None if total is None or available is None else max(0, total - available)), total


def machine_id(root: Path = Path("/proc")) -> str:
    """Identifier that all containers and nodes on one machine share until it reboots; empty: unknown."""
    return _read_text(root / "sys" / "kernel" / "random" / "boot_id").strip()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


CGROUP_MEMORY_FILES = (
    ("memory.current", "memory.max", ("inactive_file", "active_file")),
    ("memory.usage_in_bytes", "memory.limit_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Files of both cgroup versions: usage, limit, and the parts of the usage that the kernel can reclaim."""


class MemoryUsage(NamedTuple):
    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes


class MemoryMeter:
    """Samples the cgroups repeatedly."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = root / "proc/meminfo"
        physical = physical_bytes()
        groups = [(folder, *names) for folder in memory_cgroups(root) for names in CGROUP_MEMORY_FILES]
        self._groups = [it for it in groups if (limit := _read_limit(it[0] / it[2])) is not None and limit < physical]
        """Cgroups with a limit below that of the machine."""

    def read(self) -> MemoryUsage | None:
        """None: no such file."""
        found = [use for group in self._groups if (use := _cgroup_usage(*group)) is not None]
        with suppress(OSError):
            used, total = parse_meminfo(self._meminfo.read_text(encoding="ascii", errors="replace"))
            if used is not None and total:
                found.append(MemoryUsage(used, total))
        return max(found, key=lambda use: use.share, default=None)


def _cgroup_usage(folder: Path, current: str, limit: str, reclaimable: tuple[str, ...]) -> MemoryUsage | None:
    most = _read_limit(folder / limit)
    try:
        used = int((folder / current).read_bytes())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
        cached = sum(int(stat.get(name, 0)) for name in reclaimable)
        return None if most is None else MemoryUsage(max(0, used - cached), most)
    except (OSError, ValueError):
        return None


def _read_limit(path: Path) -> int | None:
    try:
        return parse_memory_limit(path.read_bytes())
    except (OSError, ValueError):
        return None
