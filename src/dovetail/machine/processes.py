"""CPU, memory and disk usage of worker processes by session, and the start time of a process.

A worker is a session, identified by the pid of its leader; processes that leave it by setsid are not counted. Totals of
a session only grow: usage that a parent inherits by waiting for a child is not counted twice, and usage that no process
inherits is kept.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_START_TIME_FIELD = 19
"""Index of the field in /proc/PID/stat behind the name, which may contain any character."""


def process_start_time(pid: int) -> float | None:
    """Seconds since the epoch; None: no such process, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        booted = Path("/proc/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _psutil_start_time(pid)
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    since = next(int(line.split()[1]) for line in booted.splitlines() if line.startswith(b"btime"))
    return since + int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal (Ctrl-Z, SIGSTOP) or a debugger."""
    text = _read_proc_file(f"/proc/{pid}/stat")
    return text[text.rfind(b")") + 1 :].split()[:1] in ([b"T"], [b"t"])


def _psutil_start_time(pid: int) -> float | None:
    import psutil  # late: it costs more than the other imports of a run for this

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
USS_EVERY_S = 5.0
USS_GROWTH = 1.1
"""A process whose RSS grew by this many bytes is measured early, so that a peak is not missed."""
USS_PAUSE_FACTOR, USS_PAUSE_FACTOR_GROWN = 500, 50
"""Reading USS walks the page tables and may be slow: wait this many times the duration before the next read."""
USS_BUDGET_S = 0.004
"""CPU time per sample for all processes together; the process that was not read for longest comes first."""
READ_BYTES = 8192

Totals = tuple[int, int, int]
"""Clock ticks, bytes read, bytes written."""


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """One session. CPU and bytes are totals since its start; memory is current."""

    cpu_s: float
    uss_bytes: int
    """Memory that would be free if the session ended, without pages shared between its processes."""
    rss_bytes: int
    read_bytes: int
    """Disk bytes: page cache hits and tmpfs do not count."""
    write_bytes: int
    pids: tuple[int, ...]

    @property
    def processes(self) -> int:
        return len(self.pids)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Values from /proc/PID/stat."""

    parent: int
    session: int
    own_ticks: int
    reaped_ticks: int
    """CPU time of reaped children."""
    start_ticks: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class SessionProcess:
    """A process of a session at the last sample."""

    stat: ProcessStat
    read_bytes: int = 0
    write_bytes: int = 0
    uss_bytes: int = 0
    uss_rss_bytes: int = 0
    """Its RSS when its USS was read."""
    uss_at: float = float("-inf")
    uss_cost_s: float = 0.0

    @property
    def total(self) -> Totals:
        return self.stat.own_ticks + self.stat.reaped_ticks, self.read_bytes, self.write_bytes

    @property
    def inherited(self) -> Totals:
        """Usage that grows when the process waits for a child. The kernel adds a child's bytes to its own."""
        return self.stat.reaped_ticks, self.read_bytes, self.write_bytes


@dataclass(slots=True)
class _Session:
    members: dict[int, SessionProcess] = field(default_factory=dict)
    exited_totals: Totals = (0, 0, 0)


class SessionSampler:
    """Samples sessions repeatedly. Thread: one at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, uss_budget_s: float = USS_BUDGET_S) -> None:
        self._clock, self._uss_budget_s = clock, uss_budget_s
        self._sessions: dict[int, _Session] = {}

    def sample(self, sessions: Iterable[int]) -> dict[int, SessionUsage]:
        """Sessions that are no longer requested are forgotten. None without /proc."""
        wanted = set(sessions)
        found = _session_stats(wanted)
        if found is None:
            return {}
        self._sessions = {number: self._sessions.get(number) or _Session() for number in wanted}
        for number, session in self._sessions.items():
            before, stats = session.members, found.get(number, {})
            session.members = {pid: _update_member(pid, stat, before.get(pid)) for pid, stat in stats.items()}
            session.exited_totals = _add_totals(session.exited_totals, unclaimed_totals(before, session.members))
        self._read_uss(self._clock())
        return {number: _session_usage(session) for number, session in self._sessions.items()}

    def _read_uss(self, now: float) -> None:
        """USS of the processes that are due, within the budget: at least of one."""
        due = [
            (member.uss_at, pid, session.members)
            for session in self._sessions.values()
            for pid, member in session.members.items()
            if uss_is_due(member, now)
        ]
        began = last = time.thread_time()
        for _, pid, members in sorted(due, key=lambda it: it[:2]):
            member, uss = members[pid], uss_bytes(f"/proc/{pid}")
            cost, last = time.thread_time() - last, time.thread_time()
            rss = member.stat.rss_bytes
            members[pid] = replace(member, uss_bytes=uss, uss_rss_bytes=rss, uss_at=now, uss_cost_s=cost)
            if last - began >= self._uss_budget_s:
                return


def private_bytes(sessions: Iterable[int]) -> dict[int, int]:
    """Approximate memory that would be free if a session ended, at the cost of reading its processes: USS would walk
    all of their page tables."""
    found = _session_stats(set(sessions)) or {}
    return {
        number: sum(parse_statm(_read_proc_file(f"/proc/{pid}/statm")) for pid in members)
        for number, members in found.items()
    }


def _session_usage(session: _Session) -> SessionUsage:
    members = session.members
    ticks, read, written = _add_totals(session.exited_totals, *(member.total for member in members.values()))
    return SessionUsage(
        cpu_s=ticks * TICK_S,
        uss_bytes=sum(member.uss_bytes for member in members.values()),
        rss_bytes=sum(member.stat.rss_bytes for member in members.values()),
        read_bytes=read,
        write_bytes=written,
        pids=tuple(members),
    )


def unclaimed_totals(before: Mapping[int, SessionProcess], now: Mapping[int, SessionProcess]) -> Totals:
    """Usage of exited members that no living member inherited.

    A process that waits for a child inherits the child's usage, so the heir of an exited process is its nearest living
    ancestor. If no process waits for a child (SIGCHLD is ignored), the heir's totals do not grow.
    """
    owed: dict[int | None, Totals] = {}
    for pid, member in before.items():
        if not _is_same_process(member, now.get(pid)):
            heir = _surviving_ancestor(member, before, now)
            owed[heir] = _add_totals(owed.get(heir, (0, 0, 0)), member.total)
    lost = owed.pop(None, (0, 0, 0))
    for heir, debt in owed.items():
        assert heir is not None
        was, is_now = before[heir].inherited, now[heir].inherited
        paid = [max(0, it - (new - old)) for it, old, new in zip(debt, was, is_now, strict=True)]
        lost = _add_totals(lost, (paid[0], paid[1], paid[2]))
    return lost


def _surviving_ancestor(
    member: SessionProcess, before: Mapping[int, SessionProcess], now: Mapping[int, SessionProcess]
) -> int | None:
    parent = member.stat.parent
    for _ in before:  # no chain is longer, and reused pids might form a cycle
        ancestor = before.get(parent)
        if ancestor is None:
            return None
        if _is_same_process(ancestor, now.get(parent)):
            return parent
        parent = ancestor.stat.parent
    return None


def _is_same_process(one: SessionProcess, other: SessionProcess | None) -> bool:
    return other is not None and one.stat.start_ticks == other.stat.start_ticks


def _add_totals(*totals: Totals) -> Totals:
    ticks, read, written = zip(*totals, strict=True)
    return sum(ticks), sum(read), sum(written)


# --- one process


def _update_member(pid: int, stat: ProcessStat, last: SessionProcess | None) -> SessionProcess:
    """With its last USS."""
    if last is None or last.stat.start_ticks != stat.start_ticks:
        last = SessionProcess(stat)
    read, written = parse_io(_read_proc_file(f"/proc/{pid}/io"))
    # a counter that is no longer readable keeps its value
    read, written = max(read, last.read_bytes), max(written, last.write_bytes)
    # without memory: a zombie
    uss = last.uss_bytes if stat.rss_bytes else 0
    return replace(last, stat=stat, read_bytes=read, write_bytes=written, uss_bytes=uss)


def uss_is_due(member: SessionProcess, now: float) -> bool:
    """Whether USS is due: periodically or after growth, but limited by the cost of reading it."""
    if not member.stat.rss_bytes:
        return False
    since = now - member.uss_at
    if since >= max(USS_EVERY_S, USS_PAUSE_FACTOR * member.uss_cost_s):
        return True
    grown = member.stat.rss_bytes > USS_GROWTH * member.uss_rss_bytes
    return grown and since >= USS_PAUSE_FACTOR_GROWN * member.uss_cost_s


def uss_bytes(folder: str) -> int:
    """Private memory of the process; an estimate where the kernel does not allow reading it."""
    private = parse_private(_read_proc_file(f"{folder}/smaps_rollup"))
    return parse_statm(_read_proc_file(f"{folder}/statm")) if private is None else private


def tree_bytes(root: int) -> int:
    """Memory of a process and everything below it; pages that they share are counted once. One pass over all
    processes."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        stat = parse_stat(_read_proc_file(f"/proc/{name}/stat")) if name.isdigit() else None
        if stat is not None:
            parents[int(name)] = stat.parent
    found, waiting = {root}, True
    while waiting:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        waiting = bool(below)
    return sum(_pss_bytes(f"/proc/{pid}") for pid in found)


def _pss_bytes(folder: str) -> int:
    """Memory of a process, with its part of shared pages; an estimate where the kernel does not allow reading it."""
    lines = _read_proc_file(f"{folder}/smaps_rollup").splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith(b"Pss:")]
    return sizes[0] * 1024 if sizes else parse_statm(_read_proc_file(f"{folder}/statm"))


