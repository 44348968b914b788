"""How full is the memory that this process may use? The machine's, or that of its cgroups, whichever is fuller."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dovetail.machine.cpus import memory_folders, parse_memory_limit, physical_bytes
from dovetail.machine.host_use import parse_meminfo

FILES = (
    ("memory.current", "memory.max", "inactive_file"),
    ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
)
"""Of both versions of cgroups: what is used, the limit, and what of it the kernel takes back without asking."""


class MemoryUse(NamedTuple):
    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes


class MemoryMeter:
    """Reads it again and again."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = root / "proc/meminfo"
        physical = physical_bytes()
        groups = [(folder, *names) for folder in memory_folders(root) for names in FILES]
        self._groups = [it for it in groups if (limit := _limit(it[0] / it[2])) is not None and limit < physical]
        """Those that are narrower than the machine."""

    def read(self) -> MemoryUse | None:
        """None: nobody says."""
        found = [use for group in self._groups if (use := _use(*group)) is not None]
        with suppress(OSError):
            used, total = parse_meminfo(self._meminfo.read_text(encoding="ascii", errors="replace"))
            if used is not None and total:
                found.append(MemoryUse(used, total))
        return max(found, key=lambda use: use.share, default=None)


def _use(folder: Path, current: str, limit: str, inactive: str) -> MemoryUse | None:
    most = _limit(folder / limit)
    try:
        used = int((folder / current).read_bytes())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
        return None if most is None else MemoryUse(max(0, used - int(stat.get(inactive, 0))), most)
    except (OSError, ValueError):
        return None


def _limit(path: Path) -> int | None:
    try:
        return parse_memory_limit(path.read_bytes())
    except (OSError, ValueError):
        return None
