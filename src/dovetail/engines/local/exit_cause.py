"""Cause of exit of a worker process from its wait status and the OOM-kill counters of the kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dovetail.control.events import LossCause
from dovetail.machine.cgroups import memory_cgroups

CGROUP_OOM_FILES = ("memory.events", "memory.oom_control")
"""Files of a cgroup that count the processes killed by the kernel's OOM killer, in both versions."""
VMSTAT_PATH = "/proc/vmstat"
OOM_KILL_FIELD = "oom_kill"
SIGNAL_MEANINGS = {
    signal.SIGSEGV: "invalid memory access",
    signal.SIGBUS: "access to unbacked memory: a truncated file or a full /dev/shm",
    signal.SIGABRT: "aborted, often by a failed assertion in native code",
    signal.SIGILL: "an instruction that this CPU does not support",
    signal.SIGFPE: "division by zero in native code",
    signal.SIGKILL: "killed by another process",
    signal.SIGTERM: "terminated by another process",
}


class OomKillCounter:
    """Whether the kernel's OOM killer ended a process. Each counted kill explains one exit."""

    def __init__(self, counters: tuple[tuple[str, str], ...] | None = None) -> None:
        counters = oom_counters(Path("/")) if counters is None else counters
        found = ((Path(path), name) for path, name in counters)
        self._counter = next((one for one in found if _read_counter(*one) is not None), None)
        """Uses the narrowest counter: kills elsewhere on the machine do not concern this run."""
        self._seen = self._read()

    def _read(self) -> int:
        return (_read_counter(*self._counter) or 0) if self._counter is not None else 0

    def take_kill(self) -> bool:
        if self._read() <= self._seen:
            return False
        self._seen += 1
        return True


def oom_counters(root: Path) -> tuple[tuple[str, str], ...]:
    """Candidate files, narrowest first: the cgroup of this process (in version 1 its parents do not count its kills),
    its parents, the machine."""
    files = [folder / name for folder in memory_cgroups(root) for name in CGROUP_OOM_FILES]
    return tuple((str(file), OOM_KILL_FIELD) for file in (*files, root / VMSTAT_PATH.lstrip("/")))


def _read_counter(path: Path, name: str) -> int | None:
    """None: no counter in this file."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(words[1]) for words in map(str.split, lines) if words[:1] == [name]), None)


def describe_exit(status: int, watch: OomKillCounter) -> tuple[LossCause, str]:
    """Cause and one-line description of a wait status (-1: the process never started)."""
    if status == -1:
        return LossCause.EXIT, "the process was not started"
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return LossCause.EXIT, f"the process exited with exit code {code}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and watch.take_kill():
        return LossCause.OUT_OF_MEMORY, "killed by the kernel: out of memory"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    meaning = f": {SIGNAL_MEANINGS[signal.Signals(number)]}" if number in SIGNAL_MEANINGS else ""
    return LossCause.SIGNAL, f"signal {number} ({name}{meaning})"
