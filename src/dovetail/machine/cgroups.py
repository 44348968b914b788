"""CPU and memory limits of this process from affinity and cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_UNLIMITED = (b"max", b"-1")
# The two files of v1, joined by a space, have the format of the v2 file: "quota period".
_CPU_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_MEMORY_FILES = (("memory.max",), ("memory.limit_in_bytes",))
_GIB = 2**30


def usable_cpu_milli(root: Path) -> tuple[int, list[str]]:
    """Usable CPUs in thousandths: the minimum of online CPUs, affinity and cgroup quotas; and notes."""
    online = os.cpu_count() or 1
    usable = online * 1000
    quota, notes = _lowest_limit(_cgroup_folders(root, "cpu"), _CPU_FILES, parse_cpu_quota)
    allowed = _affinity(online)
    if allowed < online:
        usable = allowed * 1000
        notes.append(f"CPU affinity: {allowed} of {online} CPUs")
    if quota is not None and quota < usable:
        usable = quota
        notes.append(f"CPU quota of the cgroup: {quota / 1000:g} of {online} CPUs")
    return usable, notes


def usable_memory_bytes(root: Path) -> tuple[int, list[str]]:
    """Usable memory: the minimum of physical memory and cgroup limits; and notes."""
    physical = physical_bytes()
    limit, notes = _lowest_limit(_cgroup_folders(root, "memory"), _MEMORY_FILES, parse_memory_limit)
    # v1 writes "no limit" as a huge number, which needs no special case.
    if limit is None or limit >= physical:
        return physical, notes
    notes.append(f"memory limit of the cgroup: {limit / _GIB:.1f} of {physical / _GIB:.1f} GiB")
    return limit, notes


def memory_cgroups(root: Path) -> list[Path]:
    """Folders of the memory controllers of this process, narrowest first."""
    return list(_cgroup_folders(root, "memory"))


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_cpu_quota(raw: bytes) -> int | None:
    """Thousandths of a CPU from "quota period"; None: no limit. ValueError if malformed."""
    quota, *rest = raw.split() or [b""]
    if quota in _UNLIMITED:
        return None
    (period,) = rest
    return max(1, _parse_positive(quota) * 1000 // _parse_positive(period))


def parse_memory_limit(raw: bytes) -> int | None:
    """Bytes; None: no limit. ValueError if malformed."""
    word = raw.strip()
    return None if word in _UNLIMITED else _parse_positive(word)


def _parse_positive(word: bytes) -> int:
    # bytes.isdigit, because int() would also accept "1_000" and "+5", which the kernel never writes.
    if not word.isdigit() or (number := int(word)) == 0:
        raise ValueError(word)
    return number


def _affinity(online: int) -> int:
    # Only Linux has affinity.
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return online if affinity is None else len(affinity(0))


def _lowest_limit(
    folders: Iterable[Path], sources: Iterable[tuple[str, ...]], parse: Callable[[bytes], int | None]
) -> tuple[int | None, list[str]]:
    limits: list[int] = []
    notes: list[str] = []
    for folder in folders:
        for names in sources:
            contents = [content for name in names if (content := _read_bytes(folder / name)) is not None]
            if len(contents) < len(names):
                continue
            raw = b" ".join(contents)
            try:
                limit = parse(raw)
            except ValueError:
                notes.append(f"{str(folder / names[0])!a} is malformed ({raw[:40]!r}): taken as no limit")
                continue
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None), notes


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits apply to this process, from its own cgroup up to the root of each hierarchy.

    Inside a container, the path may be that of the host, while only the own cgroup is visible, as the root: the folders
    of that path are then missing, and the root has the limit.
    """
    own: dict[str, str] = {}
    for line in (_read_bytes(root / "proc/self/cgroup") or b"").splitlines():
        _, _, controllers_and_path = os.fsdecode(line).partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        own.update(dict.fromkeys(controllers.split(","), path))
    mount = root / "sys/fs/cgroup"
    # v2 has no controller in its line; a machine with both versions mounts it under unified/.
    for top, name in ((mount, ""), (mount / "unified", ""), (mount / controller, controller)):
        parts = [part for part in own.get(name, "").split("/") if part]
        if ".." in parts:  # the cgroup is outside of the mounted tree
            parts = []
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
