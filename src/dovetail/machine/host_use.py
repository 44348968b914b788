"""How busy is this machine as a whole, with the work of others?"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

IDLE, IOWAIT, STEAL = 3, 4, 7


@dataclass(frozen=True, slots=True)
class HostUse:
    """The machine between two looks. What is not known is None."""

    cpus: float | None
    """CPUs that were busy."""
    cpu_count: int
    memory_used_bytes: int | None
    memory_bytes: int | None


def all_hosts(hosts: Iterable[HostUse]) -> HostUse | None:
    """Several machines as if they were one; what is known of some of them counts. None: there is none."""
    found = list(hosts)
    if not found:
        return None
    cpus = [it.cpus for it in found if it.cpus is not None]
    used = [it.memory_used_bytes for it in found if it.memory_used_bytes is not None]
    total = [it.memory_bytes for it in found if it.memory_bytes is not None]
    return HostUse(
        sum(cpus) if cpus else None,
        sum(it.cpu_count for it in found),
        sum(used) if used else None,
        sum(total) if total else None,
    )


class HostMeter:
    """Reads it again and again. For one thread."""

    def __init__(self, root: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._before: tuple[float, float] | None = None

    def read(self) -> HostUse:
        now, busy = self._clock(), parse_busy(_text(self._root / "stat"))
        before = self._before
        self._before = None if busy is None else (now, busy)
        cpus = None
        if before is not None and busy is not None and now > before[0]:
            cpus = max(0.0, busy - before[1]) / (now - before[0])
        used, total = parse_meminfo(_text(self._root / "meminfo"))
        return HostUse(cpus, os.cpu_count() or 1, used, total)


def parse_busy(stat: str) -> float | None:
    """Seconds that all CPUs together were busy. What a virtual machine was not given was not busy here."""
    head, *words = stat.partition("\n")[0].split()[:9] or [""]
    if head != "cpu" or len(words) <= IOWAIT:
        return None
    ticks = sum(int(word) for place, word in enumerate(words) if place not in (IDLE, IOWAIT, STEAL))
    return ticks / os.sysconf("SC_CLK_TCK")


def parse_meminfo(meminfo: str) -> tuple[int | None, int | None]:
    """Bytes in use, that is, not to be had without swapping; and bytes in all."""
    sizes = {words[0]: int(words[1]) * 1024 for line in meminfo.splitlines() if len(words := line.split()) == 3}
    total, available = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    return (None if total is None or available is None else max(0, total - available)), total


def machine_id(root: Path = Path("/proc")) -> str:
    """The same for all containers and nodes on one machine, until it boots again; empty: not known."""
    return _text(root / "sys" / "kernel" / "random" / "boot_id").strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
