"""CPU of a process and all of its descendants until a given time, including those that no parent waited for.

Ray's servers are never waited for, and a raylet does not report the CPU of its workers. So the CPU of each process is
sampled from outside; the last sample of a process that has ended stays in the sum.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

SAMPLE_S = 0.02
SEARCH_S = 0.2
"""Interval of the search for new processes; a shorter process may be missed."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class Tally:
    """Samples from a thread until it is stopped. Times are those of time.monotonic, in any process."""

    def __init__(self, *pids: int) -> None:
        self._roots = pids
        self._cpu_s: dict[tuple[int, str], float] = {}
        """(pid, start time) -> CPU seconds in the last sample."""
        self._alive: dict[int, str] = {}
        self._times: list[float] = []
        self._totals: list[float] = []
        self._searched_at = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def total_s(self) -> float:
        return self._totals[-1]

    def between(self, began: float, ended: float) -> float:
        return self._at(ended) - self._at(began)

    def _at(self, moment: float) -> float:
        """Total at a time, interpolated between two samples."""
        after = bisect.bisect_left(self._times, moment)
        if after == 0 or after == len(self._times):
            return self._totals[min(after, len(self._times) - 1)]
        (early, late), (low, high) = self._times[after - 1 : after + 1], self._totals[after - 1 : after + 1]
        return low + (high - low) * (moment - early) / (late - early)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(SAMPLE_S)
            now = time.monotonic()
            if stopped or now - self._searched_at >= SEARCH_S:
                self._searched_at = now
                self._find_processes()
            self._sample()
            self._times.append(time.monotonic())
            self._totals.append(sum(self._cpu_s.values()))

    def _sample(self) -> None:
        for pid, started in list(self._alive.items()):
            found = _stat(pid)
            if found is None or found[1] != started:
                del self._alive[pid]
            else:
                self._cpu_s[pid, started] = found[2]

    def _find_processes(self) -> None:
        """Find the descendants of known processes. An orphan stays known."""
        every = {
            int(path.name): found for path in PROC.iterdir() if path.name.isdigit() and (found := _stat(path.name))
        }
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in every.items():
            below.setdefault(parent, []).append(pid)
        todo = [*self._roots, *self._alive]
        seen: set[int] = set()
        while todo:
            pid = todo.pop()
            if pid in every and pid not in seen:
                seen.add(pid)
                self._alive.setdefault(pid, every[pid][1])
                todo += below.get(pid, [])


def _stat(pid: int | str) -> tuple[int, str, float] | None:
    """Parent, start time and CPU seconds of a process."""
    with suppress(OSError, ValueError):
        words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(words[1]), words[19], (int(words[11]) + int(words[12])) * TICK_S
    return None