def parse_private(smaps: bytes) -> int | None:
    """Private bytes; None: not in the file."""
    sizes = [int(line.split()[1]) for line in smaps.splitlines() if line.startswith(b"Private_")]
    return sum(sizes) * 1024 if sizes else None


def parse_statm(statm: bytes) -> int:
    """Resident pages without file and shared memory pages."""
    words = statm.split()
    return max(0, int(words[1]) - int(words[2])) * PAGE_BYTES if len(words) > 2 else 0


def parse_io(io: bytes) -> tuple[int, int]:
    """Bytes read and written; 0 if not in the file."""
    values = dict(line.split(b": ", 1) for line in io.splitlines() if b": " in line)
    return int(values.get(b"read_bytes", 0)), int(values.get(b"write_bytes", 0))


def parse_stat(stat: bytes) -> ProcessStat | None:
    """Parse behind the last parenthesis, because a process may have any name; None: empty file."""
    words = stat[stat.rfind(b")") + 1 :].split()
    if len(words) < 22:
        return None
    own, reaped = int(words[11]) + int(words[12]), int(words[13]) + int(words[14])
    return ProcessStat(int(words[1]), int(words[3]), own, reaped, int(words[19]), int(words[21]) * PAGE_BYTES)


def _session_stats(sessions: set[int]) -> dict[int, dict[int, ProcessStat]] | None:
    """Session -> pid -> stat of its members; None if processes cannot be listed. One pass over all processes."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - a Path per process costs more than the rest
    except OSError:
        return None
    found: dict[int, dict[int, ProcessStat]] = {}
    for name in names:
        if name.isdigit() and _may_belong_to(int(name), sessions):
            stat = parse_stat(_read_proc_file(f"/proc/{name}/stat"))
            if stat is not None and stat.session in sessions:
                found.setdefault(stat.session, {})[int(name)] = stat
    return found


def _may_belong_to(pid: int, sessions: set[int]) -> bool:
    """Cheap filter: costs a tenth of reading stat, on machines with thousands of other processes."""
    try:
        return os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:
        return True


def _read_proc_file(path: str) -> bytes:
    """Contents; empty if unreadable or gone. All of these files are small and complete in one read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, READ_BYTES)
    except OSError:
        return b""
    finally:
        os.close(file)
