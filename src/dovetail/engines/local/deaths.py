"""Why did a process end? Its status, and whether the kernel ran out of memory meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dovetail.control.events import Cause
from dovetail.machine.cpus import memory_folders

COUNTERS = ("memory.events", "memory.oom_control")
"""Files of a cgroup in which the kernel counts whom it killed for want of memory, in both versions."""
OF_MACHINE = "/proc/vmstat"
COUNTED_AS = "oom_kill"
MEANINGS = {
    signal.SIGSEGV: "invalid memory access",
    signal.SIGBUS: "memory that is not there: a truncated file or a full /dev/shm",
    signal.SIGABRT: "aborted by itself, often by a failed check in native code",
    signal.SIGILL: "an instruction that this CPU does not have",
    signal.SIGFPE: "division by zero in native code",
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "asked to end from outside",
}


class OutOfMemoryWatch:
    """Whether the kernel killed somebody for want of memory: one death for each that it counts."""

    def __init__(self, counters: tuple[tuple[str, str], ...] | None = None) -> None:
        counters = counters_of(Path("/")) if counters is None else counters
        found = ((Path(path), name) for path, name in counters)
        self._counter = next((one for one in found if _count(*one) is not None), None)
        """The narrowest there is: what happens elsewhere on the machine is not ours."""
        self._seen = self._read()

    def _read(self) -> int:
        return (_count(*self._counter) or 0) if self._counter is not None else 0

    def killed(self) -> bool:
        if self._read() <= self._seen:
            return False
        self._seen += 1
        return True


def counters_of(root: Path) -> tuple[tuple[str, str], ...]:
    """Where to look, the narrowest first: this process's cgroup (in version 1 those around it do not count what happens
    in it), those around it, the machine."""
    files = [folder / name for folder in memory_folders(root) for name in COUNTERS]
    return tuple((str(file), COUNTED_AS) for file in (*files, root / OF_MACHINE.lstrip("/")))


def _count(path: Path, name: str) -> int | None:
    """None: it is not counted there."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(words[1]) for words in map(str.split, lines) if words[:1] == [name]), None)


def cause_of(status: int, watch: OutOfMemoryWatch) -> tuple[Cause, str]:
    """Of a wait status (-1: it never began): the cause, and one line for people."""
    if status == -1:
        return Cause.EXIT, "it was never there"
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return Cause.EXIT, f"it left by itself with exit code {code}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and watch.killed():
        return Cause.OUT_OF_MEMORY, "killed by the kernel: out of memory"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    meaning = f": {MEANINGS[signal.Signals(number)]}" if number in MEANINGS else ""
    return Cause.SIGNAL, f"signal {number} ({name}{meaning})"
